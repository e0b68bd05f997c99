"""Options that several commands share, and how they become library values."""

from __future__ import annotations

__all__ = [
    "common_options",
    "plan_options",
    "plan_options_of",
    "quiet_logging",
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
from hccl_fusion.errors import UsageError
from hccl_fusion.fuse import DEFAULT_GROUP
from hccl_fusion.plan_file import PlanFile, read_plan
from hccl_fusion.strategy import Strategy, StrategyKind

_Command = TypeVar("_Command", bound=Callable[..., Any])
_STRATEGY_FLAGS = ("idx", "size", "max_bytes", "segments", "single", "none", "plan_file")


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
        click.option("--plan", "plan_file", metavar="FILE", help="The segments of a plan file."),
        click.option("--group", default=DEFAULT_GROUP, show_default=True, help="The group that is cut."),
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

    Raises:
        UsageError: more than one is given.
    """
    given = {name: params.pop(name) for name in _STRATEGY_FLAGS}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("plan_file", "plan").replace("_", "-") for name in given)
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
    return next((readers[name](value) for name, value in given.items()), None)


@contextlib.contextmanager
def quiet_logging(quiet: bool) -> Iterator[None]:
    """Log lines and warnings of the library on stderr, one line each; none where quiet."""
    logger = logging.getLogger("hccl_fusion")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
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
