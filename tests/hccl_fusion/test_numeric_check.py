"""compare_graphs: equal graphs are found equal, every wrong value is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.lower import lower_reductions
from graph_passes.messages import GraphDef, types_pb2
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.graph_roles import find_roles
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.runtime.inputs import fix_seeds, initial_values, random_value
from hccl_fusion.runtime.numeric_check import compare_graphs
from hccl_fusion.runtime.output_difference import compare_arrays

v1 = tf.compat.v1


def training_graph(optimizer=None, use_resource=False, ranks=2):
    """Two layers with dropout; unknown batch; summaries, saver, global step, one all-reduce per variable."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        labels = v1.placeholder(tf.int64, [None], name="labels")
        with v1.variable_scope("net", use_resource=use_resource):
            hidden = tf.nn.relu(tf.matmul(x, v1.get_variable("w1", [4, 5])) + v1.get_variable("b1", [5]))
            logits = tf.matmul(tf.nn.dropout(hidden, rate=0.5), v1.get_variable("w2", [5, 3]))
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), name="loss"
            )
        step = v1.train.get_or_create_global_step()
        optimizer = optimizer or v1.train.MomentumOptimizer(0.1, 0.9)
        pairs = optimizer.compute_gradients(loss)
        pairs = [(all_reduce(grad, name=f"reduced/{var.op.name}") / ranks, var) for grad, var in pairs]
        optimizer.apply_gradients(pairs, global_step=step, name="train")
        v1.summary.scalar("loss_summary", loss)
        v1.train.Saver()
        v1.global_variables_initializer()
        return export_graph_def(graph)


REDUCED = ("reduced/net/w1", "reduced/net/b1", "reduced/net/w2")
SHAPES = ((4, 5), (5,), (5, 3))


def changed(graph_def):
    """A copy of a graph, and its nodes by name."""
    copy = GraphDef()
    copy.CopyFrom(graph_def)
    return copy, {node.name: node for node in copy.node}


def become(node, op, inputs, **types):
    node.op = op
    node.input[:] = inputs
    node.attr.clear()
    for name, value in types.items():
        node.attr[name].type = value


