"""The main job in one function: graph and strategy in, plan and rewritten graph out."""

from __future__ import annotations

__all__ = ["DEFAULT_GROUP", "Emit", "FuseResult", "fuse", "list_gradients", "plan_graph", "shape_inference"]

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from graph_passes.find import Find, InferShapes
from graph_passes.fuse import Fuse
from graph_passes.fusion_id import TagFusionId
from graph_passes.index import Index
from graph_passes.lower import Form, Lower
from graph_passes.messages import GraphDef
from graph_passes.pipeline import GraphItem, GraphPass, Observer, Pipeline
from graph_passes.sections import Gradient, GradientId, Section, Shape
from graph_passes.verify import Verify
from hccl_fusion.boundaries import Decision, PlanOptions, decide
from hccl_fusion.errors import StrategyError, UsageError, summarise
from hccl_fusion.plan import Plan
from hccl_fusion.plan_file import PlanFile
from hccl_fusion.planner import PlanPass
from hccl_fusion.registry import registered_idx, registered_strategy, stale_index_warning
from hccl_fusion.strategy import Strategy, StrategyKind, check_group

DEFAULT_GROUP = "hccl_world_group"


class Emit(enum.Enum):
    """What the rewritten graph looks like; docs/forms.md shows each."""

    FUSED = "fused"
    FUSION_ID = "fusion-id"
    COLLECTIVE = "collective"
    MOCK = "mock"


@dataclass(frozen=True)
class FuseResult:
    """The outcome of `fuse`.

    Attributes:
        graph_def: the rewritten graph; the very one that came in where nothing was to do.
        plan: what was fused, and why the rest was not.
        gradients: every all-reduce of the graph in breadth-first order.
        modified: whether the graph was changed.
        notes: one remark or more of each pass.
    """

    graph_def: GraphDef = field(repr=False)
    plan: Plan
    gradients: tuple[Gradient, ...] = field(repr=False)
    modified: bool
    notes: tuple[str, ...]


def fuse(
    graph_def: GraphDef,
    strategy: Strategy | PlanFile | None = None,
    *,
    group: str = DEFAULT_GROUP,
    emit: Emit | str = Emit.FUSED,
    ranks: int | None = None,
    chain: bool = True,
    options: PlanOptions | None = None,
    fetch: Sequence[str] = (),
    keep: Sequence[str] = (),
    infer_shapes: bool | InferShapes = True,
    observe: Observer | None = None,
) -> FuseResult:
    """Fuses the all-reduces of a graph as HCCL would.

    Args:
        graph_def: a training graph with HcomAllReduce nodes; it is not changed.
        strategy: how to cut group `group` into segments; None takes what was registered for each group with
            `set_split_strategy_by_idx` or `set_split_strategy_by_size`, else HCCL's default.
        group: the group that `strategy` is for; other groups take what is registered.
        emit: the form of the result.
        ranks: number of ranks for the forms `collective` and `mock`; None takes RANK_SIZE from the environment, else 1.
        chain: order the fused reductions by control edges.
        options: size accounting and segmentation mode.
        fetch, keep: nodes that must stay a reduction of their own.
        infer_shapes: ask TensorFlow's shape inference for shapes that the graph does not tell; or what to ask instead.
        observe: called after each pass.

    Raises:
        HcclFusionError: the graph, the strategy or an option is illegal; the graph that came in is untouched.
    """
    form = _emit(emit)
    plans: list[Plan] = []
    decider = _decider(strategy, group, options or PlanOptions())
    passes: tuple[GraphPass, ...] = (
        Find(_inference(infer_shapes), allow_lowered=True),
        Index(),
        PlanPass(decider, plans.append),
        *_writers(form, chain, ranks),
        Verify(),
    )
    item = GraphItem(graph_def, fetch=tuple(fetch), keep=tuple(keep))
    result = Pipeline(passes, observe=observe).run(item)
    return FuseResult(result.item.graph_def, plans[0], result.item.gradients or (), result.modified, result.notes)


