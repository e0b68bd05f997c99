"""The arithmetic of gradient segmentation: byte sizes in, boundaries out.

A boundary list holds the inclusive last gradient index of every segment; inside the project segments
are half-open ranges, and this module is the one place that converts.

All arithmetic of by-size and default is IEEE float32 with one rounding per operation, since HCCL
computes so and a boundary may hang on the last bit. The rules, with their quirks: docs/segmentation.md.
"""

from __future__ import annotations

__all__ = [
    "boundaries_to_segments",
    "cap_boundaries",
    "collapse_boundaries",
    "equal_boundaries",
    "padded_bytes",
    "segment_boundaries",
    "segments_to_boundaries",
]

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Optional, Union

import numpy as np
from numpy.typing import NDArray

from hccl_fusion.errors import StrategyError
from hccl_fusion.strategy import (
    MAX_SEGMENTS,
    check_idx_list,
    check_index_list,
    check_size_list,
    format_list,
)

_Sizes = Union[Sequence[int], NDArray[np.integer]]
_Cap = Optional[np.float32]

_MATCH = np.float32(1e-6)  # two byte counts closer than this are equal
_FIRST_DEFAULT = np.float32(96.54)
_SECOND_DEFAULT = np.float32(100) - _FIRST_DEFAULT  # 3.4599991: not the float32 nearest to 3.46
_HUNDRED = np.float32(100)
_MIB = 2**20
_MAX_BUFFER_MIB = 2**31 - 1
_MAX_BYTES = 2**63 - 1


def segment_boundaries(
    sizes_bytes: _Sizes,
    strategy: str,
    values: Iterable[float] | NDArray[np.generic] = (),
    *,
    shape_mode: str = "known",
    buffer_mib: int = 200,
) -> list[int]:
    """Computes the boundaries of one section exactly as HCCL does.

    O(n) for the running sum and O(log n) a boundary. Source: docs/segmentation.md, "the arithmetic".

    Args:
        sizes_bytes: Bytes of each gradient in index order, as they are to be counted (see `padded_bytes`).
        strategy: "default", "size" or "idx".
        values: Percentages that add to 100 for "size"; last indices for "idx"; empty for "default".
        shape_mode: "known", or "unknown" for a graph with a node of unknown shape.
        buffer_mib: Communication buffer in MiB (HCCL_BUFFSIZE); counts in mode "unknown" only.

    Returns:
        The raw list: it may repeat a boundary and, by size, may end before the last index. See
        `collapse_boundaries`.

    Raises:
        StrategyError: no sizes, a size that is no whole number of bytes in 0 to 2^63-1, or an illegal
            strategy, list, mode or buffer.
    """
    sizes = _checked_sizes(sizes_bytes)
    if shape_mode not in ("known", "unknown"):
        raise StrategyError("no such shape mode", found=repr(shape_mode), expected='"known" or "unknown"')
    buffer_bytes = _checked_integer("communication buffer in MiB", buffer_mib, _MAX_BUFFER_MIB) * _MIB
    cap = np.float32(buffer_bytes - _MIB) if shape_mode == "unknown" else None
    numbers = values if isinstance(values, (list, tuple, np.ndarray)) else tuple(values)
    if strategy == "idx":
        indices = check_idx_list(numbers, most=None)
        check_index_list(indices, len(sizes), "of the given sizes")
        return list(indices)
    if strategy == "size":
        percentages = check_size_list(numbers, most=None)
        return _by_size(_running_sums(sizes), [np.float32(value) for value in percentages], cap)
    if strategy != "default":
        raise StrategyError("no such strategy", found=repr(strategy), expected='"default", "size" or "idx"')
    if len(numbers):
        raise StrategyError("strategy default takes no values", found=list(numbers))
    return _by_default(_running_sums(sizes), cap)


def equal_boundaries(sizes_bytes: _Sizes, segments: int) -> list[int]:
    """Cuts a section into equal parts by bytes: the by-size arithmetic with 100/K percent each.

    Args:
        sizes_bytes: As for `segment_boundaries`.
        segments: K, 1 or more. More than there are gradients gives repeats; so K above 8 is lowered to
            the number of gradients where it is larger, since the steps would only repeat.

    Returns:
        The raw list, as for `segment_boundaries`.

    Raises:
        StrategyError: illegal sizes, or `segments` is no integer of 1 or more.
    """
    sizes = _checked_sizes(sizes_bytes)
    wanted = _checked_integer("number of segments", segments, _MAX_BYTES)
    parts = min(wanted, max(len(sizes), MAX_SEGMENTS))
    return _by_size(_running_sums(sizes), repeat(np.float32(100 / parts), parts), None)


