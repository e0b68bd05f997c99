"""Groups of ranks: the functions of HCCL's `hccl.manage.api`, with its names and its order of parameters.

A group is a subset of the ranks that reduces on its own; its members, and only they, create it, with equal arguments.
Groups may be created before `hccl_fusion.init()`, which then checks them; everything else needs it. A rank's number
inside a group is its position in `rank_ids`. Every error is a ValueError, as in HCCL.
"""

from __future__ import annotations

__all__ = [
    "MAX_GROUP_RANKS",
    "create_group",
    "destroy_group",
    "get_group_rank_from_world_rank",
    "get_local_rank_id",
    "get_local_rank_size",
    "get_rank_id",
    "get_rank_size",
    "get_world_rank_from_group_rank",
    "group_key",
    "group_ranks",
]

from collections import Counter
from typing import Any

import numpy as np

from graph_passes.lower import group_keys
from hccl_fusion.errors import StrategyError, summarise
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime import group_registry
from hccl_fusion.strategy import check_group

MAX_GROUP_RANKS = 32768
"""HCCL's documented limit."""


def create_group(group: str, rank_num: int, rank_ids: Any) -> None:
    """Creates a group; all of its members must call this with equal arguments.

    After `init` the call waits for the other members.

    Args:
        group: its name, 1 to 127 bytes, not `hccl_world_group`.
        rank_num: how many ranks it has.
        rank_ids: list or tuple of their world ranks, each once.

    Raises:
        StrategyError: an illegal argument, a group that exists, or this rank is not in it.
        AgreementError: the members do not agree on the group.
    """
    name = _user_group(group, "create_group")
    size = _integer(rank_num, "rank_num", "create_group", least=1)
    if size > MAX_GROUP_RANKS:
        raise StrategyError(
            "rank_num is too large", where="create_group", found=size, expected=f"1 to {MAX_GROUP_RANKS}"
        )
    if not isinstance(rank_ids, (list, tuple)):
        found = type(rank_ids).__name__
        raise StrategyError("rank_ids has the wrong type", where="create_group", found=found, expected="a list of int")
    if len(rank_ids) != size:
        raise StrategyError(
            f"rank_num is {size}, but rank_ids does not have as many",
            where="create_group",
            found=len(rank_ids),
            expected=size,
        )
    ranks = tuple(_integer(rank, f"rank_ids[{at}]", "create_group", least=0) for at, rank in enumerate(rank_ids))
    twice = [str(rank) for rank, count in Counter(ranks).items() if count > 1]
    if twice:
        raise StrategyError(
            "rank_ids has a rank twice", where="create_group", found=summarise(twice), expected="each once"
        )
    group_registry.add_group(name, ranks)


def destroy_group(group: str) -> None:
    """Removes a group that `create_group` made.

    Raises:
        StrategyError: the world group, or there is no such group.
        NotInitialisedError: before `init`.
    """
    name = _user_group(group, "destroy_group")
    group_registry.current_world("destroy_group")
    group_registry.remove_group(name)


def get_rank_size(group: str = DEFAULT_GROUP) -> int:
    """How many ranks the group has."""
    return len(_ranks(group, "get_rank_size"))


def get_local_rank_size(group: str = DEFAULT_GROUP) -> int:
    """How many ranks of the group are on this rank's server."""
    return len(_local_ranks(group, "get_local_rank_size"))


def get_rank_id(group: str = DEFAULT_GROUP) -> int:
    """This rank's number inside the group."""
    ranks = _ranks(group, "get_rank_id")
    return ranks.index(group_registry.current_world("get_rank_id").rank)


def get_local_rank_id(group: str = DEFAULT_GROUP) -> int:
    """This rank's number among the ranks of the group on its server."""
    ranks = _local_ranks(group, "get_local_rank_id")
    return ranks.index(group_registry.current_world("get_local_rank_id").rank)


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """The world rank of a rank of the group.

    Raises:
        StrategyError: the group has no such rank.
    """
    function = "get_world_rank_from_group_rank"
    ranks = _ranks(group, function)
    number = _integer(group_rank_id, "group_rank_id", function, least=0)
    if number >= len(ranks):
        raise StrategyError(
            f"the group {group!r} has no such rank", where=function, found=number, expected=f"0 to {len(ranks) - 1}"
        )
    return ranks[number]


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """The number inside the group of a world rank. HCCL's order of parameters: the rank comes first.

    Raises:
        StrategyError: the world rank is not in the group.
    """
    function = "get_group_rank_from_world_rank"
    ranks = _ranks(group, function)
    number = _integer(world_rank_id, "world_rank_id", function, least=0)
    if number not in ranks:
        raise StrategyError(
            f"the world rank is not in the group {group!r}",
            where=function,
            found=number,
            expected=f"one of {summarise([str(rank) for rank in ranks])}",
        )
    return ranks.index(number)


def group_ranks(group: str = DEFAULT_GROUP) -> tuple[int, ...]:
    """The world ranks of the group, in the order of their numbers inside it."""
    return _ranks(group, "group_ranks")


def group_key(group: str = DEFAULT_GROUP) -> int:
    """The group's key for TensorFlow's collectives, as `graph_passes.lower` gives it; the same on all ranks."""
    _ranks(group, "group_key")
    return group_keys([group])[group]


def _ranks(group: str, function: str) -> tuple[int, ...]:
    return group_registry.group_ranks(check_group(group), function)


def _local_ranks(group: str, function: str) -> tuple[int, ...]:
    world = group_registry.current_world(function)
    here = world.servers[world.rank]
    return tuple(rank for rank in _ranks(group, function) if world.servers[rank] == here)


def _user_group(group: str, function: str) -> str:
    name = check_group(group)
    if name == DEFAULT_GROUP:
        raise StrategyError(
            "the world group always exists and stays", where=function, found=name, expected="the name of another group"
        )
    return name


def _integer(value: object, name: str, function: str, least: int) -> int:
    """Numpy integers count as int, bool does not."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise StrategyError(f"{name} has the wrong type", where=function, found=type(value).__name__, expected="int")
    if value < least:
        raise StrategyError(f"{name} is too small", where=function, found=int(value), expected=f"at least {least}")
    return int(value)
