"""`hccl-fusion verify`: do two graphs compute the same?"""

from __future__ import annotations

__all__ = ["command", "verification_document"]

import math
from typing import Any

import click

from graph_passes.files import read_graph
from graph_passes.find import Find
from graph_passes.graph import graphs_of
from graph_passes.messages import GraphDef
from graph_passes.order import breadth_first_order
from graph_passes.pipeline import GraphItem
from hccl_fusion.cli.feeds import read_feeds
from hccl_fusion.cli.options import FILE, common_options, naming, quiet_logging
from hccl_fusion.cli.output import Progress, print_json, print_table
from hccl_fusion.errors import UsageError
from hccl_fusion.plan_json import SCHEMA_VERSION
from hccl_fusion.runtime.verification import Verification, verify_graphs

_SHOWN = 5


@click.command("verify", short_help="Run two graphs and compare all their outputs.")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="In-process ranks.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Training steps to run.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--fetch", "fetches", multiple=True, metavar="TENSOR", help="Another tensor to compare; repeatable.")
@click.option("--feeds", "feeds_file", type=FILE, metavar="FILE.npz", help="Values for placeholders, by tensor name.")
@common_options
def command(
    before: str,
    after: str,
    ranks: int,
    steps: int,
    seed: int,
    fetches: tuple[str, ...],
    feeds_file: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run graphs BEFORE and AFTER on in-process ranks with different inputs and compare all their outputs.

    With 2 ranks they must be equal bit for bit, with more within rounding. Exit code 1 where they are not.

    Example: hccl-fusion verify resnet50.pb fused.pb -n 2
    """
    from hccl_fusion.runtime.quiet_import import load_tensorflow_quietly

    if before == after == "-":
        raise UsageError("stdin carries one graph only", where="arguments BEFORE and AFTER", found="- twice")
    with quiet_logging(quiet), Progress(2, quiet) as progress:
        feeds = read_feeds(feeds_file)
        graphs = [_read_sound_graph(before, with_reductions=True), _read_sound_graph(after)]
        load_tensorflow_quietly()
        progress.step("running both graphs")
        with naming(f"{before} against {after}"):
            result = verify_graphs(graphs[0], graphs[1], ranks, feeds=feeds, fetches=fetches, seed=seed, steps=steps)
    if as_json:
        print_json(verification_document(result))
    else:
        _print(result)
    click.get_current_context().exit(0 if result.equal else 1)


def _read_sound_graph(path: str, *, with_reductions: bool = False) -> GraphDef:
    """A broken graph is an error that names its file, and is found before TensorFlow is loaded."""
    graph_def = read_graph(path).graph_def
    with naming(path):
        if with_reductions:
            Find(allow_lowered=True).run(GraphItem(graph_def))
        else:
            for graph in graphs_of(graph_def):
                breadth_first_order(graph)
    return graph_def


def verification_document(result: Verification) -> dict[str, Any]:
    """The JSON document of `verify --json`; a difference that is no number (shapes differ, NaN) is null."""
    comparison = result.comparison
    return {
        "schema_version": SCHEMA_VERSION,
        "equal": result.equal,
        "ranks": comparison.ranks,
        "outputs": [
            {
                "name": output.name,
                "max_abs_diff": output.max_abs_diff if math.isfinite(output.max_abs_diff) else None,
                "bit_equal": output.bit_equal,
            }
            for output in comparison.outputs
        ],
        "structure": list(result.structure),
        "notes": list(comparison.notes),
    }


def _print(result: Verification) -> None:
    comparison = result.comparison
    for finding in result.structure[:_SHOWN]:
        click.echo(f"structure: {finding}")
    if len(result.structure) > _SHOWN:
        click.echo(f"structure: and {len(result.structure) - _SHOWN} more")
    different = [output for output in comparison.outputs if not output.bit_equal]
    worst = sorted(different, key=lambda output: -output.max_abs_diff)
    if worst:
        rows = [(output.name, f"{output.max_abs_diff:.3g}", "no") for output in worst[:_SHOWN]]
        print_table(("output", "largest difference>", "bit-equal"), rows)
        if len(worst) > _SHOWN:
            click.echo(f"and {len(worst) - _SHOWN} more")
    for note in comparison.notes:
        click.echo(f"note: {note}")
    count = len(comparison.outputs)
    verdict = "equal" if result.equal else "NOT equal"
    findings = "1 finding" if len(result.structure) == 1 else f"{len(result.structure)} findings"
    click.echo(
        f"{verdict}: {count - len(different)} of {count} outputs are bit-equal on {comparison.ranks} ranks"
        + (f", the structure has {findings}" if result.structure else "")
    )
