"""What the commands on one graph share: plan it, let every error name the file, ask TensorFlow quietly."""

from __future__ import annotations

__all__ = ["plan_file_graph", "quiet_inference"]

from collections.abc import Mapping, Sequence
from typing import Any

from graph_passes.files import read_graph
from graph_passes.find import InferShapes
from graph_passes.messages import GraphDef
from graph_passes.sections import Gradient, GradientId, Shape
from hccl_fusion.cli.options import naming, plan_options_of, quiet_logging, strategy_of
from hccl_fusion.cli.output import Progress
from hccl_fusion.fuse import plan_graph, shape_inference
from hccl_fusion.plan import Plan


def plan_file_graph(
    path: str, group: str, infer_shapes: bool, quiet: bool, log: bool, params: dict[str, Any]
) -> tuple[Plan, tuple[Gradient, ...]]:
    """The plan of the graph in a file and its gradients; `params` are the strategy and size options.

    `log` lets the segment result line through to stderr.
    """
    with quiet_logging(quiet, info=log), Progress(4, quiet) as progress:
        strategy = strategy_of(params)
        graph_def = read_graph(path).graph_def
        with naming(path):
            return plan_graph(
                graph_def,
                strategy,
                group=group,
                options=plan_options_of(**params),
                infer_shapes=quiet_inference(infer_shapes),
                observe=progress,
            )


def quiet_inference(wanted: bool) -> bool | InferShapes:
    """TensorFlow's shape inference, loaded without its start-up lines; False where it is not wanted."""

    def infer(graph_def: GraphDef, gradients: Sequence[GradientId]) -> Mapping[GradientId, Shape]:
        from hccl_fusion.runtime.quiet_import import load_tensorflow_quietly

        load_tensorflow_quietly()
        return shape_inference()(graph_def, gradients)

    return infer if wanted else False
