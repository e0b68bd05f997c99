"""The tables of ops are those of the installed TensorFlow: a new op that they lack fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import FLOAT, Nodes, Type

import graph_passes
from graph_passes.op_tables import (
    fixed_outputs,
    flat_port,
    has_output,
    output_counts,
    training_ops,
)
from hccl_fusion.runtime.op_tables import main, output_table, registered_ops, training_table

TABLES = Path(graph_passes.__file__).parent / "tables"


@pytest.fixture(scope="module")
def ops():
    return registered_ops()


def table(name: str) -> dict:
    return json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "make"), [("outputs", output_table), ("training_ops", training_table)])
def test_the_table_has_every_op_of_the_installed_tensorflow(ops, name, make):
    known, installed = table(name), make(ops)
    wrong = {op: (known.get(op), value) for op, value in installed.items() if known.get(op) != value}
    assert wrong == {}, "run python -m hccl_fusion.runtime.op_tables"


def test_writing_the_tables_anew_gives_the_same_files(tmp_path, monkeypatch):
    package = tmp_path / "graph_passes"
    (package / "tables").mkdir(parents=True)
    monkeypatch.setattr(graph_passes, "__file__", str(package / "__init__.py"))
    main()
    for name in ("outputs", "training_ops"):
        written = json.loads((package / "tables" / f"{name}.json").read_text(encoding="utf-8"))
        known = table(name)
        assert {op: known.get(op) for op in written} == written


def test_the_training_ops_are_those_that_people_use():
    found = training_ops()
    for op in ("ApplyGradientDescent", "ApplyMomentum", "ApplyAdam", "ResourceApplyAdam", "ResourceApplyKerasMomentum"):
        assert op in found
    assert (found["ApplyGradientDescent"].grad, found["ApplyAdam"].grad) == (2, 9)
    assert found["ApplyMomentum"].indices is None
    assert (found["ResourceSparseApplyMomentum"].grad, found["ResourceSparseApplyMomentum"].indices) == (3, 4)
    assert all(positions.var == 0 for positions in found.values())


def test_counts_of_outputs():
    nodes = Nodes()
    nodes.add("split", "SplitV", num_split=3, T=Type(FLOAT))
    nodes.add("call", "PartitionedCall", Tout=[Type(FLOAT), Type(FLOAT)])
    nodes.add("bn", "FusedBatchNormGradV3")
    nodes.add("ar", "HcomAllReduce")
    nodes.add("no", "NoOp")
    nodes.add("own", "OpOfSomebodyElse")
    nodes.add("bare", "Split")
    split, call, bn, ar, no, own, bare = nodes.graph_def.node

    assert output_counts(split) == {"output": 3}
    assert output_counts(call) == {"output": 2}
    assert sum(output_counts(bn).values()) == 5
    assert output_counts(ar) == {"output": 1}
    assert output_counts(no) == {}
    assert output_counts(own) is None
    assert output_counts(bare) == {"output": 0}
    assert [has_output(split, port) for port in (0, 2, 3)] == [True, True, False]
    assert has_output(own, 99)
    assert (fixed_outputs()["FusedBatchNormGradV3"], fixed_outputs()["NoOp"]) == (5, 0)
    assert "Split" not in fixed_outputs()
    assert [flat_port(split, "output", 2), flat_port(bn, "scale_backprop", 0), flat_port(bn, "", 3)] == [2, 1, 3]
    assert (flat_port(own, "y", 0), flat_port(bn, "y", 0)) == (None, None)
