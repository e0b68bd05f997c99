"""`hccl-fusion fuse`: the rewritten graph."""

from __future__ import annotations

__all__ = ["command"]

import os
from typing import Any

import click

from graph_passes.files import read_graph, write_graph
from graph_passes.node_input import producer_name
from hccl_fusion.cli.destinations import check_destinations, one_result_only
from hccl_fusion.cli.options import (
    FILE,
    common_options,
    naming,
    plan_options,
    plan_options_of,
    quiet_logging,
    strategy_of,
    strategy_options,
)
from hccl_fusion.cli.output import Progress, print_json
from hccl_fusion.cli.planning import quiet_inference
from hccl_fusion.errors import UsageError, summarise
from hccl_fusion.fuse import Emit, FuseResult, fuse
from hccl_fusion.json_file import write_json
from hccl_fusion.plan_json import plan_document


@click.command("fuse", short_help="Write the graph with its all-reduces fused.")
@click.argument("graph", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, metavar="OUT", help="The rewritten graph; - is stdout.")
@strategy_options
@plan_options
@click.option("--emit", type=click.Choice([form.value for form in Emit]), default="fused", show_default=True,
              help="fused: one all-reduce a segment. fusion-id: attributes for the NPU runtime. collective: for "
                   "TensorFlow's own collectives. mock: one process.")  # fmt: skip
@click.option("-n", "--ranks", type=click.IntRange(min=1), metavar="N",
              help="Ranks of the forms collective and mock; default RANK_SIZE, else 1.")  # fmt: skip
@click.option("--chain/--no-chain", default=True, help="Order the segments by control edges (default).")
@click.option("--keep", multiple=True, metavar="NODE", help="An all-reduce to leave alone; may be repeated.")
@click.option("--plan-out", type=FILE, metavar="FILE", help="Write the plan to a JSON file; - is stdout.")
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
    if "-" in (output, plan_out) and as_json:
        raise one_result_only("-o -" if output == "-" else "--plan-out -", "--json")
    check_destinations({"--output": output, "--plan-out": plan_out}, params["plan_file"], may_be_folder=True)
    check_destinations({"--output": output}, may_be_folder=os.path.isdir(graph))
    check_destinations({"--plan-out": plan_out}, graph)
    with quiet_logging(quiet), Progress(8, quiet) as progress:
        strategy = strategy_of(params)
        source = read_graph(graph)
        with naming(graph):
            result = fuse(
                source.graph_def,
                strategy,
                group=group,
                emit=emit,
                ranks=ranks,
                chain=chain,
                options=plan_options_of(**params),
                keep=keep,
                infer_shapes=quiet_inference(infer_shapes),
                observe=progress,
            )
        _require_kept(graph, result, keep)
        write_graph(source, result.graph_def, output, overwrite_input=overwrite)
        if plan_out not in (None, "-"):
            write_json(plan_out, plan_document(result.plan))
    if as_json:
        print_json({**plan_document(result.plan), "modified": result.modified, "notes": list(result.notes)})
        return
    if plan_out == "-":
        print_json(plan_document(result.plan))
    to_stderr = "-" in (output, plan_out)
    if not (to_stderr and quiet):
        _summarise(graph, output, result, to_stderr=to_stderr, is_tagged=emit == Emit.FUSION_ID.value)


def _require_kept(graph: str, result: FuseResult, keep: tuple[str, ...]) -> None:
    """Refuses a name that keeps nothing: a slip of the pen would go unnoticed."""
    known = {gradient.name for gradient in result.gradients if not gradient.graph}
    unknown = [name for name in keep if producer_name(name) not in known]
    if unknown:
        raise UsageError(
            "no all-reduce has that name",
            where="option --keep",
            found=summarise(unknown),
            expected=f"the name of an all-reduce of {graph}",
            remedy=f"the key all_reduce in hccl-fusion list {graph} --json",
        )


def _summarise(graph: str, output: str, result: FuseResult, *, to_stderr: bool, is_tagged: bool) -> None:
    """A few lines: on stderr where stdout carries a result of its own."""
    fused = [part for part in result.plan.parts if len(part.gradients) > 1]
    members = sum(len(part.gradients) for part in fused)
    alone = len(result.gradients) - members
    became = "are marked to become" if is_tagged else "became"
    click.echo(
        f"{graph}: {members} of {len(result.gradients)} all-reduces {became} {len(fused)}; {alone} stay as they are",
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
