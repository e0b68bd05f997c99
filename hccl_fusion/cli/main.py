"""The command group, and the one place where errors become a line and an exit code.

Exit codes: 0 done, 1 a check found a difference, 2 usage or bad input.
"""

from __future__ import annotations

__all__ = ["cli", "main"]

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

import hccl_fusion
from hccl_fusion.errors import HcclFusionError, UsageError

_PROGRAM = "hccl-fusion"
_COMPLETION = "_HCCL_FUSION_COMPLETE"
_COMMANDS = ("list", "plan", "fuse", "verify", "run", "demo")
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


@click.group(
    cls=_LazyGroup,
    context_settings=_CONTEXT,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
)
@click.version_option(hccl_fusion.__version__, prog_name=_PROGRAM)
@click.pass_context
def cli(context: click.Context) -> None:
    """Shows, plans, rewrites and verifies the fusion of gradient all-reduces, exactly as HCCL does it.

    GRAPH is a GraphDef, MetaGraphDef or SavedModel, binary or text, also gzipped; - is stdin.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in args
    _prepare_streams()
    try:
        result = cli.main(args, prog_name=_PROGRAM, complete_var=_COMPLETION, standalone_mode=False)
    except HcclFusionError as error:
        return _report(error, debug)
    except click.ClickException as error:
        return _report(_usage_error(error), debug)
    except (click.Abort, KeyboardInterrupt):
        return _report(HcclFusionError("interrupted"), debug)
    except SystemExit:
        if _COMPLETION in os.environ:
            raise
        # click's way to say that the reader of stdout has gone: it has seen enough.
        _abandon_stdout()
        return 0
    except OSError as error:
        if error.filename is None:
            _abandon_stdout()
        where, found = str(error.filename or "stdout"), error.strerror or str(error)
        return _report(HcclFusionError("cannot read or write", where=where, found=found), debug)
    return result if isinstance(result, int) else 0


def _prepare_streams() -> None:
    """A closed stream becomes an empty one; a character that stdout cannot encode is written escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long-lived as the stream it stands for
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and sys.stdout.errors == "strict":
        reconfigure(errors="backslashreplace")


def _abandon_stdout() -> None:
    """Keeps the interpreter from writing the rest, and from complaining, when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):  # a test's stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: click.ClickException) -> UsageError:
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else _PROGRAM
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        remedy = " or ".join(error.possibilities)
        return UsageError(f"no such option {error.option_name}", where=where, remedy=remedy)
    what = error.format_message().strip().rstrip(".")
    return UsageError(what[:1].lower() + what[1:], where=where, remedy=f"{where} --help")


def _report(error: HcclFusionError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {error}", err=True)
    return 2