def plan_graph(
    graph_def: GraphDef,
    strategy: Strategy | PlanFile | None = None,
    *,
    group: str = DEFAULT_GROUP,
    options: PlanOptions | None = None,
    infer_shapes: bool | InferShapes = True,
    observe: Observer | None = None,
) -> tuple[Plan, tuple[Gradient, ...]]:
    """The plan of a graph, and its gradients in breadth-first order; arguments and errors as in `fuse`."""
    plans: list[Plan] = []
    passes: tuple[GraphPass, ...] = (
        Find(_inference(infer_shapes)),
        Index(),
        PlanPass(_decider(strategy, group, options or PlanOptions()), plans.append),
    )
    result = Pipeline(passes, observe=observe).run(GraphItem(graph_def))
    return plans[0], result.item.gradients or ()


def list_gradients(graph_def: GraphDef, *, infer_shapes: bool | InferShapes = True) -> tuple[Gradient, ...]:
    """Every all-reduce of a graph in breadth-first order; errors as in `fuse`."""
    find = Find(_inference(infer_shapes))
    return Pipeline((find,)).run(GraphItem(graph_def)).item.gradients or ()


def _emit(emit: Emit | str) -> Emit:
    try:
        return Emit(emit)
    except ValueError:
        forms = ", ".join(form.value for form in Emit)
        raise UsageError("the form is unknown", found=repr(emit), expected=f"one of {forms}") from None


def _writers(form: Emit, chain: bool, ranks: int | None) -> tuple[GraphPass, ...]:
    if form is Emit.FUSED:
        return (Fuse(chain),)
    if form is Emit.FUSION_ID:
        return (TagFusionId(chain),)
    return Fuse(chain), Lower(Form(form.value), _ranks(ranks))


def _ranks(ranks: int | None) -> int:
    """The given number, else RANK_SIZE, else 1: one process without any environment is a world of one."""
    found: object = os.environ.get("RANK_SIZE", "1") if ranks is None else ranks
    text = str(found)
    if isinstance(found, bool) or not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise UsageError(
            "the number of ranks is illegal",
            where="environment variable RANK_SIZE" if ranks is None else "ranks",
            found=repr(found),
            expected="an integer of at least 1",
            remedy="--ranks N (in Python: ranks=N)" if ranks is None else "",
        )
    return int(text)


def _decider(
    strategy: Strategy | PlanFile | None, group: str, options: PlanOptions
) -> Callable[[Sequence[Section]], Sequence[Decision]]:
    check_group(group)
    if isinstance(strategy, PlanFile):
        return strategy.decide

    def strategy_of(name: str) -> Strategy:
        return strategy if strategy is not None and name == group else registered_strategy(name)

    def decide_sections(sections: Sequence[Section]) -> Sequence[Decision]:
        _require_group(sections, group, is_given=strategy is not None or group != DEFAULT_GROUP)
        decisions = decide(sections, strategy_of, options)
        _warn_stale_lists(sections, strategy_of)
        return decisions

    return decide_sections


def _require_group(sections: Sequence[Section], group: str, is_given: bool) -> None:
    groups = sorted({section.key.group for section in sections if section.takes_strategy})
    if is_given and groups and group not in groups:
        raise StrategyError(
            "no gradient of the graph belongs to the group",
            where=f"group {group}",
            found=f"groups {summarise(groups)}",
            expected="one of these",
            remedy=f"--group {groups[0]}",
        )


def _warn_stale_lists(sections: Sequence[Section], strategy_of: Callable[[str], Strategy]) -> None:
    for group in sorted({section.key.group for section in sections if section.takes_strategy}):
        if strategy_of(group).kind is StrategyKind.SIZE and registered_idx(group) is not None:
            counts = [len(s.gradients) for s in sections if s.takes_strategy and s.key.group == group]
            stale_index_warning(group, counts)


def _inference(choice: bool | InferShapes) -> InferShapes | None:
    if isinstance(choice, bool):
        return shape_inference() if choice else None
    return choice


def shape_inference() -> InferShapes:
    """TensorFlow's own shape inference; loaded only when it is called."""

    def infer(graph_def: GraphDef, gradients: Sequence[GradientId]) -> Mapping[GradientId, Shape]:
        main = [gradient for gradient in gradients if not gradient.graph]
        if not main:
            return {}
        from hccl_fusion.runtime.shape_inference import infer_shapes

        shapes = infer_shapes(graph_def, [gradient.name for gradient in main])
        return {gradient: shapes.get(gradient.name) for gradient in main}

    return infer