def cap_boundaries(sizes_bytes: _Sizes, max_bytes: int) -> list[int]:
    """Cuts a section so that no segment is larger than a limit, from the first index on.

    A segment ends before the gradient that would take it over the limit; a gradient that is larger
    than the limit by itself is a segment by itself. Exact integers. O(n).

    Args:
        sizes_bytes: As for `segment_boundaries`.
        max_bytes: The limit in bytes, 1 or more.

    Returns:
        Strictly ascending boundaries that end at the last index.

    Raises:
        StrategyError: illegal sizes, or `max_bytes` is no integer of 1 or more.
    """
    sizes = _checked_sizes(sizes_bytes)
    limit = _checked_integer("segment limit in bytes", max_bytes, _MAX_BYTES)
    boundaries: list[int] = []
    filled = sizes[0]
    for index, size in enumerate(sizes[1:]):
        if filled + size > limit:
            boundaries.append(index)
            filled = 0
        filled += size
    return [*boundaries, len(sizes) - 1]


def padded_bytes(size_bytes: int) -> int:
    """Returns the bytes that segmentation counts for a gradient of `size_bytes` bytes.

    Source: docs/segmentation.md, size of a gradient.

    >>> padded_bytes(4004)
    4064

    Raises:
        StrategyError: not a whole number of bytes, or negative.
    """
    (size,) = _checked_sizes([size_bytes])
    return 32 * (-(-size // 32)) + 32


def collapse_boundaries(raw: Iterable[int], count: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Drops the empty segments of a raw boundary list and makes it end at the last gradient.

    Args:
        raw: Boundaries as `segment_boundaries` gives them, each in 0 to `count - 1`.
        count: How many gradients the section has.

    Returns:
        The strictly ascending boundary list that ends at `count - 1`, and one note for every boundary
        that was dropped.

    Raises:
        StrategyError: a boundary outside 0 to `count - 1`, or `count` below 1.
    """
    _checked_integer("number of gradients", count, _MAX_BYTES)
    kept: list[int] = []
    notes: list[str] = []
    for position, boundary in enumerate(raw):
        if not 0 <= boundary < count:
            expected = f"an index from 0 to {count - 1}"
            raise StrategyError("a boundary is outside the section", found=boundary, expected=expected)
        if kept and boundary <= kept[-1]:
            relation = "repeats" if boundary == kept[-1] else "lies before"
            notes.append(f"boundary {boundary} at position {position} {relation} {kept[-1]}: dropped as empty")
        else:
            kept.append(boundary)
    if not kept or kept[-1] < count - 1:
        kept.append(count - 1)
    return tuple(kept), tuple(notes)


def boundaries_to_segments(boundaries: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Converts inclusive last indices to half-open ranges.

    >>> boundaries_to_segments([20, 100, 159])
    ((0, 21), (21, 101), (101, 160))

    Raises:
        StrategyError: the boundaries are not strictly ascending from 0 or more.
    """
    starts = [0, *(boundary + 1 for boundary in boundaries)]
    segments = tuple((start, boundary + 1) for start, boundary in zip(starts, boundaries))
    if any(stop <= start for start, stop in segments):
        raise StrategyError("boundaries must ascend strictly from 0 on", found=format_list(boundaries))
    return segments


def segments_to_boundaries(segments: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Converts half-open ranges to inclusive last indices.

    >>> segments_to_boundaries([(0, 21), (21, 101), (101, 160)])
    (20, 100, 159)

    Raises:
        StrategyError: the ranges do not follow each other from 0 without gap, or one is empty.
    """
    expected_start = 0
    for start, stop in segments:
        if start != expected_start or stop <= start:
            raise StrategyError(
                "segments must follow each other from 0, none empty",
                found=f"[{start},{stop})",
                expected=f"a range that starts at {expected_start}",
            )
        expected_start = stop
    return tuple(stop - 1 for _, stop in segments)


def _by_size(sums: NDArray[np.float32], percentages: Iterable[np.float32], cap: _Cap) -> list[int]:
    """One step a percentage; what a step leaves, which may be negative, is carried to the next."""
    boundaries: list[int] = []
    left = np.float32(0)
    for percentage in percentages:
        left = _step(sums, boundaries, percentage / _HUNDRED * sums[-1] + left, cap)
        if boundaries[-1] == len(sums) - 1:
            break
    return boundaries


def _by_default(sums: NDArray[np.float32], cap: _Cap) -> list[int]:
    """96.54 % and the rest; with known shapes the second boundary is simply the last index."""
    last = len(sums) - 1
    if cap is None:
        boundaries = [_search(sums, _FIRST_DEFAULT / _HUNDRED * sums[-1], lower=False)]
    else:
        boundaries = _by_size(sums, (_FIRST_DEFAULT, _SECOND_DEFAULT), cap)
    return boundaries if boundaries[-1] == last else [*boundaries, last]


def _step(sums: NDArray[np.float32], boundaries: list[int], wanted: np.float32, cap: _Cap) -> np.float32:
    """Appends the boundaries that cover `wanted` more bytes; returns the bytes left, or over if negative.

    Within a step all that follows depends on the last boundary alone. So a step that comes to a
    boundary for the second time would never end (HCCL's does not), and one that ends adds at most n.
    A step without end keeps its first boundary and drops the others.
    """
    last = len(sums) - 1
    before = sums[boundaries[-1]] if boundaries else np.float32(0)
    used: np.float32 = before
    remaining: np.float32 = wanted
    added: list[int] = []
    seen: set[int] = set()
    previous = boundaries[-1] if boundaries else -1
    while True:
        target = (remaining if cap is None else min(remaining, cap)) + used
        index = _search(sums, target, lower=cap is not None)
        if index <= previous:
            index += 1  # one past the match, not past the previous boundary: it may repeat or fall back
        added.append(index)
        used = sums[index]
        remaining = wanted + before - used
        if index == last or (sums[index + 1] - used) - remaining > _MATCH:
            break
        if index in seen:
            del added[1:]
            remaining = wanted + before - sums[added[0]]
            break
        seen.add(index)
        previous = index
    boundaries.extend(added)
    return remaining


def _search(sums: NDArray[np.float32], target: np.float32, *, lower: bool) -> int:
    """Finds the running sum nearest to a target, or with `lower` the one below it.

    Starts from the sum that the binary search probed last, which is not always the true lower bound.
    """
    low, high, middle = 0, len(sums) - 1, 0
    while low <= high:
        middle = (low + high) // 2
        value = sums[middle]
        if abs(value - target) < _MATCH:
            return middle
        if value > target:
            high = middle - 1
        else:
            low = middle + 1
    if middle == 0:
        return 0
    if lower:
        return middle if sums[middle] < target else middle - 1
    return middle - 1 if target - sums[middle - 1] <= sums[middle] - target else middle


def _running_sums(sizes: list[int]) -> NDArray[np.float32]:
    """Adds in float32 from left to right, one rounding an addition (numpy's accumulate does not pair)."""
    rounded = np.array(sizes, dtype=np.int64).astype(np.float32)
    return np.add.accumulate(rounded, dtype=np.float32)


def _checked_sizes(sizes_bytes: _Sizes) -> list[int]:
    values = sizes_bytes.tolist() if isinstance(sizes_bytes, np.ndarray) else list(sizes_bytes)
    if not values:
        raise StrategyError("there are no gradients to cut", expected="one size a gradient")
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= _MAX_BYTES:
            values[index] = _whole_bytes(value, index)
    return values


def _whole_bytes(value: object, index: int) -> int:
    """The slow way to a size: numpy integers and floats without a fraction are sizes too."""
    number: Any = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if is_number and 0 <= number <= _MAX_BYTES and number == int(number):
        return int(number)
    raise StrategyError(
        "a gradient's size is no number of bytes",
        where=f"gradient {index}",
        found=repr(value)[:60],
        expected=f"a whole number from 0 to {_MAX_BYTES}",
    )


def _checked_integer(name: str, value: object, most: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 1 <= value <= most:
        return int(value)
    raise StrategyError(f"the {name} is out of range", found=repr(value)[:60], expected=f"an integer from 1 to {most}")
