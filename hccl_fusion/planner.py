"""Makes a plan: planned segments, divided by device and by dependence, with a reason for each gradient left alone."""

from __future__ import annotations

__all__ = ["PlanPass", "make_plan"]

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from graph_passes.divide import Division, PlannedPart, divide
from graph_passes.graph import Graph
from graph_passes.node_input import producer_name
from graph_passes.pipeline import GraphItem, PassResult, require
from graph_passes.sections import Gradient, GradientId, Part, Reason, Section, Single
from hccl_fusion.boundaries import Decision
from hccl_fusion.plan import DivisionNote, Plan, SectionPlan, Segment
from hccl_fusion.result_log import log_segment_result

Decide = Callable[[Sequence[Section]], Sequence[Decision]]
"""Sections to planned segments: a strategy, a plan file or a tuner."""


@dataclass(frozen=True)
class PlanPass:
    """The pass between index and fuse: asks `decide` and hands the parts on; `plan_of` keeps the plan for people."""

    decide: Decide
    receive: Callable[[Plan], None]
    name: ClassVar[str] = "plan"

    def requires(self, item: GraphItem) -> None:
        """The sections are known."""
        require(item.sections is not None, self.name, "the sections are not known", "running index before it")

    def run(self, item: GraphItem) -> PassResult:
        """Sets `parts` and `singles`."""
        plan = make_plan(item, self.decide)
        self.receive(plan)
        segments = sum(len(section.segments) for section in plan.sections)
        note = f"{segments} segments in {len(plan.sections)} sections"
        return PassResult(replace(item, parts=plan.parts, singles=plan.singles), notes=(note,))

    def ensures(self, item: GraphItem) -> None:
        """No gradient is in two parts."""
        names = [name for part in item.parts or () for name in part.gradients]
        require(len(set(names)) == len(names), self.name, "a gradient is in two parts", "a bug report")


def make_plan(item: GraphItem, decide: Decide) -> Plan:
    """The plan of an item whose sections are known.

    Raises:
        StrategyError: the strategy does not fit the sections.
    """
    decisions = decide(item.sections or ())
    kept = _kept_reasons(item)
    fused_chains = {d.chain for d in decisions if len(d.boundaries) < len(d.section.gradients)}
    drafts = [_draft(decision, kept, decision.chain in fused_chains) for decision in decisions]
    _divide_drafts(item, drafts)
    sections = tuple(_section_plan(draft) for draft in drafts)
    singles = [*item.singles, *(single for draft in drafts for single in _singles(draft, kept))]
    parts = _chained(part for draft in drafts for part in _parts(draft))
    for section in sections:
        if section.fusion == 1 and section.strategy != "none":
            log_segment_result(section.last_indices)
    return Plan(sections, tuple(singles), parts)


@dataclass
class _Piece:
    """Indices of one reduction of a section; `cut_at` is where its planned segment was divided before it, if it was."""

    indices: tuple[int, ...]
    planned: int
    cut_at: int | None = None


@dataclass
class _Draft:
    """A section on its way from planned segments to parts in force.

    `is_fused` is False where every segment of its chain has one gradient: then nothing is fused and nothing is chained.
    """

    decision: Decision
    pieces: list[_Piece]
    fetched: frozenset[int]
    is_fused: bool
    divisions: list[DivisionNote] = field(default_factory=list)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        return self.decision.section.gradients


def _kept_reasons(item: GraphItem) -> dict[str, Reason]:
    """Nodes of the graph itself that must not be fused, from the item's keep and fetch lists."""
    kept = {producer_name(name): Reason.KEPT for name in item.keep}
    kept.update({producer_name(name): Reason.FETCHED for name in item.fetch})
    return kept


def _draft(decision: Decision, kept: dict[str, Reason], is_fused: bool) -> _Draft:
    gradients = decision.section.gradients
    fetched = frozenset(i for i, g in enumerate(gradients) if not g.graph and g.name in kept)
    pieces = []
    for planned, (start, stop) in enumerate(decision.segments):
        by_device: dict[str, list[int]] = {}
        for index in range(start, stop):
            if index not in fetched:
                by_device.setdefault(gradients[index].device, []).append(index)
        pieces += [_Piece(tuple(indices), planned) for indices in by_device.values()]
    return _Draft(decision, pieces, fetched, is_fused)


def _divide_drafts(item: GraphItem, drafts: Sequence[_Draft]) -> None:
    """Replaces pieces by what they must be divided into, graph by graph."""
    for graph, order in zip(item.graphs or (), item.orders or ()):
        here = [d for d in drafts if d.is_fused and d.decision.section.key.graph == graph.label]
        while _divide_once(graph, order, here):
            for draft in here:
                _divide_at_cuts(draft)


def _divide_once(graph: Graph, order: Sequence[int], drafts: Sequence[_Draft]) -> bool:
    """True where a piece had to be divided."""
    pieces = [(draft, piece) for draft in drafts for piece in draft.pieces]
    if not pieces:
        return False
    planned = [
        PlannedPart(tuple(draft.gradients[i].node for i in piece.indices), draft.decision.chain)
        for draft, piece in pieces
    ]
    in_force, divisions = divide(graph, order, planned)
    if divisions:
        _apply_divisions(graph, drafts, pieces, in_force, divisions)
    return bool(divisions)


