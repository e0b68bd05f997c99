"""`hccl-fusion plan`: the segments."""

from __future__ import annotations

__all__ = ["command"]

from typing import Any

import click

from hccl_fusion.cli.destinations import check_destinations, one_result_only
from hccl_fusion.cli.options import FILE, common_options, plan_options, strategy_options
from hccl_fusion.cli.output import print_json
from hccl_fusion.cli.planning import plan_file_graph
from hccl_fusion.hccl_calls import hccl_calls
from hccl_fusion.json_file import write_json
from hccl_fusion.plan_json import plan_document


@click.command("plan", short_help="Print the segments that gradients are fused into.")
@click.argument("graph", type=FILE)
@strategy_options
@plan_options
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the plan to a JSON file; - is stdout.")
@click.option("--hccl-calls", "as_calls", is_flag=True, help="Print the set_split_strategy call for these segments.")
@common_options
def command(
    graph: str,
    group: str,
    output: str | None,
    as_calls: bool,
    infer_shapes: bool,
    as_json: bool,
    quiet: bool,
    **params: Any,
) -> None:
    """Print the segments that the gradients of GRAPH are fused into.

    Example: hccl-fusion plan resnet50.pb --idx 86,160
    """
    if as_calls and (as_json or output == "-"):
        raise one_result_only("--hccl-calls", "--json" if as_json else "-o -")
    check_destinations({"--output": output}, graph)
    plan, _ = plan_file_graph(graph, group, infer_shapes, quiet, True, params)
    document = plan_document(plan)
    if output not in (None, "-"):
        write_json(output, document)
    if as_json or output == "-":
        print_json(document)
    elif as_calls:
        click.echo(hccl_calls(plan))
    else:
        from hccl_fusion.cli.tables import print_plan

        print_plan(plan)
