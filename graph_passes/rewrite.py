"""Helpers that the rewriting passes share."""

from __future__ import annotations

__all__ = ["Target", "kept_attrs", "replace_node", "targets"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graph_passes.builder import NodeBuilder
from graph_passes.graph import Graph
from graph_passes.messages import AttrValue, GraphDef, NodeDef


@dataclass(frozen=True)
class Target:
    """One graph of a GraphDef under rewriting: its index before, and where to write."""

    graph: Graph
    nodes: Sequence[NodeDef]
    builder: NodeBuilder

    def node(self, number: int) -> NodeDef:
        """The writable NodeDef of a node of the index."""
        return self.nodes[number - self.graph.arg_count]


def targets(output: GraphDef, graphs: Sequence[Graph]) -> Iterator[Target]:
    """The graph itself, then each function; `graphs` is the index of the same graphs before."""
    containers = [output.node, *(function.node_def for function in output.library.function)]
    for graph, container in zip(graphs, containers):
        yield Target(graph, container, NodeBuilder(container, _Names(graph), bool(graph.label)))


class _Names(set):  # type: ignore[type-arg]
    """The names of a graph without copying them: its index, and what was added since."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._ids = graph.ids

    def __contains__(self, name: object) -> bool:
        return name in self._ids or super().__contains__(name)


def kept_attrs(node: NodeDef) -> dict[str, AttrValue]:
    """The attributes that outlive a change of op: those that start with `_` (`_class`, `_output_shapes`, …)."""
    kept = {}
    for name, value in node.attr.items():
        if name.startswith("_"):
            copy = AttrValue()
            copy.CopyFrom(value)
            kept[name] = copy
    return kept


def replace_node(node: NodeDef, op: str, inputs: Sequence[str], types: dict[str, int]) -> None:
    """Turns a node into another op; name, device and `_` attributes stay."""
    kept = kept_attrs(node)
    node.op = op
    del node.input[:]
    node.input.extend(inputs)
    node.attr.clear()
    for name, value in kept.items():
        node.attr[name].CopyFrom(value)
    for name, dtype in types.items():
        node.attr[name].type = dtype
