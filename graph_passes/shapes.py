"""Static shapes of tensors, from what the nodes themselves say.

Sources, in order: the `_output_shapes` attribute, then ops whose output shape is written in the node (Const,
Placeholder, Reshape to a Const, a filter gradient's sizes, …) and shape-preserving ops between. The variable that a
gradient updates is another source: `graph_passes.variables`.
"""

from __future__ import annotations

__all__ = ["ShapeReader", "shape_of_proto"]

import struct

from graph_passes.attributes import read_attr
from graph_passes.graph import Graph
from graph_passes.messages import AttrValue, NodeDef, TensorProto, TensorShapeProto
from graph_passes.node_input import parse_input
from graph_passes.op_tables import flat_port
from graph_passes.overlay import Overlay
from graph_passes.sections import Shape

_Output = tuple[int, int]  # number of the node, number of its output

_MAX_VALUES = 2**24
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
_SHAPE_ATTR = frozenset({"Placeholder", "PlaceholderV2", "PlaceholderWithDefault", "VariableV2", "Variable"})


def shape_of_proto(proto: TensorShapeProto) -> Shape:
    """The shape in a TensorShapeProto; None unless every dimension is known."""
    sizes = tuple([dim.size for dim in proto.dim])
    return None if proto.unknown_rank or (sizes and min(sizes) < 0) else sizes


def _int_values(tensor: TensorProto) -> tuple[int, ...] | None:
    """The values of a small int32 or int64 tensor constant."""
    count = 1
    for dim in tensor.tensor_shape.dim:
        count *= dim.size
    wide = tensor.dtype == 9  # DT_INT64
    if not 0 <= count <= _MAX_VALUES:
        return None
    if tensor.tensor_content:
        size, code = (8, "q") if wide else (4, "i")
        is_whole = len(tensor.tensor_content) == count * size
        return struct.unpack(f"<{count}{code}", tensor.tensor_content) if is_whole else None
    values = tuple(tensor.int64_val if wide else tensor.int_val)
    if not values:
        return (0,) * count
    return values + (values[-1],) * (count - len(values))


class ShapeReader:
    """Reads shapes of one graph's tensors, each node at most once. The graph must be acyclic, while loops aside."""

    def __init__(self, graph: Graph | Overlay) -> None:
        self._graph = graph
        self._known: dict[_Output, Shape] = {}
        self._declared: dict[_Output, Shape] = {}
        self._constants: dict[int, tuple[int, ...] | None] = {}

    def shape(self, number: int, port: int = 0) -> Shape:
        """The static shape of an output; None where the nodes do not say it."""
        pending: list[_Output] = [(number, port)]
        opened: set[_Output] = set()
        while pending:
            output = pending[-1]
            if output not in self._known and output not in opened:
                opened.add(output)
                pending += [source for source in self._sources(*output) if source not in self._known]
                continue
            pending.pop()
            if output not in self._known:
                self._known[output] = self._read(*output)
        return self._known[number, port]

    def declared(self, number: int, port: int = 0) -> Shape:
        """What `_output_shapes` says of an output, alone."""
        key = (number, port)
        if key not in self._declared:
            self._declared[key] = self._read_declared(number, port)
        return self._declared[key]

    def _read_declared(self, number: int, port: int) -> Shape:
        if number < self._graph.arg_count:
            return None
        value = self._graph.node(number).attr.get("_output_shapes")
        return None if value is None else _listed(value, port)

    def constant_ints(self, number: int) -> tuple[int, ...] | None:
        """The values of an integer Const; read once, since the sizes of a long segment serve all its members."""
        if number not in self._constants:
            self._constants[number] = self._read_constant(number)
        return self._constants[number]

    def _read_constant(self, number: int) -> tuple[int, ...] | None:
        node = self._node(number)
        if node is None or node.op != "Const" or read_attr(node, "dtype").type not in (3, 9):
            return None
        return _int_values(read_attr(node, "value").tensor)

    def input_output(self, number: int, position: int) -> tuple[int, int] | None:
        """The output that an input reads: its node and the number that it has there; None where that is not known."""
        consumer = self._node(number)
        if consumer is None or position >= len(consumer.input):
            return None
        text = parse_input(consumer.input[position])
        if text.is_control:
            return None
        source = self._graph.producers(number)[position]
        if not text.arg:
            return source, text.port
        node = self._node(source)
        port = 0 if node is None else flat_port(node, text.arg, text.port)
        return None if port is None else (source, port)

    def _node(self, number: int) -> NodeDef | None:
        """None for a function's argument."""
        return None if number < self._graph.arg_count else self._graph.node(number)

    def _sources(self, number: int, port: int) -> list[_Output]:
        """The outputs whose shapes decide over this one's."""
        node = self._node(number)
        if node is None or port or self.declared(number) is not None:
            return []
        count = 1 if node.op in _SAME_AS_INPUT_0 else len(node.input) if node.op in _ELEMENTWISE else 0
        return [source for source in (self.input_output(number, i) for i in range(count)) if source is not None]

    def _read(self, number: int, port: int) -> Shape:
        node = self._node(number)
        declared = self.declared(number, port)
        if node is None or declared is not None:
            return declared
        written = self.written(number, port)
        return written if written is not None or port else self._computed(node, number)

    def written(self, number: int, port: int = 0) -> Shape:
        """What a node itself says of its output's shape, by its attributes or by a constant input."""
        node = self._node(number)
        if node is None:
            return None
        if node.op in _SHAPE_ATTR:
            return shape_of_proto(read_attr(node, "shape").shape) if "shape" in node.attr else None
        if node.op == "Const":
            return shape_of_proto(read_attr(node, "value").tensor.tensor_shape) if "value" in node.attr else None
        if node.op == "IteratorGetNext":
            return _listed(read_attr(node, "output_shapes"), port)
        return self._sizes_in_input(number, _SIZES_IN_INPUT[node.op]) if node.op in _SIZES_IN_INPUT else None

    def _sizes_in_input(self, number: int, position: int) -> Shape:
        source = self.input_output(number, position)
        sizes = self.constant_ints(source[0]) if source else None
        return sizes if sizes is not None and min(sizes, default=0) >= 0 else None

    def _computed(self, node: NodeDef, number: int) -> Shape:
        if node.op == "ReadVariableOp":
            return self._variable_shape(number)
        if node.op in _SAME_AS_INPUT_0:
            return self._input_shape(number, 0)
        return self._broadcast(node, number) if node.op in _ELEMENTWISE else None

    def _variable_shape(self, number: int) -> Shape:
        """What a VarHandleOp holds; its own output is a handle, a scalar."""
        source = self.input_output(number, 0)
        handle = self._node(source[0]) if source else None
        if handle is None or handle.op != "VarHandleOp" or "shape" not in handle.attr:
            return None
        return shape_of_proto(read_attr(handle, "shape").shape)

    def _input_shape(self, number: int, position: int) -> Shape:
        source = self.input_output(number, position)
        return None if source is None else self._known.get(source)

    def _broadcast(self, node: NodeDef, number: int) -> Shape:
        """Only the plain cases: equal shapes, and scalars beside one shape."""
        count = sum(not text.startswith("^") for text in node.input)
        shapes = {self._input_shape(number, position) for position in range(count)}
        shaped = shapes - {()}
        if None in shapes or not shapes or len(shaped) > 1:
            return None
        return next(iter(shaped), ())


def _listed(value: AttrValue, port: int) -> Shape:
    shapes = value.list.shape
    return shape_of_proto(shapes[port]) if port < len(shapes) else None
