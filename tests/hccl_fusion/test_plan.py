"""Plans: segments in force, a reason for every gradient left alone, JSON, fingerprint."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest
from builders import DOUBLE, HALF, WORLD, Nodes, gradients_graph, indexed, random_graph
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import PassError
from graph_passes.messages import GraphDef
from graph_passes.pipeline import GraphItem
from graph_passes.sections import GradientId, Reason
from hccl_fusion.boundaries import PlanOptions, decide
from hccl_fusion.errors import StrategyError
from hccl_fusion.fuse import plan_graph
from hccl_fusion.plan import Plan
from hccl_fusion.plan_json import gradients_document, plan_document
from hccl_fusion.planner import PlanPass, make_plan
from hccl_fusion.registry import reset_split_strategy
from hccl_fusion.segmentation import padded_bytes
from hccl_fusion.strategy import Strategy, StrategyKind

DEFAULT = Strategy(StrategyKind.DEFAULT)
SINGLE = Strategy(StrategyKind.SINGLE)
NONE = Strategy(StrategyKind.NONE)


@pytest.fixture(autouse=True)
def empty_registry():
    reset_split_strategy()
    yield
    reset_split_strategy()


def idx(*values: int) -> Strategy:
    return Strategy(StrategyKind.IDX, values)


def plan_of(
    graph_def: GraphDef, strategy: Strategy = SINGLE, options: PlanOptions | None = None, **lists: tuple[str, ...]
) -> Plan:
    item = indexed(graph_def, **lists)
    return make_plan(item, lambda sections: decide(sections, lambda _: strategy, options or PlanOptions()))


def reasons(plan: Plan) -> dict[str, str]:
    return {str(entry.id): entry.reason.value for entry in plan.singles}


def segments(plan: Plan) -> list[list[tuple[int, int]]]:
    return [[(segment.start, segment.stop) for segment in section.segments] for section in plan.sections]


def parts(plan: Plan) -> list[list[str]]:
    return [[name.name for name in part.gradients] for part in plan.parts]


def names(plan: Plan) -> list[str]:
    return [gradient.name for section in plan.sections for gradient in section.gradients]


# -------------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (SINGLE, [(0, 6)]),
        (NONE, [(n, n + 1) for n in range(6)]),
        (idx(1, 5), [(0, 2), (2, 6)]),
        (Strategy(StrategyKind.SIZE, (50, 50)), [(0, 3), (3, 6)]),
        (Strategy(StrategyKind.SEGMENTS, (3,)), [(0, 2), (2, 4), (4, 6)]),
        (Strategy(StrategyKind.MAX_BYTES, (320,)), [(0, 2), (2, 4), (4, 6)]),
        (Strategy(StrategyKind.MAX_BYTES, (1,)), [(n, n + 1) for n in range(6)]),
        (DEFAULT, [(0, 6)]),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_segments_of_six_equal_gradients(strategy, expected):
    """96.54 % of six equal gradients is 5.79 of them: the nearest boundary is the last one."""
    plan = plan_of(gradients_graph(*[(25,)] * 6), strategy)
    assert segments(plan) == [expected]
    (section,) = plan.sections
    assert section.last_indices == tuple(stop - 1 for _, stop in expected)
    assert section.boundaries == section.last_indices
    assert section.strategy == strategy.kind.value
    assert section.values == strategy.values


def test_sizes_count_padded_unless_told_otherwise():
    """A scalar counts 64 bytes padded and 4 raw, 90 floats count 416 and 360."""
    graph_def = gradients_graph((), (), (), (), (), (), (90,))
    most = Strategy(StrategyKind.MAX_BYTES, (384,))
    assert segments(plan_of(graph_def, most)) == [[(0, 6), (6, 7)]]
    assert segments(plan_of(graph_def, most, PlanOptions(size_accounting="raw"))) == [[(0, 7)]]


def test_the_buffer_caps_segments_of_unknown_shape_mode():
    graph_def = gradients_graph(*[(2**18,)] * 6)
    unknown = PlanOptions(shape_mode="unknown", buffer_mib=4)
    assert segments(plan_of(graph_def, DEFAULT)) == [[(0, 6)]]
    assert len(segments(plan_of(graph_def, DEFAULT, unknown))[0]) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shape_mode": "odd"}, "the shape mode is unknown"), ({"size_accounting": "odd"}, "the size accounting is")],
)
def test_options_are_checked(options, message):
    with pytest.raises(StrategyError, match=f"{message}.*found 'odd', expected"):
        PlanOptions(**options)


def test_a_section_by_fusion_id_is_one_segment_whatever_the_strategy():
    nodes = Nodes()
    for number in range(4):
        nodes.gradient(f"id_{number}", (2,), fusion=2, fusion_id=5)
    for number in range(2):
        nodes.gradient(f"ar_{number}", (2,))
    plan = plan_of(nodes.graph_def, idx(0, 1))
    by_id = next(section for section in plan.sections if section.key.fusion_id == 5)
    assert [(segment.start, segment.stop) for segment in by_id.segments] == [(0, 4)]
    assert by_id.strategy == "fusion_id"
    assert reasons(plan) == {"ar_0": "one-per-segment", "ar_1": "one-per-segment"}


def test_the_index_list_of_another_graph_shows_the_corrected_one():
    graph_def = gradients_graph(*[(1,)] * 160)
    with pytest.raises(StrategyError) as caught:
        plan_of(graph_def, idx(20, 100, 160))
    text = str(caught.value)
    for part in (WORLD, "160 gradients", "found [20,100,160]", "the last index to be 159", "try [20,100,159]"):
        assert part in text
    assert segments(plan_of(graph_def, idx(20, 100, 159))) == [[(0, 21), (21, 101), (101, 160)]]


# ------------------------------------------------------------------------------------------ types and one list


def mixed(*dtypes: int) -> GraphDef:
    nodes = Nodes()
    for number, dtype in enumerate(dtypes):
        nodes.gradient(f"ar_{number}", (2,), dtype)
    return nodes.graph_def


def test_one_list_over_two_types_is_read_over_all_gradients():
    plan = plan_of(mixed(1, DOUBLE, 1, DOUBLE, 1, DOUBLE, 1), idx(3, 6))
    assert parts(plan) == [["ar_0", "ar_2"], ["ar_1", "ar_3"], ["ar_4", "ar_6"], ["ar_5"]]
    assert [part.segment for part in plan.parts] == [0, 0, 1, 1]
    assert len({part.chain for part in plan.parts}) == 1
    assert reasons(plan) == {"ar_5": "dtype"}
    assert all("read over all 7 gradients" in section.notes[0] for section in plan.sections)


def test_a_list_that_fits_every_type_is_read_as_hccl_reads_it():
    plan = plan_of(mixed(1, DOUBLE, 1, DOUBLE), idx(0, 1))
    assert segments(plan) == [[(0, 1), (1, 2)], [(0, 1), (1, 2)]]
    assert all(section.notes == () for section in plan.sections)
    plan = plan_of(mixed(1, DOUBLE, 1, DOUBLE), idx(1))
    assert parts(plan) == [["ar_0", "ar_2"], ["ar_1", "ar_3"]]
    assert len({part.chain for part in plan.parts}) == 2


def test_a_type_with_one_gradient_does_not_count():
    plan = plan_of(mixed(1, DOUBLE, 1, 1), idx(2))
    assert parts(plan) == [["ar_0", "ar_2", "ar_3"]]
    assert reasons(plan) == {"ar_1": "alone"}


@pytest.mark.parametrize(
    ("values", "corrected"), [((0, 3), r"\[0,4\]"), ((0, 4, 7), r"\[0,4\]"), ((0, 5), r"\[0,4\]"), ((9,), r"\[4\]")]
)
def test_a_list_that_fits_in_neither_reading(values, corrected):
    with pytest.raises(StrategyError, match="fits neither each section nor all of them together") as caught:
        plan_of(mixed(1, DOUBLE, 1, DOUBLE, 1), idx(*values))
    text = str(caught.value)
    assert "3 in hccl_world_group float32 sum" in text
    assert "2 in hccl_world_group float64 sum" in text
    assert "a last index of 4, counted over all 5 gradients" in text
    assert text.endswith("try " + corrected.replace("\\", ""))


def test_other_strategies_work_in_each_type_by_itself():
    plan = plan_of(mixed(1, DOUBLE, HALF, 1, DOUBLE, HALF))
    assert sorted(parts(plan)) == [["ar_0", "ar_3"], ["ar_1", "ar_4"], ["ar_2", "ar_5"]]
    assert len({part.chain for part in plan.parts}) == 3


# --------------------------------------------------------------------------------------------------- reasons


def many_reasons() -> Nodes:
    nodes = Nodes()
    for number in range(6):
        nodes.gradient(f"ar_{number}", (2,))
    nodes.gradient("unknown", (-1,))
    nodes.gradient("largest", (2,), reduction="max")
    nodes.gradient("zero", (2,), fusion=0)
    nodes.gradient("alone", (2,), group="some")
    nodes.gradient("elsewhere", (2,), device="/gpu:1")
    return nodes


def test_every_reason_of_a_gradient_that_is_alone():
    nodes = many_reasons()
    nodes.add_n("needs", "ar_0", "ar_1", "ar_2", "ar_3", "ar_4", "ar_5", "elsewhere")
    nodes.all_reduce("late", "needs", device="")
    plan = plan_of(nodes.graph_def, fetch=("ar_2:0", "^nobody"), keep=("ar_3",))
    assert reasons(plan) == {
        "unknown": "unknown-shape",
        "largest": "reduction",
        "zero": "fusion=0",
        "alone": "alone",
        "elsewhere": "device",
        "ar_2": "fetched",
        "ar_3": "kept",
        "late": "dependence",
    }
    assert parts(plan) == [["ar_0", "ar_1", "ar_4", "ar_5"], ["elsewhere"], ["late"]]


def test_a_fetched_gradient_that_is_also_kept_is_fetched():
    plan = plan_of(gradients_graph((1,), (1,), (1,)), fetch=("ar_1",), keep=("ar_1",))
    assert reasons(plan) == {"ar_1": "fetched"}


def test_the_rest_of_a_segment_whose_others_are_fetched_is_alone():
    plan = plan_of(gradients_graph((1,), (1,), (1,)), fetch=("ar_0", "ar_2"))
    assert reasons(plan) == {"ar_0": "fetched", "ar_1": "alone", "ar_2": "fetched"}


def test_fetches_name_nodes_of_the_graph_and_not_of_functions():
    nodes = Nodes()
    body = nodes.function("f", {"x": 1}, {})
    body.constant("c", [1.0])
    for number in range(2):
        body.all_reduce(f"ar_{number}", "c:output:0")
    assert reasons(plan_of(nodes.graph_def, fetch=("ar_0",))) == {}


def test_as_many_segments_as_members_is_no_fusion():
    graph_def = gradients_graph((1,), (1,), (1,))
    plan = plan_of(graph_def, idx(0, 1, 2), fetch=("ar_1",))
    assert reasons(plan) == {"ar_0": "one-per-segment", "ar_1": "fetched", "ar_2": "one-per-segment"}
    assert plan.parts == ()
    plan = plan_of(graph_def, NONE)
    assert reasons(plan) == dict.fromkeys(["ar_0", "ar_1", "ar_2"], "no-fusion")


def test_a_segment_of_one_among_larger_ones_is_as_planned():
    plan = plan_of(gradients_graph((1,), (1,), (1,)), idx(0, 2))
    assert reasons(plan) == {}
    assert parts(plan) == [["ar_0"], ["ar_1", "ar_2"]]


def test_devices_are_told_apart_after_normalising():
    nodes = Nodes()
    for number, device in enumerate(["/cpu:0", "/device:CPU:0", "/CPU:0", "/gpu:0", "/device:GPU:0"]):
        nodes.gradient(f"ar_{number}", (1,), device=device)
    plan = plan_of(nodes.graph_def)
    assert parts(plan) == [["ar_0", "ar_1", "ar_2"], ["ar_3", "ar_4"]]
    (segment,) = plan.sections[0].segments
    assert segment.parts == ((0, 1, 2), (3, 4))
    assert reasons(plan) == {}


# -------------------------------------------------------------------------------------------------- divisions


def dependent(count: int, *edges: tuple[int, int]) -> GraphDef:
    """Gradients in this order, some of which are computed from an earlier reduced one."""
    nodes = Nodes()
    for number in range(count):
        nodes.placeholder(f"g_{number}", (2,))
    after = {late: early for early, late in edges}
    for number in range(count):
        tensor = f"g_{number}"
        if number in after:
            tensor = nodes.add_n(f"sum_{number}", tensor, f"ar_{after[number]}")
        nodes.all_reduce(f"ar_{number}", tensor)
    return nodes.graph_def


def test_a_division_is_explained():
    plan = plan_of(dependent(4, (0, 2)))
    (section,) = plan.sections
    at = names(plan).index("ar_2")
    assert section.boundaries == (3,)
    assert [segment.start for segment in section.segments] == [0, at]
    (note,) = section.divisions
    assert (note.at, note.on, note.text) == (at, "ar_0", "ar_2 depends on the reduced ar_0")


def test_a_division_through_another_segment_names_it():
    nodes = Nodes()
    nodes.placeholder("g", (2,))
    for name, tensor, group in [("a", "g", "one"), ("d", "g", "two"), ("b", "gb", "one"), ("c", "gc", "two")]:
        nodes.all_reduce(name, tensor, group=group)
    nodes.identity("gb", "d")
    nodes.identity("gc", "a")
    texts = [note.text for section in plan_of(nodes.graph_def).sections for note in section.divisions]
    assert texts == ["c depends on the reduced d through the segment of a"]


@given(st.integers(0, 10**6), st.integers(2, 40), st.sampled_from(["single", "none", "segments", "idx"]))
def test_the_books_balance(seed, size, kind):
    """Segments cover each section; parts hold each fused gradient once; every other one has exactly one reason."""
    rng = random.Random(seed)
    graph_def = random_graph(seed, size, reductions=0.7)
    for node in graph_def.node:
        node.op = {"Const": "SomeSource", "VariableV2": "SomeSource"}.get(node.op, node.op)
        node.attr["_output_shapes"].list.shape.add().dim.add().size = 7
        if node.op == "HcomAllReduce":
            node.attr["T"].type = rng.choice([1, 1, 2])
            node.attr["reduction"].s = rng.choice([b"sum", b"sum", b"max"])
            node.attr["group"].s = rng.choice([b"g", b"g", b"h"])
            node.attr["fusion"].i = rng.choice([1, 1, 1, 0])
            node.device = rng.choice(["", "/cpu:0"])
    if not any(node.op == "HcomAllReduce" for node in graph_def.node):
        return
    item = indexed(graph_def)
    counts = [len(section.gradients) for section in item.sections]
    if kind == "idx" and len(set(counts)) != 1:
        return
    strategy = {
        "single": SINGLE, "none": NONE, "segments": Strategy(StrategyKind.SEGMENTS, (3,)),
        "idx": idx(counts[0] - 1) if counts else SINGLE,
    }[kind]  # fmt: skip

    plan = make_plan(item, lambda sections: decide(sections, lambda _: strategy, PlanOptions()))

    for section in plan.sections:
        bounds = [(segment.start, segment.stop) for segment in section.segments]
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == len(section.gradients)
        for segment in section.segments:
            indices = sorted(index for part in segment.parts for index in part)
            assert indices == list(range(segment.start, segment.stop))
    fused = [name for part in plan.parts if len(part.gradients) > 1 for name in part.gradients]
    listed = [entry.id for entry in plan.singles]
    planned_alone = [
        section.gradients[boundary].id
        for section in plan.sections
        for boundary, before in zip(section.boundaries, (-1, *section.boundaries))
        if boundary - before == 1
    ]
    everything = {gradient.id for gradient in item.gradients}
    assert len(set(fused)) == len(fused)
    assert len(set(listed)) == len(listed)
    assert not set(fused) & set(listed)
    assert everything - set(fused) - set(listed) <= set(planned_alone)
    assert len({name for part in plan.parts for name in part.gradients}) == sum(len(p.gradients) for p in plan.parts)


def test_the_log_tells_what_is_really_in_force(caplog):
    with caplog.at_level(logging.INFO, "hccl_fusion"):
        plan_of(dependent(4, (0, 2)))
        plan_of(gradients_graph((1,), (1,)), NONE)
    line = "gradient segment result: segment num: 2, segment index list: [0,1] [2,3]  "
    assert [record.getMessage() for record in caplog.records] == [line]


def test_the_pass_needs_sections_and_hands_on_parts():
    received: list[Plan] = []
    graph_pass = PlanPass(lambda sections: decide(sections, lambda _: SINGLE, PlanOptions()), received.append)
    with pytest.raises(PassError, match="pass plan cannot run: the sections are not known"):
        graph_pass.requires(GraphItem(GraphDef()))
    result = graph_pass.run(indexed(many_reasons().graph_def))
    graph_pass.ensures(result.item)
    assert received[0].parts == result.item.parts
    assert received[0].singles == result.item.singles
    assert received[0].reasons[GradientId("", "alone")] is Reason.ALONE
    assert result.notes == ("1 segments in 1 sections",)
    assert not result.modified


# ------------------------------------------------------------------------------------------------------ JSON


def test_the_keys_of_a_plan_in_json():
    plan = plan_of(dependent(4, (0, 2)), fetch=("ar_1",))
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["schema_version"] == 1
    assert set(document) == {"schema_version", "sections", "single", "fingerprint"}
    (section,) = document["sections"]
    assert {key: section[key] for key in ("graph", "group", "dtype", "reduction", "fusion_id", "count")} == {
        "graph": "", "group": WORLD, "dtype": "float32", "reduction": "sum", "fusion_id": -1, "count": 4,
    }  # fmt: skip
    assert (section["strategy"], section["boundaries"], section["segments"]) == ("single", [3], [[0, 1], [2, 3]])
    assert section["gradients"] == ["ar_0", "ar_1", "ar_2", "ar_3"]
    assert section["bytes"] == [8, 8, 8, 8]
    assert section["divisions"] == [{"at": 2, "on": "ar_0", "reason": "ar_2 depends on the reduced ar_0"}]
    assert {(entry["name"], entry["reason"]) for entry in document["single"]} == {
        ("ar_0", "dependence"), ("ar_1", "fetched"),
    }  # fmt: skip
    assert document["fingerprint"] == plan.fingerprint


def test_json_tells_devices_and_functions():
    nodes = Nodes()
    for number, device in enumerate(["", "/cpu:0", "", "/cpu:0"]):
        nodes.gradient(f"ar_{number}", (1,), device=device)
    body = nodes.function("f", {"x": 1}, {})
    body.all_reduce("inside", "x")
    document = plan_document(plan_of(nodes.graph_def))
    assert document["sections"][0]["parts"] == [[[0, 2], [1, 3]]]
    assert document["single"] == [{"name": "inside", "graph": "f", "reason": "unknown-shape"}]


def test_the_keys_of_a_list_in_json():
    nodes = many_reasons()
    item = indexed(nodes.graph_def)
    plan = make_plan(item, lambda sections: decide(sections, lambda _: SINGLE, PlanOptions()))
    document: dict[str, Any] = json.loads(json.dumps(gradients_document(plan, item.gradients)))
    assert document["schema_version"] == 1
    rows = {row["all_reduce"]: row for row in document["gradients"]}
    assert [row["all_reduce"] for row in document["gradients"]] == [str(g.id) for g in item.gradients]
    assert set(rows["ar_0"]) == {
        "index", "section", "all_reduce", "tensor", "variable", "shape", "dtype", "bytes", "padded_bytes", "segment",
        "reason",
    }  # fmt: skip
    assert rows["ar_1"]["index"] == 1
    assert rows["ar_1"]["segment"] == 0
    assert rows["ar_1"]["reason"] is None
    assert (rows["ar_1"]["tensor"], rows["ar_1"]["shape"], rows["ar_1"]["dtype"]) == ("ar_1/g", [2], "float32")
    assert (rows["ar_1"]["bytes"], rows["ar_1"]["padded_bytes"]) == (8, padded_bytes(8))
    assert (rows["unknown"]["shape"], rows["unknown"]["bytes"], rows["unknown"]["padded_bytes"]) == (None, None, None)
    for row in rows.values():
        assert (row["index"] is None) is (row["segment"] is None) is (row["reason"] is not None)


def test_a_list_tells_the_segment_in_force_on_each_device():
    """A division on one device moves no gradient of the other device to another segment."""
    nodes = Nodes()
    nodes.placeholder("x", (1,))
    nodes.all_reduce("a0", "x", device="/cpu:0")
    nodes.all_reduce("b0", "x", device="/cpu:1")
    nodes.all_reduce("a1", nodes.identity("a1/g", "a0"), device="/cpu:0")
    nodes.all_reduce("b1", nodes.identity("b1/h", nodes.identity("b1/g", "x")), device="/cpu:1")
    assert [g.name for g in indexed(nodes.graph_def).gradients] == ["a0", "b0", "a1", "b1"]
    item = indexed(nodes.graph_def)
    plan = make_plan(item, lambda sections: decide(sections, lambda _: SINGLE, PlanOptions()))
    rows = {row["all_reduce"]: row["segment"] for row in gradients_document(plan, item.gradients)["gradients"]}
    number_of = {name.name: part.segment for part in plan.parts for name in part.gradients}
    for name, segment in rows.items():
        if segment is not None:
            assert segment == number_of[name]


# ------------------------------------------------------------------------------------------------ fingerprint


def base(**changes: Any) -> Plan:
    shapes = changes.get("shapes", [(2,), (3,), (4,)])
    nodes = Nodes()
    for number, shape in enumerate(shapes):
        name = changes.get("names", "abc")[number]
        nodes.gradient(
            name, shape, changes.get("dtype", 1), group=changes.get("group", WORLD), device=changes.get("device", "")
        )
    return plan_of(nodes.graph_def, changes.get("strategy", idx(1, 2)))


def test_the_fingerprint_is_the_same_for_the_same_plan():
    assert base().fingerprint == base().fingerprint
    assert len(base().fingerprint) == 64
    # On another rank the devices have other names, and a strategy may come by another way.
    assert base(device="/job:worker/task:1/gpu:0").fingerprint == base().fingerprint
    assert base(strategy=Strategy(StrategyKind.MAX_BYTES, (130,))).fingerprint == base().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"names": "abd"},
        {"names": "acb"},
        {"shapes": [(2,), (3,), (5,)]},
        {"shapes": [(2,), (3,), (4, 1)]},
        {"shapes": [(2,), (3,), (2, 2)]},
        {"dtype": DOUBLE},
        {"group": "some"},
        {"strategy": idx(0, 2)},
        {"strategy": SINGLE},
    ],
    ids=str,
)
def test_the_fingerprint_changes_with_all_that_must_be_equal_on_every_rank(change):
    assert base(**change).fingerprint != base().fingerprint


def test_the_fingerprint_tells_what_is_reduced_alone():
    def fingerprint(reduction: str) -> str:
        nodes = Nodes()
        for name in ("a", "b", "c"):
            nodes.placeholder(f"p_{name}", (4,))
        nodes.all_reduce("a", "p_a")
        nodes.all_reduce("b", "p_b")
        nodes.all_reduce("c", "p_c", reduction=reduction)
        return plan_graph(nodes.graph_def, infer_shapes=False)[0].fingerprint

    assert fingerprint("min") != fingerprint("sum")
    plain = Nodes()
    for name in ("a", "b"):
        plain.placeholder(f"p_{name}", (4,))
        plain.all_reduce(name, f"p_{name}")
    assert fingerprint("min") != plan_graph(plain.graph_def, infer_shapes=False)[0].fingerprint