def add_constant(graph_def, name, value, dtype=None):
    node = graph_def.node.add(name=name, op="Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return name


def fused(graph_def):
    """The three reductions as one: concat, reduce, split, with the old names on the reshapes."""
    copy, nodes = changed(graph_def)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    buffer, split = copy.node.add(name="fused/concat", op="ConcatV2"), copy.node.add(name="fused/split", op="SplitV")
    reduction = copy.node.add(name="fused/reduce", op="HcomAllReduce", input=["fused/concat"])
    reduction.MergeFrom(type(reduction)(attr=nodes[REDUCED[0]].attr))
    for number, (name, shape) in enumerate(zip(REDUCED, SHAPES)):
        flat = copy.node.add(name=f"fused/flat_{number}", op="Reshape")
        minus_one = add_constant(copy, f"fused/minus_one_{number}", [-1], tf.int32)
        become(flat, "Reshape", [nodes[name].input[0], minus_one], T=1, Tshape=3)
        sizes_of = add_constant(copy, f"fused/shape_{number}", shape, tf.int32)
        become(nodes[name], "Reshape", [f"fused/split:{number}" if number else "fused/split", sizes_of], T=1, Tshape=3)
    flats = [f"fused/flat_{number}" for number in range(3)]
    become(buffer, "ConcatV2", [*flats, add_constant(copy, "fused/axis", 0, tf.int32)], T=1, Tidx=3)
    buffer.attr["N"].i = 3
    split_sizes = add_constant(copy, "fused/sizes", sizes, tf.int32)
    become(split, "SplitV", ["fused/reduce", split_sizes, "fused/axis"], T=1, Tlen=3)
    split.attr["num_split"].i = 3
    return copy


def by_name(comparison):
    return {output.name: output for output in comparison.outputs}


class TestEqual:
    @pytest.mark.parametrize("use_resource", [False, True])
    def test_a_fused_graph_has_the_same_bits(self, use_resource):
        before = training_graph(use_resource=use_resource)
        bytes_before = before.SerializeToString(deterministic=True)
        comparison = compare_graphs(before, fused(before), steps=2)
        assert before.SerializeToString(deterministic=True) == bytes_before
        assert comparison.equal
        assert comparison.ranks == 2
        assert all(output.bit_equal and output.max_abs_diff == 0 for output in comparison.outputs)
        variables = {
            "net/w1",
            "net/b1",
            "net/w2",
            "net/w1/Momentum",
            "net/b1/Momentum",
            "net/w2/Momentum",
            "global_step",
        }
        assert {"net/loss", *REDUCED, *variables} <= set(by_name(comparison))
        assert [output.name for output in comparison.outputs][:3] == list(REDUCED)
        assert comparison.notes == ()

    def test_a_run_can_be_repeated(self):
        before = training_graph(v1.train.AdamOptimizer())
        assert compare_graphs(before, before, seed=3) == compare_graphs(before, before, seed=3)

    def test_more_ranks_are_equal_within_rounding(self):
        before = training_graph(ranks=3)
        comparison = compare_graphs(before, fused(before), ranks=3, steps=3)
        assert comparison.equal
        assert max(output.max_abs_diff for output in comparison.outputs) < 1e-6

    def test_the_collective_form_of_another_group_size(self):
        before = training_graph()
        after = lower_reductions(fused(before), form="collective", ranks=8)
        assert compare_graphs(before, after).equal
        comparison = compare_graphs(lower_reductions(before, form="collective", ranks=4), after)
        assert comparison.equal
        assert set(REDUCED) <= set(by_name(comparison))

    def test_the_mock_form_gets_equal_inputs(self):
        before = training_graph()
        mock = lower_reductions(fused(before), form="mock", ranks=2)
        comparison = compare_graphs(before, mock)
        assert comparison.equal
        assert comparison.notes == ("a graph is in the mock form for 2 ranks: all ranks get equal inputs",)
        assert not compare_graphs(before, mock, same_inputs=False).equal
        with pytest.raises(NumericCheckError, match=r"another number of ranks.*found 2, expected 3; try -n 2"):
            compare_graphs(before, mock, ranks=3)

    def test_feeds_replace_random_inputs(self):
        before = training_graph()
        random = np.random.default_rng(1)
        feeds = [{"x": random.standard_normal((3, 4)), "labels:0": [rank, 1, 2]} for rank in range(2)]
        comparison = compare_graphs(before, fused(before), feeds=feeds, fetches=["net/Relu"])
        assert comparison.equal
        assert "net/Relu" in by_name(comparison)


def scaled(graph_def):
    copy, nodes = changed(graph_def)
    scaled_by = add_constant(copy, "factor", 1 + 1e-6, tf.float32)
    node = copy.node.add(name="scaled")
    become(node, "Mul", [nodes[REDUCED[1]].input[0], scaled_by], T=1)
    nodes[REDUCED[1]].input[0] = "scaled"
    return copy


def swapped(graph_def):
    copy, nodes = changed(graph_def)
    first, second = nodes["reduced/net/w1"], nodes["net/w1/twin"]
    first.input[0], second.input[0] = second.input[0], first.input[0]
    return copy


def dropped(graph_def):
    copy, nodes = changed(graph_def)
    become(nodes[REDUCED[2]], "Identity", nodes[REDUCED[2]].input, T=1)
    return copy


class TestDifferent:
    def test_one_gradient_scaled_by_a_millionth(self):
        comparison = compare_graphs(training_graph(), scaled(training_graph()))
        assert not comparison.equal
        wrong = {name for name, output in by_name(comparison).items() if not output.bit_equal}
        assert wrong == {"reduced/net/b1", "net/b1", "net/b1/Momentum"}
        assert 0 < by_name(comparison)["reduced/net/b1"].max_abs_diff < 1e-5

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_one_gradient_not_reduced(self, ranks):
        comparison = compare_graphs(training_graph(), dropped(training_graph()), ranks)
        assert not comparison.equal
        assert by_name(comparison)["reduced/net/w2"].max_abs_diff > 1e-4

    def test_two_gradients_swapped(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [2], name="x")
            for name in ("reduced/net/w1", "net/w1/twin"):
                all_reduce(x * (3.0 if name == "net/w1/twin" else 2.0), name=name)
            before = export_graph_def(graph)
        comparison = compare_graphs(before, swapped(before))
        assert [output.bit_equal for output in comparison.outputs] == [False, False]
        assert not comparison.equal

    def test_another_learning_rate_shows_in_the_variables_only(self):
        before, after = training_graph(), training_graph(v1.train.MomentumOptimizer(0.2, 0.9))
        wrong = {name for name, out in by_name(compare_graphs(before, after)).items() if not out.bit_equal}
        assert wrong == {"net/w1", "net/b1", "net/w2"}

    def test_a_name_that_is_gone(self):
        before = training_graph()
        after, nodes = changed(before)
        for node in after.node:
            node.input[:] = ["other" if text == REDUCED[0] else text for text in node.input]
        nodes[REDUCED[0]].name = "other"
        comparison = compare_graphs(before, after)
        assert not comparison.equal
        assert by_name(comparison)[REDUCED[0]].max_abs_diff == math.inf
        assert comparison.notes == (f"the second graph lacks reduced gradients: {REDUCED[0]}",)

    def test_an_update_that_is_gone(self):
        after, nodes = changed(training_graph())
        candidates = [n for n in nodes if n.endswith("net/b1/ApplyMomentum")]
        become(nodes[candidates[0]], "NoOp", [])
        nodes[candidates[0]].name = "nothing"
        for node in after.node:
            node.input[:] = [text for text in node.input if text != f"^{candidates[0]}"]
        comparison = compare_graphs(training_graph(), after)
        assert not comparison.equal
        assert comparison.notes == (f"the second graph lacks updates: {candidates[0]}",)


class TestInputs:
    def test_values_depend_on_name_rank_and_seed(self):
        first = random_value("x:0", 0, 0, (2, 3), np.float32)
        assert first.dtype == np.float32
        assert first.tobytes() == random_value("x:0", 0, 0, (2, 3), np.float32).tobytes()
        others = [("y:0", 0, 0), ("x:0", 1, 0), ("x:0", 0, 1)]
        assert all(first.tobytes() != random_value(*key, (2, 3), np.float32).tobytes() for key in others)

    def test_every_kind_of_number(self):
        for dtype in (
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "int8",
            "uint8",
            "int32",
            "int64",
            "bool",
            "complex64",
        ):
            kind = tf.dtypes.as_dtype(dtype).as_numpy_dtype
            value = random_value("x", 1, 2, (40,), kind)
            assert value.dtype == kind
            assert len(np.unique(value)) > 1
            if np.dtype(kind).kind in "iub":
                assert set(value.tolist()) == {0, 1}

    def test_scalars_are_rates_and_switches(self):
        assert random_value("is_training", 0, 0, (), np.bool_)
        assert 0.5 <= random_value("rate", 0, 0, (), np.float32) < 1

    def test_iterators_queues_and_images(self):
        with tf.Graph().as_default() as graph:
            data = tf.data.Dataset.from_tensors((np.zeros((2, 3), np.float32), "name"))
            numbers, names = v1.data.make_one_shot_iterator(data).get_next()
            queued = tf.queue.FIFOQueue(5, [tf.float32], [[3]]).dequeue_many(4)
            image = v1.placeholder(tf.float32, [None, None, None, 3], name="image")
            pooled = tf.nn.max_pool2d(image, 8, 8, "VALID")
            all_reduce(tf.concat([numbers, queued, tf.reduce_sum(pooled, [1, 2])[:1]], 0), name="y")
            tf.identity(names, name="only_names")
            graph_def = export_graph_def(graph)
        comparison = compare_graphs(graph_def, graph_def)
        assert comparison.equal
        assert "y" in by_name(comparison)
        assert "only_names" not in by_name(comparison)

    @pytest.mark.parametrize(
        ("dtype", "shape", "text"),
        [
            (tf.string, [2], r"cannot be made up, node x, found strings.*feeds=\{\"x:0\": …\}"),
            (tf.float32, None, r"no known rank, node x, .*feeds=\{\"x:0\": …\}"),
        ],
    )
    def test_inputs_that_must_be_fed(self, dtype, shape, text):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(dtype, shape, name="x")
            all_reduce(tf.strings.to_number(x) if dtype == tf.string else x, name="y")
            graph_def = export_graph_def(graph)
        with pytest.raises(NumericCheckError, match=text) as caught:
            compare_graphs(graph_def, graph_def)
        assert "\n" not in str(caught.value)
        value = ["1", "2"] if dtype == tf.string else [1, 2]
        assert compare_graphs(graph_def, graph_def, feeds={"x": value}).equal

    def test_an_intermediate_tensor_can_be_fed(self):
        with tf.Graph().as_default() as graph:
            parsed = tf.strings.to_number(v1.placeholder(tf.string, [2], name="x"), name="parsed")
            all_reduce(parsed, name="y")
            graph_def = export_graph_def(graph)
        assert compare_graphs(graph_def, graph_def, feeds={"parsed": [1, 2]}).equal

    def test_shapes_that_do_not_fit_are_named(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, None, 3], name="x")
            all_reduce(tf.reshape(x, [-1, 5]), name="y")
            graph_def = export_graph_def(graph)
        with pytest.raises(NumericCheckError, match=r"the graph fails.*made up: x:0 \[2, 2, 3\]"):
            compare_graphs(graph_def, graph_def)


