"""Fits a graph's collective reductions to ranks that live in one process: GraphDef in, GraphDef out.

`retarget_collectives` sets the group size and a timeout. `pad_collectives` guards against empty tensors: TensorFlow's
CPU ring reduction kills the process (segmentation fault) when it is given a tensor without elements, so a reduction
whose input may be empty gets one element more, which is cut off again.
"""

from __future__ import annotations

__all__ = ["COLLECTIVES", "COLLECTIVE_REDUCTIONS", "pad_collectives", "retarget_collectives"]

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from graph_passes.builder import NodeBuilder, fresh_scope
from graph_passes.messages import FunctionDef, GraphDef, NodeDef, types_pb2
from graph_passes.node_input import producer_name

COLLECTIVE_REDUCTIONS = frozenset({"CollectiveReduce", "CollectiveReduceV2"})
# All of these take the group size as their second input.
_SIZED_BY_INPUT = frozenset({
    "CollectiveAllToAllV2", "CollectiveGatherV2", "CollectiveReduceScatterV2", "CollectiveReduceV2",
})  # fmt: skip
_SIZED_BY_ATTR = frozenset({"CollectiveBcastRecv", "CollectiveBcastSend", "CollectiveGather", "CollectiveReduce"})
COLLECTIVES = _SIZED_BY_INPUT | _SIZED_BY_ATTR
_PADDING = (
    "axis", "begin", "count", "counts", "flat", "minus_one", "one", "padded", "reduced", "shape", "whole", "zero",
)  # fmt: skip


class _Body:
    """The node list of a graph or a function, and what is to be appended to it."""

    def __init__(self, nodes: Any, function: FunctionDef | None) -> None:
        self.nodes = nodes
        self.function = function
        taken = {node.name for node in nodes}
        self._args = {arg.name for arg in function.signature.input_arg} if function is not None else set()
        self.builder = NodeBuilder(taken | self._args, function is not None)
        self._has_frames = any(node.op.endswith("Enter") for node in nodes)

    def constant(self, name: str, values: Any, dtype: int, beside: str) -> str:
        """A constant for a node whose input is `beside`: where there are loops it must be in the same one."""
        producer = producer_name(beside)
        control = [f"^{producer}"] if self._has_frames and producer not in self._args else []
        return self.builder.constant(name, values, dtype, control=control)


@contextlib.contextmanager
def _copied(graph_def: GraphDef) -> Iterator[tuple[GraphDef, list[_Body]]]:
    """A copy of a graph, and its bodies; what their builders have made is appended at the end."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    bodies = [_Body(result.node, None)]
    bodies += [_Body(function.node_def, function) for function in result.library.function]
    yield result, bodies
    for body in bodies:
        body.nodes.extend(body.builder.added)


def retarget_collectives(graph_def: GraphDef, ranks: int, timeout_seconds: float) -> GraphDef:
    """A copy in which every collective, in functions too, spans `ranks` ranks and gives up in time.

    Args:
        graph_def: one rank's graph; stays as it is.
        ranks: the new group size.
        timeout_seconds: after which a collective that lacks a rank becomes an error.
    """
    with _copied(graph_def) as (result, bodies):
        for body in bodies:
            for node in body.nodes:
                if node.op in _SIZED_BY_ATTR:
                    node.attr["group_size"].i = ranks
                elif node.op in _SIZED_BY_INPUT:
                    scope = fresh_scope(f"{node.name}/in_process", ("group_size",), body.builder.taken)
                    node.input[1] = body.constant(f"{scope}/group_size", ranks, types_pb2.DT_INT32, node.input[0])
                else:
                    continue
                node.attr["timeout_seconds"].f = timeout_seconds
    return result


def pad_collectives(graph_def: GraphDef, names: Collection[str]) -> GraphDef:
    """A copy in which reductions can take a tensor without elements.

    Args:
        graph_def: one rank's graph; stays as it is.
        names: which reductions of the graph itself; those of functions, whose shapes nobody knows, are all changed.
    """
    with _copied(graph_def) as (result, bodies):
        for body in bodies:
            chosen = [
                node
                for node in body.nodes
                if node.op in COLLECTIVE_REDUCTIONS and (body.function is not None or node.name in names)
            ]
            for node in chosen:
                _pad(node, body)
            if body.function is not None:
                _rename_outputs(body.function, [node.name for node in chosen])
    return result


def _pad(node: NodeDef, body: _Body) -> None:
    """The reduction moves into new nodes; the node of its name becomes the reshape that yields the result."""
    builder, source, dtype = body.builder, node.input[0], node.attr["T"].type
    scope = fresh_scope(f"{node.name}/padding", _PADDING, builder.taken)
    int32 = types_pb2.DT_INT32

    def constant(name: str, values: Any, kind: int = int32) -> str:
        return body.constant(f"{scope}/{name}", values, kind, source)

    def add(name: str, op: str, inputs: Sequence[str], arg: str = "output", **types: int) -> str:
        builder.add(f"{scope}/{name}", op, inputs, types={"T": dtype, **types})
        return builder.ref(f"{scope}/{name}", arg)

    flat = add("flat", "Reshape", [source, constant("minus_one", [-1])], Tshape=int32)
    padded = add("padded", "ConcatV2", [flat, constant("zero", [0], dtype), constant("axis", 0)], Tidx=int32)
    builder.added[-1].attr["N"].i = 2
    reduced = builder.add(f"{scope}/reduced", node.op, [padded, *node.input[1:]])
    for attribute in node.attr:
        reduced.attr[attribute].CopyFrom(node.attr[attribute])
    count = add("count", "Size", [source], out_type=int32)
    counts = add("counts", "Reshape", [count, constant("one", [1])], T=int32, Tshape=int32)
    result = builder.ref(reduced.name, "data")
    whole = add("whole", "Slice", [result, constant("begin", [0]), counts], Index=int32)
    shape = add("shape", "Shape", [source], out_type=int32)
    node.op = "Reshape"
    node.input[:] = [whole, shape]
    node.attr.clear()
    node.attr["T"].type, node.attr["Tshape"].type = dtype, int32


def _rename_outputs(function: FunctionDef, names: Sequence[str]) -> None:
    """A reduction calls its output `data`, the reshape in its place `output`."""
    new = {f"{name}:data:0": f"{name}:output:0" for name in names}
    for node in function.node_def:
        node.input[:] = [new.get(text, text) for text in node.input]
    for result, text in function.ret.items():
        function.ret[result] = new.get(text, text)
