"""Pass fusion-id: leaves every all-reduce where it is and tells the NPU runtime which ones to merge.

Each member of a part gets `fusion` 2 and a `fusion_id` that no other part of its group has; the graph engine merges
equal ids itself, without copies. Sections that already carry ids keep theirs. One control edge, from the last member
of a part to the first of the next, orders the merged reductions.
"""

from __future__ import annotations

__all__ = ["TagFusionId"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.edit import EditWriter
from graph_passes.pipeline import GraphItem, PassResult, require
from graph_passes.sections import Gradient, GradientId, Part


@dataclass(frozen=True)
class TagFusionId:
    """Writes fusion ids.

    Attributes:
        chain: order the merged reductions of a chain by control edges.
    """

    chain: bool = True
    name: ClassVar[str] = "fusion-id"

    def requires(self, item: GraphItem) -> None:
        """A plan is there."""
        require(item.parts is not None, self.name, "there is no plan", "planning before it")

    def run(self, item: GraphItem) -> PassResult:
        """Returns the tagged graph; the very graph that came in where it carries these tags already."""
        gradients = {gradient.id: gradient for gradient in item.gradients or ()}
        ids = dict(_fusion_ids(item.parts or (), gradients))
        writers = item.writers({part.key.graph for part in item.parts or ()})
        modified = False
        for label, writer in writers.items():
            parts = [part for part in item.parts or () if part.key.graph == label]
            modified |= _tag_graph(writer, parts, gradients, ids, self.chain)
        if not modified:
            return PassResult(item, notes=("nothing to tag",))
        return PassResult(item.edited(writers), True, (f"{len(ids)} fusion ids",))

    def ensures(self, item: GraphItem) -> None:
        """Pass verify checks the result."""


def _fusion_ids(parts: Sequence[Part], gradients: dict[GradientId, Gradient]) -> Iterator[tuple[Part, int]]:
    """An id for every part: its own where it has one, else the next that is free in its group."""
    used: dict[str, set[int]] = {}
    for gradient in gradients.values():
        used.setdefault(gradient.group, set()).add(gradient.fusion_id)
    kept: set[tuple[str, int]] = set()
    following: dict[str, int] = {}
    for part in parts:
        group, fusion_id = part.key.group, part.key.fusion_id
        if fusion_id >= 0 and (group, fusion_id) not in kept:
            # A section that was divided keeps its id for the first part only.
            kept.add((group, fusion_id))
        else:
            fusion_id = following.get(group, 0)
            while fusion_id in used[group]:
                fusion_id += 1
            following[group] = fusion_id + 1
        yield part, fusion_id


def _tag_graph(
    writer: EditWriter,
    parts: Sequence[Part],
    gradients: dict[GradientId, Gradient],
    ids: dict[Part, int],
    chain: bool,
) -> bool:
    modified = False
    last_of_chain: dict[int, str] = {}
    for part in parts:
        for name in part.gradients:
            gradient = gradients[name]
            if (gradient.fusion, gradient.fusion_id) != (2, ids[part]):
                node = writer.node(gradient.node)
                node.attr["fusion"].i, node.attr["fusion_id"].i = 2, ids[part]
                modified = True
        before = last_of_chain.get(part.chain)
        first = gradients[part.gradients[0]].node
        if chain and part.chain >= 0:
            if before is not None and f"^{before}" not in writer.current(first).input:
                writer.node(first).input.append(f"^{before}")
                modified = True
            last_of_chain[part.chain] = part.gradients[-1].name
    return modified
