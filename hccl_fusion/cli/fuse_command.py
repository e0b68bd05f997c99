"""`hccl-fusion fuse`: the rewritten graph."""

from __future__ import annotations

__all__ = ["command"]

from typing import Any

import click

from graph_passes.files import read_graph, write_graph
from hccl_fusion.cli.options import (
    common_options,
    plan_options,
    plan_options_of,
    quiet_logging,
    strategy_of,
    strategy_options,
)
from hccl_fusion.cli.output import Progress, print_json
from hccl_fusion.cli.planning import naming_file
from hccl_fusion.errors import UsageError
from hccl_fusion.fuse import Emit, fuse
from hccl_fusion.json_file import write_json
from hccl_fusion.plan_json import plan_document


@click.command("fuse")
@click.argument("graph")
@click.option("-o", "--output", required=True, metavar="OUT", help="The rewritten graph; - is stdout.")
@strategy_options
@plan_options
@click.option("--emit", type=click.Choice([form.value for form in Emit]), default="fused", show_default=True,
              help="fused: one all-reduce a segment. fusion-id: attributes for the NPU runtime. collective: for "
                   "TensorFlow's own collectives. mock: one process.")  # fmt: skip
@click.option("-n", "--ranks", type=int, metavar="N",
              help="Ranks of the forms collective and mock; default RANK_SIZE, else 1.")  # fmt: skip
@click.option("--chain/--no-chain", default=True, help="Order the segments by control edges (default).")
@click.option("--keep", multiple=True, metavar="NODE", help="An all-reduce to leave alone; may be repeated.")
@click.option("--plan-out", metavar="FILE", help="Write the plan to a JSON file.")
@click.option("--overwrite", is_flag=True, help="Allow OUT to be GRAPH itself.")
@common_options
def command(
    graph: str,
    output: str,
    group: str,
    emit: str,
    ranks: int | None,
    chain: bool,
    keep: tuple[str, ...],
    plan_out: str | None,
    overwrite: bool,
    infer_shapes: bool,
    as_json: bool,
    quiet: bool,
    **params: Any,
) -> None:
    """Write GRAPH with its gradients' all-reduces fused.

    Example: hccl-fusion fuse resnet50.pb -o fused.pb --size 60,20,20
    """
    strategy = strategy_of(params)
    if output == "-" and as_json:
        raise UsageError("stdout can carry the graph or the JSON, not both", found="-o - with --json")
    with quiet_logging(quiet), Progress(8, quiet) as progress:
        source = read_graph(graph)
        with naming_file(graph):
            result = fuse(
                source.graph_def,
                strategy,
                group=group,
                emit=emit,
                ranks=ranks,
                chain=chain,
                options=plan_options_of(**params),
                keep=keep,
                infer_shapes=infer_shapes,
                observe=progress,
            )
        write_graph(source, result.graph_def, output, overwrite_input=overwrite)
        if plan_out is not None:
            write_json(plan_out, plan_document(result.plan))
    if as_json:
        print_json({**plan_document(result.plan), "modified": result.modified, "notes": list(result.notes)})
        return
    _summarise(graph, output, result)


def _summarise(graph: str, output: str, result: Any) -> None:
    """A few lines: on stderr where stdout carries the graph."""
    to_stderr = output == "-"
    fused = [part for part in result.plan.parts if len(part.gradients) > 1]
    members = sum(len(part.gradients) for part in fused)
    alone = len(result.gradients) - members
    click.echo(
        f"{graph}: {members} of {len(result.gradients)} all-reduces became {len(fused)}; {alone} stay as they are",
        err=to_stderr,
    )
    for section in result.plan.sections:
        spans = " ".join(f"[{segment.start},{segment.stop - 1}]" for segment in section.segments[:16])
        more = f" and {len(section.segments) - 16} more" if len(section.segments) > 16 else ""
        click.echo(f"  {section.key}: {spans}{more}", err=to_stderr)
        for division in section.divisions[:5]:
            click.echo(f"  divided before index {division.at}: {division.text}", err=to_stderr)
    state = "verified, written to" if result.modified else "nothing to change, copied to"
    click.echo(f"{state} {output}", err=to_stderr)
