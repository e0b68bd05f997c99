"""The strategies that a script has registered for its groups, and HCCL's two setters.

The registry is per process and safe for threads. The first list of a kind stays until it is reset, as
in HCCL; what HCCL leaves unsaid (a second list, a list that its own check would refuse) is a warning.
The rules: docs/segmentation.md.
"""

from __future__ import annotations

__all__ = [
    "DEFAULT_GROUP",
    "RecordedCall",
    "check_recorded_groups",
    "hccl_accepts_sizes",
    "nearest_accepted_sizes",
    "recorded_calls",
    "registered_idx",
    "registered_strategy",
    "reset_split_strategy",
    "set_membership_check",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "size_list_advice",
    "stale_index_warning",
]

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from hccl_fusion.errors import StrategyError, StrategyWarning, summarise
from hccl_fusion.strategy import Number, Strategy, StrategyKind, check_group, format_list, left_to_right_sum

DEFAULT_GROUP = "hccl_world_group"
"""The group of all ranks."""

_SETTERS = {
    StrategyKind.IDX: "set_split_strategy_by_idx",
    StrategyKind.SIZE: "set_split_strategy_by_size",
}
_FLOAT32_TOLERANCE = np.float32(1e-6)
_MAX_PLACES = 5  # one unit of the fifth decimal is above a float32 step near 100, so a move is felt
_MAX_MOVES = 3


@dataclass(frozen=True)
class RecordedCall:
    """A setter's call that no membership check has seen yet."""

    function: str
    group: str


class _Registry:
    """What the setters have stored. Every access holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.strategies: dict[tuple[str, StrategyKind], Strategy] = {}
        self.recorded: list[RecordedCall] = []
        self.membership_check: Callable[[str], None] | None = None


_registry = _Registry()


def set_split_strategy_by_idx(idxList: Any, group: str = DEFAULT_GROUP) -> None:
    """Registers an index list for a group: the last gradient index of every segment.

    Args:
        idxList: List, tuple or 1-d numpy array of integers, strictly ascending, at most 8. The last
            one is the number of gradients less one, which can be checked only against a graph.
        group: Name of the group.

    Raises:
        StrategyError: an illegal group or list, or the caller's rank is not in the group.

    Warns:
        StrategyWarning: a different index list was registered for the group before; that one stays.
    """
    name = check_group(group)
    _register(name, Strategy(StrategyKind.IDX, idxList))


def set_split_strategy_by_size(dataSizeList: Any, group: str = DEFAULT_GROUP) -> None:
    """Registers a size list for a group: the share of the gradient bytes of every segment, in percent.

    Args:
        dataSizeList: List, tuple or 1-d numpy array of numbers that add to 100, at most 8.
        group: Name of the group.

    Raises:
        StrategyError: an illegal group or list, or the caller's rank is not in the group.

    Warns:
        StrategyWarning: a different size list was registered for the group before; that one stays. Or
            HCCL's own sum check would refuse the list.
    """
    name = check_group(group)
    strategy = Strategy(StrategyKind.SIZE, dataSizeList)
    advice = size_list_advice(strategy.values)
    if _register(name, strategy) and advice:
        warnings.warn(advice, StrategyWarning, stacklevel=2)


def reset_split_strategy(group: str | None = None) -> None:
    """Forgets what is registered for a group, or for all groups.

    Raises:
        StrategyError: an illegal group name.
    """
    name = None if group is None else check_group(group)
    with _registry.lock:
        for key in [key for key in _registry.strategies if name in (None, key[0])]:
            del _registry.strategies[key]
        _registry.recorded = [call for call in _registry.recorded if name not in (None, call.group)]


def registered_strategy(group: str = DEFAULT_GROUP) -> Strategy:
    """Returns what is in force for a group: by size before by index before the default."""
    with _registry.lock:
        for kind in (StrategyKind.SIZE, StrategyKind.IDX):
            strategy = _registry.strategies.get((group, kind))
            if strategy is not None:
                return strategy
    return Strategy(StrategyKind.DEFAULT)


def registered_idx(group: str = DEFAULT_GROUP) -> tuple[int, ...] | None:
    """Returns the index list of a group, in force or not, or None."""
    with _registry.lock:
        strategy = _registry.strategies.get((group, StrategyKind.IDX))
    return None if strategy is None else tuple(int(value) for value in strategy.values)


def stale_index_warning(group: str, counts: Sequence[int]) -> None:
    """Warns when a size list wins over an index list that fits no section.

    HCCL looks at the index list first, even where a size list wins, and then refuses the graph.

    Args:
        group: Name of the group.
        counts: Number of gradients of every section of the group with two or more.

    Warns:
        StrategyWarning: both lists are registered and the last index is `count - 1` of no section.
    """
    indices = registered_idx(group)
    if indices is None or registered_strategy(group).kind is not StrategyKind.SIZE or not counts:
        return
    if indices[-1] + 1 not in counts:
        expected = " or ".join(str(count - 1) for count in sorted(set(counts)))
        warnings.warn(
            f"group {group}: the index list {format_list(indices)} fits no section, although the size list "
            f"is in force: HCCL would refuse the graph, expected {expected} at its end; "
            f"try reset_split_strategy({group!r}) and then only the size list",
            StrategyWarning,
            stacklevel=2,
        )


def set_membership_check(check: Callable[[str], None] | None) -> None:
    """Installs what the setters ask whether this rank is in a group; None removes it.

    Args:
        check: Raises `StrategyError` when the rank is not in the group. Without one the calls are
            recorded for `check_recorded_groups`.
    """
    with _registry.lock:
        _registry.membership_check = check


def recorded_calls() -> tuple[RecordedCall, ...]:
    """Returns the calls that no membership check has seen yet, in their order."""
    with _registry.lock:
        return tuple(_registry.recorded)


def check_recorded_groups(is_member: Callable[[str], bool]) -> None:
    """Checks the calls that came before the runtime was initialised, and forgets those that pass.

    Args:
        is_member: Whether this rank is in the group of that name.

    Raises:
        StrategyError: names the calls whose group this rank is not in.
    """
    calls = recorded_calls()
    refused = [call for call in calls if not is_member(call.group)]  # outside the lock, as in _register
    passed = set(calls).difference(refused)
    with _registry.lock:
        _registry.recorded = [call for call in _registry.recorded if call not in passed]
    if refused:
        raise StrategyError(
            "a split strategy was set for a group that this rank is not in",
            found=summarise([f"{call.function}(..., group={call.group!r})" for call in refused]),
            expected="calls on members of the group only",
            remedy="the call inside `if` on the ranks of the group",
        )


def size_list_advice(values: Sequence[Number]) -> str | None:
    """Returns what to tell the user where HCCL's own check would refuse a legal size list, else None."""
    if hccl_accepts_sizes(values):
        return None
    return (
        f"HCCL would refuse the size list {format_list(values)}: its sum in double precision is "
        f"{left_to_right_sum(values)!r} and in float32 {float(_float32_sum(values)):.9g}, and both must be "
        f"100; the nearest list that it accepts is {format_list(nearest_accepted_sizes(values))}"
    )


