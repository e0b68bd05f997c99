"""Pass index: puts the gradients into sections and gives each its index, exactly as HCCL does.

Tests in this order, for each all-reduce:

1. shape not fully known: single, `unknown-shape`;
2. reduction other than sum: single, `reduction`;
3. fusion 0: single, `fusion=0`;
4. fusion 1 with a fusion_id, fusion 2 without a legal one, any other fusion: error;
5. inside a while loop of TensorFlow 1: single, `frame`; in a branch of its `cond`: single, `branch` (HCCL sees a
   loop's body and a branch as graphs of their own);
6. else a member of section (graph, group, fusion_id, dtype, reduction); its index is its rank there.

A section of one member stays as it is: single, `alone`.
"""

from __future__ import annotations

__all__ = ["Index", "sections_of"]

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from graph_passes.errors import ReductionError
from graph_passes.frames import is_branch
from graph_passes.pipeline import GraphItem, PassResult, require
from graph_passes.sections import Gradient, Reason, Section, SectionKey, Single

_MAX_FUSION_ID = 2**31 - 1


@dataclass(frozen=True)
class Index:
    """Numbers the gradients."""

    name: ClassVar[str] = "index"

    def requires(self, item: GraphItem) -> None:
        """The gradients are known."""
        require(item.gradients is not None, self.name, "the gradients are not known", "running find before it")

    def run(self, item: GraphItem) -> PassResult:
        """Sets `sections` and `singles`.

        Raises:
            ReductionError: an all-reduce has an illegal fusion or fusion_id.
        """
        sections, singles = sections_of(item.gradients or ())
        counts = ", ".join(str(len(section.gradients)) for section in sections) or "no"
        note = f"sections of {counts} gradients, {len(singles)} single"
        return PassResult(replace(item, sections=sections, singles=singles), notes=(note,))

    def ensures(self, item: GraphItem) -> None:
        """Each gradient is in a section or single, not in both."""
        placed = [g.id for section in item.sections or () for g in section.gradients]
        placed += [single.id for single in item.singles]
        require(
            sorted(placed) == sorted(g.id for g in item.gradients or ()),
            self.name,
            "a gradient was lost or counted twice",
            "a bug report",
        )


def sections_of(gradients: Iterable[Gradient]) -> tuple[tuple[Section, ...], tuple[Single, ...]]:
    """Sections of two or more members by key order, and every gradient that is reduced alone.

    `gradients` come in breadth-first order, graph by graph.
    """
    members: dict[SectionKey, list[Gradient]] = {}
    singles = []
    for gradient in gradients:
        reason = _single_reason(gradient)
        if reason is None:
            members.setdefault(gradient.key, []).append(gradient)
        else:
            singles.append(Single(gradient.id, reason))
    for key in [key for key, found in members.items() if len(found) == 1]:
        singles.append(Single(members.pop(key)[0].id, Reason.ALONE))
    sections = [Section(key, found[0].fusion, tuple(found)) for key, found in members.items()]
    return tuple(sorted(sections, key=lambda section: section.key)), tuple(singles)


def _single_reason(gradient: Gradient) -> Reason | None:
    if gradient.shape is None:
        return Reason.UNKNOWN_SHAPE
    if gradient.reduction != "sum":
        return Reason.REDUCTION
    if gradient.fusion == 0:
        return Reason.FUSION_0
    _require_legal_fusion(gradient)
    if not gradient.frame:
        return None
    return Reason.BRANCH if is_branch(gradient.frame) else Reason.FRAME


def _require_legal_fusion(gradient: Gradient) -> None:
    fusion, fusion_id = gradient.fusion, gradient.fusion_id
    if fusion not in (1, 2):
        found, expected = f"fusion {fusion}", "fusion 0, 1 or 2"
    elif fusion == 1 and fusion_id != -1:
        found, expected = f"fusion 1 with fusion_id {fusion_id}", "fusion_id -1 (or fusion 2)"
    elif fusion == 2 and not 0 <= fusion_id <= _MAX_FUSION_ID:
        found, expected = f"fusion 2 with fusion_id {fusion_id}", f"a fusion_id of 0 to {_MAX_FUSION_ID}"
    else:
        return
    where = f"node {gradient.name}" + (f" of function {gradient.graph}" if gradient.graph else "")
    raise ReductionError(
        "an all-reduce has an illegal fusion",
        where=where,
        found=found,
        expected=expected,
        remedy="fusion=1, fusion_id=-1",
    )
