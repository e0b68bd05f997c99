"""The wrapper of TensorFlow 1 optimizers: on two real ranks, and its graph in one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from test_agreement import run_ranks
from test_reduce import reduce_ops, two_ranks, world_of_one  # noqa: F401  # two of them are fixtures

from hccl_fusion import fuse
from hccl_fusion.errors import UsageError
from hccl_fusion.runtime import reduce
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.runtime.optimizer import DistributedOptimizer, NPUDistributedOptimizer
from hccl_fusion.strategy import Strategy, StrategyKind

v1 = tf.compat.v1
BY_IDX = Strategy(StrategyKind.IDX, [1, 4, 8])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("tf1"), "wrap_tf1.py")


def largest_difference(one, other):
    assert len(one) == len(other)
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(one, other))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_two_ranks_train_like_one_process_with_the_whole_batch(trained, optimizer):
    here, there = (found["training"][optimizer] for found in trained)
    assert here["fused"] == there["fused"]
    assert largest_difference(here["fused"], here["alone"]) < 1e-6


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_fused_is_bit_equal_to_unfused(trained, optimizer):
    found = trained[0]["training"][optimizer]
    assert found["fused"] == found["unfused"]
    assert [len(ops) for ops in found["ops"]] == [9, 1]


def test_the_registered_segments_run(trained):
    found = trained[0]["by_idx"]
    assert found["lines"] == ["gradient segment result: segment num: 3, segment index list: [0,2] [3,5] [6,8]  "]
    scope = "DistributedMomentumOptimizer_Allreduce"
    assert found["ops"] == [f"{scope}/segment_{number}/all_reduce" for number in range(3)]
    assert found["weights"] == trained[0]["training"]["momentum"]["fused"]


def test_small_pieces_give_the_same_weights(trained):
    assert len(trained[0]["pieces"]["ops"]) == 12
    assert trained[0]["pieces"]["weights"] == trained[0]["by_idx"]["weights"]


def test_compression_comes_close(trained):
    assert 0 < largest_difference(trained[0]["fp16"], trained[0]["by_idx"]["weights"]) < 1e-3
    assert trained[0]["fp16"] == trained[1]["fp16"]


@pytest.mark.parametrize("policy", ["allgather", "densify"])
def test_embeddings_with_different_numbers_of_rows(trained, policy):
    here, there = (found["embedding"] for found in trained)
    assert here[policy] == there[policy]
    assert largest_difference(here[policy], here["alone"]) < 1e-6


def test_two_optimizers_in_one_graph(trained):
    here, there = (found["gan"] for found in trained)
    scopes = ("DistributedAdamOptimizer_Allreduce", "DistributedAdamOptimizer_Allreduce_1")
    assert here["ops"] == [f"{scope}/single_0/all_reduce" for scope in scopes]
    assert here["weights"] == there["weights"]


# ------------------------------------------------------------------------------------------------ one process


def tied_mlp():
    """A loss whose gradients come in another order than its variables; `shared` is used twice."""
    hidden = tf.ones([2, 4])
    shared = v1.get_variable("shared", [4, 4])
    for number in range(4):
        hidden = tf.tanh(hidden @ v1.get_variable(f"w{number}", [4, 4]) + v1.get_variable(f"b{number}", [4]))
        hidden = hidden @ shared if number % 2 else hidden
    v1.get_variable("frozen", [4], trainable=False)
    v1.get_variable("unused", [4])
    return tf.reduce_sum(hidden)


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("strategy", [None, BY_IDX])
@pytest.mark.usefixtures("two_ranks")
def test_the_wrapper_fuses_as_the_graph_pass(strategy, resource):
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=resource):
        plain = v1.train.AdamOptimizer()
        pairs = plain.compute_gradients(tied_mlp())
        with tf.name_scope("DistributedAdamOptimizer_Allreduce"):
            pairs = [(None if g is None else all_reduce(g), v) for g, v in pairs]
        plain.apply_gradients(pairs)
        expected = fuse(export_graph_def(graph), strategy, infer_shapes=False)
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=resource):
        wrapped = DistributedOptimizer(v1.train.AdamOptimizer(), plan=strategy)
        wrapped.minimize(tied_mlp())
    plan = wrapped.reducer.last_plan.plan
    assert plan.fingerprint == expected.plan.fingerprint
    assert len(reduce_ops(graph)) == len(expected.plan.parts)
    sizes = [sum(g.elements for g in part_gradients(expected, part)) for part in expected.plan.parts]
    assert [op.inputs[0].shape.num_elements() for op in reduce_ops(graph)] == sizes


def part_gradients(result, part):
    by_id = {gradient.id: gradient for gradient in result.gradients}
    return [by_id[name] for name in part.gradients]


@pytest.mark.usefixtures("two_ranks")
def test_segments_wait_for_one_another_and_pieces_do_not():
    with tf.Graph().as_default() as graph:
        DistributedOptimizer(v1.train.AdamOptimizer(), plan=BY_IDX, piece_mib=2**-15).minimize(tied_mlp())
    labels = {op.name: op.name.split("/")[1] for op in reduce_ops(graph)}
    assert set(labels.values()) == {"segment_0", "segment_1", "segment_2"}
    for op in reduce_ops(graph):
        before = {labels[control.name] for control in op.control_inputs}
        number = int(labels[op.name][-1])
        assert before == ({f"segment_{number - 1}"} if number else set())
    keys = [int(tf.get_static_value(op.inputs[3])) for op in reduce_ops(graph)]
    assert len(set(keys)) == len(keys) > 3


@pytest.mark.usefixtures("two_ranks")
def test_on_an_npu_each_gradient_gets_its_own_hcom_all_reduce(monkeypatch):
    calls = []

    class HcclOps:
        @staticmethod
        def allreduce(tensor, reduction, fusion, fusion_id, group):
            calls.append((reduction, fusion, fusion_id, group))
            return all_reduce(tensor, reduction, fusion, fusion_id, group)

    monkeypatch.setattr(reduce, "npu_hccl_ops", lambda: HcclOps)
    with tf.Graph().as_default() as graph:
        NPUDistributedOptimizer(v1.train.AdamOptimizer()).minimize(tied_mlp())
        result = fuse(export_graph_def(graph), BY_IDX, infer_shapes=False)
    assert calls == [("sum", 1, -1, "hccl_world_group")] * 9
    assert not reduce_ops(graph)
    assert [section.last_indices for section in result.plan.sections] == [(1, 4, 8)]
    assert result.gradients[0].name.startswith("DistributedAdamOptimizer_Allreduce/HcomAllReduce")


@pytest.mark.usefixtures("world_of_one")
def test_a_world_of_one_adds_nothing():
    with tf.Graph().as_default() as graph:
        wrapped = DistributedOptimizer(v1.train.MomentumOptimizer(0.1, 0.9))
        train = wrapped.minimize(tied_mlp())
        init = v1.global_variables_initializer()
        slot = wrapped.get_slot(v1.trainable_variables()[0], "momentum")
        with v1.Session() as session:
            session.run(init)
            session.run(train)
        assert any(slot is variable for variable in wrapped.variables())
    assert not [op for op in graph.get_operations() if "Allreduce" in op.name or op.type.startswith("Collective")]
    assert wrapped.get_slot_names() == ["momentum"]
    assert wrapped.get_name() == "Momentum"
    assert wrapped._momentum == 0.9


def test_what_cannot_be_wrapped_is_an_error():
    wrapped = DistributedOptimizer(v1.train.AdamOptimizer())
    with pytest.raises(UsageError, match="distributed already"):
        DistributedOptimizer(wrapped)
    with pytest.raises(UsageError, match=r"no optimizer that can be distributed.*found builtins.str"):
        DistributedOptimizer("adam")
    with pytest.raises(UsageError, match=r"weight update sharding.*try DistributedOptimizer"):
        NPUDistributedOptimizer(v1.train.AdamOptimizer(), is_weight_update_sharding=True)
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing
