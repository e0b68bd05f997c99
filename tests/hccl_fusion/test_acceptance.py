"""End to end, from graph files through the command line: the numbers of docs/segmentation.md, and ResNet-50.

The graphs are built once for the module; images are 32 pixels wide and high.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import gradients_graph

from graph_passes.files import read_graph
from graph_passes.messages import GraphDef
from graph_passes.verify import verify_rewrite
from hccl_fusion.cli import main
from hccl_fusion.demo.resnet50 import ResNet50Options, TrainingGraph, write_training_graph
from hccl_fusion.fuse import list_gradients

RANKS = 2
BATCH = 4
FORMS = ("fused", "fusion-id", "collective", "mock")
VARIANTS = {
    "bias": {},
    "no bias": {"fc_bias": False},
    "l2": {"l2_loss": True},
    "resource": {"resource_variables": True},
    "resource l2": {"resource_variables": True, "l2_loss": True},
}


@dataclass(frozen=True)
class Built:
    """A training graph and its file."""

    path: str
    training: TrainingGraph


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    """ResNet-50 training graphs by the names of VARIANTS, each built when it is first asked for."""
    folder = tmp_path_factory.mktemp("resnet50")
    built: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in built:
            options = ResNet50Options(
                image_size=32, batch_size=BATCH, ranks=RANKS, learning_rate=0.001, **VARIANTS[name]
            )
            path = str(folder / f"{name.replace(' ', '_')}.pb")
            built[name] = Built(path, write_training_graph(path, options))
        return built[name]

    return get


@pytest.fixture
def run(capsys):
    """Runs a command that must end well and returns its JSON."""

    def call(*args: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main([*args, "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        call.err = captured.err
        document: dict[str, Any] = json.loads(captured.out)
        return document

    return call


# ------------------------------------------------------------------------------------------------ the numbers


def sizes_of_the_161_gradients() -> list[int]:
    """Bytes of ResNet-50's float32 gradients in the order of its backward pass, by the layers' own arithmetic."""
    sizes = [4004, 8200192]
    for width, blocks, inner in ((512, 3, 1024), (256, 6, 512), (128, 4, 256), (64, 3, 64)):
        outer = 4 * width
        for block in reversed(range(blocks)):
            is_first = block == 0
            sizes += [4 * outer] * (4 if is_first else 2)
            sizes.append(4 * width * outer)
            if is_first and width == 64:
                sizes.append(4 * inner * outer)
            sizes += [4 * width] * 2 + [36 * width * width] + [4 * width] * 2
            sizes.append(4 * inner * width if is_first else 4 * outer * width)
            if is_first and width != 64:
                sizes.append(4 * inner * outer)
    return [*sizes, 256, 256, 37632]


@pytest.fixture(scope="module")
def size_list_file(tmp_path_factory):
    """A graph of one HcomAllReduce a size, in that order."""
    path = tmp_path_factory.mktemp("sizes") / "sizes.pb"
    graph_def = gradients_graph(*[(size // 4,) for size in sizes_of_the_161_gradients()])
    path.write_bytes(graph_def.SerializeToString())
    return str(path)


RESNET50_ROWS = [
    ("no bias", (), [[0, 107], [108, 159]]),
    ("bias", (), [[0, 108], [109, 160]]),
    ("bias", ("--idx", "86,160"), [[0, 86], [87, 160]]),
    ("no bias", ("--idx", "20,100,159"), [[0, 20], [21, 100], [101, 159]]),
]
SIZE_LIST_ROWS = [
    (("--size", "60,20,20"), [[0, 30], [31, 60], [61, 160]]),
    ((), [[0, 108], [109, 160]]),
    (("--size-accounting", "raw"), [[0, 106], [107, 160]]),
    (("--size", "80,20"), [[0, 60], [61, 160]]),
    (("--size", "90,10"), [[0, 83], [84, 160]]),
    (("--size", "20,20,20,20,20"), [[0, 7], [8, 18], [19, 30], [31, 60], [61, 160]]),
]


def check_plan(run, path: str, options: tuple[str, ...], expected: list[list[int]]) -> dict[str, Any]:
    document = run("plan", path, *options)
    (section,) = document["sections"]
    assert section["segments"] == expected
    assert section["boundaries"] == [last for _, last in expected]
    assert section["count"] == expected[-1][1] + 1
    assert document["single"] == []
    ranges = "".join(f"[{first},{last}] " for first, last in expected)
    line = f"gradient segment result: segment num: {len(expected)}, segment index list: {ranges} "
    assert run.err.splitlines()[-1].endswith(line)
    found: dict[str, Any] = section
    return found


@pytest.mark.parametrize(("variant", "options", "expected"), RESNET50_ROWS)
def test_the_segments_of_resnet50(run, resnet50, variant, options, expected):
    section = check_plan(run, resnet50(variant).path, options, expected)
    assert sum(section["bytes"]) == 102_236_324 - (4004 if variant == "no bias" else 0)


@pytest.mark.parametrize(("options", "expected"), SIZE_LIST_ROWS)
def test_the_segments_of_the_size_list(run, size_list_file, options, expected):
    sizes = sizes_of_the_161_gradients()
    assert (len(sizes), sum(sizes)) == (161, 102_236_324)
    assert check_plan(run, size_list_file, options, expected)["bytes"] == sizes


def test_the_index_order_by_variable_is_the_same_in_every_way_to_write_the_model(run, resnet50):
    orders = {}
    for variant in ("bias", "l2", "resource", "resource l2"):
        rows = run("list", resnet50(variant).path)["gradients"]
        assert [row["index"] for row in rows] == list(range(161))
        orders[variant] = [row["variable"] for row in rows]
        assert None not in orders[variant]
        assert len(set(orders[variant])) == 161
    assert orders["l2"] == orders["resource"] == orders["resource l2"] == orders["bias"]
    assert [name.partition("/")[2] for name in orders["bias"][:2]] == ["fc/bias", "fc/kernel"]
    assert orders["bias"][-1] == "resnet50/conv1/kernel"
    without_bias = [row["variable"] for row in run("list", resnet50("no bias").path)["gradients"]]
    assert without_bias == orders["bias"][1:]


# ------------------------------------------------------------------------------------------------ the four forms


def fuse_options(form: str) -> tuple[str, ...]:
    lowered = form in ("collective", "mock")
    return ("--emit", form, *(("--ranks", str(RANKS)) if lowered else ()))


@dataclass(frozen=True)
class Fused:
    """One form of ResNet-50, written to a file."""

    form: str
    path: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def fused(resnet50, tmp_path_factory):
    """ResNet-50 with bias in a form, fused once."""
    folder = tmp_path_factory.mktemp("forms")
    made: dict[str, Fused] = {}

    def get(form: str) -> Fused:
        if form not in made:
            path, plan = str(folder / f"{form}.pb"), str(folder / f"{form}.json")
            code = main(["fuse", resnet50("bias").path, "-o", path, "--plan-out", plan, "-q", *fuse_options(form)])
            assert code == 0
            made[form] = Fused(form, path, json.loads(Path(plan).read_text(encoding="utf-8")))
        return made[form]

    return get


def op_counts(graph_def: GraphDef) -> Counter[str]:
    return Counter(node.op for node in graph_def.node)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_written_read_again_and_structurally_the_equal(run, resnet50, fused, form):
    before, after = read_graph(resnet50("bias").path).graph_def, read_graph(fused(form).path).graph_def
    assert verify_rewrite(before, after, list_gradients(before)) == []
    names = {node.name for node in before.node}
    assert names < {node.name for node in after.node} or form == "fusion-id"
    counts = op_counts(after)
    reductions = {op: counts[op] for op in ("HcomAllReduce", "CollectiveReduceV2") if counts[op]}
    expected = {
        "fused": {"HcomAllReduce": 2},
        "fusion-id": {"HcomAllReduce": 161},
        "collective": {"CollectiveReduceV2": 2},
    }
    assert reductions == expected.get(form, {})
    if form == "fusion-id":
        ids = Counter(node.attr["fusion_id"].i for node in after.node if node.op == "HcomAllReduce")
        assert ids == {0: 109, 1: 52}
    assert [section["segments"] for section in fused(form).document["sections"]] == [[[0, 108], [109, 160]]]
    assert fused(form).document == run("plan", resnet50("bias").path)


@pytest.mark.parametrize("form", FORMS)
def test_fusing_the_output_again_changes_nothing(run, fused, tmp_path, form):
    again = tmp_path / "again.pb"
    document = run("fuse", fused(form).path, "-o", str(again), *fuse_options(form))
    assert document["modified"] is False
    assert again.read_bytes() == Path(fused(form).path).read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_the_input_is_untouched_and_the_output_always_the_same(run, resnet50, fused, tmp_path, form):
    first = Path(fused(form).path).read_bytes()
    path = resnet50("bias").path
    before = Path(path).read_bytes()
    second = tmp_path / "second.pb"
    run("fuse", path, "-o", str(second), *fuse_options(form))
    assert second.read_bytes() == first
    assert Path(path).read_bytes() == before


_HASHES = """
import hashlib, pathlib, sys
from hccl_fusion.cli import main
source, target, *forms = sys.argv[1:]
for form in forms:
    assert main(["fuse", source, "-o", target, "-q", *form.split()]) == 0
    print(hashlib.sha256(pathlib.Path(target).read_bytes()).hexdigest(), file=sys.stderr)
