"""Options that several commands share, and how they become library values."""

from __future__ import annotations

__all__ = [
    "FILE",
    "FOLDER",
    "common_options",
    "plan_options",
    "plan_options_of",
    "quiet_logging",
    "naming",
    "strategy_of",
    "strategy_options",
]

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from hccl_fusion.boundaries import PlanOptions
from hccl_fusion.errors import HcclFusionError, StrategyWarning, UsageError
from hccl_fusion.fuse import DEFAULT_GROUP
from hccl_fusion.plan_file import PlanFile, read_plan
from hccl_fusion.registry import size_list_advice
from hccl_fusion.strategy import Strategy, StrategyKind, check_group

_Command = TypeVar("_Command", bound=Callable[..., Any])
_STRATEGY_FLAGS = ("idx", "size", "max_bytes", "segments", "single", "none", "plan_file")


class _PathName(click.types.StringParamType):
    """A path as the user typed it, which the shell completes; whether it is there is the reader's question."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.name)]


FILE = _PathName("file")
"""The type of an argument or option that names a file."""

FOLDER = _PathName("dir")
"""The type of an option that names a folder."""


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Puts a place (a file, an option) in front of that of an error, where it is not named already.

    An error in the usage is no fault of a place: it names its own.
    """
    try:
        yield
    except HcclFusionError as error:
        if not isinstance(error, UsageError):
            error.in_file(place)
        raise


def _checked_group(_: click.Context, __: click.Parameter, value: str) -> str:
    with naming("option --group"):
        return check_group(value)


def _apply(command: _Command, *options: Callable[[_Command], _Command]) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command


def common_options(command: _Command) -> _Command:
    """--json, --quiet and --debug."""
    return _apply(
        command,
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option("-q", "--quiet", is_flag=True, help="No log lines and no progress on stderr."),
        click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
    )


def strategy_options(command: _Command) -> _Command:
    """The ways to say how gradients are cut into segments; one at most."""
    return _apply(
        command,
        click.option("--idx", metavar="LIST", help="Last gradient index of each segment: 20,100,159."),
        click.option("--size", metavar="LIST", help="Percent of the bytes of each segment: 60,20,20."),
        click.option("--max-bytes", metavar="SIZE", help="Most bytes of a segment: 25MiB."),
        click.option("--segments", type=int, metavar="K", help="K segments of equal bytes."),
        click.option("--single", is_flag=True, help="One segment."),
        click.option("--none", is_flag=True, help="No fusion."),
        click.option("--plan", "plan_file", type=FILE, metavar="FILE", help="The segments of a plan file."),
        click.option(
            "--group", default=DEFAULT_GROUP, show_default=True, callback=_checked_group, help="The group that is cut."
        ),
    )


def plan_options(command: _Command) -> _Command:
    """How sizes are counted."""
    return _apply(
        command,
        click.option(
            "--shape-mode",
            type=click.Choice(["known", "unknown"]),
            default="known",
            show_default=True,
            help="HCCL's segmentation mode; unknown caps segments at the buffer.",
        ),
        click.option(
            "--buffer-mib",
            type=click.IntRange(min=2),
            default=200,
            show_default=True,
            help="HCCL_BUFFSIZE, for --shape-mode unknown.",
        ),
        click.option(
            "--size-accounting",
            type=click.Choice(["padded", "raw"]),
            default="padded",
            show_default=True,
            help="Bytes that the segmentation counts; HCCL pads each tensor.",
        ),
        click.option(
            "--shape-inference/--no-shape-inference",
            "infer_shapes",
            default=True,
            help="Ask TensorFlow for shapes that the graph does not tell (loads TensorFlow).",
        ),
    )


def plan_options_of(shape_mode: str, buffer_mib: int, size_accounting: str) -> PlanOptions:
    """The library's value of `plan_options`."""
    return PlanOptions(shape_mode, buffer_mib, size_accounting)


def strategy_of(params: dict[str, Any]) -> Strategy | PlanFile | None:
    """Takes the strategy flags out of `params`; None where none is given.

    Warns where HCCL's own check would refuse a legal size list.

    Raises:
        UsageError: more than one is given.
        HcclFusionError: the list or the plan file is illegal; the option is named.
    """
    given = {name: params.pop(name) for name in _STRATEGY_FLAGS}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join(map(_option_of, given))
        raise UsageError("strategies exclude each other", found=flags, expected="one of them")
    readers: dict[str, Callable[[Any], Strategy | PlanFile]] = {
        "idx": Strategy.parse_idx,
        "size": Strategy.parse_size,
        "max_bytes": Strategy.parse_max_bytes,
        "segments": lambda count: Strategy(StrategyKind.SEGMENTS, (count,)),
        "single": lambda _: Strategy(StrategyKind.SINGLE),
        "none": lambda _: Strategy(StrategyKind.NONE),
        "plan_file": read_plan,
    }
    ((name, value),) = given.items()
    with naming(f"option {_option_of(name)}"):
        strategy = readers[name](value)
    if isinstance(strategy, Strategy) and strategy.kind is StrategyKind.SIZE:
        advice = size_list_advice(strategy.values)
        if advice is not None:
            warnings.warn(advice, StrategyWarning, stacklevel=2)
    return strategy


def _option_of(name: str) -> str:
    return "--plan" if name == "plan_file" else "--" + name.replace("_", "-")


@contextlib.contextmanager
def quiet_logging(quiet: bool, info: bool = True) -> Iterator[None]:
    """Log lines and warnings of the library on stderr, one line each; none where quiet.

    `info` is False where the command says the same in its result.
    """
    logger = logging.getLogger("hccl_fusion")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.setLevel(logging.ERROR if quiet else logging.INFO if info else logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("ignore" if quiet else "always")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)
