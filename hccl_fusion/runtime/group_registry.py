"""This process's world and the groups that it belongs to: what `init` opens and `shutdown` closes.

Groups that are created before `init` wait here and are checked by it. Safe for threads; loads no TensorFlow.
"""

from __future__ import annotations

__all__ = [
    "LifecycleError",
    "NotInitialisedError",
    "add_group",
    "check_against_world",
    "check_key_clashes",
    "close_world",
    "current_world",
    "defined_groups",
    "group_ranks",
    "is_open",
    "open_world",
    "remove_group",
]

import threading
from collections.abc import Callable, Iterable, Mapping

from graph_passes.lower import group_keys
from hccl_fusion.errors import HcclFusionError, StrategyError, summarise
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime.world import World

Agreement = Callable[[str, tuple[int, ...]], None]
"""Raises unless all members define a group alike; called with the group's name and its ranks."""


class LifecycleError(HcclFusionError):
    """The ranks cannot be started, or something is called at the wrong time."""


class NotInitialisedError(LifecycleError, ValueError):
    """Something needs the world before `init()`; a ValueError too, since scripts written for HCCL catch that."""


class _State:
    """Every access holds the lock, except for calls of `agreement`, which wait for other ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: World | None = None
        self.agreement: Agreement | None = None
        self.groups: dict[str, tuple[int, ...]] = {}
        # TensorFlow keeps the members of a group key until the process ends.
        self.used: dict[str, tuple[int, ...]] = {}


_state = _State()


def is_open() -> bool:
    """Whether the world is known."""
    return _state.world is not None


def current_world(function: str) -> World:
    """Returns the world; `function` is what the error says was called.

    Raises:
        NotInitialisedError: before `init` or after `shutdown`.
    """
    world = _state.world
    if world is None:
        raise NotInitialisedError(
            f"{function} was called before the ranks are initialised", remedy="hccl_fusion.init() first"
        )
    return world


def open_world(world: World, agreement: Agreement | None = None) -> None:
    """Makes the world known; groups that are created from now on are agreed on at once."""
    with _state.lock:
        _state.world = world
        _state.agreement = agreement
        _state.used.update(_state.groups)


def close_world() -> None:
    """Forgets the world and all groups."""
    with _state.lock:
        _state.world = None
        _state.agreement = None
        _state.groups.clear()


def defined_groups() -> dict[str, tuple[int, ...]]:
    """The groups that were created, without the world."""
    with _state.lock:
        return dict(_state.groups)


def group_ranks(group: str, function: str) -> tuple[int, ...]:
    """Returns the world ranks of a group, in the order of its ranks.

    Raises:
        NotInitialisedError: before `init`.
        StrategyError: there is no such group.
    """
    world = current_world(function)
    if group == DEFAULT_GROUP:
        return tuple(range(world.size))
    groups = defined_groups()
    if group not in groups:
        raise StrategyError(
            "there is no such group",
            where=function,
            found=repr(group),
            expected=summarise([repr(name) for name in (DEFAULT_GROUP, *sorted(groups))]),
            remedy=f"create_group({group!r}, …) first",
        )
    return groups[group]


def add_group(group: str, ranks: tuple[int, ...]) -> None:
    """Adds a group; with an open world it is checked, and agreed on with its other members.

    Raises:
        StrategyError: the group exists, does not fit the world, or clashes with another one.
    """
    with _state.lock:
        if group in _state.groups:
            raise StrategyError(
                f"the group {group!r} exists already",
                where="create_group",
                found=f"ranks {list(_state.groups[group])}",
                remedy=f"destroy_group({group!r}) first",
            )
        check_key_clashes([*_state.groups, group])
        world, agreement = _state.world, _state.agreement
        if world is not None:
            check_against_world(group, ranks, world)
            _check_reuse(group, ranks, _state.used)
    if agreement is not None:
        agreement(group, ranks)
    with _state.lock:
        _state.groups[group] = ranks
        if world is not None:
            _state.used[group] = ranks


def remove_group(group: str) -> None:
    """Removes a group.

    Raises:
        StrategyError: there is no such group.
    """
    with _state.lock:
        if _state.groups.pop(group, None) is None:
            raise StrategyError("there is no such group", where="destroy_group", found=repr(group))


def check_against_world(group: str, ranks: tuple[int, ...], world: World) -> None:
    """A group has ranks of the world only, and this rank is one of them.

    Raises:
        StrategyError: it is not so.
    """
    where = f"create_group({group!r}, …)"
    outside = [rank for rank in ranks if rank >= world.size]
    if outside:
        raise StrategyError(
            "a group has ranks that are not in the world",
            where=where,
            found=summarise([str(rank) for rank in outside]),
            expected=f"0 to {world.size - 1}",
        )
    if world.rank not in ranks:
        raise StrategyError(
            f"rank {world.rank} creates a group that it is not in",
            where=where,
            found=f"ranks {list(ranks)}",
            expected="calls on members of the group only",
            remedy="the call inside `if` on the ranks of the group",
        )


def check_key_clashes(groups: Iterable[str]) -> None:
    """Collective keys are made of names alone, so that all ranks have the same; two names may not share one.

    Raises:
        StrategyError: two groups have one key.
    """
    names: dict[int, str] = {}
    for group in sorted(set(groups)):
        key = group_keys([group])[group]
        if key in names:
            raise StrategyError(
                "two groups have the same collective key",
                found=f"{names[key]!r} and {group!r}",
                remedy="another name for one of them",
            )
        names[key] = group


def _check_reuse(group: str, ranks: tuple[int, ...], used: Mapping[str, tuple[int, ...]]) -> None:
    before = used.get(group, ranks)
    if before != ranks:
        raise StrategyError(
            f"the group {group!r} had other ranks before, and TensorFlow keeps them until the process ends",
            where="create_group",
            found=list(ranks),
            expected=list(before),
            remedy="another name",
        )
