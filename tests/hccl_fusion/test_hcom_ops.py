"""all_reduce stands for HcomAllReduce in stock TensorFlow; export_graph_def makes it real."""

from __future__ import annotations

import pytest
import tensorflow as tf

from graph_passes.errors import ReductionError
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def

v1 = tf.compat.v1


def nodes(graph_def):
    return {node.name: node for node in graph_def.node}


def attributes(node):
    return {key: node.attr[key].s or node.attr[key].i for key in ("reduction", "group", "fusion", "fusion_id")}


def test_defaults_and_names_are_those_of_the_npu_wrapper():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float16, [2, 3], name="x")
        with v1.name_scope("Opt_Allreduce"):
            reduced = [all_reduce(x) for _ in range(2)]
        assert [tensor.op.name for tensor in reduced] == [
            "Opt_Allreduce/HcomAllReduce",
            "Opt_Allreduce/HcomAllReduce_1",
        ]
        assert (reduced[0].dtype, reduced[0].shape.as_list()) == (tf.float16, [2, 3])
        graph_def = export_graph_def()
    node = nodes(graph_def)["Opt_Allreduce/HcomAllReduce_1"]
    assert node.op == "HcomAllReduce"
    assert list(node.input) == ["x"]
    assert node.attr["T"].type == tf.float16.as_datatype_enum
    assert attributes(node) == {"reduction": b"sum", "group": b"hccl_world_group", "fusion": 1, "fusion_id": -1}
    assert not [key for key in node.attr if key.startswith("_")]
    assert graph.get_operation_by_name(node.name).type == "Identity"


def test_all_options_and_what_tensorflow_adds_survive():
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", [2], use_resource=True)
        x = tf.constant([1.0, 2.0])
        mine = graph._attr_scope({"_mine": v1.AttrValue(i=7)})
        with tf.device("/job:worker/device:GPU:1"), tf.control_dependencies([w.initializer]), mine:
            reduced = all_reduce(x, "max", fusion=2, fusion_id=5, group="g", name="mine")
        tf.identity(reduced, name="reader")
        graph_def = export_graph_def(graph, add_shapes=True)
    node = nodes(graph_def)["mine"]
    assert attributes(node) == {"reduction": b"max", "group": b"g", "fusion": 2, "fusion_id": 5}
    assert list(node.input) == ["Const", "^w/Assign"]
    assert node.device == "/job:worker/device:GPU:1"
    assert node.attr["_mine"].i == 7
    assert [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim] == [2]
    assert list(nodes(graph_def)["reader"].input) == ["mine"]


def test_plain_identities_stay():
    with tf.Graph().as_default() as graph:
        tf.identity(all_reduce(tf.constant(1.0)), name="plain")
    assert nodes(export_graph_def(graph))["plain"].op == "Identity"


def test_functions_and_branches():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2], name="x")

        @tf.function(autograph=False)
        def called(t):
            return all_reduce(t) * 2.0

        called(x)
        tf.cond(x[0] > 0, lambda: all_reduce(x, "min"), lambda: x)
        graph_def = export_graph_def(graph)
    found = [
        node for function in graph_def.library.function for node in function.node_def if node.op == "HcomAllReduce"
    ]
    assert sorted(node.attr["reduction"].s for node in found) == [b"min", b"sum"]


def test_the_gradient_is_an_unfused_sum_of_the_same_group():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        (gradient,) = tf.gradients(all_reduce(x, group="g"), x)
        node = nodes(export_graph_def(graph))[gradient.op.name]
    assert node.op == "HcomAllReduce"
    assert attributes(node) == {"reduction": b"sum", "group": b"g", "fusion": 0, "fusion_id": -1}


def test_stock_tensorflow_runs_the_stand_in():
    with tf.Graph().as_default(), v1.Session() as session:
        assert session.run(all_reduce([1.0, 2.0])).tolist() == [1, 2]


def test_an_unknown_reduction_is_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(ReductionError, match="found 'mean', expected sum, min, max, prod") as caught,
    ):
        all_reduce(tf.constant(1.0), "mean")
    assert "\n" not in str(caught.value)
