"""Rewritten graphs run in TensorFlow itself, and give the values that the original would give on N equal ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from builders import Case, golden_cases

from graph_passes.builder import tensor_bytes
from graph_passes.lower import lower_reductions
from graph_passes.messages import GraphDef, NodeDef, types_pb2
from graph_passes.sections import Reason
from hccl_fusion.fuse import fuse
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.strategy import Strategy, StrategyKind

v1 = tf.compat.v1
CASES = golden_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def reference(graph_def: GraphDef, ranks: int) -> GraphDef:
    """The graph with each all-reduce written out for N ranks that hold the same: x+x, x*x, or x."""
    copy = GraphDef()
    copy.CopyFrom(graph_def)
    for container in (copy.node, *(function.node_def for function in copy.library.function)):
        for node in [node for node in container if node.op == "HcomAllReduce"]:
            _write_out(container, node, ranks, in_function=container is not copy.node)
    return copy


def _write_out(container: Any, node: NodeDef, ranks: int, in_function: bool) -> None:
    reduction, dtype = node.attr["reduction"].s, node.attr["T"].type
    tensor = node.input[0]
    controls = list(node.input[1:])
    if reduction == b"sum":
        added = container.add(name=f"{node.name}__sum", op="AddN", input=[tensor] * ranks, device=node.device)
        added.attr["N"].i, added.attr["T"].type = ranks, dtype
        tensor = f"{added.name}:sum:0" if in_function else added.name
    elif reduction == b"prod":
        factor = tensor
        for step in range(1, ranks):
            added = container.add(name=f"{node.name}__prod{step}", op="Mul", input=[tensor, factor], device=node.device)
            added.attr["T"].type = dtype
            tensor = f"{added.name}:z:0" if in_function else added.name
    node.op = "Identity"
    for name in ("reduction", "group", "fusion", "fusion_id"):
        del node.attr[name]
    del node.input[:]
    node.input.extend([tensor, *controls])


def session(graph_def: GraphDef) -> v1.Session:
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    return v1.Session(graph=graph)


def small_integers(graph_def: GraphDef) -> dict[str, np.ndarray]:
    """A value for each placeholder; sums and products of small integers are exact in every type."""
    rng = np.random.default_rng(7)
    feeds = {}
    for node in graph_def.node:
        if node.op == "Placeholder":
            shape = [dim.size if dim.size >= 0 else 3 for dim in node.attr["shape"].shape.dim]
            dtype = tf.as_dtype(node.attr["dtype"].type).as_numpy_dtype
            feeds[f"{node.name}:0"] = np.asarray(rng.integers(0, 5, shape)).astype(dtype)
    return feeds


def fetchable(graph_def: GraphDef) -> list[str]:
    """All reduced gradients and all that reads them, outside loops."""
    ops = ("HcomAllReduce", "Identity", "Mul", "AddN")
    return [f"{node.name}:0" for node in graph_def.node if node.op in ops and not node.name.startswith("w/")]


def values(graph_def: GraphDef, fetches: Iterable[str], feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with session(graph_def) as running:
        if any(node.name == "init" for node in graph_def.node):
            running.run("init")
        return dict(zip(fetches, running.run(list(fetches), feeds)))


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@each_case
def test_the_mock_form_computes_what_n_equal_ranks_would(case: Case):
    ranks = case.options["ranks"]
    feeds, fetches = small_integers(case.graph_def), fetchable(case.graph_def)
    expected = values(reference(case.graph_def, ranks), fetches, feeds)
    assert any(value.size for value in expected.values())

    fused = fuse(case.graph_def, emit="mock", infer_shapes=False, **case.options)

    assert_equal(values(fused.graph_def, fetches, feeds), expected)


@each_case
def test_the_mock_form_of_a_fusion_by_ids_is_the_original_one(case: Case):
    """Ids only tell the NPU what to merge; control edges between the members must be ones that TensorFlow takes."""
    ranks = case.options["ranks"]
    feeds, fetches = small_integers(case.graph_def), fetchable(case.graph_def)
    tagged = fuse(case.graph_def, emit="fusion-id", infer_shapes=False, **case.options)

    found = values(lower_reductions(tagged.graph_def, "mock", ranks), fetches, feeds)

    assert_equal(found, values(reference(case.graph_def, ranks), fetches, feeds))


@each_case
def test_tensorflow_takes_the_collective_form(case: Case):
    fused = fuse(case.graph_def, emit="collective", infer_shapes=False, **case.options)
    with session(fused.graph_def) as imported:
        collectives = [op for op in imported.graph.get_operations() if op.type == "CollectiveReduceV2"]
        functions = [node for f in fused.graph_def.library.function for node in f.node_def]
    assert collectives
    assert len(collectives) + [node.op for node in functions].count("CollectiveReduceV2") == sum(
        "_hccl_reduction" in node.attr for node in [*fused.graph_def.node, *functions]
    )


def test_one_of_several_fused_gradients_can_be_fetched_alone():
    case = next(case for case in CASES if case.name == "two_groups")
    feeds = small_integers(case.graph_def)
    fused = fuse(case.graph_def, emit="mock", infer_shapes=False, **case.options)
    with session(fused.graph_def) as running:
        np.testing.assert_array_equal(running.run("ar_2:0", feeds), 2 * feeds["ar_2/g:0"])


def test_a_variable_is_trained_through_the_fused_gradients():
    case = next(case for case in CASES if case.name == "variables")
    names = [f"w_{number}/read:0" for number in range(3)]
    after = []
    for graph_def in (
        reference(case.graph_def, 2),
        fuse(case.graph_def, emit="mock", infer_shapes=False, **case.options).graph_def,
    ):
        with session(graph_def) as running:
            running.run("init")
            before = running.run(names)
            running.run("train")
            after.append(running.run(names))
    for first, second, old in zip(*after, before):
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, old)


# --------------------------------------------------------------------------------------- a network that learns

RANKS = 4


def network(*, use_resource: bool, colocate: bool = False) -> GraphDef:
    """A perceptron of two layers with a momentum optimizer, summaries, and an all-reduce for each variable."""
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("net", use_resource=use_resource):
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, [16, 8], name="x")
        y = v1.placeholder(tf.float32, [16, 1], name="y")
        tensor = x
        for layer, (rows, columns) in enumerate([(8, 16), (16, 1)]):
            start = tf.constant(np.random.default_rng(layer).normal(0, 0.3, (rows, columns)).astype(np.float32))
            kernel = v1.get_variable(f"kernel_{layer}", initializer=start)
            bias = v1.get_variable(f"bias_{layer}", [columns], initializer=v1.zeros_initializer())
            tensor = tf.matmul(tensor, kernel) + bias
            tensor = tf.nn.tanh(tensor) if layer == 0 else tensor
        scale = v1.get_variable("scale", [], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.square(tensor * scale - y), name="loss")
        optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
        reduced = []
        for gradient, variable in optimizer.compute_gradients(loss, colocate_gradients_with_ops=colocate):
            mean = all_reduce(gradient, name=f"reduce/{variable.op.name}") / float(RANKS)
            v1.summary.histogram(variable.op.name, mean)
            reduced.append((mean, variable))
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in reduced], 5.0)
        optimizer.apply_gradients(list(zip(clipped, [variable for _, variable in reduced])), name="train")
        v1.summary.scalar("loss", loss)
        tf.identity(v1.summary.merge_all(), name="summary")
        with tf.control_dependencies([variable.initializer for variable in v1.global_variables()]):
            tf.no_op(name="init")
        return export_graph_def(graph)


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    inputs = [rng.normal(size=(16, 8)).astype(np.float32) for _ in range(steps)]
    return [{"net/x:0": x, "net/y:0": np.sin(x[:, :1]) + 0.5 * x[:, 1:2]} for x in inputs]


def train(graph_def: GraphDef, steps: int) -> tuple[list[np.ndarray], list[np.ndarray], bytes]:
    """Losses and one reduced gradient of each step, fetched by their old names, and the last summary."""
    losses, gradients = [], []
    with session(graph_def) as running:
        running.run("net/init")
        for feeds in batches(steps):
            _, loss, gradient, summary = running.run(
                ["net/train", "net/loss:0", "net/reduce/net/kernel_0:0", "net/summary:0"], feeds
            )
            losses.append(loss)
            gradients.append(gradient)
    return losses, gradients, summary


@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("strategy", ["--idx", "--single", "default"])
def test_a_network_trains_as_before(use_resource, strategy):
    graph_def = network(use_resource=use_resource)
    chosen = {
        "--idx": Strategy(StrategyKind.IDX, (1, 4)),
        "--single": Strategy(StrategyKind.SINGLE),
        "default": Strategy(StrategyKind.DEFAULT),
    }[strategy]

    result = fuse(graph_def, chosen, emit="mock", ranks=RANKS)

    assert len(result.gradients) == 5
    assert result.modified
    found, expected = train(result.graph_def, 20), train(reference(graph_def, RANKS), 20)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.mean(found[0][-4:]) < 0.7 * np.mean(found[0][:4])
    events = v1.Summary.FromString(found[2])
    assert len(events.value) == 6
    assert events == v1.Summary.FromString(expected[2])


def test_a_network_knows_its_variables_and_shapes_without_inference():
    gradients = fuse(network(use_resource=True), infer_shapes=False).gradients
    assert {(gradient.variable, gradient.shape) for gradient in gradients} == {
        ("net/kernel_0", (8, 16)), ("net/bias_0", (16,)), ("net/kernel_1", (16, 1)), ("net/bias_1", (1,)),
        ("net/scale", ()),
    }  # fmt: skip


@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_colocation_with_changed_nodes_stays_valid(use_resource):
    graph_def = network(use_resource=use_resource, colocate=True)
    assert any("_class" in node.attr for node in graph_def.node)
    reductions = {node.name for node in graph_def.node if node.op == "HcomAllReduce"}
    for node in graph_def.node:
        if node.op == "RealDiv" and node.input[0] in reductions:
            node.attr["_class"].list.s[:] = [f"loc:@{node.input[0]}".encode()]

    result = fuse(graph_def, Strategy(StrategyKind.SINGLE), emit="mock", ranks=RANKS)

    with session(result.graph_def) as running:
        groups = {op.name: op.colocation_groups() for op in running.graph.get_operations()}
    assert any(f"loc:@{name}".encode() in group for name in reductions for group in groups.values())
    np.testing.assert_array_equal(train(result.graph_def, 3)[0], train(reference(graph_def, RANKS), 3)[0])


def test_bfloat16_constants_are_rounded_as_tensorflow_rounds_them():
    values = np.concatenate([np.arange(1, 2000), [2**31 - 1, 65535, 0.1, 1 / 3, 257, 259, 261]]).astype(np.float32)
    expected = values.astype(tf.bfloat16.as_numpy_dtype)
    assert tensor_bytes(values, types_pb2.DT_BFLOAT16) == expected.tobytes()


@pytest.mark.parametrize("dtype", [types_pb2.DT_FLOAT, types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_DOUBLE])
@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max"])
def test_each_mock_reduction_of_three_ranks(dtype, reduction):
    from builders import Nodes

    nodes = Nodes()
    nodes.gradient("ar", (5,), dtype, reduction=reduction)
    x = np.arange(5).astype(tf.as_dtype(dtype).as_numpy_dtype)
    expected = {"sum": 3 * x, "prod": x**3, "min": x, "max": x}[reduction]
    lowered = lower_reductions(nodes.graph_def, "mock", 3)
    with session(lowered) as running:
        found = running.run("ar/out:0", {"ar/g:0": x})
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == x.dtype


@pytest.mark.parametrize("taken", [True, False])
def test_a_reduction_in_a_branch_of_a_conditional_is_left_alone(taken):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.disable_control_flow_v2()
        try:
            tensors = [v1.placeholder(tf.float32, (3,), name) for name in ("a", "b", "c")]
            condition = v1.placeholder(tf.bool, (), "p")
            inside = v1.cond(condition, lambda: all_reduce(tensors[0]), lambda: tf.identity(tensors[0]))
        finally:
            v1.enable_control_flow_v2()
        outside = [all_reduce(tensor, name=f"outside_{tensor.op.name}") for tensor in tensors[1:]]
        names = [tensor.name for tensor in [inside, *outside]]
        graph_def = export_graph_def(graph)

    result = fuse(graph_def, Strategy(StrategyKind.SINGLE), emit="mock", ranks=2)

    assert [single.reason for single in result.plan.singles] == [Reason.BRANCH]
    assert sum(len(part.gradients) > 1 for part in result.plan.parts) == 1
    feeds = {"a:0": [1.0, 2.0, 3.0], "b:0": [4.0] * 3, "c:0": [5.0] * 3, "p:0": taken}
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.import_graph_def(result.graph_def, name="")
        values = session.run(names, feeds)
    expected = [np.array([1.0, 2.0, 3.0]) * (2 if taken else 1), np.full(3, 8.0), np.full(3, 10.0)]
    assert all(np.array_equal(value, wanted) for value, wanted in zip(values, expected))
