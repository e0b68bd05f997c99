"""`hccl-fusion demo`: what this is all about, in one command."""

from __future__ import annotations

__all__ = ["command"]

import os
from typing import TYPE_CHECKING, Any

import click

from hccl_fusion.cli.options import FOLDER, common_options, quiet_logging
from hccl_fusion.cli.output import human_bytes, print_json, print_table
from hccl_fusion.errors import UsageError

if TYPE_CHECKING:
    from hccl_fusion.demo.run import DemoResult, DemoStep


@click.command("demo", short_help="Build, fuse and compare a real ResNet-50 training graph.")
@click.option("-o", "--output", type=FOLDER, metavar="FOLDER", default="hccl-fusion-demo", show_default=True,
              help="Folder for the files it writes.")  # fmt: skip
@click.option("--image-size", type=click.IntRange(min=32), default=32, show_default=True, help="Pixels.")
@click.option("-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="In-process ranks.")
@common_options
def command(output: str, image_size: int, ranks: int, as_json: bool, quiet: bool) -> None:
    """Build a real ResNet-50 training graph, fuse it by two plans, and show that all three compute the same.

    The graph is written to a file and read back as any user's file. Takes about a minute.

    Example: hccl-fusion demo
    """
    from hccl_fusion.runtime.quiet_import import load_tensorflow_quietly

    _make_folder(output)
    say = _say_nothing if quiet else _say
    say("loading TensorFlow")
    load_tensorflow_quietly()
    from hccl_fusion.demo.run import run_demo

    with quiet_logging(quiet):
        result = run_demo(output, image_size, ranks, say)
    if as_json:
        print_json(_document(result, ranks))
    else:
        _print(result, ranks)
    click.get_current_context().exit(0 if result.equal else 1)


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the output folder cannot be made",
            where=f"option --output {path}",
            found=error.strerror,
            expected="the path of a folder",
            remedy="another folder",
        ) from error


def _say(text: str) -> None:
    click.echo(f"… {text}", err=True)


def _say_nothing(_: str) -> None:
    """Quiet."""


def _segments(step: DemoStep) -> str:
    return " ".join(f"[{s.start},{s.stop - 1}]" for section in step.plan.sections for s in section.segments)


def _bit_equal(step: DemoStep) -> tuple[int, int]:
    outputs = step.verification.comparison.outputs
    return sum(output.bit_equal for output in outputs), len(outputs)


def _print(result: DemoResult, ranks: int) -> None:
    section = result.steps[0].plan.sections[0]
    total = sum(gradient.size_bytes or 0 for gradient in section.gradients)
    click.echo(f"{result.path}: {result.nodes:,} nodes, {len(result.gradients)} gradients, {human_bytes(total)}")
    count = len(section.gradients)
    rows: list[tuple[object, ...]] = [
        (index, gradient.variable, "x".join(map(str, gradient.shape or ())), gradient.size_bytes)
        for index, gradient in enumerate(section.gradients)
    ]
    print_table(("index>", "variable", "shape", "bytes>"), [*rows[:4], ("…", f"{count - 8} more", "", ""), *rows[-4:]])
    print_table(
        ("plan", "segments", "all-reduces", f"bit-equal outputs on {ranks} ranks>", "written to"),
        [
            (step.name, _segments(step), f"{count} became {len(step.plan.parts)}",
             "{} of {}".format(*_bit_equal(step)), step.path)
            for step in result.steps
        ],
    )  # fmt: skip
    verdict = "compute the same as" if result.equal else "DO NOT compute the same as"
    click.echo(f"Both fused graphs {verdict} the original.")
    click.echo(f"Next: hccl-fusion list {result.path}")


def _document(result: DemoResult, ranks: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "graph": result.path,
        "nodes": result.nodes,
        "gradients": len(result.gradients),
        "ranks": ranks,
        "equal": result.equal,
        "plans": [
            {
                "name": step.name,
                "path": step.path,
                "segments": [[s.start, s.stop - 1] for section in step.plan.sections for s in section.segments],
                "equal": step.verification.equal,
                "bit_equal_outputs": _bit_equal(step)[0],
                "outputs": _bit_equal(step)[1],
            }
            for step in result.steps
        ],
    }
