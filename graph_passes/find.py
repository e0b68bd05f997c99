"""Pass find: collects every all-reduce of a graph and of its functions, with group, reduction, type and shape."""

from __future__ import annotations

__all__ = ["Find", "InferShapes"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

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
    ranked = [(rank, number) for rank, number in enumerate(order) if graph.ops[number] == ALL_REDUCE_OP]
    if not ranked:
        return []
    reader = ShapeReader(graph)
    frames = frames_of(graph, order)
    return [
        replace(_gradient(graph, number, reader), rank=rank, frame=frames[number] if frames else "")
        for rank, number in ranked
    ]


def _gradient(graph: Graph, number: int, reader: ShapeReader) -> Gradient:
    node = graph.node(number)
    where = graph.where(node.name)
    inputs = graph.inputs(number)
    if sum(not text.is_control for text in inputs) != 1 or inputs[0].is_control:
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
    )


def _shape_and_variable(graph: Graph, number: int, reader: ShapeReader) -> tuple[Shape, str | None]:
    """The first source that knows the shape, checked against the others.

    Raises:
        ReductionError: two sources know it and disagree.
    """
    node_input = graph.inputs(number)[0]
    producer = graph.producers(number)[0]
    port = 0 if node_input.arg else node_input.port
    updated = updated_variable(graph, number)
    sources: dict[str, Shape] = {
        "_output_shapes of the all-reduce": reader.declared(number),
        f"_output_shapes of {node_input.name}": reader.declared(producer, port),
        f"variable {updated.name}" if updated else "variable": updated.shape if updated else None,
        f"node {node_input.name}": reader.shape(producer, port),
    }
    known = {source: shape for source, shape in sources.items() if shape is not None}
    if len(set(known.values())) > 1:
        raise ReductionError(
            "the sources of a gradient's shape disagree",
            where=graph.where(graph.names[number]),
            found=", ".join(f"{list(shape)} by {source}" for source, shape in known.items()),
            expected="one shape",
            remedy="writing the graph anew from the script",
        )
    return next(iter(known.values()), None), updated.name if updated else None