def hccl_accepts_sizes(values: Sequence[Number]) -> bool:
    """Tells whether HCCL's own sum check takes a list of percentages.

    Source of the rule: docs/segmentation.md. The plain double sum is exactly 100, as Python up to 3.11
    computes it, and the running float32 sum is within 1e-6 of 100.
    """
    in_double = left_to_right_sum(values) == 100
    return in_double and bool(abs(_float32_sum(values) - np.float32(100)) <= _FLOAT32_TOLERANCE)


def nearest_accepted_sizes(values: Sequence[Number]) -> tuple[Number, ...]:
    """Returns the nearest list that HCCL's own sum check takes.

    Nearest is the smallest total change among lists with as many decimals as the longest element (five
    at most) that add to 100, and among those the one whose elements change least in proportion. Where
    three moves of one unit find nothing, one decimal fewer is tried; whole numbers are always taken.

    Args:
        values: A legal size list.
    """
    exact = [Decimal(repr(value)) for value in values]
    written = max(-int(value.normalize().as_tuple().exponent) for value in exact)
    for places in range(max(0, min(written, _MAX_PLACES)), 0, -1):
        start = _whole_units(exact, places)
        for candidates in _by_distance(start):
            accepted = [units for units in candidates if hccl_accepts_sizes(_from_units(units, places))]
            if accepted:
                return _from_units(min(accepted, key=lambda units: _relative_change(start, units)), places)
    return _from_units(_whole_units(exact, 0), 0)


def _register(group: str, strategy: Strategy) -> bool:
    """Stores a strategy; returns False where an earlier one of its kind stays."""
    function = _SETTERS[strategy.kind]
    with _registry.lock:
        check = _registry.membership_check
    if check is not None:
        check(group)  # outside the lock: it may ask the runtime, which may ask the registry
    with _registry.lock:
        first = _registry.strategies.setdefault((group, strategy.kind), strategy)
        call = RecordedCall(function, group)
        if check is None and call not in _registry.recorded:
            _registry.recorded.append(call)
    if first.values != strategy.values:
        warnings.warn(
            f"{function}: group {group} keeps its first list {format_list(first.values)}, and "
            f"{format_list(strategy.values)} is dropped; try reset_split_strategy({group!r}) first",
            StrategyWarning,
            stacklevel=3,
        )
    return first is strategy


def _float32_sum(values: Iterable[Number]) -> np.float32:
    total: np.float32 = np.float32(0)
    for value in values:
        total = total + np.float32(value)
    return total


def _whole_units(exact: Sequence[Decimal], places: int) -> tuple[int, ...]:
    """Rounds percentages to units of the last place; the largest remainders make the total exact."""
    scaled = [value.scaleb(places) for value in exact]
    units = [int(value) for value in scaled]
    missing = 100 * 10**places - sum(units)
    order = sorted(range(len(units)), key=lambda index: units[index] - scaled[index])
    for index in order[:missing]:
        units[index] += 1
    return tuple(units)


def _by_distance(start: tuple[int, ...]) -> Iterable[list[tuple[int, ...]]]:
    """Yields the lists that lie 0, 1, 2, ... moves of one unit from one element to another away."""
    seen = {start}
    level = [start]
    for _ in range(_MAX_MOVES):
        yield level
        moved = {move for units in level for move in _moves(units)} - seen
        seen |= moved
        level = sorted(moved)
    yield level


def _moves(units: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    for source, available in enumerate(units):
        for target in range(len(units)):
            if source != target and available:
                moved = list(units)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _relative_change(start: tuple[int, ...], units: tuple[int, ...]) -> float:
    return max(abs(after - before) / before if before else float(after) for before, after in zip(start, units))


def _from_units(units: tuple[int, ...], places: int) -> tuple[Number, ...]:
    decimals = [Decimal(unit).scaleb(-places) for unit in units]
    return tuple(int(value) if value == int(value) else float(value) for value in decimals)
