"""HcomAllReduce in graphs that stock TensorFlow builds.

TensorFlow has no op of that name, so a graph under construction holds a stand-in: an Identity whose `_hccl_*`
attributes say what it stands for. `export_graph_def` turns the stand-ins into real HcomAllReduce nodes.
"""

from __future__ import annotations

__all__ = ["all_reduce", "export_graph_def"]

import contextlib
from collections.abc import Iterable
from typing import Any

from graph_passes.errors import ReductionError
from graph_passes.messages import AttrValue, GraphDef, NodeDef

_REDUCTIONS = ("sum", "min", "max", "prod")
_OP = "HcomAllReduce"
_GRADIENT_KEY = "_gradient_op_type"
_GRADIENT_NAME = "HcclFusionAllReduce"
# Marker on the stand-in -> attribute of the real op. The first one identifies a stand-in.
_MARKERS = {
    "_hccl_reduction": "reduction",
    "_hccl_group": "group",
    "_hccl_fusion": "fusion",
    "_hccl_fusion_id": "fusion_id",
}


def all_reduce(
    tensor: Any,
    reduction: str = "sum",
    fusion: int = 1,
    fusion_id: int = -1,
    group: str = "hccl_world_group",
    name: str | None = None,
) -> Any:
    """Adds the stand-in of an all-reduce to the graph under construction.

    Run by stock TensorFlow it yields its input. Its gradient is an all-reduce too (sum, never fused), as on the NPU.

    Args:
        tensor: any numeric tensor of the default graph.
        reduction: "sum", "min", "max" or "prod".
        fusion: 0 never fused, 1 by the group's split strategy, 2 with all others of equal `fusion_id`.
        fusion_id: -1 unless `fusion` is 2.
        group, name: the HCCL group; the node's name in the current scope, by default HcomAllReduce.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ReductionError: `reduction` is none of the four.
    """
    import tensorflow as tf

    if reduction not in _REDUCTIONS:
        expected = ", ".join(_REDUCTIONS)
        raise ReductionError("unknown reduction", found=repr(reduction), expected=expected, remedy='reduction="sum"')
    _register_gradient()
    tensor = tf.convert_to_tensor(tensor)
    attrs = {
        "T": AttrValue(type=tensor.dtype.as_datatype_enum),
        _GRADIENT_KEY: AttrValue(s=_GRADIENT_NAME.encode()),
        **_markers(reduction, group, fusion, fusion_id),
    }
    graph = tf.compat.v1.get_default_graph()  # inside a function or a branch not the graph of the tensor
    operation = graph.create_op("Identity", [tensor], [tensor.dtype], name=name or _OP, attrs=attrs)
    return operation.outputs[0]


def _markers(reduction: str, group: str, fusion: int, fusion_id: int) -> dict[str, AttrValue]:
    return {
        "_hccl_reduction": AttrValue(s=reduction.encode()),
        "_hccl_group": AttrValue(s=group.encode()),
        "_hccl_fusion": AttrValue(i=fusion),
        "_hccl_fusion_id": AttrValue(i=fusion_id),
    }


def _register_gradient() -> None:
    """Registers, once a process, the gradient that stand-ins name."""
    import tensorflow as tf

    def gradient(operation: Any, grad: Any) -> Any:
        return all_reduce(grad, fusion=0, group=operation.get_attr("_hccl_group").decode())

    with contextlib.suppress(KeyError):  # an earlier call has registered it
        tf.RegisterGradient(_GRADIENT_NAME)(gradient)


def export_graph_def(graph: Any = None, add_shapes: bool = False) -> GraphDef:
    """The GraphDef of a graph, its functions included, with real HcomAllReduce nodes.

    Name, inputs, device and the other attributes whose names begin with `_` stay as they are.

    Args:
        graph: a `tf.Graph`; the default graph if None.
        add_shapes: also writes the `_output_shapes` attributes.
    """
    import tensorflow as tf

    graph = graph if graph is not None else tf.compat.v1.get_default_graph()
    graph_def: GraphDef = graph.as_graph_def(add_shapes=add_shapes)
    _realise(graph_def.node)
    for function in graph_def.library.function:
        _realise(function.node_def)
    return graph_def


def _realise(nodes: Iterable[NodeDef]) -> None:
    """Turns the stand-ins among the nodes into HcomAllReduce, in place."""
    for node in nodes:
        if node.op != "Identity" or "_hccl_reduction" not in node.attr:
            continue
        node.op = _OP
        for marker, attribute in _MARKERS.items():
            node.attr[attribute].CopyFrom(node.attr[marker])
            del node.attr[marker]
        if node.attr[_GRADIENT_KEY].s == _GRADIENT_NAME.encode():
            del node.attr[_GRADIENT_KEY]
