"""The functions of hccl.manage.api: arguments, answers and errors; no TensorFlow."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import hccl_fusion.groups as groups
from graph_passes.lower import group_keys
from hccl_fusion.errors import StrategyError
from hccl_fusion.runtime import group_registry
from hccl_fusion.runtime.group_registry import NotInitialisedError, check_key_clashes
from hccl_fusion.runtime.world import World

WORLD = World(2, ("a", "a", "b", "b", "b"), tuple(f"host:{port}" for port in range(1, 6)))
CLASHING = ("group294875", "group2040348")  # found by trying names


@pytest.fixture(autouse=True)
def _clean():
    group_registry.close_world()
    yield
    group_registry.close_world()
    group_registry._state.used.clear()


@pytest.fixture
def world():
    group_registry.open_world(WORLD)
    return WORLD


class TestSignatures:
    @pytest.mark.parametrize(
        ("function", "parameters"),
        [
            (groups.create_group, "group rank_num rank_ids"),
            (groups.destroy_group, "group"),
            (groups.get_rank_size, "group"),
            (groups.get_local_rank_size, "group"),
            (groups.get_rank_id, "group"),
            (groups.get_local_rank_id, "group"),
            (groups.get_world_rank_from_group_rank, "group group_rank_id"),
            (groups.get_group_rank_from_world_rank, "world_rank_id group"),
        ],
    )
    def test_order_of_parameters_is_that_of_hccl(self, function, parameters):
        assert list(inspect.signature(function).parameters) == parameters.split()

    def test_the_world_is_the_default(self, world):
        sizes = groups.get_rank_size(), groups.get_local_rank_size(), groups.get_rank_id(), groups.get_local_rank_id()
        assert sizes == (5, 3, 2, 0)


@pytest.mark.usefixtures("world")
class TestAnswers:
    def test_a_group_in_its_own_order(self):
        groups.create_group("g", 3, [4, 1, 2])
        assert groups.group_ranks("g") == (4, 1, 2)
        assert groups.get_rank_size("g") == 3
        assert groups.get_local_rank_size("g") == 2
        assert groups.get_rank_id("g") == 2
        assert groups.get_local_rank_id("g") == 1
        assert [groups.get_world_rank_from_group_rank("g", at) for at in range(3)] == [4, 1, 2]
        assert [groups.get_group_rank_from_world_rank(rank, "g") for rank in (4, 1, 2)] == [0, 1, 2]

    def test_numpy_integers(self):
        groups.create_group("g", np.int64(2), tuple(np.array([2, 3])))
        assert groups.group_ranks("g") == (2, 3)
        assert groups.get_world_rank_from_group_rank("g", np.int32(1)) == 3

    def test_keys_are_those_of_the_graph_pass(self):
        groups.create_group("g", 2, [2, 3])
        assert groups.group_key() == 1
        assert groups.group_key("g") == group_keys(["g", "hccl_world_group"])["g"]

    def test_destroy_and_create_again(self):
        groups.create_group("g", 2, [2, 3])
        groups.destroy_group("g")
        with pytest.raises(StrategyError, match=r"no such group, get_rank_size, found 'g'.*try create_group"):
            groups.get_rank_size("g")
        groups.create_group("g", 2, [2, 3])
        groups.destroy_group("g")
        with pytest.raises(StrategyError, match=r"had other ranks before.*found \[2, 4\], expected \[2, 3\]"):
            groups.create_group("g", 2, [2, 4])


@pytest.mark.usefixtures("world")
class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("hccl_world_group", 1, [2]), "world group always exists"),
            (("", 1, [2]), "name is illegal.*0 bytes"),
            (("g" * 128, 1, [2]), "name is illegal.*128 bytes"),
            ((7, 1, [2]), "name is illegal"),
            (("g", 0, []), "rank_num is too small.*found 0"),
            (("g", -1, []), "rank_num is too small.*found -1"),
            (("g", 32769, []), "rank_num is too large"),
            (("g", 1.0, [2]), "rank_num has the wrong type.*found float, expected int"),
            (("g", True, [2]), "rank_num has the wrong type.*found bool"),
            (("g", 1, {2}), "rank_ids has the wrong type.*found set"),
            (("g", 1, "2"), "rank_ids has the wrong type.*found str"),
            (("g", 2, [2]), "rank_num is 2, but rank_ids.*found 1, expected 2"),
            (("g", 2, [2, -1]), r"rank_ids\[1\] is too small"),
            (("g", 2, [2, "3"]), r"rank_ids\[1\] has the wrong type"),
            (("g", 2, [2, 2]), "rank twice.*found 2"),
            (("g", 2, [2, 5]), "not in the world.*found 5, expected 0 to 4"),
            (("g", 2, [0, 1]), "rank 2 creates a group that it is not in"),
        ],
    )
    def test_create(self, arguments, message):
        with pytest.raises(StrategyError, match=message) as info:
            groups.create_group(*arguments)
        assert isinstance(info.value, ValueError)
        assert "\n" not in str(info.value)

    def test_create_twice(self):
        groups.create_group("g", 2, [2, 3])
        with pytest.raises(StrategyError, match=r"'g' exists already.*found ranks \[2, 3\].*destroy_group"):
            groups.create_group("g", 2, [2, 3])

    def test_a_name_of_127_bytes(self):
        groups.create_group("é" * 63 + "x", 1, [2])

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: groups.destroy_group("hccl_world_group"), "world group always exists"),
            (lambda: groups.destroy_group("h"), "no such group, destroy_group, found 'h'"),
            (
                lambda: groups.get_rank_id("h"),
                "no such group, get_rank_id, found 'h', expected 'hccl_world_group'; 'g'",
            ),
            (lambda: groups.get_world_rank_from_group_rank("g", 2), "no such rank.*found 2, expected 0 to 1"),
            (lambda: groups.get_world_rank_from_group_rank("g", -1), "group_rank_id is too small"),
            (lambda: groups.get_world_rank_from_group_rank(0, "g"), "name is illegal"),
            (
                lambda: groups.get_group_rank_from_world_rank(0, "g"),
                "not in the group 'g'.*found 0, expected one of 2; 3",
            ),
            (lambda: groups.get_group_rank_from_world_rank("g", 0), "name is illegal"),
            (lambda: groups.group_key(None), "name is illegal"),
        ],
    )
    def test_others(self, call, message):
        groups.create_group("g", 2, [2, 3])
        with pytest.raises(StrategyError, match=message):
            call()

    def test_members_must_agree(self):
        calls = []
        group_registry.open_world(WORLD, lambda *call: calls.append(call))
        groups.create_group("g", 2, [2, 3])
        assert calls == [("g", (2, 3))]

        def refuse(*_):
            raise StrategyError("no")

        group_registry.open_world(WORLD, refuse)
        with pytest.raises(StrategyError):
            groups.create_group("h", 2, [2, 3])
        assert set(group_registry.defined_groups()) == {"g"}


class TestBeforeInit:
    @pytest.mark.parametrize(
        "call",
        [
            lambda: groups.destroy_group("g"),
            groups.get_rank_size,
            groups.get_local_rank_size,
            groups.get_rank_id,
            groups.get_local_rank_id,
            lambda: groups.get_world_rank_from_group_rank("g", 0),
            lambda: groups.get_group_rank_from_world_rank(0, "g"),
            groups.group_ranks,
            groups.group_key,
        ],
    )
    def test_needs_init(self, call):
        with pytest.raises(
            NotInitialisedError, match=r"before the ranks are initialised; try hccl_fusion.init\(\) first"
        ):
            call()

    def test_create_is_recorded(self):
        groups.create_group("g", 2, [7, 9])
        assert group_registry.defined_groups() == {"g": (7, 9)}


class TestKeys:
    def test_two_names_with_one_key_are_refused(self, world):
        first, second = CLASHING
        assert group_keys([first]) == {first: group_keys([second])[second]}
        groups.create_group(first, 2, [2, 3])
        with pytest.raises(StrategyError, match=f"same collective key, found '{second}' and '{first}'; try another"):
            groups.create_group(second, 2, [2, 4])
        groups.destroy_group(first)
        groups.create_group(second, 2, [2, 4])

    def test_other_names_pass(self):
        check_key_clashes(["a", "b", "a", "hccl_world_group"])
