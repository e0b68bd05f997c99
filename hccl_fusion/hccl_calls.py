"""A plan as the calls that a script for the NPU makes."""

from __future__ import annotations

__all__ = ["hccl_calls"]

from hccl_fusion.plan import Plan, SectionPlan
from hccl_fusion.strategy import MAX_SEGMENTS


def hccl_calls(plan: Plan) -> str:
    """Python text that registers the segments in force with HCCL; comments say what HCCL cannot express."""
    by_group: dict[str, list[SectionPlan]] = {}
    for section in plan.sections:
        if section.fusion == 1:
            by_group.setdefault(section.key.group, []).append(section)
    lines = [line for group, sections in by_group.items() for line in _group_lines(group, sections)]
    return "\n".join(lines) if lines else "# no section takes a strategy: there is nothing to register"


def _group_lines(group: str, sections: list[SectionPlan]) -> list[str]:
    lists = {section.last_indices for section in sections}
    if len(lists) > 1:
        described = "; ".join(f"{section.key}: {list(section.last_indices)}" for section in sections)
        return [f"# HCCL takes one index list a group, and {group} needs several: {described}"]
    indices = list(next(iter(lists)))
    lines = []
    if len(indices) > MAX_SEGMENTS:
        lines.append(
            f"# HCCL documents at most {MAX_SEGMENTS} segments; use the form fusion-id for these {len(indices)}"
        )
    return [*lines, f'set_split_strategy_by_idx({indices}, group="{group}")']
