"""Plans of tensors under construction, and what their reduction adds to a graph."""

from __future__ import annotations

import pytest
import tensorflow as tf
from test_agreement import run_ranks

from graph_passes.messages import GraphDef, types_pb2
from graph_passes.node_input import producer_name
from hccl_fusion import plan_graph, set_split_strategy_by_idx
from hccl_fusion.demo.resnet50 import ResNet50Options, build_training_graph
from hccl_fusion.errors import StrategyError, UsageError
from hccl_fusion.runtime import agreement, group_registry, lifecycle, reduce
from hccl_fusion.runtime.collective_keys import KEYS_OF_ANY_LENGTH, KeyBook, round_up_length, take_keys
from hccl_fusion.runtime.compression import Compression, wire_dtype
from hccl_fusion.runtime.graph_order import NodeSpec, plan_graph_tensors, plan_listed_tensors
from hccl_fusion.runtime.reduce import GradientReducer, reduce_tensors
from hccl_fusion.runtime.reduce_options import ReduceOptions
from hccl_fusion.runtime.world import World
from hccl_fusion.strategy import Strategy, StrategyKind

v1 = tf.compat.v1
WORLD = "hccl_world_group"


@pytest.fixture
def two_ranks(monkeypatch):
    """This process believes to be rank 0 of two: graphs can be built, but not run."""
    monkeypatch.setattr(agreement, "agree_on_plan", lambda *_: None)
    group_registry.open_world(World(0, ("localhost", "localhost"), ("localhost:1", "localhost:2")))
    yield
    group_registry.close_world()


@pytest.fixture
def world_of_one():
    lifecycle.init(environ={})
    yield
    lifecycle.shutdown()


def reduce_ops(graph):
    return [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]


# ------------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize("options", [{}, {"resource_variables": True, "l2_loss": True}])
def test_the_plan_of_resnet_50_before_its_reductions_are_there(options):
    """The graph is cut back to what it was before the wrapper: all that the gradients need, and nothing else."""
    training = build_training_graph(ResNet50Options(image_size=32, batch_size=2, **options))
    expected, _ = plan_graph(training.graph_def, infer_shapes=False)
    nodes = {node.name: node for node in training.graph_def.node}
    reductions = [nodes[name] for name in training.reductions]
    shapes = {g.name: g.shape for section in expected.sections for g in section.gradients}
    needed = [producer_name(node.input[0]) for node in reductions]
    kept = set(needed)
    while needed:
        inputs = [producer_name(text) for text in nodes[needed.pop()].input]
        needed += [name for name in inputs if name not in kept]
        kept.update(inputs)
    before = GraphDef(node=[node for node in training.graph_def.node if node.name in kept])
    before.library.CopyFrom(training.graph_def.library)
    specs = [NodeSpec(node.input[0], node.attr["T"].type, shapes[node.name], node.device) for node in reductions]
    scope = training.reductions[0].rpartition("/")[0]
    found = plan_graph_tensors(before, specs, scope, WORLD)
    assert [section.last_indices for section in found.plan.sections] == [(108, 160)]
    assert found.plan.fingerprint == expected.fingerprint
    names = [list(training.reductions)[at] for bucket in found.buckets for at in bucket.positions]
    assert names == [gradient.name for gradient in expected.sections[0].gradients]


def test_without_a_graph_the_order_is_the_reverse_of_the_list():
    specs = [NodeSpec("", types_pb2.DT_FLOAT, (number + 1,)) for number in range(12)]
    found = plan_listed_tensors(specs, "Allreduce", WORLD, Strategy(StrategyKind.IDX, [3, 11]))
    assert [bucket.positions for bucket in found.buckets] == [(11, 10, 9, 8), (7, 6, 5, 4, 3, 2, 1, 0)]
    assert [bucket.label for bucket in found.buckets] == ["segment_0", "segment_1"]
    assert "reverse order of the list" in found.plan.notes[0]


