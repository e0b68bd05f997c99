"""Is one graph the other's equal? By structure, as the pass verify sees it, and by numbers on in-process ranks."""

from __future__ import annotations

__all__ = ["Verification", "verify_graphs"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.find import Find
from graph_passes.graph import graphs_of
from graph_passes.messages import GraphDef
from graph_passes.pipeline import GraphItem
from graph_passes.verify import verify_rewrite
from hccl_fusion.fuse import shape_inference
from hccl_fusion.runtime.numeric_check import Comparison, compare_graphs


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify_graphs`.

    Attributes:
        comparison: the outputs of both graphs, compared.
        structure: what the structural check found; empty where every gradient is reduced once, as it was.
    """

    comparison: Comparison
    structure: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True where neither check found anything."""
        return self.comparison.equal and not self.structure


def verify_graphs(
    before: GraphDef,
    after: GraphDef,
    ranks: int = 2,
    *,
    feeds: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    fetches: Sequence[str] = (),
    seed: int = 0,
    steps: int = 1,
) -> Verification:
    """Compares a graph with its rewritten form; arguments as in `compare_graphs`.

    Raises:
        HcclFusionError: one of the graphs is broken or cannot be run.
    """
    item = Find(shape_inference(), allow_lowered=True).run(GraphItem(before)).item
    graphs_of(after)  # a broken second graph is an error of its own, not a difference
    structure = verify_rewrite(before, after, item.gradients or (), item.graphs)
    comparison = compare_graphs(before, after, ranks, feeds=feeds, fetches=fetches, seed=seed, steps=steps)
    return Verification(comparison, tuple(structure))
