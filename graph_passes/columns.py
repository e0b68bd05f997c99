"""Names, ops and inputs of all nodes at once.

Reading them node by node costs a Python object for every node and field. Protobuf merges the occurrences of a field
that is declared singular, so the same bytes, parsed by a schema in which a graph has *one* node with repeated names,
ops and inputs, give each column as one list. How many inputs each node has is then read off the wire format, for all
nodes side by side. Where the bytes are not of the plain form that protobuf writes, nodes are read one by one.
"""

from __future__ import annotations

__all__ = ["Columns", "columns_by_node", "columns_of_graph", "node_ranges"]

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from graph_passes.messages import GraphDef, NodeDef

_NAME_TAG, _OP_TAG, _INPUT_TAG = 0x0A, 0x12, 0x1A
_FEW = 32


@dataclass(frozen=True)
class Columns:
    """All nodes of one graph.

    Attributes:
        names, ops: one a node.
        inputs: of all nodes, in node order.
        counts: how many inputs each node has.
        content: the graph as protobuf writes it, and `starts`, `stops`: where in it each NodeDef stands; None where
            nodes were read one by one.
    """

    names: list[str]
    ops: list[str]
    inputs: list[str]
    counts: NDArray[np.int64]
    content: bytes | None = None
    starts: NDArray[np.int64] | None = None
    stops: NDArray[np.int64] | None = None


def columns_by_node(nodes: Iterable[NodeDef]) -> Columns:
    """Reads the nodes one by one."""
    names, ops, inputs, counts = [], [], [], []
    for node in nodes:
        names.append(node.name)
        ops.append(node.op)
        texts = node.input
        inputs += texts
        counts.append(len(texts))
    return Columns(names, ops, inputs, np.array(counts, dtype=np.int64))


def columns_of_graph(graph_def: GraphDef) -> Columns:
    """The columns of a graph's own nodes."""
    content = graph_def.SerializeToString()
    starts, stops = node_ranges(content)
    counts = _input_counts(np.frombuffer(content, np.uint8), starts, stops)
    if counts is None:
        return columns_by_node(graph_def.node)
    node = _schemas()[0].FromString(content).node
    return Columns(node.name[:], node.op[:], node.input[:], counts, content, starts, stops)


def node_ranges(content: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each NodeDef starts and stops in a GraphDef as protobuf writes it: nodes first."""
    sizes = np.fromiter(map(len, _schemas()[1].FromString(content).node), np.int64)
    stops = np.cumsum(1 + _varint_sizes(sizes) + sizes)
    return stops - sizes, stops


@functools.cache
def _schemas() -> tuple[Any, Any]:
    """GraphDef with one node of repeated fields, and GraphDef with its nodes as bytes."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="graph_columns.proto", package="graph_passes", syntax="proto3")
    node = file.message_type.add(name="AllNodes")
    for number, name in enumerate(("name", "op", "input"), 1):
        node.field.add(name=name, number=number, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
    merged = file.message_type.add(name="MergedGraph")
    merged.field.add(
        name="node", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_OPTIONAL, type_name=".graph_passes.AllNodes"
    )
    apart = file.message_type.add(name="NodesApart")
    apart.field.add(name="node", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())

    def message(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"graph_passes.{name}"))

    return message("MergedGraph"), message("NodesApart")


def _varint_sizes(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes that each number takes as a varint."""
    sizes = np.ones(len(values), dtype=np.int64)
    for bits in (7, 14, 21, 28):
        sizes += values >= 1 << bits
    return sizes


def _input_counts(
    data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Inputs of each node; None unless every node starts with a name and an op."""
    positions = starts.copy()
    for tag in (_NAME_TAG, _OP_TAG):
        if not np.array_equal(_tags(data, positions, stops), np.full(len(positions), tag)):
            return None
        positions = _skip(data, positions)
    counts = np.zeros(len(starts), dtype=np.int64)
    active = np.flatnonzero(_tags(data, positions, stops) == _INPUT_TAG)
    while len(active) > _FEW:
        counts[active] += 1
        positions[active] = _skip(data, positions[active])
        active = active[_tags(data, positions[active], stops[active]) == _INPUT_TAG]
    for node in active.tolist():
        counts[node] += _count_inputs(data, int(positions[node]), int(stops[node]))
    return counts


def _tags(data: NDArray[np.uint8], positions: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The byte at each position; 0, which is no tag, where the node ends there."""
    padded = np.minimum(positions, len(data) - 1)
    return np.where(positions < stops, data[padded], 0).astype(np.uint8)


def _skip(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions behind the length-delimited fields that start at `positions`."""
    at = positions + 1
    sizes = np.zeros(len(at), dtype=np.int64)
    shift = 0
    more = np.ones(len(at), dtype=bool)
    while more.any():
        byte = np.where(more, data[np.minimum(at, len(data) - 1)], 0).astype(np.int64)
        sizes += (byte & 0x7F) << shift
        at = at + more
        more &= byte >= 0x80
        shift += 7
    return at + sizes


def _count_inputs(data: NDArray[np.uint8], position: int, stop: int) -> int:
    """Inputs from a position on, one by one: for the few nodes that have very many."""
    count = 0
    view = data.data
    while position < stop and view[position] == _INPUT_TAG:
        size = shift = 0
        position += 1
        while True:
            byte = view[position]
            position += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        position += size
        count += 1
    return count
