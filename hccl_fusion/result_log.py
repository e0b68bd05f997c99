"""The log line that tells how a section was cut: written here, and read back from an NPU host's log.

The documented recipe for finding the largest gradient index searches the log for `segment result`; so
the line is HCCL's to the last blank. Source: docs/segmentation.md, log line.
"""

from __future__ import annotations

__all__ = [
    "SegmentResult",
    "format_segment_result",
    "log_segment_result",
    "parse_segment_results",
]

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hccl_fusion.errors import HcclFusionError
from hccl_fusion.segmentation import boundaries_to_segments

_LOGGER = logging.getLogger("hccl_fusion")
_MARK = "segment result:"
_TAIL = re.compile(r"\s*segment num:\s*([0-9]{1,10}),\s*segment index list:((?:\s*\[[^\[\]]*\])+)\s*")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"\s*([0-9]{1,10})\s*,\s*([0-9]{1,10})\s*")
_EXPECTED = "segment result: segment num: 2, segment index list: [0,107] [108,159]"


@dataclass(frozen=True)
class SegmentResult:
    """One section's result as a log tells it.

    Attributes:
        boundaries: Inclusive last gradient index of each segment, strictly ascending.
        line_number: Where the line stands, from 1.
    """

    boundaries: tuple[int, ...]
    line_number: int


def format_segment_result(boundaries: Sequence[int]) -> str:
    """Writes the line: one blank after each bracket and one more at the end.

    >>> format_segment_result([107, 159])
    'gradient segment result: segment num: 2, segment index list: [0,107] [108,159]  '

    Raises:
        StrategyError: the boundaries are not strictly ascending from 0 on.
    """
    segments = boundaries_to_segments(boundaries)
    ranges = "".join(f"[{start},{stop - 1}] " for start, stop in segments)
    return f"gradient segment result: segment num: {len(segments)}, segment index list: {ranges} "


def log_segment_result(boundaries: Sequence[int]) -> None:
    """Logs the line at INFO on logger `hccl_fusion`.

    Raises:
        StrategyError: the boundaries are not strictly ascending from 0 on.
    """
    _LOGGER.info("%s", format_segment_result(boundaries))


def parse_segment_results(text_or_lines: str | Iterable[str]) -> tuple[SegmentResult, ...]:
    """Reads all such lines back from a log, whatever stands before them on their lines.

    Args:
        text_or_lines: The log as one text or line by line; blanks at the end of a line do not count.

    Returns:
        The results in the order of the log; lines without `segment result:` are passed over.

    Raises:
        HcclFusionError: such a line is malformed, its segments do not follow each other from 0, or
            their number is not the one it states; the line is named.
    """
    lines = text_or_lines.split("\n") if isinstance(text_or_lines, str) else text_or_lines
    return tuple(
        SegmentResult(_parse_result(line.partition(_MARK)[2], number), number)
        for number, line in enumerate(lines, 1)
        if _MARK in line
    )


def _parse_result(tail: str, line_number: int) -> tuple[int, ...]:
    where = f"line {line_number}"
    match = _TAIL.fullmatch(tail)
    if match is None:
        raise HcclFusionError("malformed segment result", where=where, found=tail[:120], expected=_EXPECTED)
    boundaries: list[int] = []
    for bracket in _BRACKET.findall(match[2]):
        ends = _RANGE.fullmatch(bracket)
        if ends is None:
            expected = "two indices such as [0,107]"
            raise HcclFusionError("malformed segment", where=where, found=f"[{bracket}]", expected=expected)
        start, last = int(ends[1]), int(ends[2])
        expected_start = boundaries[-1] + 1 if boundaries else 0
        if start != expected_start or last < start:
            expected = f"a segment that starts at {expected_start}"
            raise HcclFusionError("segments do not follow", where=where, found=f"[{bracket}]", expected=expected)
        boundaries.append(last)
    if len(boundaries) != int(match[1]):
        found = f"segment num: {match[1]}"
        raise HcclFusionError(
            "wrong number of segments", where=where, found=found, expected=f"{len(boundaries)} as listed"
        )
    return tuple(boundaries)
