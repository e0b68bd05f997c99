"""In-process ranks: copies of a graph, real collectives between them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.lower import lower_reductions
from graph_passes.messages import GraphDef
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.runtime.in_process import InProcessRanks, simulate_ranks
from hccl_fusion.runtime.in_process_collectives import pad_collectives, retarget_collectives
from hccl_fusion.runtime.replicate import extract, replicate

v1 = tf.compat.v1


def one_reduction(dtype=tf.float32, shape=(3,), reduction="sum"):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(dtype, shape, name="x")
        all_reduce(x, reduction, name="y")
        return export_graph_def(graph)


def nodes(graph_def):
    return {node.name: node for node in graph_def.node}


class TestReplicate:
    def graph(self):
        with tf.Graph().as_default() as graph, tf.device("/job:worker/task:3/device:GPU:1"):
            w = v1.get_variable("w", [2], use_resource=True)
            queue = tf.queue.FIFOQueue(3, [tf.float32], shared_name="numbers")
            with tf.control_dependencies([tf.no_op()]), v1.colocate_with(w.op):
                tf.add(queue.dequeue(), w, name="sum")
            tf.split(tf.ones([4]), 2, name="halves")
            tf.identity(graph.get_tensor_by_name("halves:1"), name="second")
            return graph.as_graph_def()

    def test_every_node_and_reference_gets_the_rank(self):
        merged = nodes(replicate(self.graph(), 2))
        copy = merged["rank1/sum"]
        assert copy.device == "/device:CPU:1"
        assert all(
            text.lstrip("^").startswith("rank1/")
            for node in ("sum", "second")
            for text in merged[f"rank1/{node}"].input
        )
        assert list(merged["rank1/fifo_queue_Dequeue"].input) == ["rank1/fifo_queue", "^rank1/NoOp"]
        assert list(copy.attr["_class"].list.s) == [b"loc:@rank1/w"]
        assert list(merged["rank0/second"].input) == ["rank0/halves:1"]
        assert merged["rank0/w"].attr["shared_name"].s == b"rank0/w"
        assert merged["rank1/fifo_queue"].attr["shared_name"].s == b"rank1/numbers"
        assert merged["rank1/fifo_queue"].attr["container"].s == b""

    def test_the_input_is_untouched_and_the_copies_are_complete(self):
        graph_def = self.graph()
        bytes_before = graph_def.SerializeToString(deterministic=True)
        merged = replicate(graph_def, 3)
        assert graph_def.SerializeToString(deterministic=True) == bytes_before
        assert len(merged.node) == 3 * len(graph_def.node)
        assert merged.versions == graph_def.versions

    def test_extract_keeps_what_is_needed_and_valid_colocations(self):
        part = extract(self.graph(), ["second"])
        assert {node.name for node in part.node} == {"ones", "halves/split_dim", "halves", "second"}
        assert list(nodes(extract(self.graph(), ["sum"]))["sum"].attr["_class"].list.s) == [b"loc:@w"]
        graph_def = self.graph()
        nodes(graph_def)["second"].attr["_class"].list.s.append(b"loc:@w")
        assert "_class" not in nodes(extract(graph_def, ["second"]))["second"].attr


class TestReductions:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "int16"])
    def test_sum_of_all_types(self, dtype):
        kind = tf.dtypes.as_dtype(dtype)
        feeds = [{"x": np.array([1, 2, 3]).astype(kind.as_numpy_dtype) * (rank + 1)} for rank in range(3)]
        for found in simulate_ranks(one_reduction(kind), 3, feeds, ["y:0"]):
            assert found["y:0"].dtype == kind.as_numpy_dtype
            assert found["y:0"].astype(float).tolist() == [6, 12, 18]

    @pytest.mark.parametrize(("reduction", "expected"), [("sum", 2.5), ("min", 0.5), ("max", 2), ("prod", 1)])
    def test_all_reductions(self, reduction, expected):
        feeds = [{"x:0": np.float32(0.5)}, {"x:0": np.float32(2)}]
        for found in simulate_ranks(one_reduction(shape=(), reduction=reduction), 2, feeds, ["y"]):
            assert found["y"] == expected

    def test_one_mapping_feeds_all_ranks(self):
        first, second = simulate_ranks(one_reduction(), 2, {"x": [1, 2, 3]}, ["y", "x:0"])
        assert first["y"].tolist() == second["y"].tolist() == [2, 4, 6]
        assert first["x:0"].tolist() == [1, 2, 3]

    @pytest.mark.parametrize("shape", [(0,), (2, 0), (None,), None])
    def test_tensors_that_are_or_may_be_empty(self, shape):
        graph_def = one_reduction(shape=shape)
        for value in (np.zeros((2, 0)), np.zeros(0), np.ones(3), np.ones((2, 2))):
            if tf.TensorShape(shape).is_compatible_with(value.shape):
                found = simulate_ranks(graph_def, 2, {"x": value}, ["y"])
                assert found[1]["y"].tolist() == (2 * value).tolist()

    def test_a_graph_lowered_for_another_group_size_runs_on_any(self):
        lowered = lower_reductions(one_reduction(), form="collective", ranks=8)
        found = simulate_ranks(lowered, 2, [{"x": [1, 2, 3]}, {"x": [10, 20, 30]}], ["y"])
        assert [rank["y"].tolist() for rank in found] == [[11, 22, 33]] * 2

    def test_one_rank(self):
        assert simulate_ranks(one_reduction(), 1, {"x": [1, 2, 3]}, ["y"])[0]["y"].tolist() == [1, 2, 3]

    def test_inside_functions_loops_and_conditionals(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [2], name="x")

            @tf.function(autograph=False)
            def called(t):
                return all_reduce(t) + 1.0

            @tf.function(autograph=False)
            def called_loop(t):
                return tf.while_loop(lambda i, _: i < 2, lambda i, u: (i + 1, all_reduce(u)), (0, t))[1]

            tf.identity(called(x), name="called")
            tf.identity(called_loop(x), name="called_loop")
            looped = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, all_reduce(t)), (0, x))
            tf.identity(looped[1], name="looped")
            chosen = tf.cond(tf.constant(True), lambda: all_reduce(x), lambda: x)
            tf.identity(chosen, name="chosen")
            graph_def = export_graph_def(graph)
        assert any(n.op == "HcomAllReduce" for f in graph_def.library.function for n in f.node_def)
        found = simulate_ranks(
            graph_def, 2, [{"x": [1, 2]}, {"x": [10, 20]}], ["called", "called_loop", "looped", "chosen"]
        )
        for rank in found:
            assert rank["called"].tolist() == [12, 23]
            assert rank["called_loop"].tolist() == [22, 44]
            assert rank["looped"].tolist() == [44, 88]
            assert rank["chosen"].tolist() == [11, 22]

    def test_inside_a_loop_of_frames(self):
        v2_was_on = v1.control_flow_v2_enabled()
        v1.disable_control_flow_v2()
        try:
            with tf.Graph().as_default() as graph:
                x = v1.placeholder(tf.float32, [2], name="x")
                looped = v1.while_loop(lambda i, _: i < 2, lambda i, t: (i + 1, all_reduce(t)), (0, x))
                tf.identity(looped[1], name="looped")
                graph_def = export_graph_def(graph)
        finally:
            if v2_was_on:
                v1.enable_control_flow_v2()
        assert any(node.op == "Enter" for node in graph_def.node)
        found = simulate_ranks(graph_def, 2, [{"x": [1, 2]}, {"x": [10, 20]}], ["looped"])
        assert [rank["looped"].tolist() for rank in found] == [[22, 44]] * 2

    def test_two_runs_give_the_same_bits(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [64, 500], name="x")
            ids = v1.placeholder(tf.int32, [64], name="ids")
            y = tf.nn.softmax(tf.matmul(x, tf.transpose(x)))
            parts = [tf.reduce_sum(y), tf.nn.l2_loss(x), tf.reduce_mean(tf.math.unsorted_segment_sum(x, ids, 3))]
            all_reduce(tf.stack(parts), name="out")
            graph_def = export_graph_def(graph)
        random = np.random.default_rng(0)
        feeds = [{"x": random.standard_normal((64, 500)), "ids": random.integers(0, 3, 64)} for _ in range(3)]
        results = {simulate_ranks(graph_def, 3, feeds, ["out"])[rank]["out"].tobytes() for rank in (0, 1, 2, 0)}
        assert len(results) == 1


class TestState:
    @pytest.mark.parametrize("use_resource", [False, True])
    def test_variables_start_equal_and_move_together(self, use_resource):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [2], name="x")
            w = v1.get_variable("w", [2], initializer=v1.random_normal_initializer(), use_resource=use_resource)
            tf.group(v1.assign_sub(w, all_reduce(x)), name="step")
            graph_def = export_graph_def(graph)
        with InProcessRanks(graph_def, 2) as ranks:
            assert ranks.variables == ("w",)
            ranks.assign({"w": np.array([5, 5], np.float32)})
            for _ in range(2):
                assert ranks.run([], [{"x": [1, 0]}, {"x": [0, 2]}], ["step"]) == ({}, {})
            assert [rank["w"].tolist() for rank in ranks.read(["w"])] == [[3, 1]] * 2
        fetch = "w/read" if not use_resource else "w/Read/ReadVariableOp"
        first, second = simulate_ranks(graph_def, 2, {}, [fetch])
        assert first[fetch].tobytes() == second[fetch].tobytes()

    def test_state_inside_shared_functions_is_apart(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [], name="x")

            @tf.function(autograph=False)
            def count(t):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="counter")
                tf.raw_ops.AssignVariableOp(resource=handle, value=t)
                return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

            tf.identity(count(x), name="y")
            graph_def = graph.as_graph_def()
        found = simulate_ranks(graph_def, 2, [{"x": 1.0}, {"x": 2.0}], ["y"])
        assert [rank["y"] for rank in found] == [1.0, 2.0]


class TestErrors:
    def test_a_stall_ends_in_time(self):
        with tf.Graph().as_default() as graph:
            go = v1.placeholder(tf.bool, [], name="go")
            x = v1.placeholder(tf.float32, [2], name="x")
            tf.identity(tf.cond(go, lambda: all_reduce(x), lambda: x), name="y")
            graph_def = export_graph_def(graph)
        with InProcessRanks(graph_def, 2, timeout_seconds=1) as ranks, pytest.raises(NumericCheckError) as caught:
            ranks.run(["y"], [{"x": [1, 2], "go": True}, {"x": [1, 2], "go": False}])
        assert "stalled for 1 s" in str(caught.value)
        assert "only some ranks run" in str(caught.value)

    def test_a_queue_that_nobody_fills_ends_in_time(self):
        with tf.Graph().as_default() as graph:
            tf.identity(tf.queue.FIFOQueue(1, [tf.float32]).dequeue(), name="y")
            graph_def = graph.as_graph_def()
        with (
            InProcessRanks(graph_def, 2, timeout_seconds=0.5) as ranks,
            pytest.raises(NumericCheckError, match="stalled"),
        ):
            ranks.run(["y"])

    def test_an_op_that_tensorflow_does_not_have(self):
        graph_def = GraphDef()
        graph_def.node.add(name="npu", op="NpuThing")
        with pytest.raises(NumericCheckError, match=r"cannot import the graph.*NpuThing"):
            InProcessRanks(graph_def, 2)

    @pytest.mark.parametrize(
        ("fetches", "feeds", "targets", "text"),
        [
            (["nix"], {}, [], "no such tensor, found 'nix'"),
            (["y:3"], {}, [], "no such tensor, found 'y:3'"),
            ([], {}, ["nix"], "no such node, found 'nix'"),
            (["y"], {}, [], "the graph fails when it is run, node rank[01]/x"),
            (["y"], {"x": [1, 2]}, [], r"cannot be fed.*shape \(2,\)"),
            (["y"], [{"x": [1, 2, 3]}], [], "found 1 mappings, expected one for all or 2"),
        ],
    )
    def test_wrong_names_and_values(self, fetches, feeds, targets, text):
        with InProcessRanks(one_reduction(), 2) as ranks, pytest.raises(NumericCheckError, match=text) as caught:
            ranks.run(fetches, feeds, targets)
        assert "\n" not in str(caught.value)

    def test_no_ranks(self):
        with pytest.raises(NumericCheckError, match="no ranks, found 0"):
            InProcessRanks(one_reduction(), 0)

    def test_run_needs_the_with_block(self):
        with pytest.raises(NumericCheckError, match="not running"):
            InProcessRanks(one_reduction(), 1).run(["y"], {"x": [1, 2, 3]})


def test_collective_passes_leave_their_input_alone():
    lowered = lower_reductions(one_reduction(), form="collective", ranks=8)
    bytes_before = lowered.SerializeToString(deterministic=True)
    padded = pad_collectives(retarget_collectives(lowered, 2, 7.0), {n.name for n in lowered.node})
    assert lowered.SerializeToString(deterministic=True) == bytes_before
    reduced = [node for node in padded.node if node.op == "CollectiveReduceV2"]
    assert [node.attr["timeout_seconds"].f for node in reduced] == [7.0]
