"""The ResNet-50 training graph: the facts of docs/index_order.md, and that it trains and fuses."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graph_passes.files import read_graph
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef
from graph_passes.order import breadth_first_order
from hccl_fusion.demo.resnet50 import ResNet50Options, build_training_graph, main
from hccl_fusion.fuse import fuse
from hccl_fusion.runtime.graph_roles import find_roles
from hccl_fusion.runtime.numeric_check import compare_graphs
from hccl_fusion.runtime.shape_inference import infer_shapes
from hccl_fusion.segmentation import segment_boundaries
from hccl_fusion.strategy import Strategy, StrategyKind

ROOT = Path(__file__).resolve().parents[2]


def training_graph(**options):
    return _built(ResNet50Options(image_size=32, **options))


@functools.cache
def _built(options):
    return build_training_graph(options)


def index_order(training):
    """Variables by gradient index."""
    graph = Graph(training.graph_def.node)
    variable = dict(zip(training.reductions, training.variables))
    order = [graph.names[number] for number in breadth_first_order(graph)]
    return [variable[name] for name in order if name in variable]


def variable_shapes(training):
    return {
        node.name: tuple(dim.size for dim in node.attr["shape"].shape.dim)
        for node in training.graph_def.node
        if node.op in ("VariableV2", "VarHandleOp") and node.name in training.variables
    }


def sizes_bytes(training):
    shapes = variable_shapes(training)
    return [4 * int(np.prod(shapes[name])) for name in index_order(training)]


class TestIndexOrder:
    def test_variables_and_weight_decay_do_not_matter(self):
        expected = index_order(training_graph())
        assert len(expected) == 161
        for use_resource, l2_loss in ((True, False), (False, True), (True, True)):
            assert index_order(training_graph(resource_variables=use_resource, l2_loss=l2_loss)) == expected
        assert index_order(training_graph(batch_size=None)) == expected
        without_bias = index_order(training_graph(fc_bias=False))
        assert without_bias == [name for name in expected if name != "resnet50/fc/bias"]

    def test_creation_order_is_another(self):
        training = training_graph()
        assert index_order(training) != list(training.variables)
        assert index_order(training)[:2] == ["resnet50/fc/bias", "resnet50/fc/kernel"]
        assert index_order(training)[-1] == "resnet50/conv1/kernel"

    @pytest.mark.parametrize(
        ("fc_bias", "total", "default"), [(True, 102_236_324, [108, 160]), (False, 102_232_320, [107, 159])]
    )
    def test_sizes_and_default_segments(self, fc_bias, total, default):
        sizes = sizes_bytes(training_graph(fc_bias=fc_bias))
        assert sum(sizes) == total
        assert segment_boundaries([32 * -(-size // 32) + 32 for size in sizes], "default") == default

    @pytest.mark.parametrize(
        ("fc_bias", "indices", "segments"),
        [(True, (86, 160), [(0, 87), (87, 161)]), (False, (20, 100, 159), [(0, 21), (21, 101), (101, 160)])],
    )
    def test_segments_by_index(self, fc_bias, indices, segments):
        result = fuse(training_graph(fc_bias=fc_bias).graph_def, Strategy(StrategyKind.IDX, indices))
        (section,) = result.plan.sections
        assert [(segment.start, segment.stop) for segment in section.segments] == segments


class TestGraph:
    def test_what_a_real_training_graph_holds(self):
        training = training_graph()
        ops = Counter(node.op for node in training.graph_def.node)
        assert ops["HcomAllReduce"] == ops["ApplyMomentum"] == 161
        assert ops["Conv2D"] == ops["FusedBatchNormV3"] == 53
        assert ops["SaveV2"] == ops["RestoreV2"] == ops["ScalarSummary"] == 1
        nodes = {node.name: node for node in training.graph_def.node}
        assert {training.train_op, training.init_op, "global_step"} <= set(nodes)
        assert all(
            name.startswith("DistributedMomentumOptimizer_Allreduce/HcomAllReduce") for name in training.reductions
        )
        assert nodes["DistributedMomentumOptimizer_Allreduce/div"].input[0] == training.reductions[0]
        apply = next(node for node in training.graph_def.node if node.op == "ApplyMomentum")
        assert apply.attr["_class"].list.s[0].startswith(b"loc:@resnet50/")

    def test_the_stride_is_in_the_3x3_convolutions(self):
        training = training_graph()
        strided = [
            node.name
            for node in training.graph_def.node
            if node.op == "Conv2D" and list(node.attr["strides"].list.i)[1:3] == [2, 2]
        ]
        layers = {name.split("/")[-2] for name in strided if "block" in name}
        assert layers == {"conv2", "shortcut"}
        assert len(strided) == 1 + 2 * 3

    def test_what_runs_in_a_step(self):
        roles = find_roles(training_graph(l2_loss=True).graph_def)
        assert [len(group) for group in roles.updates] == [161 + 2 * 53 + 1]
        assert roles.results[0] == "loss"
        assert set(roles.initialisers) == set(roles.variables)

    def test_resource_variables(self):
        ops = Counter(node.op for node in training_graph(resource_variables=True).graph_def.node)
        assert ops["ResourceApplyMomentum"] == 161
        assert ops["VariableV2"] == 0

    def test_gradients_have_their_variables_shapes_even_with_an_unknown_batch(self):
        training = training_graph(batch_size=None)
        shapes = variable_shapes(training)
        expected = {name: shapes[variable] for name, variable in zip(training.reductions, training.variables)}
        assert infer_shapes(training.graph_def, training.reductions) == expected


class TestNumbers:
    def test_the_fused_graph_computes_the_same_and_a_wrong_one_is_found(self):
        training = training_graph(batch_size=None)
        fused = fuse(training.graph_def, Strategy(StrategyKind.DEFAULT)).graph_def
        comparison = compare_graphs(training.graph_def, fused)
        assert comparison.equal
        names = {output.name for output in comparison.outputs}
        assert {"loss", "global_step", *training.reductions, *training.variables} <= names
        assert all(output.bit_equal for output in comparison.outputs)

        wrong = GraphDef()
        wrong.CopyFrom(fused)
        nodes = {node.name: node for node in wrong.node}
        divisions = ["DistributedMomentumOptimizer_Allreduce/div_1", "DistributedMomentumOptimizer_Allreduce/div_2"]
        inputs = [nodes[name].input[0] for name in divisions]
        for name, text in zip(divisions, reversed(inputs)):
            nodes[name].input[0] = text
        found = compare_graphs(training.graph_def, wrong)
        assert not found.equal
        swapped = set(training.variables[1:3])  # gamma and beta of the first layer
        assert {output.name for output in found.outputs if not output.bit_equal} == {
            *swapped,
            *(f"{name}/Momentum" for name in swapped),
        }


class TestFiles:
    def test_main_writes_a_graph(self, tmp_path, capsys):
        path = tmp_path / "graph.pb"
        assert main(["-o", str(path), "--image-size", "32", "--no-fc-bias", "--l2-loss", "--ranks", "4"]) == 0
        assert "160 gradients" in capsys.readouterr().out
        graph_def = read_graph(str(path)).graph_def
        images = next(node for node in graph_def.node if node.name == "images")
        assert [dim.size for dim in images.attr["shape"].shape.dim] == [-1, 32, 32, 3]

    def test_main_says_in_one_line_why_it_cannot(self, tmp_path, capsys):
        assert main(["-o", str(tmp_path / "no" / "graph.pb"), "--image-size", "32"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: the graph cannot be written")
        assert error.count("\n") == 1
        with pytest.raises(SystemExit) as caught:
            main(["-o", "x", "--ranks", "0"])
        assert caught.value.code == 2
        assert "'0' is not a whole number of at least 1" in capsys.readouterr().err

    def test_the_example_runs(self, tmp_path):
        path = tmp_path / "resnet50.pb"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "examples" / "resnet50.py"), str(path)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert "161 gradients, from resnet50/conv1/kernel to resnet50/fc/bias" in result.stdout
        assert len(read_graph(str(path)).graph_def.node) > 5000
