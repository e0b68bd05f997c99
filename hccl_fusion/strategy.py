"""Strategies: how the gradients of a section are to be cut into segments, and which lists are legal.

A `Strategy` is a validated value and knows nothing of graphs. The lists that scripts register for a
group live in `hccl_fusion.registry`; the arithmetic that turns a strategy into boundaries lives in
`hccl_fusion.segmentation`. The rules and how they differ from HCCL's: docs/segmentation.md.
"""

from __future__ import annotations

__all__ = [
    "MAX_INDEX",
    "MAX_SEGMENTS",
    "Strategy",
    "StrategyKind",
    "check_group",
    "check_idx_list",
    "check_index_list",
    "check_size_list",
    "format_list",
    "left_to_right_sum",
]

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, Union

import numpy as np

from hccl_fusion.errors import StrategyError

MAX_SEGMENTS = 8
"""Most segments that one list may ask for."""

MAX_INDEX = 2**32 - 1
"""Largest gradient index that HCCL can store."""

_MAX_GROUP_BYTES = 127
_SUM_TOLERANCE = 1e-9
_BYTES_PER_UNIT = {"": 1, "b": 1}
_BYTES_PER_UNIT.update({f"{letter}b": 1000**power for power, letter in enumerate("kmg", 1)})
_BYTES_PER_UNIT.update({f"{letter}ib": 1024**power for power, letter in enumerate("kmg", 1)})

Number = Union[int, float]
"""One element of a strategy's list: an index, a percentage, a number of bytes or of segments."""


class StrategyKind(Enum):
    """What decides the segments of a section."""

    DEFAULT = "default"
    IDX = "idx"
    SIZE = "size"
    MAX_BYTES = "max-bytes"
    SEGMENTS = "segments"
    SINGLE = "single"
    NONE = "none"


@dataclass(frozen=True)
class Strategy:
    """One legal strategy.

    Attributes:
        kind: What decides the segments.
        values: IDX: the last gradient index of each segment, ascending. SIZE: each segment's share of
            the bytes in percent. MAX_BYTES: one number, bytes. SEGMENTS: one number, how many equal
            parts. Other kinds: empty. Any sequence of numbers is taken and kept as a tuple.

    Raises:
        StrategyError: the values are not legal for the kind.
    """

    kind: StrategyKind
    values: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _checked_values(self.kind, self.values))

    def __str__(self) -> str:
        numbers = ",".join(str(value) for value in self.values)
        return f"{self.kind.value} {numbers}".rstrip()

    @classmethod
    def parse_idx(cls, text: str) -> Strategy:
        """Reads a comma-separated list of last gradient indices.

        >>> Strategy.parse_idx("20,100,159").values
        (20, 100, 159)
        """
        return cls(StrategyKind.IDX, tuple(_parse_numbers(text, "index list", r"[0-9]+", "20,100,159")))

    @classmethod
    def parse_size(cls, text: str) -> Strategy:
        """Reads a comma-separated list of percentages, which must add to 100.

        Where the decimals as typed add to exactly 100 the doubles do so within 1e-12, and the sum rule
        admits 1e-9: so a list that is right on paper is never refused for its rounding.

        >>> Strategy.parse_size("96.54,3.46").values
        (96.54, 3.46)
        """
        pattern = r"[0-9]+(\.[0-9]*)?|\.[0-9]+"
        return cls(StrategyKind.SIZE, tuple(_parse_numbers(text, "size list", pattern, "60,20,20")))

    @classmethod
    def parse_max_bytes(cls, text: str) -> Strategy:
        """Reads a number of bytes with B, KB, MB, GB (powers of 1000) or KiB, MiB, GiB (of 1024).

        Upper and lower case are the same; a number without a unit is bytes.

        >>> Strategy.parse_max_bytes("25MiB").values
        (26214400,)
        """
        match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
        unit = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
        if match and unit:
            size = Fraction(match[1]) * unit
            if size.denominator == 1:
                return cls(StrategyKind.MAX_BYTES, (int(size),))
        expected = "a whole number of bytes such as 25MiB (B, KB, KiB, MB, MiB, GB, GiB)"
        raise StrategyError("the segment limit is no byte count", found=_shown(text), expected=expected)


def check_group(group: object) -> str:
    """Returns the group's name, or raises.

    Source of the rule: HCCL's limit of 128 bytes with the terminator (docs/segmentation.md). HCCL's
    Python counts characters and its C side bytes; bytes are what counts.

    Raises:
        StrategyError: not a str, or not 1 to 127 bytes in UTF-8.
    """
    found = _shown(group)
    if isinstance(group, str):
        with suppress(UnicodeEncodeError):  # a lone surrogate
            size = len(group.encode("utf-8"))
            if 1 <= size <= _MAX_GROUP_BYTES:
                return group
            found = f"{size} bytes"
    expected = f"a str of 1 to {_MAX_GROUP_BYTES} bytes in UTF-8"
    raise StrategyError("the group's name is illegal", found=found, expected=expected)


def check_idx_list(values: object, *, most: int | None = MAX_SEGMENTS) -> tuple[int, ...]:
    """Returns an index list as a tuple of int, or raises.

    Args:
        values: A list, a tuple or a 1-d numpy array.
        most: How many segments are allowed; None for any number.

    Raises:
        StrategyError: not a list, empty, too long, an element that is no integer (bool included) or
            not in 0 to 2^32-1, or not strictly ascending: the first offending pair is named.
    """
    numbers: tuple[int, ...] = _elements(values, "index list", most)
    for position, value in enumerate(numbers):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INDEX:
            raise StrategyError(
                "an element of the index list is no gradient index",
                where=f"position {position}",
                found=_shown(value),
                expected=f"an integer from 0 to {MAX_INDEX}",
            )
    for position, (left, right) in enumerate(zip(numbers, numbers[1:])):
        if left >= right:
            ordered = sorted(numbers)
            sortable = len(set(ordered)) == len(ordered)
            raise StrategyError(
                "the index list must be strictly ascending",
                where=f"positions {position} and {position + 1}",
                found=f"{left} before {right} in {format_list(numbers)}",
                remedy=format_list(ordered) if sortable else "the list without repeats",
            )
    return numbers