class TestState:
    def test_initial_values_come_from_the_graph_even_in_chains(self):
        with tf.Graph().as_default() as graph:
            a = v1.get_variable("a", [2], initializer=v1.constant_initializer(3.0), use_resource=False)
            v1.get_variable("b", initializer=a.initialized_value() * 2, use_resource=False)
            x = v1.placeholder(tf.float32, [2], name="x")
            v1.get_variable("c", initializer=x, use_resource=True)
            v1.train.Saver()
            graph_def = graph.as_graph_def()
        values = initial_values(graph_def, ["b", "c"])
        assert list(values) == ["b", "c"]
        assert values["b"].tolist() == [6, 6]
        assert all(0.02 <= value < 0.12 for value in values["c"])

    def test_seeds_are_fixed_where_they_are_random(self):
        with tf.Graph().as_default() as graph:
            for seed in (None, 7):
                all_reduce(v1.random_normal([3], seed=seed, name=f"noise_{seed}"), name=f"y_{seed}")
            graph_def = export_graph_def(graph)
        fixed = {node.name: node for node in fix_seeds(graph_def).node}
        assert fixed["noise_7/RandomStandardNormal"].attr["seed2"].i == 7
        assert fixed["noise_None/RandomStandardNormal"].attr["seed"].i > 0
        assert compare_graphs(graph_def, graph_def, steps=2).equal

    def test_roles(self):
        roles = find_roles(training_graph())
        assert roles.reductions == REDUCED
        assert [len(group) for group in roles.updates] == [4]
        assert roles.results[0] == "net/loss"
        assert all(name.startswith("gradients/") for name in roles.results[1:])  # gradients that lead nowhere
        assert set(roles.initialisers) == set(roles.variables)
        assert not any("Assign" in name and "global_step" not in name for group in roles.updates for name in group)

    def test_what_two_optimizers_dispute_runs_one_after_the_other(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [3], name="x")
            g, d = (v1.get_variable(name, [3], use_resource=False) for name in "gd")
            updates = [("d", tf.reduce_sum(x * g * d), d), ("g", -tf.reduce_sum(x * g * d * d), g)]
            for name, loss, variable in updates:
                optimizer = v1.train.GradientDescentOptimizer(0.1)
                pairs = optimizer.compute_gradients(loss, [variable])
                optimizer.apply_gradients([(all_reduce(grad), var) for grad, var in pairs], name=f"train_{name}")
            setter = v1.placeholder(tf.float32, [3], name="setter")
            v1.assign(g, setter, name="set")
            v1.assign(g, d, name="copy")
            graph_def = export_graph_def(graph)
        roles = find_roles(graph_def)
        assert len(roles.updates) == 3
        assert not any("set" in group for group in roles.updates)
        assert compare_graphs(graph_def, graph_def, steps=3).equal

    def test_savers_do_not_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        before = training_graph()
        assert compare_graphs(before, before).equal
        assert list(tmp_path.iterdir()) == []

    def test_foreign_ops_matter_only_where_they_are_needed(self):
        before, nodes = changed(training_graph())
        before.node.add(name="broadcast", op="HcomBroadcast", input=["net/w1"])
        assert compare_graphs(before, before).equal
        nodes[REDUCED[0]].input.append("^broadcast")
        with pytest.raises(NumericCheckError, match=r"ops that TensorFlow does not have.*HcomBroadcast \(broadcast\)"):
            compare_graphs(before, before)

    def test_reductions_in_branches_are_noted(self):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [2], name="x")
            go = v1.placeholder(tf.bool, [], name="go")
            tf.identity(tf.cond(go, lambda: all_reduce(x), lambda: x), name="y")
            graph_def = export_graph_def(graph)
        comparison = compare_graphs(graph_def, graph_def)
        assert comparison.equal
        assert [output.name for output in comparison.outputs] == ["y"]
        assert "compared only through what depends on them" in comparison.notes[0]


