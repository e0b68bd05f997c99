"""What `list` and `plan` share: read a graph, plan it, and let every error name the file."""

from __future__ import annotations

__all__ = ["naming_file", "plan_file_graph"]

import contextlib
from collections.abc import Iterator
from typing import Any

from graph_passes.files import read_graph
from graph_passes.sections import Gradient
from hccl_fusion.cli.options import plan_options_of, quiet_logging, strategy_of
from hccl_fusion.cli.output import Progress
from hccl_fusion.errors import HcclFusionError
from hccl_fusion.fuse import plan_graph
from hccl_fusion.plan import Plan


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Puts the file's name into the place of an error that has none."""
    try:
        yield
    except HcclFusionError as error:
        error.in_file(path)
        raise


def plan_file_graph(
    path: str, group: str, infer_shapes: bool, quiet: bool, log: bool, params: dict[str, Any]
) -> tuple[Plan, tuple[Gradient, ...]]:
    """The plan of the graph in a file and its gradients; `params` are the strategy and size options.

    `log` lets the segment result line through to stderr.
    """
    strategy = strategy_of(params)
    with quiet_logging(quiet or not log), Progress(4, quiet) as progress:
        graph_def = read_graph(path).graph_def
        with naming_file(path):
            return plan_graph(
                graph_def,
                strategy,
                group=group,
                options=plan_options_of(**params),
                infer_shapes=infer_shapes,
                observe=progress,
            )