def _divide_at_cuts(draft: _Draft) -> None:
    """A segment is a run of indices: where it is divided on one device, it is divided on the others too."""
    cuts = sorted({piece.cut_at for piece in draft.pieces if piece.cut_at is not None})
    divided = []
    for piece in draft.pieces:
        runs = itertools.groupby(piece.indices, lambda index: bisect.bisect_right(cuts, index))
        for number, (passed, indices) in enumerate(runs):
            divided.append(_Piece(tuple(indices), piece.planned, cuts[passed - 1] if number else piece.cut_at))
    draft.pieces = divided


def _apply_divisions(
    graph: Graph,
    drafts: Sequence[_Draft],
    pieces: Sequence[tuple[_Draft, _Piece]],
    in_force: Sequence[Sequence[tuple[int, ...]]],
    divisions: Sequence[Division],
) -> None:
    why = {division.at: division for division in divisions}
    for draft in drafts:
        draft.pieces = []
    for (draft, piece), members in zip(pieces, in_force):
        index_of = {draft.gradients[i].node: i for i in piece.indices}
        for number, nodes in enumerate(members):
            indices = tuple(index_of[node] for node in nodes)
            draft.pieces.append(_Piece(indices, piece.planned, indices[0] if number else piece.cut_at))
            if number:
                draft.divisions.append(_division_note(graph, indices[0], why[nodes[0]]))


def _division_note(graph: Graph, index: int, division: Division) -> DivisionNote:
    at, on = graph.names[division.at], graph.names[division.on]
    text = f"{at} depends on the reduced {on}"
    if division.by_chain:
        text = f"{at} depends on a segment that the chain puts after {on}"
    if division.through:
        text += f" through the segment of {', '.join(graph.names[n] for n in division.through[:3])}"
    return DivisionNote(index, on, text)


def _segments(draft: _Draft) -> tuple[Segment, ...]:
    """The segments in force: the planned ranges, cut where a piece was cut off."""
    cuts = {piece.cut_at for piece in draft.pieces if piece.cut_at is not None}
    starts = sorted({start for start, _ in draft.decision.segments} | cuts)
    stops = [*starts[1:], len(draft.gradients)]
    pieces = sorted((piece.indices for piece in draft.pieces), key=lambda indices: indices[0])
    return tuple(
        Segment(number, start, stop, tuple(p for p in pieces if start <= p[0] < stop))
        for number, (start, stop) in enumerate(zip(starts, stops))
    )


def _section_plan(draft: _Draft) -> SectionPlan:
    decision = draft.decision
    return SectionPlan(
        key=decision.section.key,
        fusion=decision.section.fusion,
        gradients=draft.gradients,
        strategy=decision.strategy,
        values=decision.values,
        boundaries=decision.boundaries,
        segments=_segments(draft),
        divisions=tuple(draft.divisions),
        notes=decision.notes,
    )


def _singles(draft: _Draft, kept: dict[str, Reason]) -> Iterable[Single]:
    """The gradients of a section that end up alone for a reason; one that its strategy puts alone has none."""
    for index in sorted(draft.fetched):
        yield Single(draft.gradients[index].id, kept[draft.gradients[index].name])
    if not draft.is_fused:
        reason = Reason.UNFUSED if draft.decision.strategy == "none" else Reason.ONE_PER_SEGMENT
        yield from (Single(g.id, reason) for i, g in enumerate(draft.gradients) if i not in draft.fetched)
        return
    for piece in draft.pieces:
        why = _alone_reason(draft, piece) if len(piece.indices) == 1 else None
        if why is not None:
            yield Single(draft.gradients[piece.indices[0]].id, why)


def _alone_reason(draft: _Draft, piece: _Piece) -> Reason | None:
    start, stop = draft.decision.segments[piece.planned]
    if stop - start == 1:
        return Reason.DTYPE if draft.decision.segment_sizes[piece.planned] > 1 else None
    gradient = draft.gradients[piece.indices[0]]
    siblings = [i for i in range(start, stop) if i not in draft.fetched and i != piece.indices[0]]
    if any(draft.gradients[i].device == gradient.device for i in siblings):
        return Reason.DEPENDENCE
    return Reason.DEVICE if siblings else Reason.ALONE


def _parts(draft: _Draft) -> Iterable[tuple[int, Part]]:
    """The parts of a section with the rank that orders them in their chain."""
    if not draft.is_fused:
        return
    decision = draft.decision
    is_global = decision.segment_numbers != tuple(range(len(decision.boundaries)))
    number_of = {part: segment.number for segment in _segments(draft) for part in segment.parts}
    for piece in draft.pieces:
        number = decision.segment_numbers[piece.planned] if is_global else number_of[piece.indices]
        members = [draft.gradients[i] for i in piece.indices]
        names: tuple[GradientId, ...] = tuple(member.id for member in members)
        yield members[0].rank, Part(decision.section.key, number, names, decision.chain)


def _chained(parts: Iterable[tuple[int, Part]]) -> tuple[Part, ...]:
    return tuple(part for _, part in sorted(parts, key=lambda entry: (entry[1].chain, entry[0])))
