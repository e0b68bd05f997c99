"""Reads a plan file and fits it to a graph by gradient names; what changed since is reported as drift."""

from __future__ import annotations

__all__ = ["PlanFile", "read_plan"]

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.messages import dtype_name
from graph_passes.sections import Section
from hccl_fusion.boundaries import Decision
from hccl_fusion.errors import PlanError, summarise
from hccl_fusion.plan_json import SCHEMA_VERSION

_SectionName = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class _PlannedSection:
    """One section of a plan file: its gradients with their bytes, and its segments, inclusive."""

    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlanFile:
    """A plan file, anchored by gradient names."""

    path: str
    sections: dict[_SectionName, _PlannedSection]

    def decide(self, sections: Sequence[Section]) -> list[Decision]:
        """The plan's segments fitted to these sections; drift is in each decision's notes.

        A gradient that the plan does not know joins the segment of the one before it. A cut stays after the last
        gradient that the plan puts before it.

        Raises:
            PlanError: no section of the graph shares a gradient with the plan.
        """
        # Chains are numbered as a strategy numbers them: sections by fusion_id come first.
        in_order = sorted(sections, key=lambda section: section.takes_strategy)
        decisions = [self._decide(section, in_order.index(section)) for section in sections]
        if sections and not any(decision.strategy == "plan" for decision in decisions):
            raise PlanError(
                "the plan is of another graph",
                where=self.path,
                found=f"sections {summarise([str(name) for name in self.sections])}",
                expected=f"gradients of {summarise([str(section.key) for section in sections])}",
                remedy="a plan of this graph",
            )
        return decisions

    def _decide(self, section: Section, chain: int) -> Decision:
        key = section.key
        planned = self.sections.get((key.graph, key.group, dtype_name(key.dtype), key.reduction, key.fusion_id))
        names = [gradient.name for gradient in section.gradients]
        last = len(names) - 1
        known = set(planned.names) & set(names) if planned else set()
        if planned is None or not known:
            note = f"{self.path} has no gradient of section {key}: its gradients are left unfused"
            return Decision.local(section, "none", (), tuple(range(last + 1)), chain, (note,))
        boundaries = _fit(planned, names)
        notes = _drift(planned, section)
        return Decision.local(section, "plan", (), boundaries, chain, notes)


def _fit(planned: _PlannedSection, names: Sequence[str]) -> tuple[int, ...]:
    segment_of = {
        planned.names[index]: number
        for number, (first, last) in enumerate(planned.segments)
        for index in range(first, last + 1)
    }
    boundaries: list[int] = []
    for number in range(len(planned.segments) - 1):
        inside = [i for i, name in enumerate(names) if segment_of.get(name, len(planned.segments)) <= number]
        if inside and inside[-1] < len(names) - 1 and (not boundaries or inside[-1] > boundaries[-1]):
            boundaries.append(_with_unknown(inside[-1], names, segment_of))
    return (*dict.fromkeys(boundaries), len(names) - 1)


def _with_unknown(index: int, names: Sequence[str], segment_of: dict[str, int]) -> int:
    """Moves a cut behind the unknown gradients that follow it."""
    while index + 2 < len(names) and names[index + 1] not in segment_of:
        index += 1
    return index


def _drift(planned: _PlannedSection, section: Section) -> tuple[str, ...]:
    names = [gradient.name for gradient in section.gradients]
    before, now = dict(zip(planned.names, planned.sizes_bytes)), set(names)
    added = [name for name in names if name not in before]
    removed = [name for name in planned.names if name not in now]
    resized = [
        f"{g.name} {before[g.name]} -> {g.size_bytes} bytes"
        for g in section.gradients
        if g.name in before and before[g.name] != g.size_bytes
    ]
    common_now = [name for name in names if name in before]
    common_before = [name for name in planned.names if name in now]
    moved = [b for a, b in zip(common_before, common_now) if a != b]
    found = (("added", added), ("removed", removed), ("resized", resized), ("reordered", moved))
    return tuple(f"{len(entries)} gradients {what}: {summarise(entries)}" for what, entries in found if entries)


# ---------------------------------------------------------------------------------------------------- reading


def read_plan(path: str) -> PlanFile:
    """Reads a plan file.

    Raises:
        PlanError: the file is missing, no JSON, of another schema, or not a plan; the message says where.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except OSError as error:
        raise _error(path, "the plan file cannot be read", error.strerror) from error
    except UnicodeDecodeError as error:
        raise _error(path, "the plan file is no text", f"byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise _error(path, "the plan file is no JSON", str(error)) from error
    return _parse(path, document)


def _error(where: str, what: str, found: object) -> PlanError:
    return PlanError(
        what, where=where, found=found, expected="a file that `plan -o` wrote", remedy="making the plan again"
    )


def _parse(path: str, document: Any) -> PlanFile:
    version = document.get("schema_version") if isinstance(document, dict) else type(document)
    if type(version) is not int or version != SCHEMA_VERSION:
        shown = type(document).__name__ if version is type(document) else repr(version)[:80]
        raise _error(path, "the plan file has another schema", f"schema_version {shown}")
    entries = document.get("sections")
    if not isinstance(entries, list):
        raise _error(path, "the plan file has no sections", type(entries).__name__)
    sections = {}
    for number, entry in enumerate(entries):
        name, planned = _parse_section(f"{path}, section {number}", entry)
        if name in sections:
            raise _error(f"{path}, section {number}", "a section stands twice in the plan file", str(name))
        sections[name] = planned
    return PlanFile(path, sections)


def _field(where: str, entry: dict[str, Any], name: str, kind: type) -> Any:
    value = entry.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _error(where, f"key {name} of the plan file is missing or of the wrong type", repr(value)[:80])
    return value


def _parse_section(where: str, entry: Any) -> tuple[_SectionName, _PlannedSection]:
    if not isinstance(entry, dict):
        raise _error(where, "a section of the plan file is no object", type(entry).__name__)
    texts = [_field(where, entry, name, str) for name in ("graph", "group", "dtype", "reduction")]
    fusion_id = _field(where, entry, "fusion_id", int)
    names = _field(where, entry, "gradients", list)
    sizes = _field(where, entry, "bytes", list)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise _error(where, "the gradients of the plan file are not distinct names", summarise(list(map(str, names))))
    if len(sizes) != len(names) or not all(type(size) is int and size >= 0 for size in sizes):
        raise _error(where, "the bytes of the plan file are not one number a gradient", repr(sizes)[:80])
    segments = _parse_segments(where, _field(where, entry, "segments", list), len(names))
    name = (texts[0], texts[1], texts[2], texts[3], fusion_id)
    return name, _PlannedSection(tuple(names), tuple(sizes), segments)


def _parse_segments(where: str, entries: list[Any], count: int) -> tuple[tuple[int, int], ...]:
    following = 0
    segments = []
    for entry in entries:
        is_pair = isinstance(entry, list) and len(entry) == 2 and all(type(index) is int for index in entry)
        if not is_pair or entry[0] != following or not entry[0] <= entry[1] < count:
            raise _error(where, "the segments of the plan file do not follow one another", repr(entry)[:80])
        segments.append((entry[0], entry[1]))
        following = entry[1] + 1
    if following != count:
        raise _error(where, "the segments of the plan file do not cover its gradients", f"{following} of {count}")
    return tuple(segments)