"""


def test_two_processes_write_the_same_bytes(resnet50, fused, tmp_path):
    options = [" ".join(fuse_options(form)) for form in FORMS]
    expected = [hashlib.sha256(Path(fused(form).path).read_bytes()).hexdigest() for form in FORMS]
    for seed in ("1", "2"):
        command = [sys.executable, "-c", _HASHES, resnet50("bias").path, str(tmp_path / "out.pb"), *options]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr.split() == expected


# ------------------------------------------------------------------------------------------------ the values


def test_resnet50_computes_bit_for_bit_the_same_on_2_ranks(resnet50, fused):
    # In a process of its own, as a user runs it: TensorFlow sizes its thread pools by the first session of a process.
    command = [sys.executable, "-m", "hccl_fusion", "verify", resnet50("bias").path, fused("fused").path]
    ran = subprocess.run([*command, "-n", "2", "--json"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    document = json.loads(ran.stdout)
    assert (document["equal"], document["ranks"], document["structure"]) == (True, 2, [])
    assert all(output["bit_equal"] for output in document["outputs"])
    compared = {output["name"] for output in document["outputs"]}
    assert compared.issuperset(resnet50("bias").training.reductions)
    assert compared.issuperset(resnet50("bias").training.variables)


@pytest.mark.parametrize("form", ["fused", "collective"])
def test_a_small_graph_on_4_ranks_is_equal_within_rounding(run, tmp_path, form):
    source, target = str(tmp_path / "g.pb"), str(tmp_path / "out.pb")
    Path(source).write_bytes(gradients_graph((1000,), (37, 3), (), (513,), (2, 2, 2)).SerializeToString())
    run("fuse", source, "-o", target, "--idx", "2,4", "--emit", form, "--ranks", "4")
    document = run("verify", source, target, "-n", "4")
    assert (document["equal"], document["ranks"]) == (True, 4)
    assert {f"ar_{number}" for number in range(5)} <= {output["name"] for output in document["outputs"]}
    assert max(output["max_abs_diff"] for output in document["outputs"]) < 1e-4


@pytest.fixture(scope="module")
def mock_session(resnet50, fused):
    """A session on the mock form, with its variables initialised."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(read_graph(fused("mock").path).graph_def, name="")
        with tf.compat.v1.Session() as session:
            session.run(resnet50("bias").training.init_op)
            yield session, graph


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((BATCH, 32, 32, 3)).astype(np.float32), rng.integers(0, 1001, BATCH).astype(np.int32)


