"""The demo: a real ResNet-50 training graph, indexed, split as HCCL splits it, fused, and shown to compute the same."""

from __future__ import annotations

__all__ = ["DemoResult", "DemoStep", "STRATEGIES", "run_demo"]

import os
from collections.abc import Callable
from dataclasses import dataclass

from graph_passes.files import GraphFile, read_graph, write_graph
from graph_passes.sections import Gradient
from hccl_fusion.fuse import fuse, plan_graph
from hccl_fusion.json_file import write_json
from hccl_fusion.plan import Plan
from hccl_fusion.plan_json import plan_document
from hccl_fusion.runtime.verification import Verification, verify_graphs
from hccl_fusion.strategy import Strategy, StrategyKind

STRATEGIES = {
    "default": Strategy(StrategyKind.DEFAULT),
    # What the ResNet-50 script in Ascend/ModelZoo-TensorFlow (Apache-2.0) registers.
    "by-idx": Strategy(StrategyKind.IDX, (86, 160)),
}
"""The plans that the demo shows, by name."""


@dataclass(frozen=True)
class DemoStep:
    """One fused graph: where it was written, its plan, and how it compares with the original."""

    name: str
    path: str
    plan: Plan
    verification: Verification


@dataclass(frozen=True)
class DemoResult:
    """All that the demo made."""

    path: str
    nodes: int
    gradients: tuple[Gradient, ...]
    steps: tuple[DemoStep, ...]

    @property
    def equal(self) -> bool:
        """True where every fused graph computes what the original computes."""
        return all(step.verification.equal for step in self.steps)


def run_demo(folder: str, image_size: int, ranks: int, say: Callable[[str], None]) -> DemoResult:
    """Builds the graph, writes it to `folder`, reads it back as any user's file, and fuses and verifies it.

    `say` is told what is being done. The images are `image_size` pixels wide and high, so that a laptop runs it.
    """
    from hccl_fusion.demo.resnet50 import ResNet50Options, write_training_graph

    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "resnet50.pb")
    say("building the ResNet-50 v1.5 training graph")
    write_training_graph(path, ResNet50Options(image_size=image_size, batch_size=2, ranks=ranks))
    source = read_graph(path)
    _, gradients = plan_graph(source.graph_def, STRATEGIES["default"], infer_shapes=False)
    steps = tuple(_step(source, folder, name, strategy, ranks, say) for name, strategy in STRATEGIES.items())
    return DemoResult(path, len(source.graph_def.node), gradients, steps)


def _step(
    source: GraphFile, folder: str, name: str, strategy: Strategy, ranks: int, say: Callable[[str], None]
) -> DemoStep:
    say(f"fusing by {strategy}")
    result = fuse(source.graph_def, strategy, infer_shapes=False)
    path = os.path.join(folder, f"fused-{name}.pb")
    write_graph(source, result.graph_def, path)
    write_json(os.path.join(folder, f"plan-{name}.json"), plan_document(result.plan))
    say(f"running the original and the fused graph on {ranks} in-process ranks")
    verification = verify_graphs(source.graph_def, read_graph(path).graph_def, ranks)
    return DemoStep(name, path, result.plan, verification)
