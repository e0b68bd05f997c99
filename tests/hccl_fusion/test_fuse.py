"""The main job in one function: strategy or plan in, plan and rewritten graph out."""

from __future__ import annotations

import random

import pytest
from builders import WORLD, Nodes, gradients_graph, gradients_of, node_of, random_graph
from hypothesis import assume, given
from hypothesis import strategies as st

from graph_passes.errors import GraphError, PassError
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.verify import verify_rewrite
from hccl_fusion.errors import HcclFusionError, StrategyError, StrategyWarning, UsageError
from hccl_fusion.fuse import Emit, fuse, list_gradients, plan_graph
from hccl_fusion.registry import (
    reset_split_strategy,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hccl_fusion.strategy import Strategy, StrategyKind

SINGLE = Strategy(StrategyKind.SINGLE)
NONE = Strategy(StrategyKind.NONE)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.delenv("RANK_SIZE", raising=False)
    reset_split_strategy()
    yield
    reset_split_strategy()


def idx(*values: int) -> Strategy:
    return Strategy(StrategyKind.IDX, values)


def six() -> GraphDef:
    return gradients_graph(*[(25,)] * 6)


def boundaries(result: object) -> list[tuple[int, ...]]:
    plan = result[0] if isinstance(result, tuple) else result.plan
    return [section.last_indices for section in plan.sections]


def ops(graph_def: GraphDef) -> list[str]:
    return [node.op for node in graph_def.node]


# --------------------------------------------------------------------------------- where the strategy comes from


def test_without_any_word_hccls_default_is_taken():
    graph_def = gradients_graph(*[(10,)] * 100)
    result = fuse(graph_def)
    assert boundaries(result) == [(95, 99)]
    assert result.plan.sections[0].strategy == "default"


def test_what_was_registered_is_taken():
    set_split_strategy_by_idx([1, 5])
    assert boundaries(fuse(six())) == [(1, 5)]
    set_split_strategy_by_size([50, 50])
    assert boundaries(fuse(six())) == [(2, 5)]


def test_a_given_strategy_wins_over_a_registered_one():
    set_split_strategy_by_idx([1, 5])
    assert boundaries(fuse(six(), SINGLE)) == [(5,)]
    assert boundaries(plan_graph(six(), idx(3, 5))) == [(3, 5)]


def test_a_given_strategy_is_for_its_group_alone():
    nodes = Nodes()
    for number in range(4):
        nodes.gradient(f"a_{number}", (2,))
        nodes.gradient(f"b_{number}", (2,), group="some")
    set_split_strategy_by_idx([0, 3], group="some")
    set_split_strategy_by_idx([1, 3])
    keyed = {
        section.key.group: section.last_indices for section in fuse(nodes.graph_def, SINGLE, group="some").plan.sections
    }
    assert keyed == {WORLD: (1, 3), "some": (3,)}
    keyed = {section.key.group: section.last_indices for section in fuse(nodes.graph_def).plan.sections}
    assert keyed == {WORLD: (1, 3), "some": (0, 3)}


def test_a_group_that_the_graph_has_not_is_an_error():
    with pytest.raises(
        StrategyError, match=r"no gradient of the graph belongs to the group, group other, .*found groups"
    ):
        fuse(six(), SINGLE, group="other")
    with pytest.raises(StrategyError, match=f"try --group {WORLD}"):
        plan_graph(six(), group="other")
    with pytest.raises(StrategyError, match="the group's name is illegal"):
        fuse(six(), SINGLE, group="")


def test_a_stale_index_list_beside_a_size_list_is_a_warning():
    set_split_strategy_by_idx([7])
    set_split_strategy_by_size([50, 50])
    with pytest.warns(StrategyWarning, match=r"\[7\] fits no section"):
        result = fuse(six())
    assert boundaries(result) == [(2, 5)]
    reset_split_strategy()
    set_split_strategy_by_idx([5])
    set_split_strategy_by_size([50, 50])
    assert boundaries(fuse(six())) == [(2, 5)]


def test_an_index_list_that_does_not_fit_names_pass_section_and_list():
    with pytest.raises(StrategyError) as caught:
        fuse(six(), idx(1, 4))
    text = str(caught.value)
    for part in (
        "in pass plan (after find, index)",
        "hccl_world_group float32 sum with 6 gradients",
        "[1,4]",
        "try [1,5]",
    ):
        assert part in text
    assert isinstance(caught.value, ValueError)


# ------------------------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize("emit", list(Emit))
def test_each_form_by_enum_and_by_name(emit):
    one, other = fuse(six(), SINGLE, emit=emit, ranks=2), fuse(six(), SINGLE, emit=emit.value, ranks=2)
    assert one.graph_def == other.graph_def
    assert one.modified
    assert [gradient.name for gradient in one.gradients] == [f"ar_{number}" for number in range(6)]
    assert one.notes
    reductions = {
        "fused": "HcomAllReduce",
        "fusion-id": "HcomAllReduce",
        "mock": "Mul",
        "collective": "CollectiveReduceV2",
    }
    assert ops(one.graph_def).count(reductions[emit.value]) == (6 if emit is Emit.FUSION_ID else 1)


def test_an_unknown_form_is_a_usage_error():
    with pytest.raises(
        UsageError, match=r"the form is unknown, found 'horovod', expected one of fused, fusion-id, coll"
    ):
        fuse(six(), emit="horovod")


def ranks_of(graph_def: GraphDef) -> int:
    return node_of(graph_def, "fused_0/all_reduce/reduce/mock").attr["_hccl_mock_ranks"].i


@pytest.mark.parametrize(("given_ranks", "environment", "expected"), [(3, "8", 3), (None, "8", 8), (None, None, 1)])
def test_the_number_of_ranks(monkeypatch, given_ranks, environment, expected):
    if environment is not None:
        monkeypatch.setenv("RANK_SIZE", environment)
    assert ranks_of(fuse(six(), SINGLE, emit="mock", ranks=given_ranks).graph_def) == expected


@pytest.mark.parametrize("ranks", [0, -1, 2**31, True, 1.5, "x"])
def test_an_illegal_number_of_ranks(ranks):
    with pytest.raises(UsageError, match="the number of ranks is illegal"):
        fuse(six(), SINGLE, emit="collective", ranks=ranks)


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "²"])
def test_an_illegal_number_of_ranks_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("RANK_SIZE", text)
    with pytest.raises(UsageError, match="environment variable RANK_SIZE"):
        fuse(six(), SINGLE, emit="mock")
    assert fuse(six(), SINGLE).modified  # the other forms do not ask


