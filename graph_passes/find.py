"""Pass find: collects every all-reduce of a graph and of its functions, with group, reduction, type and shape."""

from __future__ import annotations

__all__ = ["Find", "InferShapes"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from graph_passes.attributes import int_attr, string_attr, type_attr
from graph_passes.devices import normalise_device
from graph_passes.errors import GraphError, ReductionError
from graph_passes.frames import frames_of
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, dtype_name, dtype_size_bytes
from graph_passes.op_tables import ALL_REDUCE_OP, GROUP_ATTR, LOWERED_OPS
from graph_passes.order import breadth_first_order
from graph_passes.pipeline import GraphItem, PassResult, require
from graph_passes.sections import Gradient, GradientId, Shape
from graph_passes.shapes import ShapeReader
from graph_passes.variables import updated_variable

InferShapes = Callable[[GraphDef, Sequence[GradientId]], Mapping[GradientId, Shape]]
"""TensorFlow's own shape inference, handed in from outside: loading it takes seconds and is the last resort."""


@dataclass(frozen=True)
class Find:
    """Finds the reductions.

    Attributes:
        infer_shapes: asked for gradients whose shape the nodes do not tell; None leaves those unknown.
        allow_lowered: a graph whose reductions were lowered before is no error; it has no gradient left to fuse.
    """

    infer_shapes: InferShapes | None = None
    allow_lowered: bool = False
    name: ClassVar[str] = "find"

    def requires(self, item: GraphItem) -> None:
        """Any graph will do."""

    def run(self, item: GraphItem) -> PassResult:
        """Sets `gradients` (breadth-first order within each graph), `graphs` and `orders`.

        Raises:
            GraphError: the graph is none (duplicate name, dangling input, cycle) or has no all-reduce.
            ReductionError: an all-reduce has a missing or illegal attribute, or two sources disagree on its shape.
        """
        item = item.indexed()
        graphs = item.graphs or ()
        orders = tuple(breadth_first_order(graph) for graph in graphs)
        found = tuple(g for graph, order in zip(graphs, orders) for g in _gradients(graph, order))
        if not found:
            self._accept_no_all_reduce(graphs)
        found = self._with_inferred_shapes(item.graph_def, found)
        return PassResult(replace(item, orders=orders, gradients=found), notes=(f"{len(found)} all-reduces",))

    def ensures(self, item: GraphItem) -> None:
        """At least one gradient is known."""
        found = self.allow_lowered or bool(item.gradients)
        require(found, self.name, "it found no gradient and raised nothing", "a bug report")

    def _accept_no_all_reduce(self, graphs: Sequence[Graph]) -> None:
        lowered = sum(_is_lowered(graph, number) for graph in graphs for number in range(graph.arg_count, len(graph)))
        if lowered and self.allow_lowered:
            return
        raise GraphError(
            "the graph has no all-reduce",
            found=f"{len(graphs[0])} nodes, none of op {ALL_REDUCE_OP}"
            + (f", {lowered} reductions that were lowered before" if lowered else ""),
            expected=f"a training graph with an {ALL_REDUCE_OP} for each gradient",
            remedy="the graph as it was before lowering"
            if lowered
            else "the graph that an NPU optimizer wrapper builds",
        )

    def _with_inferred_shapes(self, graph_def: GraphDef, found: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
        unknown = [gradient.id for gradient in found if gradient.shape is None]
        if not unknown or self.infer_shapes is None:
            return found
        shapes = self.infer_shapes(graph_def, unknown)
        return tuple(replace(g, shape=shapes[g.id]) if shapes.get(g.id) is not None else g for g in found)


def _is_lowered(graph: Graph, number: int) -> bool:
    return graph.ops[number] in LOWERED_OPS and GROUP_ATTR in graph.node(number).attr


def _gradients(graph: Graph, order: Sequence[int]) -> list[Gradient]:
    numbers = [number for number, op in enumerate(graph.ops) if op == ALL_REDUCE_OP]
    if not numbers:
        return []
    ranks = np.empty(len(graph), dtype=np.int64)
    ranks[order] = np.arange(len(graph))
    ranked = sorted(zip(ranks[numbers].tolist(), numbers))
    reader = ShapeReader(graph)
    frames = frames_of(graph, order)
    return [_gradient(graph, number, rank, frames[number] if frames else "", reader) for rank, number in ranked]


def _gradient(graph: Graph, number: int, rank: int, frame: str, reader: ShapeReader) -> Gradient:
    node = graph.node(number)
    where = graph.where(node.name)
    if [text[:1] == "^" for text in node.input].count(False) != 1 or node.input[0][:1] == "^":
        raise ReductionError(
            "an all-reduce has the wrong number of inputs",
            where=where,
            found=f"{list(node.input)}",
            expected="one tensor, then control inputs",
            remedy="building the all-reduce anew",
        )
    dtype = type_attr(node, "T", where)
    if dtype_size_bytes(dtype) is None:
        raise ReductionError(
            "an all-reduce has a type that cannot be reduced",
            where=where,
            found=dtype_name(dtype),
            expected="a numeric type",
            remedy="reducing a numeric tensor",
        )
    shape, variable = _shape_and_variable(graph, number, reader)
    return Gradient(
        graph=graph.label,
        name=node.name,
        node=number,
        tensor=node.input[0],
        group=string_attr(node, "group", where),
        reduction=string_attr(node, "reduction", where),
        fusion=int_attr(node, "fusion", 1, where),
        fusion_id=int_attr(node, "fusion_id", -1, where),
        dtype=dtype,
        shape=shape,
        variable=variable,
        device=normalise_device(node.device),
        frame=frame,
        rank=rank,
    )


def _shape_and_variable(graph: Graph, number: int, reader: ShapeReader) -> tuple[Shape, str | None]:
    """The first source that knows the shape, checked against the others; the graph is walked only if none does.

    Raises:
        ReductionError: two sources know it and disagree.
    """
    source = reader.input_output(number, 0)
    updated = updated_variable(graph, number)
    said = {reader.declared(number), *((reader.declared(*source), reader.written(*source)) if source else ())}
    if updated is not None and updated.shape and said - {None} == {()}:
        # A scalar that scales the variable's gradient, such as an all-reduced count: not the gradient itself.
        updated = None
    shapes = [
        reader.declared(number),
        reader.declared(*source) if source else None,
        updated.shape if updated else None,
        reader.written(*source) if source else None,
    ]
    known = set(shapes) - {None}
    if len(known) > 1:
        raise _disagreement(graph, number, updated.name if updated else "", shapes)
    shape = known.pop() if known else reader.shape(*source) if source else None
    return shape, updated.name if updated else None


def _disagreement(graph: Graph, number: int, variable: str, shapes: Sequence[Shape]) -> ReductionError:
    tensor = graph.inputs(number)[0].name
    labels = (
        "_output_shapes of the all-reduce",
        f"_output_shapes of {tensor}",
        f"variable {variable}",
        f"node {tensor}",
    )
    said = [f"{list(shape)} by {label}" for label, shape in zip(labels, shapes) if shape is not None]
    return ReductionError(
        "the sources of a gradient's shape disagree",
        where=graph.where(graph.names[number]),
        found=", ".join(said),
        expected="one shape",
        remedy="writing the graph anew from the script",
    )
