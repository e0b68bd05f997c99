"""Plan files: they bring a plan to the same graph, to a graph that changed, and to nothing else."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from builders import DOUBLE, WORLD, Nodes, golden_cases, gradients_graph, node_of
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.messages import GraphDef
from graph_passes.sections import GradientId
from hccl_fusion.errors import HcclFusionError, PlanError
from hccl_fusion.fuse import fuse, plan_graph
from hccl_fusion.json_file import write_json
from hccl_fusion.plan import Plan
from hccl_fusion.plan_file import PlanFile, read_plan
from hccl_fusion.plan_json import plan_document
from hccl_fusion.strategy import Strategy, StrategyKind


def idx(*values: int) -> Strategy:
    return Strategy(StrategyKind.IDX, values)


def saved(path: Path, plan: Plan | dict[str, Any]) -> PlanFile:
    file = path / "plan.json"
    write_json(str(file), plan_document(plan) if isinstance(plan, Plan) else plan)
    return read_plan(str(file))


def named(*names: str, group: str = WORLD, shape: tuple[int, ...] = (2,)) -> GraphDef:
    nodes = Nodes()
    for name in names:
        nodes.gradient(name, shape, group=group)
    return nodes.graph_def


def segments(plan: Plan) -> list[list[str]]:
    """The names of each segment."""
    return [
        [gradient.name for gradient in section.gradients[segment.start : segment.stop]]
        for section in plan.sections
        for segment in section.segments
    ]


def fused(plan: Plan) -> set[tuple[GradientId, ...]]:
    return {part.gradients for part in plan.parts if len(part.gradients) > 1}


def notes(plan: Plan) -> str:
    return "; ".join(note for section in plan.sections for note in section.notes)


# ----------------------------------------------------------------------------------------- to the same graph

CASES = [case for case in golden_cases() if not case.options["fetch"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_file_gives_the_same_graph_as_the_strategy_that_made_it(tmp_path, case):
    direct = fuse(case.graph_def, infer_shapes=False, **case.options)
    options = {key: value for key, value in case.options.items() if key not in ("strategy", "group")}

    again = fuse(case.graph_def, saved(tmp_path, direct.plan), infer_shapes=False, **options)

    assert fused(again.plan) == fused(direct.plan)
    assert again.plan.fingerprint == direct.plan.fingerprint
    assert notes(again.plan) == ""
    sections_by_chain = {(part.chain, part.key) for part in direct.plan.parts}
    if len({chain for chain, _ in sections_by_chain}) == len(sections_by_chain):
        assert again.graph_def == direct.graph_def


def test_a_plan_says_that_it_came_from_a_file(tmp_path):
    graph_def = gradients_graph((2,), (3,), (4,))
    plan, _ = plan_graph(graph_def, saved(tmp_path, plan_graph(graph_def, idx(0, 2))[0]))
    assert [section.strategy for section in plan.sections] == ["plan"]


def test_a_divided_plan_is_not_divided_again(tmp_path):
    nodes = Nodes()
    nodes.all_reduce("a", nodes.placeholder("g_a", (2,)))
    nodes.gradient("c", (2,))
    nodes.all_reduce("b", nodes.identity("g_b", "a"))
    single = Strategy(StrategyKind.SINGLE)
    first, _ = plan_graph(nodes.graph_def, single)
    second, _ = plan_graph(nodes.graph_def, saved(tmp_path, first))
    assert segments(first) == segments(second)
    assert len(segments(first)) == 2
    assert second.sections[0].divisions == ()


# ------------------------------------------------------------------------------------ to a graph that changed


@pytest.fixture
def plan(tmp_path) -> PlanFile:
    """[a, b] [c, d] [e]."""
    return saved(tmp_path, plan_graph(named(*"abcde"), idx(1, 3, 4))[0])


@pytest.mark.parametrize(
    ("names", "expected", "drift"),
    [
        ("abcde", ["ab", "cd", "e"], ""),
        ("abxcde", ["abx", "cd", "e"], "1 gradients added: x"),
        ("xabcde", ["xab", "cd", "e"], "1 gradients added: x"),
        ("abcdex", ["ab", "cd", "ex"], "1 gradients added: x"),
        ("abcdxe", ["ab", "cdx", "e"], "1 gradients added: x"),
        ("acde", ["a", "cd", "e"], "1 gradients removed: b"),
        ("cde", ["cd", "e"], "2 gradients removed: a; b"),
        ("abe", ["ab", "e"], "2 gradients removed: c; d"),
        ("abcd", ["ab", "cd"], "1 gradients removed: e"),
        ("ac", ["a", "c"], "3 gradients removed: b; d; e"),
        ("bacde", ["ba", "cd", "e"], "2 gradients reordered: b; a"),
        ("abdce", ["ab", "dc", "e"], "2 gradients reordered: d; c"),
        ("axyzcde", ["axyz", "cd", "e"], "3 gradients added: x; y; z"),
    ],
)
def test_cuts_stay_where_the_names_are(plan, names, expected, drift):
    found, _ = plan_graph(named(*names), plan)
    assert segments(found) == [list(segment) for segment in expected]
    assert notes(found).startswith(drift) if drift else notes(found) == ""


def test_a_gradient_that_moved_over_a_cut_keeps_all_segments_in_order(plan):
    found, _ = plan_graph(named(*"cabde"), plan)
    assert [name for segment in segments(found) for name in segment] == list("cabde")
    assert "reordered" in notes(found)
    assert segments(found)[-1] == ["e"]


def test_a_gradient_of_another_size_is_drift(plan):
    graph_def = named(*"abcde")
    del node_of(graph_def, "b/g").attr["shape"].shape.dim[0]
    found, _ = plan_graph(graph_def, plan)
    assert segments(found) == [["a", "b"], ["c", "d"], ["e"]]
    assert notes(found) == "1 gradients resized: b 8 -> 4 bytes"


def test_the_sixth_gradient_of_a_kind_is_only_counted(plan):
    found, _ = plan_graph(named(*"abcde", *(f"x{number}" for number in range(7))), plan)
    assert notes(found) == "7 gradients added: x0; x1; x2; x3; x4; and 2 more"


@given(st.permutations("abcdefgh"), st.integers(1, 8), st.integers(0, 7))
def test_any_drift_gives_a_legal_plan(order, count, cut):
    """Whatever was added, removed and moved: segments follow one another and hold every gradient."""
    document = plan_document(plan_graph(named(*"abcdefgh"), idx(*sorted({cut, 7})))[0])
    with tempfile.TemporaryDirectory() as folder:
        known = saved(Path(folder), document)
    names = [*order[:count], "new_1", "new_2"]
    found, _ = plan_graph(named(*names), known)
    assert [name for segment in segments(found) for name in segment] == names
    assert all(segments(found))


def test_a_section_that_the_plan_does_not_know_stays_unfused(plan):
    graph_def = named(*"abcde")
    nodes = Nodes(graph_def.node)
    for number in range(2):
        nodes.gradient(f"double_{number}", (2,), DOUBLE)
    found, _ = plan_graph(graph_def, plan)
    assert "has no gradient of section hccl_world_group float64 sum: its gradients are left unfused" in notes(found)
    assert {entry.id.name: entry.reason.value for entry in found.singles} == {
        "double_0": "no-fusion", "double_1": "no-fusion",
    }  # fmt: skip


@pytest.mark.parametrize("graph_def", [named("x", "y"), named("a", "b", group="some")], ids=["names", "group"])
def test_a_plan_of_another_graph_is_an_error(plan, graph_def):
    with pytest.raises(
        PlanError, match=r"the plan is of another graph, .*plan\.json, in pass plan.*expected gradients of"
    ):
        plan_graph(graph_def, plan)


def test_a_graph_without_sections_fits_any_plan(plan):
    found, _ = plan_graph(named("x"), plan)
    assert [entry.reason.value for entry in found.singles] == ["alone"]


# ------------------------------------------------------------------------------------------- malformed files


def document() -> dict[str, Any]:
    return plan_document(plan_graph(named(*"abcde"), idx(1, 4))[0])


def error_of(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        read_plan(str(path))
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    assert "expected a file that `plan -o` wrote; try making the plan again" in text
    return text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe{}", "no text"),
        (b"[]", "another schema, .*found schema_version list"),
        (b"null", "another schema, .*found schema_version NoneType"),
        (b"{}", "another schema, .*found schema_version None"),
        (b'{"schema_version": 2}', "another schema, .*found schema_version 2"),
        (b'{"schema_version": "1"}', "another schema, .*found schema_version '1'"),
        (b'{"schema_version": true, "sections": []}', "another schema"),
        (b'{"schema_version": 1}', "no sections, .*found NoneType"),
        (b'{"schema_version": 1, "sections": {}}', "no sections, .*found dict"),
        (b'{"schema_version": 1, "sections": [7]}', "section 0, found int"),
        (b'{"schema_version": 1, "sections": [{}]}', "key graph of the plan file is missing"),
        (b'{"schema_version": ' + b"1" * 5000 + b"}", "no JSON|another schema"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert re.search(message, error_of(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("graph", None, "key graph"),
        ("group", 7, "key group of the plan file is missing or of the wrong type, .*found 7"),
        ("dtype", [], "key dtype"),
        ("reduction", None, "key reduction"),
        ("fusion_id", "x", "key fusion_id"),
        ("fusion_id", True, "key fusion_id"),
        ("fusion_id", 1.5, "key fusion_id"),
        ("gradients", "abcde", "key gradients"),
        ("gradients", ["a", "b", "c", "d", 5], "not distinct names"),
        ("gradients", ["a", "b", "c", "d", "a"], "not distinct names"),
        ("gradients", ["a", "b"], "not one number a gradient"),
        ("bytes", [8, 8, 8, 8], "not one number a gradient"),
        ("bytes", [8, 8, 8, 8, -8], "not one number a gradient"),
        ("bytes", [8, 8, 8, 8, True], "not one number a gradient"),
        ("bytes", [8, 8, 8, 8, 8.0], "not one number a gradient"),
        ("bytes", None, "key bytes"),
        ("segments", [[0, 1]], "do not cover its gradients, .*found 2 of 5"),
        ("segments", [], "do not cover its gradients"),
        ("segments", [[0, 1], [3, 4]], r"do not follow one another, .*found \[3, 4\]"),
        ("segments", [[0, 1], [1, 4]], "do not follow one another"),
        ("segments", [[0, 5]], "do not follow one another"),
        ("segments", [[1, 4]], "do not follow one another"),
        ("segments", [[0, 1], [2, 1], [2, 4]], "do not follow one another"),
        ("segments", [[0, 4, 5]], "do not follow one another"),
        ("segments", [4], "do not follow one another"),
        ("segments", [[False, 4]], "do not follow one another"),
        ("segments", "x", "key segments"),
    ],
)
def test_a_plan_with_one_wrong_key(tmp_path, key, value, message):
    content = document()
    if value is None:
        del content["sections"][0][key]
    else:
        content["sections"][0][key] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    text = error_of(path)
    assert re.search(message, text), text
    assert f"{path}, section 0" in text


def test_a_section_that_stands_twice(tmp_path):
    content = document()
    content["sections"] *= 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    assert "section 1" in error_of(path)


def test_keys_that_a_plan_does_not_need_may_be_missing_or_new(tmp_path):
    content = document()
    for key in ("count", "strategy", "values", "boundaries"):
        del content["sections"][0][key]
    for key in ("fingerprint", "single"):
        del content[key]
    content["sections"][0]["of_a_later_version"] = 1
    plan, _ = plan_graph(named(*"abcde"), saved(tmp_path, content))
    assert segments(plan) == [["a", "b"], ["c", "d", "e"]]


def test_a_plan_that_is_not_there(tmp_path):
    assert "cannot be read" in error_of(tmp_path / "gone.json")


def test_a_plan_that_is_a_folder(tmp_path):
    assert "cannot be read" in error_of(tmp_path)


def test_a_plan_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(HcclFusionError, match=r"cannot write the file, .*found No such file"):
        write_json(str(tmp_path / "no" / "plan.json"), document())
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_not_ascii_survive(tmp_path):
    names = ["é", "名前", "a\u2028b"]
    plan, _ = plan_graph(named(*names), saved(tmp_path, plan_graph(named(*names), idx(0, 2))[0]))
    assert segments(plan) == [[names[0]], names[1:]]
