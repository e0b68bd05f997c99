"""An index over the nodes of one graph or one function body: names, ops, edges.

Built once in linear time. Nodes are numbered in node-list order; in a function body its arguments come first, as
nodes of op `_Arg`, so that every input resolves in the same way. Edges are kept as flat integer lists (compressed
sparse rows), which is what makes a million nodes affordable.
"""

from __future__ import annotations

__all__ = ["Graph", "graphs_of"]

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from graph_passes.errors import GraphError, summarise
from graph_passes.messages import FunctionDef, GraphDef, NodeDef
from graph_passes.node_input import NodeInput, parse_input

_NEXT_ITERATION = frozenset({"NextIteration", "RefNextIteration"})
_MERGE = frozenset({"Merge", "RefMerge"})


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the cycle collector from scanning millions of fresh strings and integers again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """Index over a GraphDef's own nodes, or over one function's body.

    Attributes:
        label: "" for the graph itself, else the function's name.
        container: the NodeDefs, as they stand in the message.
        arg_count: how many pseudo nodes (function arguments) come before the first NodeDef.
        names, ops: by node number.
        ids: node number by name.
        in_start, in_src: inputs of node v are in_src[in_start[v] : in_start[v + 1]], in input order, data and control.
        out_start, out_dst: consumers of node v likewise; an edge from NextIteration to Merge is left out.
        ported: (consumer, producer, port) of every input that names an output other than by the bare name.
    """

    def __init__(self, container: Sequence[NodeDef], args: Sequence[str] = (), label: str = "") -> None:
        self.label = label
        self.container = container
        self.arg_count = len(args)
        with paused_gc():
            self.names, self.ops, flat, counts = _columns(container, args)
            self.ids = dict(zip(self.names, range(len(self.names))))
            self._require_unique()
            self.ported: list[tuple[int, int, int]] = []
            self.in_start = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
            self.in_src = self._resolve(flat)
            self.out_start, self.out_dst = self._consumers()

    @classmethod
    def of_function(cls, function: FunctionDef) -> Graph:
        """The index of a function's body."""
        args = [arg.name for arg in function.signature.input_arg]
        return cls(function.node_def, args, function.signature.name)

    def rewritten(self, container: Sequence[NodeDef], changed: Sequence[int]) -> Graph:
        """The index of a graph that differs from this one in some nodes and in nodes added at the end.

        `changed` lists the numbers of the nodes that differ, ascending; names stay. Costs little where it is short.
        """
        graph = Graph.__new__(Graph)
        graph.label, graph.container, graph.arg_count = self.label, container, self.arg_count
        with paused_gc():
            fresh = [*changed, *range(len(self), self.arg_count + len(container))]
            names, ops, flat, counts = _columns([container[n - self.arg_count] for n in fresh], ())
            graph.names = self.names + names[len(changed) :]
            graph.ops = self.ops + ops[len(changed) :]
            for number, op in zip(changed, ops):
                graph.ops[number] = op
            graph.ids = {**self.ids, **dict(zip(names[len(changed) :], range(len(self), len(graph.names))))}
            graph._require_unique()
            graph._splice_edges(self, fresh, flat, counts)
            graph.out_start, graph.out_dst = graph._consumers()
        return graph

    def _splice_edges(self, before: Graph, fresh: list[int], flat: list[str], counts: list[int]) -> None:
        """Takes over the edges of unchanged nodes and resolves those of the fresh ones."""
        replaced = set(fresh)
        self.ported = [entry for entry in before.ported if entry[0] not in replaced]
        all_counts = np.zeros(len(self), dtype=np.int64)
        all_counts[: len(before)] = np.diff(before.in_start)
        all_counts[fresh] = counts
        self.in_start = [0, *np.cumsum(all_counts).tolist()]
        # Only the fresh nodes' inputs are resolved, under their own numbers.
        resolved = self._resolve(flat, np.repeat(fresh, counts).tolist())
        edges: list[int] = []
        kept_from = taken = 0
        for number, count in zip(fresh, counts):
            if number < len(before):
                edges += before.in_src[kept_from : before.in_start[number]]
                kept_from = before.in_start[number + 1]
            elif kept_from < len(before.in_src):
                edges += before.in_src[kept_from:]
                kept_from = len(before.in_src)
            edges += resolved[taken : taken + count]
            taken += count
        self.in_src = edges + before.in_src[kept_from:]

    def __len__(self) -> int:
        return len(self.names)

    def node(self, number: int) -> NodeDef:
        """The NodeDef of a node that is no function argument."""
        return self.container[number - self.arg_count]

    def consumers(self, number: int) -> list[int]:
        """Nodes that have an edge from this one, data or control, once per edge."""
        return self.out_dst[self.out_start[number] : self.out_start[number + 1]]

    def producers(self, number: int) -> list[int]:
        """Nodes that this one has an edge from, in input order."""
        return self.in_src[self.in_start[number] : self.in_start[number + 1]]

    def is_back_edge(self, source: int, target: int) -> bool:
        """True for the edge that closes a while loop."""
        return self.ops[source] in _NEXT_ITERATION and self.ops[target] in _MERGE

    def inputs(self, number: int) -> list[NodeInput]:
        """The parsed inputs of a node; none for a function argument."""
        if number < self.arg_count:
            return []
        return [parse_input(text) for text in self.node(number).input]

    def where(self, name: str) -> str:
        """How errors name a node of this graph."""
        return f"node {name} of function {self.label}" if self.label else f"node {name}"

    def _require_unique(self) -> None:
        if len(self.ids) == len(self.names):
            return
        seen: set[str] = set()
        twice = [name for name in self.names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise GraphError(
            "node names are not unique",
            where=self.where(twice[0]),
            found=summarise(twice) + " more than once",
            expected="each name once",
            remedy="renaming one of them",
        )

    def _resolve(self, flat: list[str], owners: Sequence[int] | None = None) -> list[int]:
        """Input texts to node numbers. Bare names resolve in one dictionary pass, the others are parsed.

        `owners` gives the consumer of each text where they are not all of the graph's, in order.
        """
        sources = list(map(self.ids.get, flat))
        unresolved = [edge for edge, source in enumerate(sources) if source is None]
        if owners is None:
            consumers = (np.searchsorted(self.in_start, unresolved, side="right") - 1).tolist()
        else:
            consumers = [owners[edge] for edge in unresolved]
        dangling = []
        for edge, owner in zip(unresolved, consumers):
            text = flat[edge]
            source = self.ids.get(text[1:]) if text.startswith("^") else self._resolve_port(text, owner)
            if source is None:
                dangling.append(f"{self.names[owner]} <- {text}")
            sources[edge] = source
        if dangling:
            raise GraphError(
                "an input names no node",
                where=self.where(dangling[0].split(" <- ")[0]),
                found=summarise(dangling),
                expected="the name of a node of the same graph",
                remedy="writing the graph again, whole",
            )
        return sources  # type: ignore[return-value]  # no None is left

    def _resolve_port(self, text: str, owner: int) -> int | None:
        try:
            parsed = parse_input(text)
        except ValueError as error:
            raise GraphError(
                "an input cannot be read",
                where=self.where(self.names[owner]),
                found=repr(text),
                expected="name, name:port or ^name",
                remedy="writing the graph again",
            ) from error
        source = self.ids.get(parsed.name)
        if source is not None:
            self.ported.append((owner, source, parsed.port))
        return source

    def _consumers(self) -> tuple[list[int], list[int]]:
        sources = np.asarray(self.in_src, dtype=np.int32)
        targets = np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.in_start))
        forward = self._forward_edges(sources, targets)
        if forward is not None:
            sources, targets = sources[forward], targets[forward]
        by_source = np.argsort(sources, kind="stable")
        starts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.bincount(sources, minlength=len(self)), out=starts[1:])
        return starts.tolist(), targets[by_source].tolist()

    def _forward_edges(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
        """A mask without the back edges of while loops; None where there are none."""
        if not _NEXT_ITERATION.intersection(self.ops):
            return None
        leaves = np.fromiter((op in _NEXT_ITERATION for op in self.ops), bool, len(self))
        enters = np.fromiter((op in _MERGE for op in self.ops), bool, len(self))
        return ~(leaves[sources] & enters[targets])


def _columns(container: Sequence[NodeDef], args: Sequence[str]) -> tuple[list[str], list[str], list[str], list[int]]:
    """Names, ops, all inputs in one list, and the number of inputs of each node."""
    names, ops, flat = list(args), ["_Arg"] * len(args), []
    counts = [0] * len(args)
    for node in container:
        names.append(node.name)
        ops.append(node.op)
        inputs = node.input
        flat += inputs
        counts.append(len(inputs))
    return names, ops, flat, counts


def graphs_of(graph_def: GraphDef) -> tuple[Graph, ...]:
    """The index of the graph itself, then of every function of its library, in library order."""
    main = Graph(graph_def.node)
    return (main, *(Graph.of_function(function) for function in graph_def.library.function))
