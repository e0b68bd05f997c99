"""Ranks that would reduce different things say so instead of hanging."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hccl_fusion.runtime.agreement import PlanStatement, StatedTensor, plan_difference

SCRIPTS = Path(__file__).parent / "scripts"


def run_ranks(folder, script, *arguments, ranks=2):
    """What every rank of a script wrote."""
    command = [sys.executable, SCRIPTS / "wrap_launch.py", ranks, 60, SCRIPTS / script, folder, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def statement(rank=0, **changes):
    tensors = (StatedTensor("w", "[2, 3]", "float32", "segment_0"), StatedTensor("b", "[3]", "float32", "segment_0"))
    return replace(PlanStatement(rank, "Allreduce", "average=True", tensors), **changes)


def test_equal_statements_have_no_difference():
    assert plan_difference([statement(0), statement(1), statement(2)]) == ""
    assert statement(0).digest == statement(1).digest
    assert PlanStatement.from_json(statement(1, keys=(5, 2)).to_json()) == statement(1, keys=(5, 2))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"options": "average=False"}, "options: average=True on rank 0 and average=False on rank 1"),
        ({"what": "Other"}, "what: Allreduce on rank 0 and Other on rank 1"),
        ({"keys": (7, 1)}, "keys: (0, 0) on rank 0 and (7, 1) on rank 1"),
        (
            {"tensors": statement().tensors[:1]},
            "gradient 1 is b float32 [3] in segment_0 on rank 0 and none on rank 1",
        ),
        (
            {"tensors": statement().tensors[::-1]},
            "gradient 0 is w float32 [2, 3] in segment_0 on rank 0 and b float32 [3] in segment_0 on rank 1",
        ),
    ],
)
def test_the_first_difference_is_named(changes, found):
    other = statement(1, **changes)
    assert plan_difference([statement(0), other]) == found
    assert statement(0).digest != other.digest


def test_two_ranks_that_differ_get_the_same_error_and_can_go_on(tmp_path):
    found = run_ranks(tmp_path, "wrap_agree.py", "disagree")
    assert found[0] == found[1]
    texts = {case: text for case, (kind, text) in found[0].items() if kind == "AgreementError"}
    assert found[0]["same"] == ["none", ""]
    assert set(texts) == {"shape", "strategy", "count", "options", "variables"}
    assert "b:0 float32 [4, 5] in segment_0 on rank 0 and b:0 float32 [4, 6] in segment_0 on rank 1" in texts["shape"]
    assert "in segment_0 on rank 0 and b:0 float32 [4, 5] in single_0 on rank 1" in texts["strategy"]
    assert "gradient 2 is none on rank 0" in texts["count"]
    assert "compression=none" in texts["options"]


def test_a_rank_that_dies_is_an_error_that_names_the_segment(tmp_path):
    command = [sys.executable, SCRIPTS / "wrap_launch.py", 2, 60, SCRIPTS / "wrap_agree.py", tmp_path, "stall"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "rank_0.json").read_text())
    assert "DistributedAdamOptimizer_Allreduce/segment_0/all_reduce" in found["message"]
    assert found["seconds"] < 30


def test_two_ranks_broadcast(tmp_path):
    ranks = run_ranks(tmp_path, "wrap_agree.py", "broadcast")
    assert ranks[0] == ranks[1]
    assert ranks[0]["eager"] == [[1.0, 2.0]] * 5 + [[1.0], []]
    assert ranks[0]["graph"] == [5.0, 7.0]