def test_every_tensor_is_in_one_bucket_and_unknown_shapes_are_alone():
    kinds = [
        (types_pb2.DT_FLOAT, (2,)),
        (types_pb2.DT_FLOAT, None),
        (types_pb2.DT_HALF, (3,)),
        (types_pb2.DT_FLOAT, ()),
    ]
    found = plan_listed_tensors([NodeSpec("", dtype, shape) for dtype, shape in kinds], "a/b", WORLD)
    assert [(bucket.label, bucket.positions) for bucket in found.buckets] == [
        ("segment_0", (3, 0)),
        ("single_0", (2,)),
        ("single_1", (1,)),
    ]
    assert found.buckets[2].shapes == (None,)


@pytest.mark.usefixtures("two_ranks")
def test_a_registered_list_that_does_not_fit_is_an_error():
    with tf.Graph().as_default():
        set_split_strategy_by_idx([5])
        try:
            with pytest.raises(StrategyError, match="found \\[5\\], expected the last index to be 1"):
                reduce_tensors([tf.zeros([1]), tf.zeros([2])])
        finally:
            lifecycle.reset_split_strategy()


# ------------------------------------------------------------------------------------------------ graph


@pytest.mark.usefixtures("two_ranks")
def test_pieces_cover_the_buffer_and_a_tensor_that_stands_twice_is_reduced_once():
    with tf.Graph().as_default() as graph:
        x, y = v1.placeholder(tf.float32, [100, 3]), v1.placeholder(tf.float32, [7])
        out = reduce_tensors([x, None, y, x], piece_mib=256 / 2**20, plan=Strategy(StrategyKind.SINGLE))
    assert out[1] is None
    assert out[0] is out[3]
    assert [tensor.shape.as_list() for tensor in (out[0], out[2])] == [[100, 3], [7]]
    sizes = [op.inputs[0].shape.num_elements() for op in reduce_ops(graph)]
    assert sum(sizes) == 307
    assert max(sizes) <= 64
    assert {op.name.rpartition("/")[0] for op in reduce_ops(graph)} == {"Allreduce/segment_0"}
    assert {op.device for op in reduce_ops(graph)} == {"/job:worker/replica:0/task:0/device:CPU:0"}
    assert {op.get_attr("timeout_seconds") for op in reduce_ops(graph)} == {120.0}


@pytest.mark.usefixtures("two_ranks")
def test_a_function_is_planned_from_its_own_graph_and_its_pieces_run_side_by_side():
    reducer = GradientReducer(ReduceOptions.of(piece_mib=64 / 2**20))

    @tf.function(input_signature=[tf.TensorSpec([40])])
    def step(x):
        return reducer.reduce([tf.exp(tf.exp(x)), -x, tf.reduce_sum(x)])

    graph = step.get_concrete_function().graph
    assert len(reduce_ops(graph)) == 6
    assert all(not op.control_inputs for op in reduce_ops(graph))
    assert [bucket.positions for bucket in reducer.last_plan.buckets] == [(1, 0, 2)]


@pytest.mark.usefixtures("two_ranks")
def test_a_second_trace_has_the_keys_of_the_first():
    reducer = GradientReducer(ReduceOptions())

    @tf.function
    def step(x):
        return reducer.reduce([tf.reduce_sum(x), tf.reduce_max(x)]), reducer.reduce([tf.reduce_mean(x)])

    keys = []
    for size in (3, 4):
        graph = step.get_concrete_function(tf.TensorSpec([size])).graph
        keys.append([int(tf.get_static_value(op.inputs[3])) for op in reduce_ops(graph)])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


@pytest.mark.usefixtures("two_ranks")
def test_the_type_that_travels():
    with tf.Graph().as_default() as graph:
        reduce_tensors([v1.placeholder(tf.float32, [4])], compression="bf16")
        reduce_tensors([v1.placeholder(tf.uint8, [4])], average=False)
    assert [op.get_attr("T") for op in reduce_ops(graph)] == [tf.bfloat16, tf.int32]
    assert wire_dtype(types_pb2.DT_HALF, Compression.BF16, "g") == types_pb2.DT_HALF
    with pytest.raises(UsageError, match="cannot reduce this type, g, found complex64"):
        wire_dtype(types_pb2.DT_COMPLEX64, Compression.NONE, "g")


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int8"}, "compression is unknown"),
        ({"sparse": "drop"}, "IndexedSlices is unknown"),
        ({"piece_mib": 0}, "piece_mib is illegal"),
        ({"plan": 3}, "plan is illegal"),
    ],
)
def test_illegal_options(options, message):
    with pytest.raises(UsageError, match=message):
        ReduceOptions.of(**options)


