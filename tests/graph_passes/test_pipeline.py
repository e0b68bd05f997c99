"""Passes in a row: what they promise, what an observer sees, and what an error says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace
from typing import ClassVar

import pytest
from builders import HALF, Nodes, gradients_graph, indexed, node_of

from graph_passes.errors import GraphError, PassError
from graph_passes.find import Find
from graph_passes.fuse import Fuse
from graph_passes.fusion_id import TagFusionId
from graph_passes.index import Index
from graph_passes.lower import Form, Lower, group_keys, lower_reductions
from graph_passes.messages import GraphDef, types_pb2
from graph_passes.pipeline import GraphItem, PassResult, Pipeline
from graph_passes.sections import GradientId, Part
from graph_passes.verify import Verify


@dataclass(frozen=True)
class PlanAll:
    """One part for each section."""

    name: ClassVar[str] = "plan"

    def requires(self, item: GraphItem) -> None:
        """Nothing."""

    def run(self, item: GraphItem) -> PassResult:
        parts = [Part(s.key, 0, tuple(g.id for g in s.gradients), chain) for chain, s in enumerate(item.sections)]
        return PassResult(replace(item, parts=tuple(parts)), notes=("planned",))

    def ensures(self, item: GraphItem) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Refuse(PlanAll):
    """Refuses at one of its three stages."""

    stage: str = "run"

    def _refuse(self, stage: str, item: GraphItem) -> PassResult:
        if stage == self.stage:
            raise PassError("no", where="node x")
        return PassResult(item)

    def requires(self, item: GraphItem) -> None:
        self._refuse("requires", item)

    def run(self, item: GraphItem) -> PassResult:
        return self._refuse("run", item)

    def ensures(self, item: GraphItem) -> None:
        self._refuse("ensures", item)


FUSION = (Find(), Index(), PlanAll(), Fuse(), Verify())
FORMS = {
    "fused": FUSION,
    "fusion-id": (Find(), Index(), PlanAll(), TagFusionId(), Verify()),
    "mock": (Find(), Index(), PlanAll(), Fuse(), Lower(Form.MOCK, 2), Verify()),
    "collective": (Find(), Index(), PlanAll(), Fuse(), Lower(Form.COLLECTIVE, 2), Verify()),
}
each_form = pytest.mark.parametrize("passes", FORMS.values(), ids=FORMS)


@each_form
def test_the_observer_sees_each_pass_after_it_ran(passes):
    seen = []
    result = Pipeline(passes, observe=lambda *call: seen.append(call)).run(GraphItem(gradients_graph((2,), (3,))))

    assert [graph_pass for graph_pass, _, _ in seen] == list(passes)
    assert all(isinstance(time_ns, int) and time_ns >= 0 for _, _, time_ns in seen)
    assert [found.modified for _, found, _ in seen] == [p.name in ("fuse", "fusion-id", "lower") for p in passes]
    assert seen[-1][1].item is result.item
    assert result.modified
    assert result.notes == tuple(note for _, found, _ in seen for note in found.notes)
    assert all(result.notes)


@each_form
def test_a_pipeline_is_an_optimizer_as_grappler_knows_it(passes):
    graph_def = gradients_graph((2,), (3,), (2, 2))
    before = graph_def.SerializeToString(deterministic=True)
    pipeline = Pipeline(passes)

    optimized = pipeline.optimize(GraphItem(graph_def))

    assert pipeline.name == "hccl-fusion"
    assert isinstance(optimized, GraphDef)
    assert optimized == pipeline.run(GraphItem(graph_def)).item.graph_def
    assert graph_def.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("stage", ["requires", "run", "ensures"])
def test_an_error_names_the_pass_and_those_before_it(stage):
    passes = (Find(), Index(), Refuse(stage=stage), Fuse())
    with pytest.raises(PassError, match=r"^no, node x, in pass plan \(after find, index\)$") as caught:
        Pipeline(passes).run(GraphItem(gradients_graph((2,), (3,))))
    assert caught.value.pass_name == "plan"
    assert caught.value.passes_before == ("find", "index")


def test_an_error_of_the_first_pass_has_none_before_it():
    with pytest.raises(GraphError, match=r"the graph has no all-reduce, in pass find, found"):
        Pipeline(FUSION).run(GraphItem(GraphDef()))


def test_nothing_is_observed_of_a_pass_that_fails():
    seen = []
    with pytest.raises(PassError):
        Pipeline((Find(), Refuse()), observe=lambda p, *_: seen.append(p.name)).run(GraphItem(gradients_graph((2,))))
    assert seen == ["find"]


@pytest.mark.parametrize(
    ("graph_pass", "lacks"),
    [(Index(), "the gradients are not known"), (Fuse(), "there is no plan"), (TagFusionId(), "there is no plan")],
)
def test_a_pass_says_what_it_needs(graph_pass, lacks):
    with pytest.raises(PassError, match=f"pass {graph_pass.name} cannot run: {lacks}; try"):
        graph_pass.requires(GraphItem(GraphDef()))


def test_a_pass_is_frozen_data_with_its_options_as_fields():
    assert Fuse() == Fuse(chain=True) != Fuse(chain=False)
    assert hash(Lower(Form.MOCK, 2)) == hash(Lower(Form.MOCK, 2))
    with pytest.raises(FrozenInstanceError):
        Fuse().chain = False


def test_passes_leave_the_item_that_they_get_as_it_is():
    item = indexed(gradients_graph((2,), (3,)))
    item = PlanAll().run(item).item
    before = item.graph_def.SerializeToString(deterministic=True)
    result = Fuse().run(item)

    assert result.item is not item
    assert item.graph_def.SerializeToString(deterministic=True) == before
    assert item.graph_def is item.source
    assert result.item.graph_def is not item.source


def test_an_item_that_nobody_edits_is_its_source():
    graph_def = gradients_graph((2,), (3,))
    item = replace(indexed(graph_def), parts=())
    assert Fuse().run(item).item is item
    assert TagFusionId().run(item).item is item
    assert item.graph_def is graph_def


def test_the_collector_runs_again_after_a_pipeline_that_failed():
    import gc

    assert gc.isenabled()
    with pytest.raises(GraphError):
        Pipeline(FUSION).run(GraphItem(GraphDef()))
    assert gc.isenabled()


# --------------------------------------------------------------------------------------------- fuse, and lower


@pytest.mark.parametrize(
    "other",
    [{"group": "some"}, {"reduction": "max"}, {"dtype": HALF}, {"device": "/gpu:0"}, {"fusion_id": 3, "fusion": 2}],
)
def test_fuse_refuses_a_part_of_unequal_members(other):
    nodes = Nodes()
    nodes.gradient("a", (2,))
    nodes.gradient("b", (2,), **other)
    item = indexed(nodes.graph_def)
    part = Part(item.gradients[0].key, 0, (GradientId("", "a"), GradientId("", "b")))
    with pytest.raises(PassError, match=r"mixes gradients that cannot be fused, node b, found .*, expected .* as a"):
        Fuse().run(replace(item, parts=(part,)))


@pytest.mark.parametrize(("rows", "size_type"), [(2**30 - 1, types_pb2.DT_INT32), (2**30, types_pb2.DT_INT64)])
def test_sizes_over_the_range_of_int32_are_written_as_int64(rows, size_type):
    item = PlanAll().run(indexed(gradients_graph((rows,), (1, rows)))).item
    fused = Fuse().run(item).item.graph_def
    assert node_of(fused, "fused_0/split_sizes").attr["dtype"].type == size_type
    assert node_of(fused, "fused_0/split").attr["Tlen"].type == size_type


def test_a_dimension_over_the_range_of_int32_is_written_as_int64():
    item = PlanAll().run(indexed(gradients_graph((2**31, 1), (2**31 - 1, 1)))).item
    result = Pipeline((Fuse(), Verify())).run(item).item.graph_def
    types = [node_of(result, name).attr["Tshape"].type for name in ("ar_0", "ar_1")]
    assert types == [types_pb2.DT_INT64, types_pb2.DT_INT32]


def test_lower_needs_ranks():
    with pytest.raises(PassError, match="lowering needs a number of ranks, found 0, expected at least 1"):
        lower_reductions(gradients_graph((2,)), "mock", 0)


def test_lower_refuses_a_reduction_that_it_does_not_know():
    nodes = Nodes()
    nodes.gradient("ar", (2,), reduction="mean")
    for form in ("mock", "collective"):
        with pytest.raises(
            PassError, match="an unknown reduction, node ar, found 'mean', expected sum, prod, min or max"
        ):
            lower_reductions(nodes.graph_def, form, 2)


def test_lower_that_refuses_leaves_the_graph_as_it_was():
    nodes = Nodes()
    nodes.gradient("ar", (2,), group=None, reduction=None)
    before = nodes.graph_def.SerializeToString(deterministic=True)
    with pytest.raises(PassError):
        lower_reductions(nodes.graph_def, "mock", 2)
    assert nodes.graph_def.SerializeToString(deterministic=True) == before


def test_lower_leaves_a_graph_without_reductions_as_it_is():
    nodes = Nodes()
    nodes.placeholder("x", (2,))
    assert lower_reductions(nodes.graph_def, "mock", 2) is nodes.graph_def


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        (types_pb2.DT_BOOL, 2),
        (types_pb2.DT_QINT8, 2),
        (types_pb2.DT_FLOAT8_E5M2, 2),
        (types_pb2.DT_INT8, 128),
        (types_pb2.DT_HALF, 70000),
    ],
)
def test_a_mock_of_a_type_that_cannot_hold_the_ranks_is_an_error(dtype, ranks):
    nodes = Nodes()
    nodes.gradient("ar", (2,), dtype)
    with pytest.raises(
        PassError, match=rf"the form mock cannot compute with this type, node ar, found .* {ranks} ranks"
    ):
        lower_reductions(nodes.graph_def, "mock", ranks)


@pytest.mark.parametrize("dtype", [types_pb2.DT_COMPLEX64, types_pb2.DT_UINT64, types_pb2.DT_BOOL])
def test_a_collective_of_a_type_that_cannot_be_cast_up_is_an_error(dtype):
    nodes = Nodes()
    nodes.gradient("ar", (2,), dtype)
    with pytest.raises(PassError, match="collectives cannot reduce this type, node ar"):
        lower_reductions(nodes.graph_def, "collective", 2)


def test_a_collective_that_casts_up_says_so():
    nodes = Nodes()
    nodes.gradient("ar", (2,), types_pb2.DT_INT8)
    item = Lower(Form.COLLECTIVE, 2).run(GraphItem(nodes.graph_def))
    assert "ar: int8 is reduced as int32" in item.notes


def test_collectives_have_the_timeout_and_keys_of_their_own():
    nodes = Nodes()
    for name in ("a", "b"):
        nodes.gradient(name, (2,))
    lowered = lower_reductions(nodes.graph_def, "collective", 3, timeout_seconds=7.5)
    assert node_of(lowered, "a/reduce/collective").attr["timeout_seconds"].f == 7.5
    keys = [node_of(lowered, f"{name}/reduce/instance_key").attr["value"].tensor.tensor_content for name in "ab"]
    assert keys[0] != keys[1]


def test_group_keys_are_positive_32_bit_numbers_and_all_different():
    groups = [f"group_{number}" for number in range(2000)]
    keys = group_keys([*groups, "hccl_world_group"])
    assert keys["hccl_world_group"] == 1
    assert len(set(keys.values())) == 2001
    assert all(0 < key < 2**31 for key in keys.values())
    assert keys == group_keys(["hccl_world_group", *reversed(groups)])


def test_group_keys_that_collide_are_moved_apart(monkeypatch):
    monkeypatch.setattr("graph_passes.lower.zlib.crc32", lambda _: 5)
    keys = group_keys(["a", "b", "c", "hccl_world_group"])
    assert len(set(keys.values())) == 4
