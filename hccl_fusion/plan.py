"""A plan: the segments of every section of a graph, and the reason for every gradient that is not fused.

The plan is the only thing that travels between deciding and rewriting: a strategy, a plan file or a tuner makes one,
and the rewriting passes take nothing else.
"""

from __future__ import annotations

__all__ = ["DivisionNote", "Plan", "SectionPlan", "Segment"]

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from graph_passes.messages import dtype_name
from graph_passes.sections import Gradient, GradientId, Part, Reason, SectionKey, Single


@dataclass(frozen=True)
class Segment:
    """Gradient indices start..stop-1 of a section.

    Attributes:
        number: of the segment, from 0.
        parts: the indices of each reduction: one tuple, or one a device where the members sit on several.
    """

    number: int
    start: int
    stop: int
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DivisionNote:
    """Why a segment was divided before gradient index `at`: it depends on the reduced gradient `on`."""

    at: int
    on: str
    text: str


@dataclass(frozen=True)
class SectionPlan:
    """The plan of one section.

    Attributes:
        gradients: in index order.
        strategy: what decided: default, idx, size, max-bytes, segments, single, none, plan, or fusion_id.
        values: the strategy's list.
        boundaries: inclusive last indices as the arithmetic gave them, collapsed.
        segments: what is in force after the safety divisions.
        divisions: why there are more segments than boundaries.
        notes: remarks of the segmentation.
    """

    key: SectionKey
    fusion: int
    gradients: tuple[Gradient, ...]
    strategy: str
    values: tuple[int | float, ...]
    boundaries: tuple[int, ...]
    segments: tuple[Segment, ...]
    divisions: tuple[DivisionNote, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def last_indices(self) -> tuple[int, ...]:
        """The boundary list in force, as `set_split_strategy_by_idx` takes it."""
        return tuple(segment.stop - 1 for segment in self.segments)

    def segment_bytes(self, segment: Segment) -> int:
        """Unpadded bytes of a segment."""
        return sum(g.size_bytes or 0 for g in self.gradients[segment.start : segment.stop])


@dataclass(frozen=True)
class Plan:
    """The plan of a graph.

    Attributes:
        sections: by section key.
        singles: every gradient that is reduced alone for a reason.
        parts: what the rewriting passes write, in chain order.
        notes: remarks that belong to no single section.
    """

    sections: tuple[SectionPlan, ...]
    singles: tuple[Single, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def reasons(self) -> dict[GradientId, Reason]:
        """The reason of each gradient that is reduced alone for one."""
        return {single.id: single.reason for single in self.singles}

    def placed(self) -> Iterator[tuple[SectionPlan, int, Gradient, Segment]]:
        """Every gradient of a section, with its index and segment."""
        for section in self.sections:
            for segment in section.segments:
                for index in range(segment.start, segment.stop):
                    yield section, index, section.gradients[index], segment

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash over all that must be equal on every rank: sections with names, shapes, types, segments; singles."""
        content: list[object] = [
            [
                list(section.key),
                [[g.name, dtype_name(g.dtype), list(g.shape or ())] for g in section.gradients],
                [[list(part) for part in segment.parts] for segment in section.segments],
            ]
            for section in self.sections
        ]
        in_sections = {gradient.id for section in self.sections for gradient in section.gradients}
        outside = [[str(one.id), one.reason.value] for one in self.singles if one.id not in in_sections]
        if outside:
            # A rank that reduces something alone which another one does not would wait for it for ever.
            content.append(outside)
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()