def test_without_the_chain_no_control_edge_orders_the_reductions():
    chained, free = (fuse(six(), idx(1, 3, 5), chain=chain).graph_def for chain in (True, False))
    order = [f"fused_{number}/all_reduce" for number in range(3)]
    assert [list(node_of(chained, name).input[1:]) for name in order] == [[], [f"^{order[0]}"], [f"^{order[1]}"]]
    assert [list(node_of(free, name).input[1:]) for name in order] == [[], [], []]


@pytest.mark.parametrize("emit", list(Emit))
def test_a_graph_that_must_be_read_node_by_node(emit):
    """A node without an op stands in the way of reading all nodes at once; the outcome is the same."""
    graph_def = six()
    expected = fuse(graph_def, idx(1, 5), emit=emit, ranks=2).graph_def
    graph_def.node.insert(0, NodeDef(name="odd"))
    expected.node.insert(0, NodeDef(name="odd"))
    assert fuse(graph_def, idx(1, 5), emit=emit, ranks=2).graph_def == expected


def test_a_graph_of_functions_alone():
    nodes = Nodes()
    body = nodes.function("f", {"x": 1}, {"y": (1, "b:output:0")})
    body.constant("c", [1.0, 2.0])
    for name in "ab":
        body.all_reduce(name, "c:output:0")
    result = fuse(nodes.graph_def, SINGLE, emit="mock", ranks=2)
    assert result.modified
    assert len(result.graph_def.node) == 0
    ops_inside = [node.op for node in result.graph_def.library.function[0].node_def]
    assert (ops_inside.count("HcomAllReduce"), ops_inside.count("SplitV")) == (0, 1)


def test_nothing_to_do_gives_back_the_very_graph():
    graph_def = six()
    for result in (fuse(graph_def, NONE), fuse(gradients_graph((2,), dtype=1))):
        assert not result.modified
    assert fuse(graph_def, NONE).graph_def is graph_def


def test_a_graph_without_reductions_is_an_error_in_every_function():
    nodes = Nodes()
    nodes.placeholder("x", (1,))
    for call in (fuse, plan_graph, list_gradients):
        with pytest.raises(GraphError, match="the graph has no all-reduce"):
            call(nodes.graph_def)


