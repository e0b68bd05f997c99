"""The gradient table and the segment table."""

from __future__ import annotations

__all__ = ["print_gradients", "print_plan"]

from collections import Counter
from collections.abc import Sequence

import click

from graph_passes.messages import dtype_name
from graph_passes.sections import Gradient
from hccl_fusion.cli.output import human_bytes, print_table
from hccl_fusion.plan import Plan, SectionPlan
from hccl_fusion.segmentation import padded_bytes

_GRADIENT_COLUMNS = (
    "index>", "section>", "segment>", "gradient", "variable", "shape", "dtype", "bytes>", "padded>", "cum. %>",
    "reason",
)  # fmt: skip
_SEGMENT_COLUMNS = ("section>", "segment>", "indices", "gradients>", "bytes>", "share %>", "first gradient")


def print_gradients(plan: Plan, gradients: Sequence[Gradient]) -> None:
    """Every gradient in breadth-first order; cumulative % is over the padded bytes of its section."""
    _print_sections(plan)
    placed = {gradient.id: (section, index, segment) for section, index, gradient, segment in plan.placed()}
    numbers = {section.key: number for number, section in enumerate(plan.sections)}
    shares = {section.key: _cumulative_shares(section) for section in plan.sections}
    rows = []
    for gradient in gradients:
        reason = plan.reasons.get(gradient.id)
        section, index, segment = placed.get(gradient.id, (None, None, None))
        size = gradient.size_bytes
        rows.append(
            (
                index if reason is None else "-",
                numbers[section.key] if section else "-",
                segment.number if segment is not None and reason is None else "-",
                f"{gradient.graph}/{gradient.tensor}" if gradient.graph else gradient.tensor,
                gradient.variable or "?",
                "x".join(map(str, gradient.shape)) or "scalar" if gradient.shape is not None else "?",
                dtype_name(gradient.dtype),
                "?" if size is None else size,
                "?" if size is None else padded_bytes(size),
                f"{shares[section.key][index]:.2f}" if section and index is not None else "",
                reason.value if reason else "",
            )
        )
    print_table(_GRADIENT_COLUMNS, rows)


def _cumulative_shares(section: SectionPlan) -> list[float]:
    padded = [padded_bytes(gradient.size_bytes or 0) for gradient in section.gradients]
    total, running, shares = sum(padded), 0, []
    for size in padded:
        running += size
        shares.append(100 * running / total)
    return shares


def _print_sections(plan: Plan) -> None:
    for number, section in enumerate(plan.sections):
        size = human_bytes(sum(g.size_bytes or 0 for g in section.gradients))
        values = f" {','.join(map(str, section.values))}" if section.values else ""
        click.echo(
            f"section {number}: {section.key}, {len(section.gradients)} gradients, {size}, "
            f"strategy {section.strategy}{values}"
        )
        for note in section.notes:
            click.echo(f"  note: {note}")
        for division in section.divisions:
            click.echo(f"  divided before index {division.at}: {division.text}")


def print_plan(plan: Plan) -> None:
    """The segments in force, what was left alone and why, and the fingerprint."""
    _print_sections(plan)
    rows = []
    for number, section in enumerate(plan.sections):
        total = sum(g.size_bytes or 0 for g in section.gradients) or 1
        for segment in section.segments:
            size = section.segment_bytes(segment)
            rows.append(
                (
                    number,
                    segment.number,
                    f"[{segment.start},{segment.stop - 1}]",
                    segment.stop - segment.start,
                    human_bytes(size),
                    f"{100 * size / total:.2f}",
                    section.gradients[segment.start].variable or section.gradients[segment.start].name,
                )
            )
    if rows:
        print_table(_SEGMENT_COLUMNS, rows)
    for reason, count in sorted(Counter(single.reason.value for single in plan.singles).items()):
        names = [str(single.id) for single in plan.singles if single.reason.value == reason]
        shown = ", ".join(names[:5]) + (f" and {count - 5} more" if count > 5 else "")
        click.echo(f"single, {reason}: {shown}")
    click.echo(f"fingerprint: {plan.fingerprint}")
