"""Static shapes of tensors, from what the nodes themselves say.

Sources, in order: the `_output_shapes` attribute, then ops whose output shape is written in the node (Const,
Placeholder, Reshape to a Const, a filter gradient's sizes, …) and shape-preserving ops between. The variable that a
gradient updates is another source: `graph_passes.variables`.
"""

from __future__ import annotations

__all__ = ["ShapeReader", "shape_of_proto"]

import struct

from graph_passes.graph import Graph
from graph_passes.messages import AttrValue, NodeDef, TensorProto, TensorShapeProto
from graph_passes.sections import Shape

_MAX_DEPTH = 64
_SAME_AS_INPUT_0 = frozenset({
    "Abs", "CheckNumerics", "ClipByValue", "Cast", "Elu", "Exp", "Identity", "Log", "Neg", "OnesLike",
    "PreventGradient", "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid", "Sign", "Snapshot",
    "Softmax", "Softplus", "Sqrt", "Square", "StopGradient", "Tanh", "ZerosLike", "HcomAllReduce", "BiasAdd",
})  # fmt: skip
_ELEMENTWISE = frozenset({
    "Add", "AddV2", "AddN", "Div", "DivNoNan", "EluGrad", "Maximum", "Minimum", "Mul", "MulNoNan", "RealDiv",
    "Relu6Grad", "ReluGrad", "RsqrtGrad", "SigmoidGrad", "SoftplusGrad", "SqrtGrad", "SquaredDifference", "Sub",
    "TanhGrad", "Xdivy",
})  # fmt: skip
_SIZES_IN_INPUT = {
    "Reshape": 1, "BroadcastTo": 1, "Fill": 0, "RandomUniform": 0, "RandomStandardNormal": 0, "TruncatedNormal": 0,
    "Conv2DBackpropFilter": 1, "Conv3DBackpropFilterV2": 1, "DepthwiseConv2dNativeBackpropFilter": 1,
    "Conv2DBackpropInput": 0, "Conv3DBackpropInputV2": 0, "DepthwiseConv2dNativeBackpropInput": 0,
}  # fmt: skip
_SHAPE_ATTR = frozenset(
    {"Placeholder", "PlaceholderV2", "PlaceholderWithDefault", "VariableV2", "Variable", "VarHandleOp"}
)


def shape_of_proto(proto: TensorShapeProto) -> Shape:
    """The shape in a TensorShapeProto; None unless every dimension is known."""
    if proto.unknown_rank or any(dim.size < 0 for dim in proto.dim):
        return None
    return tuple(int(dim.size) for dim in proto.dim)


def _int_values(tensor: TensorProto) -> tuple[int, ...] | None:
    """The values of a small int32 or int64 tensor constant."""
    count = 1
    for dim in tensor.tensor_shape.dim:
        count *= dim.size
    wide = tensor.dtype == 9  # DT_INT64
    if tensor.tensor_content:
        code = f"<{count}{'q' if wide else 'i'}"
        return (
            struct.unpack(code, tensor.tensor_content) if len(tensor.tensor_content) == struct.calcsize(code) else None
        )
    values = tuple(tensor.int64_val if wide else tensor.int_val)
    if not values:
        return (0,) * count
    return values + (values[-1],) * (count - len(values))


class ShapeReader:
    """Reads shapes of one graph's tensors, each node at most once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[int, int], Shape] = {}

    def shape(self, number: int, port: int = 0, depth: int = 0) -> Shape:
        """The static shape of an output; None where the nodes do not say it."""
        if number < self._graph.arg_count or depth > _MAX_DEPTH:
            return None
        key = (number, port)
        if key not in self._known:
            self._known[key] = self._read(self._graph.node(number), number, port, depth)
        return self._known[key]

    def declared(self, number: int, port: int = 0) -> Shape:
        """What `_output_shapes` says of an output, alone."""
        if number < self._graph.arg_count:
            return None
        node = self._graph.node(number)
        if "_output_shapes" not in node.attr:
            return None
        shapes = node.attr["_output_shapes"].list.shape
        return shape_of_proto(shapes[port]) if port < len(shapes) else None

    def constant_ints(self, number: int) -> tuple[int, ...] | None:
        """The values of an integer Const."""
        node = None if number < self._graph.arg_count else self._graph.node(number)
        if node is None or node.op != "Const" or node.attr["dtype"].type not in (3, 9):
            return None
        return _int_values(node.attr["value"].tensor)

    def _read(self, node: NodeDef, number: int, port: int, depth: int) -> Shape:
        declared = self.declared(number, port)
        if declared is not None:
            return declared
        if node.op in _SHAPE_ATTR:
            return shape_of_proto(node.attr["shape"].shape) if "shape" in node.attr else None
        if node.op == "Const":
            return shape_of_proto(node.attr["value"].tensor.tensor_shape)
        if node.op == "IteratorGetNext":
            return _listed(node.attr["output_shapes"], port)
        if port:
            return None
        return self._computed(node, number, depth)

    def _computed(self, node: NodeDef, number: int, depth: int) -> Shape:
        if node.op in _SIZES_IN_INPUT:
            sizes = self.constant_ints(self._graph.producers(number)[_SIZES_IN_INPUT[node.op]])
            return sizes if sizes is not None and min(sizes, default=0) >= 0 else None
        if node.op in _SAME_AS_INPUT_0 or node.op == "ReadVariableOp":
            return self._input_shape(number, 0, depth)
        if node.op in _ELEMENTWISE:
            return self._broadcast(number, depth)
        return None

    def _input_shape(self, number: int, position: int, depth: int) -> Shape:
        inputs = self._graph.inputs(number)
        if position >= len(inputs) or inputs[position].is_control or inputs[position].arg:
            return None
        return self.shape(self._graph.producers(number)[position], inputs[position].port, depth + 1)

    def _broadcast(self, number: int, depth: int) -> Shape:
        """Only the plain cases: equal shapes, and scalars beside one shape."""
        count = sum(not text.is_control for text in self._graph.inputs(number))
        shapes = {self._input_shape(number, position, depth) for position in range(count)}
        if None in shapes:
            return None
        shaped = shapes - {()}
        if len(shaped) > 1:
            return None
        return next(iter(shaped), ())


def _listed(value: AttrValue, port: int) -> Shape:
    shapes = value.list.shape
    return shape_of_proto(shapes[port]) if port < len(shapes) else None
