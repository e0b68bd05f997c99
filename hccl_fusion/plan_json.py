"""Plans as JSON: the plan file, `plan --json`, and `list --json`."""

from __future__ import annotations

__all__ = ["SCHEMA_VERSION", "gradients_document", "plan_document"]

from typing import Any

from graph_passes.messages import dtype_name
from graph_passes.sections import Gradient
from hccl_fusion.plan import Plan, SectionPlan
from hccl_fusion.segmentation import padded_bytes

SCHEMA_VERSION = 1


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON document. Byte sizes stand beside the names as a cross-check for later graphs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sections": [_section(section) for section in plan.sections],
        "single": [
            {"name": single.id.name, "graph": single.id.graph, "reason": single.reason.value} for single in plan.singles
        ],
        "fingerprint": plan.fingerprint,
    }


def _section(section: SectionPlan) -> dict[str, Any]:
    document: dict[str, Any] = {
        "graph": section.key.graph,
        "group": section.key.group,
        "dtype": dtype_name(section.key.dtype),
        "reduction": section.key.reduction,
        "fusion_id": section.key.fusion_id,
        "count": len(section.gradients),
        "strategy": section.strategy,
        "values": list(section.values),
        "boundaries": list(section.boundaries),
        "segments": [[segment.start, segment.stop - 1] for segment in section.segments],
        "gradients": [gradient.name for gradient in section.gradients],
        "bytes": [gradient.size_bytes for gradient in section.gradients],
    }
    split = [list(map(list, segment.parts)) for segment in section.segments]
    if any(len(parts) != 1 for parts in split):
        document["parts"] = split
    if section.divisions:
        document["divisions"] = [{"at": note.at, "on": note.on, "reason": note.text} for note in section.divisions]
    if section.notes:
        document["notes"] = list(section.notes)
    return document


def gradients_document(plan: Plan, gradients: tuple[Gradient, ...]) -> dict[str, Any]:
    """The gradient table of `list --json`, in breadth-first order."""
    placed = {gradient.id: (section, index, segment) for section, index, gradient, segment in plan.placed()}
    rows = []
    for gradient in gradients:
        reason = plan.reasons.get(gradient.id)
        section, index, segment = placed.get(gradient.id, (None, None, None))
        rows.append(
            {
                "index": index if reason is None else None,
                "section": str(section.key) if section is not None else str(gradient.key),
                "all_reduce": str(gradient.id),
                "tensor": gradient.tensor,
                "variable": gradient.variable,
                "shape": None if gradient.shape is None else list(gradient.shape),
                "dtype": dtype_name(gradient.dtype),
                "bytes": gradient.size_bytes,
                "padded_bytes": None if gradient.size_bytes is None else padded_bytes(gradient.size_bytes),
                "segment": segment.number if segment is not None and reason is None else None,
                "reason": reason.value if reason is not None else None,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "gradients": rows}
