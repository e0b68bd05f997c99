"""`hccl-fusion list`: every gradient with its index."""

from __future__ import annotations

__all__ = ["command"]

from typing import Any

import click

from hccl_fusion.cli.options import FILE, common_options, plan_options, strategy_options
from hccl_fusion.cli.output import print_json
from hccl_fusion.cli.planning import plan_file_graph
from hccl_fusion.plan_json import gradients_document


@click.command("list", short_help="Print every gradient with its index, size and segment.")
@click.argument("graph", type=FILE)
@strategy_options
@plan_options
@common_options
def command(graph: str, group: str, infer_shapes: bool, as_json: bool, quiet: bool, **params: Any) -> None:
    """Print every gradient of GRAPH: its index, size, variable, segment, or why it is reduced alone.

    Example: hccl-fusion list resnet50.pb
    """
    plan, gradients = plan_file_graph(graph, group, infer_shapes, quiet, False, params)
    if as_json:
        print_json(gradients_document(plan, gradients))
        return
    from hccl_fusion.cli.tables import print_gradients

    print_gradients(plan, gradients)