def check_size_list(values: object, *, most: int | None = MAX_SEGMENTS) -> tuple[Number, ...]:
    """Returns a size list as a tuple of int and float percentages, or raises.

    A numpy float becomes the double with the same shortest decimals (float32 33.3 becomes 33.3).

    Args:
        values: A list, a tuple or a 1-d numpy array.
        most: How many segments are allowed; None for any number.

    Raises:
        StrategyError: not a list, empty, too long, an element that is no number (bool included) or not
            in 0 to 100, or a total other than 100: neither do the decimals as written add to
            exactly 100 nor is their sum in double precision within 1e-9 of it.
    """
    numbers: tuple[Number, ...] = _elements(values, "size list", most)
    for position, value in enumerate(numbers):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise StrategyError(
                "an element of the size list is no percentage",
                where=f"position {position}",
                found=_shown(value),
                expected="a number from 0 to 100",
            )
    total = sum(Fraction(repr(value)) for value in numbers)
    if total != 100 and abs(left_to_right_sum(numbers) - 100.0) > _SUM_TOLERANCE:
        raise StrategyError(
            "the size list must add to 100",
            found=f"{float(total):.15g} from {format_list(numbers)}",
            expected="percentages that add to exactly 100",
        )
    return numbers


def left_to_right_sum(values: Iterable[Number]) -> float:
    """Adds in double precision from left to right, as `sum` did before CPython 3.12 compensated it."""
    total = 0.0
    for value in values:
        total += value
    return total


def check_index_list(values: Sequence[int], count: int, section_label: str) -> None:
    """Checks that an index list ends at a section's last gradient.

    Source of the rule: docs/segmentation.md, by index; without it HCCL refuses to build the graph.

    Args:
        values: A legal index list.
        count: How many gradients the section has.
        section_label: The section as the message is to call it.

    Raises:
        StrategyError: the last element is not `count - 1`; the message shows the corrected list.
    """
    last = count - 1
    if values[-1] == last:
        return
    inside = [value for value in values if value < last]
    if len(inside) == len(values):
        inside.pop()
    raise StrategyError(
        "the index list does not end at the section's last gradient",
        where=f"section {section_label} with {count} gradients",
        found=format_list(values),
        expected=f"the last index to be {last}",
        remedy=format_list([*inside, last]),
    )


def format_list(values: Iterable[Number]) -> str:
    """Writes a list as a user would type it: `[20,100,159]`."""
    return f"[{','.join(str(value) for value in values)}]"


def _checked_values(kind: StrategyKind, values: object) -> tuple[Number, ...]:
    if not isinstance(kind, StrategyKind):
        raise StrategyError("the strategy's kind is unknown", found=_shown(kind), expected="a StrategyKind")
    if kind is StrategyKind.IDX:
        return check_idx_list(values)
    if kind is StrategyKind.SIZE:
        return check_size_list(values)
    numbers = tuple(_plain(value) for value in _sequence(values, "list of values"))
    takes_number = kind in (StrategyKind.MAX_BYTES, StrategyKind.SEGMENTS)
    if takes_number and (len(numbers) != 1 or type(numbers[0]) is not int or numbers[0] < 1):
        expected = "one integer, 1 or more"
        raise StrategyError(f"strategy {kind.value} takes one number", found=_shown(numbers), expected=expected)
    if numbers and not takes_number:
        raise StrategyError(f"strategy {kind.value} takes no values", found=_shown(numbers))
    return numbers


def _sequence(values: object, name: str) -> Sequence[Any]:
    expected = "a list, a tuple or a 1-d numpy array of integers or floats"
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            found = f"a numpy array of shape {values.shape} and dtype {values.dtype}"
            raise StrategyError(f"the {name} is no list", found=found, expected=expected)
        return list(values)
    if not isinstance(values, (list, tuple)):
        raise StrategyError(f"the {name} is no list", found=_shown(values), expected=expected)
    return values


def _elements(values: object, name: str, most: int | None) -> tuple[Any, ...]:
    elements = tuple(_plain(value) for value in _sequence(values, name))
    if not elements:
        raise StrategyError(f"the {name} is empty", expected="one element a segment")
    if most is not None and len(elements) > most:
        expected = f"at most {most}"
        raise StrategyError(f"the {name} has too many segments", found=len(elements), expected=expected)
    return elements


def _plain(value: Any) -> Any:
    """Turns a numpy scalar into the Python number with the same decimals; leaves all else alone."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(str(value))
    return value


def _parse_numbers(text: str, name: str, pattern: str, example: str) -> list[Number]:
    numbers: list[Number] = []
    for position, part in enumerate(text.split(",")):
        word = part.strip()
        if len(word) > 40 or not re.fullmatch(pattern, word):
            raise StrategyError(
                f"the {name} is malformed", where=f"position {position}", found=repr(word), remedy=example
            )
        numbers.append(float(word) if "." in word else int(word))
    return numbers


def _shown(value: object) -> str:
    """Shortens for a message; integers of any length can be shown in base 16 only."""
    text = hex(value) if isinstance(value, int) and value.bit_length() > 200 else repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
