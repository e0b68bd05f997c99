"""An index over the nodes of one graph or one function body: names, ops, edges.

Built once in linear time. Nodes are numbered in node-list order; in a function body its arguments come first, as
nodes of op `_Arg`, so that every input resolves in the same way. Edges are kept as flat integer lists (compressed
sparse rows), which is what makes a million nodes affordable.
"""

from __future__ import annotations

__all__ = ["Graph", "dependents", "graphs_of", "paused_gc", "resolve_inputs"]

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from graph_passes.columns import Columns, columns_by_node, columns_of_graph
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
        columns: names, ops and inputs of the NodeDefs.
        names, ops: by node number.
        ids: node number by name.
        in_start, in_src: inputs of node v are in_src[in_start[v] : in_start[v + 1]], in input order, data and control.
        out_start, out_dst: consumers of node v likewise; an edge from NextIteration to Merge is left out.
        in_degrees: edges into each node, without those left out.
        ported: (consumer, producer, port) of every input that names an output other than by the bare name.
    """

    def __init__(
        self,
        container: Sequence[NodeDef],
        args: Sequence[str] = (),
        label: str = "",
        columns: Columns | None = None,
    ) -> None:
        """`columns` are read from the nodes where they are not given.

        Raises:
            GraphError: two nodes share a name, or an input cannot be read or names no node.
        """
        columns = columns or columns_by_node(container)
        self.label = label
        self.container = container
        self.columns = columns
        self.arg_count = len(args)
        self.names = [*args, *columns.names] if args else columns.names
        self.ops = ["_Arg"] * len(args) + columns.ops if args else columns.ops
        self.ids = dict(zip(self.names, range(len(self.names))))
        if len(self.ids) < len(self.names):
            raise _duplicate_error(self.names, self.where)
        starts = np.zeros(len(self.names) + 1, dtype=np.int64)
        np.cumsum(columns.counts, out=starts[self.arg_count + 1 :])
        self.in_start: list[int] = starts.tolist()
        self.in_src, self.ported = resolve_inputs(
            columns.inputs,
            self.ids,
            lambda edges: (np.searchsorted(starts, edges, side="right") - 1).tolist() if edges else [],
            lambda number: self.where(self.names[number]),
        )
        self.out_start, self.out_dst, self.in_degrees = self._consumers(starts)

    @classmethod
    def of_graph(cls, graph_def: GraphDef) -> Graph:
        """The index of a graph's own nodes."""
        with paused_gc():
            return cls(graph_def.node, columns=columns_of_graph(graph_def))

    @classmethod
    def of_function(cls, function: FunctionDef) -> Graph:
        """The index of a function's body."""
        args = [arg.name for arg in function.signature.input_arg]
        with paused_gc():
            return cls(function.node_def, args, function.signature.name)

    def __len__(self) -> int:
        return len(self.names)

    def node(self, number: int) -> NodeDef:
        """The NodeDef of a node that is no function argument."""
        return self.container[number - self.arg_count]

    def name(self, number: int) -> str:
        """The name of a node."""
        return self.names[number]

    def op(self, number: int) -> str:
        """The op of a node; `_Arg` for a function argument."""
        return self.ops[number]

    def consumers(self, number: int) -> list[int]:
        """Nodes that have an edge from this one, data or control, once per edge; back edges of loops left out."""
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

    def _consumers(self, in_starts: NDArray[np.int64]) -> tuple[list[int], list[int], list[int]]:
        sources = np.fromiter(self.in_src, np.int32, len(self.in_src))
        targets = np.repeat(np.arange(len(self), dtype=np.int32), np.diff(in_starts))
        if _NEXT_ITERATION.intersection(self.ops):
            leaves = np.fromiter((op in _NEXT_ITERATION for op in self.ops), bool, len(self))
            enters = np.fromiter((op in _MERGE for op in self.ops), bool, len(self))
            forward = ~(leaves[sources] & enters[targets])
            sources, targets = sources[forward], targets[forward]
        starts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.bincount(sources, minlength=len(self)), out=starts[1:])
        degrees = np.bincount(targets, minlength=len(self))
        return starts.tolist(), targets[_stable_order(sources)].tolist(), degrees.tolist()


def dependents(starts: Iterable[int], consumers_of: Callable[[int], Iterable[int]]) -> set[int]:
    """The nodes themselves, and every node that depends on one of them. O(nodes + edges) of what is found."""
    found = set(starts)
    pending = list(found)
    while pending:
        for consumer in consumers_of(pending.pop()):
            if consumer not in found:
                found.add(consumer)
                pending.append(consumer)
    return found


def _stable_order(keys: NDArray[np.int32]) -> NDArray[np.int64]:
    """The stable argsort, by sorting key and position as one number: numpy's plain sort is many times quicker."""
    combined = (keys.astype(np.int64) << 32) | np.arange(len(keys), dtype=np.int64)
    combined.sort()
    return combined & 0xFFFFFFFF


def resolve_inputs(
    texts: list[str],
    ids: Mapping[str, int],
    owners_of: Callable[[list[int]], list[int]],
    label: Callable[[int], str],
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Input texts to node numbers, and the (consumer, producer, port) of those that name a port.

    Bare names resolve in one pass; only what is left is looked at one by one. `owners_of` gives the consumers of
    texts by their positions, `label` a consumer's place for errors.

    Raises:
        GraphError: an input cannot be read or names no node.
    """
    sources = list(map(ids.get, texts, itertools.repeat(-1)))
    unresolved: list[int] = np.flatnonzero(np.fromiter(sources, np.int32, len(sources)) < 0).tolist()
    rest = []
    for edge in unresolved:
        text = texts[edge]
        if text[:1] == "^" and text[1:] in ids:
            sources[edge] = ids[text[1:]]
        else:
            rest.append(edge)
    ported, dangling = [], []
    for edge, owner in zip(rest, owners_of(rest)):
        text = texts[edge]
        name, _, port = text.partition(":")
        source = ids.get(name)
        if source is None or not port.isdecimal() or not port.isascii():
            try:
                parsed = parse_input(text)
            except ValueError as error:
                raise _unreadable(label(owner), text) from error
            source, port = ids.get(parsed.name), str(parsed.port)
        if source is None:
            dangling.append((owner, text))
        else:
            sources[edge] = source
            ported.append((owner, source, int(port)))
    if dangling:
        raise _dangling(label(dangling[0][0]), [f"{label(owner)} <- {text}" for owner, text in dangling])
    return sources, ported


def _unreadable(where: str, text: str) -> GraphError:
    return GraphError(
        "an input cannot be read",
        where=where,
        found=repr(text),
        expected="name, name:port or ^name",
        remedy="writing the graph again",
    )


def _dangling(where: str, found: Sequence[str]) -> GraphError:
    return GraphError(
        "an input names no node",
        where=where,
        found=summarise(found),
        expected="the name of a node of the same graph",
        remedy="writing the graph again, whole",
    )


def _duplicate_error(names: Sequence[str], where: Callable[[str], str]) -> GraphError:
    seen: set[str] = set()
    twice = []
    for name in names:
        if name in seen:
            twice.append(name)
        seen.add(name)
    return GraphError(
        "node names are not unique",
        where=where(twice[0]),
        found=summarise(twice) + " more than once",
        expected="each name once",
        remedy="renaming one of them",
    )


def graphs_of(graph_def: GraphDef) -> tuple[Graph, ...]:
    """The index of the graph itself, then of every function of its library, in library order."""
    functions = (Graph.of_function(function) for function in graph_def.library.function)
    return (Graph.of_graph(graph_def), *functions)