def test_a_graph_that_was_lowered_before_has_nothing_left_to_fuse():
    lowered = fuse(six(), SINGLE, emit="collective", ranks=2).graph_def
    again = fuse(lowered, SINGLE, emit="collective", ranks=2)
    assert (again.modified, again.gradients) == (False, ())
    with pytest.raises(GraphError, match="lowered before"):
        plan_graph(lowered)


def test_fetches_and_keeps_stay_reductions_of_their_own():
    result = fuse(six(), SINGLE, fetch=("ar_1:0",), keep=("ar_3", "no_such_node"))
    after = gradients_of(result.graph_def)
    assert set(after) == {"ar_1", "ar_3", "fused_0/all_reduce"}
    for name in ("ar_1", "ar_3"):
        assert node_of(result.graph_def, name) == node_of(six(), name)


def test_the_list_is_the_breadth_first_order():
    nodes = Nodes()
    for name in ("z", "a", "m"):
        nodes.gradient(name, (2,))
    assert [gradient.name for gradient in list_gradients(nodes.graph_def)] == ["z", "a", "m"]


def test_an_observer_sees_every_pass():
    seen = []
    fuse(six(), SINGLE, emit="mock", ranks=2, observe=lambda graph_pass, *_: seen.append(graph_pass.name))
    assert seen == ["find", "index", "plan", "fuse", "lower", "verify"]


def test_an_error_leaves_the_graph_as_it_was():
    graph_def = six()
    graph_def.node[1].attr["fusion"].i = 9
    before = graph_def.SerializeToString(deterministic=True)
    with pytest.raises(HcclFusionError, match="an illegal fusion"):
        fuse(graph_def)
    assert graph_def.SerializeToString(deterministic=True) == before


# ---------------------------------------------------------------------------------------------- any graph at all


def training_graph(seed: int, size: int) -> GraphDef:
    """A random graph with all-reduces of random kinds, some of which depend on others."""
    rng = random.Random(seed)
    graph_def = random_graph(seed, size, reductions=0.6)
    for node in graph_def.node:
        node.op = {"Const": "SomeSource", "VariableV2": "SomeSource", "AddN": "SomeOp"}.get(node.op, node.op)
        node.attr["_output_shapes"].list.shape.add()
        if node.op != "HcomAllReduce":
            continue
        node.attr["T"].type = rng.choice([1, 1, 1, 2])
        node.attr["reduction"].s = rng.choice([b"sum"] * 5 + [b"max"])
        node.attr["group"].s = rng.choice([b"hccl_world_group"] * 3 + [b"h"])
        fusion = rng.choice([1, 1, 1, 1, 2, 0])
        node.attr["fusion"].i = fusion
        node.attr["fusion_id"].i = rng.randint(0, 1) if fusion == 2 else -1
        node.device = rng.choice(["", "", "/cpu:0"])
    return graph_def


strategies = st.sampled_from([SINGLE, NONE, None, *(Strategy(StrategyKind.SEGMENTS, (count,)) for count in (2, 3, 5))])


@given(
    st.integers(0, 10**6), st.integers(3, 50), strategies, st.sampled_from(["fused", "collective", "mock", "fusion-id"])
)
def test_any_graph_is_rewritten_into_one_that_verifies(seed, size, strategy, emit):
    """Verify runs inside; here once more from outside, and the second run changes nothing."""
    graph_def = training_graph(seed, size)
    if "HcomAllReduce" not in ops(graph_def):
        return
    has_world = any(node.attr["group"].s == WORLD.encode() for node in graph_def.node if node.op == "HcomAllReduce")
    group = WORLD if has_world else "h"
    before = graph_def.SerializeToString(deterministic=True)
    try:
        result = fuse(graph_def, strategy, group=group, emit=emit, ranks=2, infer_shapes=False)
    except StrategyError:
        assume(False)  # its only gradients are reduced alone
    content = result.graph_def.SerializeToString(deterministic=True)

    assert verify_rewrite(graph_def, result.graph_def, result.gradients) == []
    assert result.graph_def.SerializeToString(deterministic=True) == content
    assert graph_def.SerializeToString(deterministic=True) == before
    again = fuse(result.graph_def, strategy, group=group, emit=emit, ranks=2, infer_shapes=False)
    assert again.graph_def.SerializeToString(deterministic=True) == content


def test_verify_is_asked_at_the_end_and_stops_a_wrong_rewrite(monkeypatch):
    monkeypatch.setattr("graph_passes.verify.verify_rewrite", lambda *_: ["gradient x: is lost"])
    with pytest.raises(PassError, match=r"in pass verify \(after find, index, plan, fuse\), found gradient x: is lost"):
        fuse(six(), SINGLE)
