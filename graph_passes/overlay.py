"""A rewritten graph seen as its original with some nodes changed and some added at the end.

What was not touched is not indexed again, so looking at a rewritten graph costs as much as was rewritten.
"""

from __future__ import annotations

__all__ = ["Overlay"]

from collections import ChainMap
from collections.abc import Sequence

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, dependents, resolve_inputs
from graph_passes.messages import NodeDef
from graph_passes.node_input import NodeInput, parse_input


class Overlay:
    """The index of a rewritten graph; node numbers of the original stay.

    Attributes:
        before: the original's index.
        fresh: numbers of the changed and the added nodes.
        replaced: the changed nodes.
        ported: (consumer, producer, port) of the fresh nodes' inputs that name a port.
    """

    def __init__(self, before: Graph, container: Sequence[NodeDef], changed: Sequence[int]) -> None:
        """`changed` lists the original nodes that differ; their names are the same.

        Raises:
            GraphError: an added node's name is taken, or an input names no node.
        """
        self.before = before
        self.container = container
        self.arg_count = before.arg_count
        self.label = before.label
        self.fresh = [*changed, *range(len(before), before.arg_count + len(container))]
        nodes = [self.node(number) for number in self.fresh]
        self.replaced = frozenset(changed)
        self._names = {number: node.name for number, node in zip(self.fresh, nodes)}
        self._ops = {number: node.op for number, node in zip(self.fresh, nodes)}
        self._ids = self._added_ids(len(changed))
        texts = [text for node in nodes for text in node.input]
        owners = [number for number, node in zip(self.fresh, nodes) for _ in node.input]
        sources, self.ported = resolve_inputs(
            texts,
            ChainMap(self._ids, before.ids),
            lambda edges: [owners[edge] for edge in edges],
            lambda number: before.where(self.name(number)),
        )
        self._producers: dict[int, list[int]] = {number: [] for number in self.fresh}
        self._added_consumers: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for owner, source in zip(owners, sources):
            self._producers[owner].append(source)
            self._added_consumers.setdefault(source, []).append(owner)

    def __len__(self) -> int:
        return self.arg_count + len(self.container)

    def _added_ids(self, changed: int) -> dict[str, int]:
        ids: dict[str, int] = {}
        for number in self.fresh[changed:]:
            name = self._names[number]
            if name in ids or name in self.before.ids:
                raise GraphError("node names are not unique", where=self.before.where(name), found="an added node")
            ids[name] = number
        return ids

    def node(self, number: int) -> NodeDef:
        """The NodeDef of a node that is no function argument."""
        return self.container[number - self.arg_count]

    def name(self, number: int) -> str:
        """The name of a node."""
        return self.before.names[number] if number < len(self.before) else self._names[number]

    def op(self, number: int) -> str:
        """The op of a node; `_Arg` for a function argument."""
        found = self._ops.get(number)
        return self.before.ops[number] if found is None else found

    def producers(self, number: int) -> list[int]:
        """Nodes that this one has an edge from, in input order."""
        found = self._producers.get(number)
        return self.before.producers(number) if found is None else found

    def consumers(self, number: int) -> list[int]:
        """Nodes that have an edge from this one, once per edge; back edges of loops left out."""
        found = self._consumers.get(number)
        if found is None:
            found = self._consumers[number] = self._find_consumers(number)
        return found

    def _find_consumers(self, number: int) -> list[int]:
        old: list[int] = self.before.consumers(number) if number < len(self.before) else []
        kept = [consumer for consumer in old if consumer not in self._producers]
        added = self._added_consumers.get(number)
        if added and self.op(number).endswith("NextIteration"):
            added = [consumer for consumer in added if not self.is_back_edge(number, consumer)]
        return kept + added if added else kept

    def is_back_edge(self, source: int, target: int) -> bool:
        """True for the edge that closes a while loop."""
        return self.op(source).endswith("NextIteration") and self.op(target) in ("Merge", "RefMerge")

    def inputs(self, number: int) -> list[NodeInput]:
        """The parsed inputs of a node; none for a function argument."""
        if number < self.arg_count:
            return []
        return [parse_input(text) for text in self.node(number).input]

    def find_cycle(self) -> list[str]:
        """The names along one cycle; empty where there is none.

        A cycle of the rewritten graph goes through a fresh node, since the original has none: only what depends on
        a fresh node is sorted.
        """
        waiting = dict.fromkeys(dependents(self.fresh, self.consumers), 0)
        for node in waiting:
            for consumer in self.consumers(node):
                waiting[consumer] += 1
        ready = [node for node, count in waiting.items() if not count]
        while ready:
            for consumer in self.consumers(ready.pop()):
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    ready.append(consumer)
        stuck = [node for node, count in waiting.items() if count]
        return self._walk_cycle(stuck[0], waiting) if stuck else []

    def _walk_cycle(self, node: int, waiting: dict[int, int]) -> list[str]:
        path: dict[int, int] = {}
        while node not in path:
            path[node] = len(path)
            node = next(p for p in self.producers(node) if waiting.get(p) and not self.is_back_edge(p, node))
        return [self.name(number) for number in list(path)[path[node] :]][::-1]