class TestErrors:
    def test_nothing_to_compare(self):
        first, second = GraphDef(), GraphDef()
        add_constant(first, "a", 1.0)
        add_constant(second, "b", 1.0)
        with pytest.raises(NumericCheckError, match="nothing to compare") as caught:
            compare_graphs(first, second)
        assert "\n" not in str(caught.value)

    def test_a_graph_that_cannot_be_imported(self):
        before, nodes = changed(training_graph())
        nodes["net/MatMul"].attr["T"].type = types_pb2.DT_STRING
        with pytest.raises(NumericCheckError, match="cannot import the graph") as caught:
            compare_graphs(training_graph(), before)
        assert "\n" not in str(caught.value)

    def test_an_unknown_fetch(self):
        with pytest.raises(NumericCheckError, match="no such tensor, found 'nix:0'"):
            compare_graphs(training_graph(), training_graph(), fetches=["nix"])


class TestArrays:
    @staticmethod
    def compare(a, b, ranks=2, dtype=np.float32):
        output, is_equal = compare_arrays("x", [np.array(a, dtype)], [np.array(b, dtype)], ranks)
        return output.max_abs_diff, output.bit_equal, is_equal

    def test_two_ranks_are_compared_bit_by_bit(self):
        assert self.compare([1, 2], [1, 2]) == (0, True, True)
        assert self.compare([1, 2], [1, np.nextafter(np.float32(2), np.float32(3))])[1:] == (False, False)
        assert self.compare(0.0, -0.0) == (0, False, False)

    def test_a_nan_equals_a_nan_only(self):
        assert self.compare([np.nan, 1], [-np.nan, 1]) == (0, True, True)
        assert self.compare([np.nan, 1], [0, 1]) == (math.inf, False, False)
        assert self.compare([np.inf, 1], [np.inf, 3]) == (2, False, False)
        assert self.compare([complex(0, np.nan)], [complex(0, -np.nan)], dtype=np.complex64) == (0, True, True)

    def test_more_ranks_may_differ_by_rounding(self):
        assert self.compare([1000, 1], [1000, 1.02], ranks=3) == (pytest.approx(0.02, rel=1e-4), False, True)
        assert not self.compare([1000, 1], [1000, 1.04], ranks=3)[2]
        assert not self.compare([0, 0], [0, 1e-30], ranks=3)[2]

    def test_integers_are_exact_on_any_number_of_ranks(self):
        assert self.compare([2**62, 1], [2**62 + 1, 1], ranks=8, dtype=np.int64) == (1, False, False)
        assert self.compare([True], [False], ranks=8, dtype=np.bool_) == (1, False, False)
        assert self.compare([0], [255], dtype=np.uint8) == (255, False, False)

    def test_shapes_and_types_must_agree(self):
        assert self.compare([1, 2], [1]) == (math.inf, False, False)
        output, is_equal = compare_arrays("x", [np.zeros(2, np.float32)], [np.zeros(2, np.float64)], 3)
        assert (output.max_abs_diff, is_equal) == (math.inf, False)
