"""The command group, and the one place where errors become a line and an exit code.

Exit codes: 0 done, 1 a check found a difference, 2 usage or bad input.
"""

from __future__ import annotations

__all__ = ["cli", "main"]

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

import hccl_fusion
from hccl_fusion.errors import HcclFusionError

_COMMANDS = ("list", "plan", "fuse", "verify", "demo")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is asked for: start-up stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"hccl_fusion.cli.{cmd_name}_command")
        command: click.Command = module.command
        return command


@click.group(cls=_LazyGroup, context_settings=_CONTEXT)
@click.version_option(hccl_fusion.__version__, prog_name="hccl-fusion")
def cli() -> None:
    """Shows, plans, rewrites and verifies the fusion of gradient all-reduces, exactly as HCCL does it.

    GRAPH is a GraphDef, MetaGraphDef or SavedModel, binary or text, also gzipped; - is stdin.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(args, prog_name="hccl-fusion", standalone_mode=False)
    except HcclFusionError as error:
        return _report(str(error), "--debug" in args)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        where = f" of {error.ctx.command_path}" if isinstance(error, click.UsageError) and error.ctx else ""
        return _report(f"wrong usage{where}: {error.format_message()}; try --help", "--debug" in args)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _report("interrupted", False)
    except BrokenPipeError:
        # The reader has seen enough; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _report(message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return 2
