"""infer_shapes: TensorFlow's own inference with reductions read as Identity."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.runtime.shape_inference import infer_shapes

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def graph_def():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        square = all_reduce(tf.matmul(x, x, transpose_a=True), name="square")
        all_reduce(x * 2.0, name="unknown_batch")
        all_reduce(tf.reshape(square, [-1]), name="flat")
        tf.split(square, [1, 2], name="parts")

        @tf.function(autograph=False)
        def called(t):
            return tf.reshape(all_reduce(tf.transpose(t)[1:], name="inner"), [-1], name="inner_flat")

        tf.identity(called(square), name="out")
        return export_graph_def(graph)


def test_known_and_unknown(graph_def):
    bytes_before = graph_def.SerializeToString(deterministic=True)
    assert infer_shapes(graph_def, ["square", "square:0", "unknown_batch", "flat", "parts:1", "gone", "parts:9"]) == {
        "square": (3, 3),
        "square:0": (3, 3),
        "unknown_batch": None,
        "flat": (9,),
        "parts:1": (2, 3),
        "gone": None,
        "parts:9": None,
    }
    assert graph_def.SerializeToString(deterministic=True) == bytes_before


def test_inside_a_function(graph_def, caplog):
    function = graph_def.library.function[0]
    expected = {"inner": (2, 3), "inner_flat:0": (6,), "gone": None}
    assert infer_shapes(graph_def, list(expected), function=function.signature.name) == expected
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    copy.library.function[0].arg_attr.clear()
    assert infer_shapes(copy, list(expected), function=function.signature.name) == expected
    assert not caplog.records
    assert infer_shapes(graph_def, ["a"], function="no_such_function") == {"a": None}
    assert "no function no_such_function" in caplog.text


def test_foreign_ops_hide_only_what_depends_on_them(graph_def):
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    npu = copy.node.add(name="npu", op="NpuThing", input=["square"])
    npu.attr["T"].type = 1
    for name, inputs in (("after", ["npu:1"]), ("beside", ["square", "^npu"])):
        copy.node.add(name=name, op="HcomAllReduce", input=inputs).attr["T"].type = 1
    assert infer_shapes(copy, ["after", "beside", "npu"]) == {"after": None, "beside": (3, 3), "npu": None}


def test_a_graph_that_cannot_be_imported_is_a_warning(graph_def, caplog):
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    copy.node.add(name="bad", op="MatMul", input=["x"])
    with caplog.at_level(logging.WARNING, "hccl_fusion"):
        assert infer_shapes(copy, ["bad"]) == {"bad": None}
        assert infer_shapes(copy, ["square"]) == {"square": (3, 3)}
    assert [record.message.startswith("TensorFlow's shape inference fails") for record in caplog.records] == [True]
