"""Do two graphs compute the same? Both run on in-process ranks, with different inputs a rank; outputs are compared."""

from __future__ import annotations

__all__ = ["Comparison", "OutputDifference", "compare_graphs"]

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graph_passes.errors import summarise
from graph_passes.messages import GraphDef
from graph_passes.node_input import producer_name
from graph_passes.op_tables import MOCK_ATTR
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.check_run import GraphRun, RunOptions, RunPlan
from hccl_fusion.runtime.graph_roles import Roles, find_roles
from hccl_fusion.runtime.in_process import Feeds, tensor_name
from hccl_fusion.runtime.inputs import initial_values
from hccl_fusion.runtime.output_difference import Differences, OutputDifference
from hccl_fusion.runtime.replicate import extract
from hccl_fusion.runtime.state_access import VARIABLE_OPS


@dataclass(frozen=True)
class Comparison:
    """What compare_graphs found.

    Attributes:
        equal: all outputs are equal in the sense of this module.
        ranks: how many ranks ran.
        outputs: reduced gradients, then other results, then variables after the last step.
        notes: what was not compared, and other remarks.
    """

    equal: bool
    ranks: int
    outputs: tuple[OutputDifference, ...]
    notes: tuple[str, ...] = ()


def compare_graphs(
    before: GraphDef,
    after: GraphDef,
    ranks: int = 2,
    *,
    feeds: Feeds | None = None,
    fetches: Sequence[str] = (),
    seed: int = 0,
    steps: int = 1,
    same_inputs: bool | None = None,
    timeout_seconds: float = 300.0,
) -> Comparison:
    """Runs two graphs on in-process ranks and compares all outputs that both have.

    Both start from the same state; on more than 2 ranks, where sums differ by rounding, again before every step.

    Args:
        before, after: one rank's graph, and the same graph rewritten.
        ranks: how many ranks.
        feeds: values by tensor name, for all ranks or one mapping a rank; all other inputs are random.
        fetches: names of further tensors to compare.
        seed, steps: of the random inputs; training steps, each with new inputs.
        same_inputs: gives all ranks equal inputs; by default only where a graph is in the mock form.
        timeout_seconds: after which a step that does not come to its end is an error.

    Raises:
        NumericCheckError: a graph cannot be imported or run, or the two have no output in common.
    """
    mocked = _is_mocked(before, ranks) or _is_mocked(after, ranks)
    same = mocked if same_inputs is None else same_inputs
    options = RunOptions(ranks, feeds, seed, steps, same, timeout_seconds)
    plan = _plan(before, after, fetches, options.fed)
    values = _initial_values(before, after, plan, seed)
    differences = _run_both(before, after, plan, values, options)
    if not differences.outputs():
        raise NumericCheckError(
            "the graphs have nothing to compare", found="no reduced gradient, result or variable that both have",
            expected="at least one", remedy="naming tensors (--fetch, fetches=…)",
        )  # fmt: skip
    return Comparison(differences.all_equal, ranks, differences.outputs(), plan.notes + _mock_notes(mocked, options))


def _run_both(
    before: GraphDef, after: GraphDef, plan: _Plan, values: Mapping[str, np.ndarray], options: RunOptions
) -> Differences:
    """Runs both graphs side by side, so that no more than one step's arrays are kept.

    On more than 2 ranks the second graph takes over the state of the first before each further step: training
    amplifies a rounding error from step to step until nothing can be compared.
    """
    differences = Differences(options.ranks)
    for name in plan.missing:
        differences.add_missing(name)
    may_drift = options.ranks > 2
    with GraphRun(before, plan.run, values, options) as first, GraphRun(after, plan.run, values, options) as second:
        for step in range(options.steps):
            is_last = step + 1 == options.steps
            differences.add(first.fetch(step), second.fetch(step))
            first.update()
            second.update()
            if may_drift or is_last:
                state = first.state()
                differences.add(state, second.state())
            if may_drift and not is_last:
                second.follow(state)
    return differences


@dataclass(frozen=True)
class _Plan:
    """What to run, and what is known before."""

    run: RunPlan
    roles: Roles
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def _is_mocked(graph_def: GraphDef, ranks: int) -> bool:
    """True for a graph in the mock form, which must be made for this number of ranks."""
    bodies = (graph_def.node, *(function.node_def for function in graph_def.library.function))
    mocks = [node for body in bodies for node in body if MOCK_ATTR in node.attr]
    for node in mocks:
        if node.attr[MOCK_ATTR].i != ranks:
            raise NumericCheckError(
                "a graph in the mock form is made for another number of ranks", where=f"node {node.name}",
                found=node.attr[MOCK_ATTR].i, expected=ranks, remedy=f"-n {node.attr[MOCK_ATTR].i}",
            )  # fmt: skip
    return bool(mocks)


def _mock_notes(mocked: bool, options: RunOptions) -> tuple[str, ...]:
    if not mocked:
        return ()
    inputs = "all ranks get equal inputs" if options.same_inputs else "but the ranks get different inputs"
    return (f"a graph is in the mock form for {options.ranks} ranks: {inputs}",)


def _plan(before: GraphDef, after: GraphDef, fetches: Sequence[str], fed: Collection[str]) -> _Plan:
    roles = find_roles(before, {producer_name(name) for name in fed})
    _require_runnable(before, roles)
    present = {node.name for node in after.node}
    updates = [tuple(name for name in group if name in present) for group in roles.updates]
    missing = [name for name in roles.reductions if name not in present]
    lost = [name for group in roles.updates for name in group if name not in present]
    notes = []
    if missing:
        notes.append(f"the second graph lacks reduced gradients: {summarise(missing)}")
    if lost:
        notes.append(f"the second graph lacks updates: {summarise(lost)}")
    if roles.hidden:
        notes.append(
            "compared only through what depends on them (inside loops, conditionals or functions): "
            + summarise(roles.hidden)
        )
    run = RunPlan(
        reductions=tuple(name for name in (*roles.reductions, *roles.reduced) if name in present),
        results=tuple(name for name in roles.results if name in present),
        fetches=tuple(tensor_name(name) for name in fetches),
        updates=tuple(group for group in updates if group),
    )
    return _Plan(run, roles, tuple(missing), tuple(notes))


def _require_runnable(graph_def: GraphDef, roles: Roles) -> None:
    if roles.foreign:
        ops = {node.name: node.op for node in graph_def.node}
        raise NumericCheckError(
            "the training step needs ops that TensorFlow does not have", where=f"node {roles.foreign[0]}",
            found=summarise([f"{ops[name]} ({name})" for name in roles.foreign]), expected="TensorFlow's own ops",
            remedy="feeding their outputs (--feeds, feeds=…)",
        )  # fmt: skip
    if roles.unfeedable:
        name = roles.unfeedable[0]
        raise NumericCheckError(
            "an input cannot be made up", where=f"node {name}", found="strings or handles", expected="numbers",
            remedy=f'a value for it (--feeds FILE.npz, or feeds={{"{name}:0": …}})',
        )  # fmt: skip


def _initial_values(before: GraphDef, after: GraphDef, plan: _Plan, seed: int) -> dict[str, np.ndarray]:
    """One value for each variable that either graph needs; both graphs get the same."""
    values = initial_values(before, _variables(extract(before, plan.run.roots)), roles=plan.roles, seed=seed)
    others = [name for name in _variables(extract(after, plan.run.roots)) if name not in values]
    return {**values, **(initial_values(after, others, seed=seed) if others else {})}


def _variables(graph_def: GraphDef) -> list[str]:
    return [node.name for node in graph_def.node if node.op in VARIABLE_OPS]
