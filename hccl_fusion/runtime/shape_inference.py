"""TensorFlow's own shape inference, for gradients whose shape the graph does not tell.

Reductions are read as Identity, and nodes of ops that TensorFlow does not have as tensors of unknown shape. Loads
TensorFlow, which takes seconds: the last resort. What it cannot find out stays unknown; that is no error, since a
gradient of unknown shape is reduced alone.
"""

from __future__ import annotations

__all__ = ["infer_shapes"]

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from graph_passes.messages import FunctionDef, GraphDef, NodeDef, types_pb2
from graph_passes.node_input import parse_input, producer_name
from graph_passes.op_tables import ALL_REDUCE_OP, output_counts
from hccl_fusion.runtime.replicate import extract

Shape = Optional[tuple[int, ...]]
"""Sizes of a tensor; None unless all are known."""

_REDUCTION_ATTRS = ("reduction", "group", "fusion", "fusion_id")
_TYPE_ATTRS = ("T", "dtype", "DstT", "out_type")
_logger = logging.getLogger("hccl_fusion")


def infer_shapes(graph_def: GraphDef, tensor_names: Iterable[str], *, function: str = "") -> dict[str, Shape]:
    """The static shapes of tensors, as far as TensorFlow can tell.

    Args:
        graph_def: a graph; stays as it is.
        tensor_names: names of tensors, with or without `:0`.
        function: the function of the library that the names belong to; "" for the graph itself.

    Returns:
        The shape by name, as the names were given; None where a size stays unknown.
    """
    names = list(tensor_names)
    try:
        if not function:
            return _shapes_in_graph(graph_def, names)
        return _shapes_in_function(graph_def, function, names)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        _logger.warning("TensorFlow's shape inference fails on this graph: %s", str(error).splitlines()[0][:300])
        return dict.fromkeys(names)


def _shapes_in_graph(graph_def: GraphDef, names: Sequence[str]) -> dict[str, Shape]:
    part = _importable(extract(graph_def, map(producer_name, names)))
    graph = _import(part)
    return {name: _shape_of(graph, name) for name in names}


def _import(graph_def: GraphDef) -> Any:
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    return graph


def _shape_of(graph: Any, name: str) -> Shape:
    try:
        shape = graph.get_tensor_by_name(name if ":" in name else f"{name}:0").shape
    except (KeyError, ValueError):
        return None
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _importable(graph_def: GraphDef) -> GraphDef:
    """A graph that TensorFlow can import: reductions as Identity, foreign ops as placeholders."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    for body in (result.node, *(function.node_def for function in result.library.function)):
        for node in body:
            if node.op == ALL_REDUCE_OP:
                node.op = "Identity"
                for attribute in _REDUCTION_ATTRS:
                    node.attr.pop(attribute, None)
            node.attr.pop("_class", None)
    functions = {function.signature.name for function in result.library.function}
    foreign = {n.name: n for n in result.node if n.op not in functions and output_counts(n) is None}
    if foreign:
        _replace_foreign(result, foreign)
    return result


def _replace_foreign(graph_def: GraphDef, foreign: dict[str, NodeDef]) -> None:
    """One placeholder of unknown shape for each output that somebody uses; the first keeps the node's name."""
    ports = {name: {0} for name in foreign}
    for node in graph_def.node:
        for position, text in enumerate(node.input):
            source = parse_input(text)
            if source.name in foreign and source.port > 0:
                ports[source.name].add(source.port)
                node.input[position] = f"{source.name}/output_{source.port}"
    for name, node in foreign.items():
        dtype = next((node.attr[key].type for key in _TYPE_ATTRS if key in node.attr), types_pb2.DT_FLOAT)
        for port in sorted(ports[name]):
            placeholder = node if port == 0 else graph_def.node.add(name=f"{name}/output_{port}")
            placeholder.op = "Placeholder"
            del placeholder.input[:]
            placeholder.attr.clear()
            placeholder.attr["dtype"].type = dtype or types_pb2.DT_FLOAT
            placeholder.attr["shape"].shape.unknown_rank = True


def _shapes_in_function(graph_def: GraphDef, function: str, names: Sequence[str]) -> dict[str, Shape]:
    import tensorflow as tf
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

    library = _importable(GraphDef(versions=graph_def.versions, library=graph_def.library))
    definition = next((f for f in library.library.function if f.signature.name == function), None)
    if definition is None:
        raise KeyError(f"the graph has no function {function}")
    shapes = _argument_shapes(graph_def, definition)
    with _import(library).as_default():
        body, _ = function_def_to_graph_def(definition, [tf.TensorShape(shape) for shape in shapes])
    body.library.CopyFrom(library.library)
    return _shapes_in_graph(body, names)


def _argument_shapes(graph_def: GraphDef, function: FunctionDef) -> list[Any]:
    """The shapes of a function's arguments: as written in it, else those of its one call in the graph; or None."""
    count = len(function.signature.input_arg)
    written = [_written_shape(function, position) for position in range(count)]
    calls = [node for node in graph_def.node if function.signature.name in (node.op, node.attr["f"].func.name)]
    if None not in written or len(calls) != 1:
        return written
    inputs = [text for text in calls[0].input if not text.startswith("^")]
    passed = _shapes_in_graph(graph_def, inputs)
    return [shape if shape is not None else passed.get(text) for shape, text in zip(written, inputs)]


def _written_shape(function: FunctionDef, position: int) -> list[int | None] | None:
    attributes = function.arg_attr[position].attr if position in function.arg_attr else {}
    if "_output_shapes" not in attributes:
        return None
    shape = attributes["_output_shapes"].list.shape[0]
    return None if shape.unknown_rank else [dim.size if dim.size >= 0 else None for dim in shape.dim]