def test_before_init_nothing_is_reduced_silently():
    with pytest.raises(group_registry.NotInitialisedError, match="init"):
        reduce_tensors([tf.ones([1])])


@pytest.mark.usefixtures("world_of_one")
def test_a_world_of_one_returns_the_very_tensors():
    tensors = [tf.ones([2]), None, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))]
    found = reduce_tensors(tensors)
    assert all(a is b for a, b in zip(found, tensors))


def test_our_stand_in_of_the_npu_module_is_no_npu(monkeypatch):
    class Module:
        pass

    module = Module()
    monkeypatch.setattr(reduce.importlib, "import_module", lambda _: module)
    for owner, expected in (("hccl_fusion.compat", None), ("npu_bridge.hccl.hccl_ops", module)):
        module.allreduce = type("allreduce", (), {"__module__": owner})
        reduce.npu_hccl_ops.cache_clear()
        assert reduce.npu_hccl_ops() is expected
    reduce.npu_hccl_ops.cache_clear()


# ------------------------------------------------------------------------------------------------ keys


def test_keys_are_never_given_out_twice():
    first, second = take_keys("keys", 3), take_keys("keys", 2)
    assert set(first).isdisjoint(second)
    assert take_keys("other", 1).start == first.start


def test_equal_reductions_of_one_graph_have_keys_of_their_own():
    book, graphs = KeyBook(), (tf.Graph(), tf.Graph())
    first = [book.keys("book", "x", 2, graphs[0]) for _ in range(2)]
    again = [book.keys("book", "x", 2, graphs[1]) for _ in range(2)]
    assert [is_new for _, is_new in first + again] == [True, True, False, False]
    assert [keys for keys, _ in first] == [keys for keys, _ in again]
    assert set(first[0][0]).isdisjoint(first[1][0])
    book.give_up("x")
    assert book.keys("book", "x", 2, None)[1]


def test_lengths_are_rounded_up_to_few_values_with_a_key_each():
    lengths = [*range(1, 2100), 2**20 - 1, 2**20, 2**20 + 1, 2**30 - 1]
    seen = {}
    for length in lengths:
        padded, offset = (int(value) for value in round_up_length(tf.constant(length)))
        assert length <= padded <= max(16, length * 1.125)
        assert 0 <= offset < KEYS_OF_ANY_LENGTH
        assert seen.setdefault(offset, padded) == padded
    assert len(set(seen.values())) == len(seen)


# ------------------------------------------------------------------------------------------------ two ranks


def test_two_ranks_reduce_unusual_tensors(tmp_path):
    found, there = run_ranks(tmp_path, "wrap_agree.py", "values")
    assert found == there
    assert found["twice"] == [[1.5, 3.0], None, [1.5, 3.0], 4.5]
    assert found["empty"] == [[], [1.5], []]
    assert found["only empty"] == [[], [[], []]]
    assert found["int8"] == [[-56, 2]]
    assert found["int8 average"][1].startswith("an average of integers is none, tensor 0, found int8")
    assert found["complex"][1].startswith("TensorFlow's collectives cannot reduce this type")
    assert found["mixed"] == [[1.0], [2.0], [3.0]]
    assert found["bf16"] == [[1.5, 4.5]]
    assert [len(rows) for rows, _ in found["any length"]] == [2, 0, 40, 2]
    assert all(row == [1.5, 1.5] for rows, _ in found["any length"] for row in rows)
    assert found["group"] == [[1.5]]
    assert found["retraced"] == [1.0, 1.5]
