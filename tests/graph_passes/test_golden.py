"""Golden graphs: each input under tests/data/graphs, rewritten into every form, gives the graph that stands beside it.

`pytest --update-golden` writes the expected graphs anew; what changed is then seen in the diff.
"""

from __future__ import annotations

import difflib

import pytest
from builders import GRAPHS, Case, golden_cases, gradients_of, one_node_a_line
from google.protobuf import text_format

from graph_passes.errors import GraphError
from graph_passes.graph import graphs_of
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.order import breadth_first_order
from graph_passes.verify import verify_rewrite
from hccl_fusion.fuse import Emit, FuseResult, fuse

CASES = golden_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_form = pytest.mark.parametrize("emit", list(Emit), ids=lambda emit: emit.value)


def fused(case: Case, emit: Emit, graph_def: GraphDef | None = None) -> FuseResult:
    return fuse(case.graph_def if graph_def is None else graph_def, emit=emit, infer_shapes=False, **case.options)


@each_form
@each_case
def test_the_rewritten_graph_is_the_expected_one(case, emit, update_golden):
    path = case.folder / f"{emit.value}.pbtxt"
    found = fused(case, emit).graph_def
    if update_golden:
        path.write_text(one_node_a_line(found), encoding="utf-8")
    expected = text_format.Parse(path.read_text(encoding="utf-8"), GraphDef())
    if found != expected:
        lines = [one_node_a_line(graph_def).splitlines() for graph_def in (expected, found)]
        pytest.fail("\n".join(difflib.unified_diff(*lines, "expected", "found", lineterm="", n=0)))


@each_form
@each_case
def test_a_rewrite_keeps_its_promises(case, emit):
    """The input is untouched; the same input gives the same bytes; a second run changes nothing; verify is content."""
    before = case.graph_def.SerializeToString(deterministic=True)
    result = fused(case, emit)
    assert case.graph_def.SerializeToString(deterministic=True) == before

    again = GraphDef.FromString(before)
    content = result.graph_def.SerializeToString(deterministic=True)
    assert fused(case, emit, again).graph_def.SerializeToString(deterministic=True) == content

    second = fused(case, emit, result.graph_def)
    assert not second.modified
    assert second.graph_def is result.graph_def

    assert verify_rewrite(case.graph_def, result.graph_def, result.gradients) == []
    for graph in graphs_of(result.graph_def):
        breadth_first_order(graph)
    assert result.modified is (result.graph_def != case.graph_def)
    if not result.modified:
        assert result.graph_def is case.graph_def


@each_form
@each_case
def test_every_old_name_stays_in_its_place_with_its_device_and_shape(case, emit):
    result = fused(case, emit)
    for old, new in zip(case.graph_def.node, result.graph_def.node):
        assert (old.name, old.device) == (new.name, new.device)
        if old.op != "HcomAllReduce":
            assert old == new
        for key, value in old.attr.items():
            if key.startswith("_"):
                assert new.attr[key] == value
    names = [node.name for node in result.graph_def.node]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 250


@each_case
def test_every_gradient_is_fused_or_has_exactly_one_reason(case):
    plan = fused(case, Emit.FUSED).plan
    in_parts = [name for part in plan.parts for name in part.gradients]
    single = [entry.id for entry in plan.singles]
    together = [name for part in plan.parts if len(part.gradients) > 1 for name in part.gradients]
    alone_by_plan = [
        section.gradients[segment.start].id
        for section in plan.sections
        for segment in section.segments
        if segment.stop - segment.start == 1
    ]
    assert len(set(single)) == len(single)
    assert len(set(in_parts)) == len(in_parts)
    assert not set(single) & set(together)
    gradients = fused(case, Emit.FUSED).gradients
    assert {g.id for g in gradients} == set(single) | set(together) | set(alone_by_plan)


@each_form
@each_case
def test_as_many_reductions_are_left_as_the_plan_says(case, emit):
    result = fused(case, emit)
    before = [node.op for node in all_nodes(case.graph_def)].count("HcomAllReduce")
    expected = before - sum(len(part.gradients) - 1 for part in result.plan.parts)
    after = all_nodes(result.graph_def)
    all_reduces = [node for node in after if node.op == "HcomAllReduce"]
    lowered = [node for node in after if "_hccl_reduction" in node.attr]
    if emit is Emit.FUSED:
        assert (len(all_reduces), lowered) == (expected, [])
    elif emit is Emit.FUSION_ID:
        assert (len(all_reduces), lowered) == (before, [])
    else:
        assert (all_reduces, len(lowered)) == ([], expected)


def all_nodes(graph_def: GraphDef) -> list[NodeDef]:
    return [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]


@each_case
def test_fusion_ids_are_unique_in_their_group(case):
    result = fused(case, Emit.FUSION_ID)
    after = gradients_of(result.graph_def)
    ids = [
        {(after[name.name].group, after[name.name].fusion_id) for name in part.gradients}
        for part in result.plan.parts
        if not part.key.graph
    ]
    assert all(len(found) == 1 for found in ids)
    flat = [entry for found in ids for entry in found]
    assert len(set(flat)) == len(flat)


def test_there_is_no_golden_file_without_a_case():
    expected = {f"{emit.value}.pbtxt" for emit in Emit} | {"input.pbtxt"}
    for folder in GRAPHS.iterdir():
        assert {path.name for path in folder.iterdir()} == expected, folder


def test_a_cycle_in_the_input_is_the_inputs_fault():
    case = next(case for case in CASES if case.name == "controls")
    graph_def = GraphDef()
    graph_def.CopyFrom(case.graph_def)
    graph_def.node[0].input.append("^after")
    with pytest.raises(GraphError, match=r"the graph has a cycle, node .*, in pass find"):
        fused(case, Emit.FUSED, graph_def)
