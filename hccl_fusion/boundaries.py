"""From a strategy to the boundaries of each section: HCCL's precedence, and one index list over several types."""

from __future__ import annotations

__all__ = ["Decision", "PlanOptions", "decide"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graph_passes.sections import Gradient, Section
from hccl_fusion.errors import StrategyError
from hccl_fusion.segmentation import (
    boundaries_to_segments,
    cap_boundaries,
    collapse_boundaries,
    equal_boundaries,
    padded_bytes,
    segment_boundaries,
)
from hccl_fusion.strategy import Strategy, StrategyKind, check_index_list, format_list

StrategyOf = Callable[[str], Strategy]
"""The strategy in force for a group."""


@dataclass(frozen=True)
class PlanOptions:
    """How sizes are counted and which segmentation mode is used; docs/segmentation.md explains both.

    Attributes:
        shape_mode: "known", or "unknown" as HCCL does where the graph has unknown shapes.
        buffer_mib: HCCL's communication buffer in MiB, for unknown-shape mode.
        size_accounting: "padded" as HCCL counts, or "raw".
    """

    shape_mode: str = "known"
    buffer_mib: int = 200
    size_accounting: str = "padded"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("shape mode", self.shape_mode, ("known", "unknown")),
            ("size accounting", self.size_accounting, ("padded", "raw")),
        ):
            if value not in allowed:
                raise StrategyError(f"the {name} is unknown", found=repr(value), expected=" or ".join(allowed))

    def sizes(self, gradients: Sequence[Gradient]) -> list[int]:
        """The bytes that the segmentation counts, one number a gradient."""
        raw = [gradient.size_bytes or 0 for gradient in gradients]
        return raw if self.size_accounting == "raw" else [padded_bytes(size) for size in raw]


@dataclass(frozen=True)
class Decision:
    """The planned segments of one section, half-open.

    Attributes:
        segment_numbers: of each boundary's segment, counted over the whole chain.
        segment_sizes: gradients of each boundary's segment, those of other sections included.
        chain: equal in sections that one global index list cuts together.
    """

    section: Section
    strategy: str
    values: tuple[int | float, ...]
    boundaries: tuple[int, ...]
    segment_numbers: tuple[int, ...]
    segment_sizes: tuple[int, ...]
    chain: int
    notes: tuple[str, ...] = ()

    @classmethod
    def local(
        cls,
        section: Section,
        strategy: str,
        values: tuple[int | float, ...],
        boundaries: tuple[int, ...],
        chain: int,
        notes: tuple[str, ...] = (),
    ) -> Decision:
        """The decision of a section that is cut by itself."""
        numbers = tuple(range(len(boundaries)))
        sizes = tuple(stop - start for start, stop in boundaries_to_segments(boundaries))
        return cls(section, strategy, values, boundaries, numbers, sizes, chain, notes)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of gradient indices."""
        return boundaries_to_segments(self.boundaries)


def decide(sections: Sequence[Section], strategy_of: StrategyOf, options: PlanOptions) -> list[Decision]:
    """The planned segments of every section.

    Raises:
        StrategyError: an index list fits the graph in neither reading, or a list is illegal for it.
    """
    decisions: list[Decision] = []
    for section in sections:
        if section.takes_strategy:
            continue
        last = len(section.gradients) - 1
        decisions.append(Decision.local(section, "fusion_id", (), (last,), len(decisions)))
    by_group: dict[tuple[str, str], list[Section]] = {}
    for section in sections:
        if section.takes_strategy:
            by_group.setdefault((section.key.graph, section.key.group), []).append(section)
    for (_, group), members in by_group.items():
        decisions += _decide_group(members, strategy_of(group), options, len(decisions))
    return sorted(decisions, key=lambda decision: decision.section.key)


def _decide_group(
    sections: list[Section], strategy: Strategy, options: PlanOptions, first_chain: int
) -> list[Decision]:
    fits_each = all(len(section.gradients) - 1 == strategy.values[-1:][0] for section in sections if strategy.values)
    if strategy.kind is StrategyKind.IDX and len(sections) > 1 and not fits_each:
        return _decide_globally(sections, strategy, first_chain)
    return [_decide_section(section, strategy, options, first_chain + i) for i, section in enumerate(sections)]


def _decide_section(section: Section, strategy: Strategy, options: PlanOptions, chain: int) -> Decision:
    count = len(section.gradients)
    raw = _raw_boundaries(section, strategy, options)
    boundaries, notes = collapse_boundaries(raw, count)
    return Decision.local(section, strategy.kind.value, strategy.values, boundaries, chain, notes)


def _raw_boundaries(section: Section, strategy: Strategy, options: PlanOptions) -> list[int]:
    sizes = options.sizes(section.gradients)
    kind, values = strategy.kind, strategy.values
    if kind is StrategyKind.IDX:
        indices = [int(value) for value in values]
        check_index_list(indices, len(sizes), str(section.key))
        return indices
    if kind is StrategyKind.MAX_BYTES:
        return cap_boundaries(sizes, int(values[0]))
    if kind is StrategyKind.SEGMENTS:
        return equal_boundaries(sizes, int(values[0]))
    if kind is StrategyKind.SINGLE:
        return [len(sizes) - 1]
    if kind is StrategyKind.NONE:
        return list(range(len(sizes)))
    name = "size" if kind is StrategyKind.SIZE else "default"
    return segment_boundaries(sizes, name, values, shape_mode=options.shape_mode, buffer_mib=options.buffer_mib)


def _decide_globally(sections: list[Section], strategy: Strategy, chain: int) -> list[Decision]:
    """Reads an index list over all fusible gradients of the group, whatever their type.

    A global segment becomes one reduction for each type in it.
    """
    indices = [int(value) for value in strategy.values]
    merged = sorted(
        ((gradient.rank, number) for number, section in enumerate(sections) for gradient in section.gradients)
    )
    _require_global_fit(indices, sections, len(merged))
    local = [0] * len(sections)
    boundaries: list[list[int]] = [[] for _ in sections]
    numbers: list[list[int]] = [[] for _ in sections]
    sizes: list[list[int]] = [[] for _ in sections]
    for segment, (start, stop) in enumerate(boundaries_to_segments(indices)):
        owners = [number for _, number in merged[start:stop]]
        for number in dict.fromkeys(owners):
            local[number] += owners.count(number)
            boundaries[number].append(local[number] - 1)
            numbers[number].append(segment)
            sizes[number].append(stop - start)
    note = f"index list {format_list(indices)} read over all {len(merged)} gradients of the group"
    return [
        Decision(
            section,
            "idx",
            strategy.values,
            tuple(boundaries[i]),
            tuple(numbers[i]),
            tuple(sizes[i]),
            chain,
            (note,),
        )
        for i, section in enumerate(sections)
    ]


def _require_global_fit(indices: list[int], sections: Sequence[Section], total: int) -> None:
    if indices[-1] == total - 1:
        return
    counts = ", ".join(f"{len(section.gradients)} in {section.key}" for section in sections)
    inside = [index for index in indices if index < total - 1]
    corrected = format_list([*(inside if len(inside) < len(indices) else inside[:-1]), total - 1])
    raise StrategyError(
        "the index list fits neither each section nor all of them together",
        where=f"group {sections[0].key.group} with {counts}",
        found=format_list(indices),
        expected=f"a last index of {total - 1}, counted over all {total} gradients",
        remedy=corrected,
    )