def test_the_mock_form_trains(resnet50, mock_session):
    session, _ = mock_session
    training = resnet50("bias").training
    losses = []
    for step in range(20):
        images, labels = batch(step % 2)
        feeds = {training.images: images, training.labels: labels}
        losses.append(session.run([training.loss, training.train_op], feeds)[0])
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:2]), losses


def test_the_old_all_reduces_can_be_fetched_from_the_mock_form(resnet50, fused, mock_session):
    session, _ = mock_session
    training = resnet50("bias").training
    images, labels = batch(0)
    inputs = {node.name: node.input[0] for node in training.graph_def.node if node.op == "HcomAllReduce"}
    names = [name for index, name in enumerate(training.reductions) if index % 16 == 0]
    tensors = [f"{inputs[name]}:0" if ":" not in inputs[name] else inputs[name] for name in names]
    feeds = {training.images: images, training.labels: labels}
    gradients, reduced = session.run([tensors, [f"{name}:0" for name in names]], feeds)
    shapes = {node.name: node.attr["shape"].shape.dim for node in training.graph_def.node if node.op == "VariableV2"}
    variables = dict(zip(training.reductions, training.variables))
    for name, gradient, value in zip(names, gradients, reduced):
        assert value.shape == tuple(dim.size for dim in shapes[variables[name]])
        np.testing.assert_array_equal(value, gradient * RANKS)
    assert [section["count"] for section in fused("mock").document["sections"]] == [len(training.reductions)]


def test_the_summary_op_of_the_mock_form_runs(resnet50, mock_session):
    import tensorflow as tf

    session, _ = mock_session
    training = resnet50("bias").training
    images, labels = batch(1)
    feeds = {training.images: images, training.labels: labels}
    loss, text = session.run([training.loss, "summaries/loss:0"], feeds)
    (value,) = tf.compat.v1.Summary.FromString(text).value
    assert value.tag == "summaries/loss"
    assert value.simple_value == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_colocation_groups_of_old_nodes_are_intact(resnet50, fused, form):
    before = resnet50("bias").training.graph_def
    after = {node.name: node for node in read_graph(fused(form).path).graph_def.node}
    groups = {node.name: list(node.attr["_class"].list.s) for node in before.node if "_class" in node.attr}
    assert len(groups) > 161
    assert {name: list(after[name].attr["_class"].list.s) for name in groups} == groups
    targets = {group[len(b"loc:@") :].decode() for found in groups.values() for group in found}
    assert targets <= set(after)
    for node in after.values():
        assert node.name in groups or "_class" not in node.attr


def test_tensorflow_sees_the_colocation_groups(resnet50, mock_session):
    _, graph = mock_session
    wanted = {
        node.name: sorted(node.attr["_class"].list.s)
        for node in resnet50("bias").training.graph_def.node
        if "_class" in node.attr
    }
    found = {name: sorted(graph.get_operation_by_name(name).colocation_groups()) for name in wanted}
    assert found == wanted
