"""The plan for tensors that are about to be reduced, before any reduction is in the graph.

An optimizer wrapper must fuse as the graph pass would fuse the graph that the wrapper of an NPU leaves. So the graph
under construction is exported, one HcomAllReduce per tensor is added to the export (never to the graph itself), and
find, index and plan run on that. Eager code has no graph: there the order is the reverse of the list, which is the
order in which a backward pass yields gradients of variables that are used one after another.
"""

from __future__ import annotations

__all__ = ["Bucket", "NodeSpec", "TensorPlan", "plan_graph_tensors", "plan_listed_tensors", "virtual_names"]

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

from graph_passes.messages import GraphDef, TensorShapeProto
from graph_passes.op_tables import ALL_REDUCE_OP
from graph_passes.sections import Gradient, GradientId, Shape
from hccl_fusion.fuse import plan_graph
from hccl_fusion.plan import Plan
from hccl_fusion.plan_file import PlanFile
from hccl_fusion.strategy import Strategy

PlanSource = Union[Strategy, PlanFile, None]

_LIST_ORDER = "there is no graph in eager mode: gradients stand in the reverse order of the list"


@dataclass(frozen=True)
class NodeSpec:
    """A tensor to be reduced.

    Attributes:
        tensor: its name in the graph, as a node's input; any text where there is no graph.
        dtype: number of its type.
        shape: None where it is not fully known.
        device: of the node that yields it.
    """

    tensor: str
    dtype: int
    shape: Shape
    device: str = ""


@dataclass(frozen=True)
class Bucket:
    """Tensors that become one reduction.

    Attributes:
        label: `segment_0`, or `single_0` for a tensor that belongs to no segment.
        positions: in the caller's list, in index order.
        shapes: of these tensors; None where unknown, which only a single tensor has.
        chain: buckets of equal chain run one after another, in the order given; -1 is outside any chain.
    """

    label: str
    positions: tuple[int, ...]
    shapes: tuple[Shape, ...]
    chain: int = -1


@dataclass(frozen=True)
class TensorPlan:
    """The plan of a list of tensors, and what it comes to: every tensor is in exactly one bucket."""

    plan: Plan
    buckets: tuple[Bucket, ...]


def virtual_names(scope: str, count: int) -> list[str]:
    """The names that TensorFlow gives the all-reduces that an NPU wrapper adds under a scope."""
    prefix = f"{scope}/" if scope else ""
    return [f"{prefix}{ALL_REDUCE_OP}{f'_{number}' if number else ''}" for number in range(count)]


def plan_graph_tensors(
    graph_def: GraphDef, specs: Sequence[NodeSpec], scope: str, group: str, source: PlanSource = None
) -> TensorPlan:
    """The plan of tensors of a graph, as the graph passes see it with an all-reduce for each.

    Args:
        graph_def: the graph under construction as it is now; it is extended.
        specs: the tensors, in the order in which a wrapper would add their reductions.
        scope: name scope of the wrapper, without a slash at its end.
        group: of all these reductions.
        source: a strategy or a plan file; None takes what is registered for the group.

    Raises:
        HcclFusionError: the strategy or the plan does not fit the graph.
    """
    names = virtual_names(scope, len(specs))
    for name, spec in zip(names, specs):
        _add_all_reduce(graph_def, name, spec, group)
    plan, gradients = plan_graph(graph_def, source, group=group, infer_shapes=False)
    return TensorPlan(plan, _buckets(plan, gradients, {name: at for at, name in enumerate(names)}))


def plan_listed_tensors(specs: Sequence[NodeSpec], scope: str, group: str, source: PlanSource = None) -> TensorPlan:
    """The plan of tensors outside any graph: index 0 is the last of the list; arguments as above."""
    graph_def = GraphDef()
    names = virtual_names(scope, len(specs))
    for number, (name, spec) in reversed(list(enumerate(zip(names, specs)))):
        # A root is taken when the queue is empty, so each all-reduce follows its own placeholder.
        root = graph_def.node.add(name=f"{scope or 'eager'}/tensor_{number}", op="Placeholder")
        root.attr["dtype"].type = spec.dtype
        _add_all_reduce(graph_def, name, replace(spec, tensor=root.name), group)
    plan, gradients = plan_graph(graph_def, source, group=group, infer_shapes=False)
    buckets = _buckets(plan, gradients, {name: at for at, name in enumerate(names)})
    return TensorPlan(replace(plan, notes=(*plan.notes, _LIST_ORDER)), buckets)


def _add_all_reduce(graph_def: GraphDef, name: str, spec: NodeSpec, group: str) -> None:
    node: Any = graph_def.node.add(name=name, op=ALL_REDUCE_OP, input=[spec.tensor], device=spec.device)
    node.attr["T"].type = spec.dtype
    node.attr["reduction"].s = b"sum"
    node.attr["group"].s = group.encode("utf-8")
    node.attr["fusion"].i = 1
    node.attr["fusion_id"].i = -1
    shape = TensorShapeProto(unknown_rank=spec.shape is None)
    for size in spec.shape or ():
        shape.dim.add(size=size)
    node.attr["_output_shapes"].list.shape.add().CopyFrom(shape)


def _buckets(plan: Plan, gradients: Sequence[Gradient], position_of: dict[str, int]) -> tuple[Bucket, ...]:
    """The parts of the plan by the rank of their first gradient, and every other gradient on its own."""
    by_id = {gradient.id: gradient for gradient in gradients if gradient.name in position_of and not gradient.graph}
    groups: list[tuple[tuple[GradientId, ...], int]] = [(part.gradients, part.chain) for part in plan.parts]
    placed = {name for members, _ in groups for name in members}
    groups += [((name,), -1) for name in by_id if name not in placed]
    groups.sort(key=lambda entry: by_id[entry[0][0]].rank)
    buckets: list[Bucket] = []
    for members, chain in groups:
        kind = "single" if chain < 0 else "segment"
        number = sum(bucket.label.startswith(kind) for bucket in buckets)
        found = [by_id[name] for name in members]
        positions = tuple(position_of[gradient.name] for gradient in found)
        buckets.append(Bucket(f"{kind}_{number}", positions, tuple(g.shape for g in found), chain))
    return tuple(buckets)
