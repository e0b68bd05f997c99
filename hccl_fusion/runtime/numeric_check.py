"""Do two graphs compute the same? Both run on in-process ranks, with different inputs a rank; outputs are compared."""

from __future__ import annotations

__all__ = ["Comparison", "OutputDifference", "compare_graphs"]

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_passes.errors import summarise
from graph_passes.messages import GraphDef
from graph_passes.node_input import producer_name
from graph_passes.op_tables import MOCK_ATTR
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.graph_roles import Roles, find_roles
from hccl_fusion.runtime.in_process import Feeds, InProcessRanks, tensor_name
from hccl_fusion.runtime.inputs import fix_seeds, initial_values, random_feeds
from hccl_fusion.runtime.output_difference import OutputDifference, compare_arrays
from hccl_fusion.runtime.replicate import extract, rank_name
from hccl_fusion.runtime.state_access import VARIABLE_OPS

_STEP_STRIDE = 1_000_003
"""Between the seeds of two steps."""


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

    Args:
        before: one rank's graph.
        after: the same graph, rewritten.
        ranks: how many ranks.
        feeds: values by tensor name, for all ranks or one mapping a rank; all other inputs are random.
        fetches: names of further tensors to compare.
        seed: of the random inputs.
        steps: training steps; each has new inputs.
        same_inputs: gives all ranks equal inputs; by default only where a graph is in the mock form.
        timeout_seconds: after which a step that does not come to its end is an error.

    Raises:
        NumericCheckError: a graph cannot be imported or run, or the two have no output in common.
    """
    mocked = _is_mocked(before, ranks) or _is_mocked(after, ranks)
    options = _Options(ranks, feeds, seed, steps, bool(mocked) if same_inputs is None else same_inputs, timeout_seconds)
    plan = _plan(before, after, fetches, options.fed)
    values = _initial_values(before, after, plan, seed)
    first, second = (_run(graph, plan, values, options) for graph in (before, after))
    outputs, equal = _compare(first, second, plan, ranks)
    return Comparison(equal, ranks, outputs, (*plan.notes, *_mock_notes(mocked, options)))


def _compare(
    first: Mapping[str, Sequence[np.ndarray]], second: Mapping[str, Sequence[np.ndarray]], plan: _Plan, ranks: int
) -> tuple[tuple[OutputDifference, ...], bool]:
    """The differences of all outputs that both graphs have, and whether all count as equal."""
    shared = [name for name in first if name in second]
    if not shared and not plan.missing:
        raise NumericCheckError(
            "the graphs have nothing to compare", found="no reduced gradient, result or variable that both have",
            expected="at least one", remedy="naming tensors (--fetch, fetches=…)",
        )  # fmt: skip
    compared = [compare_arrays(name, first[name], second[name], ranks) for name in shared]
    missing = [OutputDifference(name, math.inf, False) for name in plan.missing]
    equal = not missing and all(is_equal for _, is_equal in compared)
    return (*missing, *(output for output, _ in compared)), equal


@dataclass(frozen=True)
class _Options:
    ranks: int
    feeds: Feeds | None
    seed: int
    steps: int
    same_inputs: bool
    timeout_seconds: float

    @property
    def fed(self) -> frozenset[str]:
        """Names of the tensors that the caller feeds."""
        mappings = [self.feeds] if isinstance(self.feeds, Mapping) else self.feeds or ()
        return frozenset(tensor_name(name) for mapping in mappings for name in mapping)


@dataclass(frozen=True)
class _Plan:
    """What to run and to fetch in both graphs; nodes by name, `fetches` as tensors."""

    roles: Roles
    reductions: tuple[str, ...]
    missing: tuple[str, ...]
    results: tuple[str, ...]
    fetches: tuple[str, ...]
    updates: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    @property
    def roots(self) -> tuple[str, ...]:
        """All nodes that may run."""
        fetched = map(producer_name, self.fetches)
        return (*self.reductions, *self.results, *fetched, *(name for group in self.updates for name in group))


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


def _mock_notes(mocked: bool, options: _Options) -> list[str]:
    if not mocked:
        return []
    inputs = "all ranks get equal inputs" if options.same_inputs else "but the ranks get different inputs"
    return [f"a graph is in the mock form for {options.ranks} ranks: {inputs}"]


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
    return _Plan(
        roles=roles,
        reductions=tuple(name for name in (*roles.reductions, *roles.reduced) if name in present),
        missing=tuple(missing),
        results=tuple(name for name in roles.results if name in present),
        fetches=tuple(tensor_name(name) for name in fetches),
        updates=tuple(group for group in updates if group),
        notes=tuple(notes),
    )


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
    values = initial_values(before, _variables(extract(before, plan.roots)), roles=plan.roles, seed=seed)
    others = [name for name in _variables(extract(after, plan.roots)) if name not in values]
    return {**values, **(initial_values(after, others, seed=seed) if others else {})}


def _variables(graph_def: GraphDef) -> list[str]:
    return [node.name for node in graph_def.node if node.op in VARIABLE_OPS]


def _run(
    graph_def: GraphDef, plan: _Plan, values: Mapping[str, np.ndarray], options: _Options
) -> dict[str, list[np.ndarray]]:
    """Runs all steps; for each output its arrays, rank by rank in each step."""
    part = fix_seeds(extract(graph_def, [*plan.roots, *values]))
    found: dict[str, list[np.ndarray]] = {}
    with InProcessRanks(part, options.ranks, timeout_seconds=options.timeout_seconds) as ranks:
        known = {name: value for name, value in values.items() if name in ranks.variables}
        ranks.assign(known)
        fetches = [f"{name}:0" for name in plan.reductions]
        fetches += [tensor for name in plan.results for tensor in _numeric_outputs(ranks.graph, name)]
        fetches += [name for name in plan.fetches if name not in fetches]
        roots = {*map(producer_name, fetches), *(name for group in plan.updates for name in group)}
        for step in range(options.steps):
            feeds = _feeds(part, roots, ranks, options, step)
            with _naming_made_up(feeds[0], options):
                _collect(found, ranks.run(fetches, feeds))
                for group in plan.updates:
                    ranks.run((), feeds, group)
        _collect(found, ranks.read(known))
    return found


def _collect(found: dict[str, list[np.ndarray]], by_rank: Iterable[Mapping[str, np.ndarray]]) -> None:
    for arrays in by_rank:
        for name, array in arrays.items():
            found.setdefault(name.removesuffix(":0"), []).append(array)


@contextlib.contextmanager
def _naming_made_up(feeds: Mapping[str, Any], options: _Options) -> Iterator[None]:
    """A failure may come from an input of a shape or a value that the graph cannot take; says which were made up."""
    try:
        yield
    except NumericCheckError as error:
        made_up = [
            f"{name} {list(np.shape(value))}" for name, value in feeds.items() if tensor_name(name) not in options.fed
        ]
        if made_up and not error.expected:
            error.remedy = f"real data (--feeds, feeds=…) for the inputs that were made up: {summarise(made_up)}"
        raise


def _feeds(
    part: GraphDef, roots: Collection[str], ranks: InProcessRanks, options: _Options, step: int
) -> list[dict[str, Any]]:
    """One mapping a rank: what the caller feeds, and random values for the rest."""
    random = random_feeds(part, roots, ranks.graph, options.fed, options.seed + step * _STEP_STRIDE)
    given = options.feeds or {}
    by_rank = [given] * options.ranks if isinstance(given, Mapping) else given
    if len(by_rank) != options.ranks:
        raise NumericCheckError(
            "the feeds do not fit the ranks", found=f"{len(by_rank)} mappings",
            expected=f"one for all or {options.ranks}", remedy="one mapping for each rank",
        )  # fmt: skip
    return [{**random(0 if options.same_inputs else rank), **by_rank[rank]} for rank in range(options.ranks)]


def _numeric_outputs(graph: Any, name: str) -> list[str]:
    """The outputs of a node that are numbers or bools, as `name:port`."""
    outputs = graph.get_operation_by_name(rank_name(0, name)).outputs
    return [
        f"{name}:{port}"
        for port, tensor in enumerate(outputs)
        if tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_complex
    ]
