"""Runs one of two graphs that are to be compared, step by step."""

from __future__ import annotations

__all__ = ["Arrays", "GraphRun", "RunOptions", "RunPlan"]

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_passes.errors import summarise
from graph_passes.messages import GraphDef
from graph_passes.node_input import producer_name
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.in_process import Feeds, InProcessRanks, tensor_name
from hccl_fusion.runtime.inputs import fix_seeds, random_feeds
from hccl_fusion.runtime.replicate import extract, rank_name

Arrays = Sequence[Mapping[str, np.ndarray]]
"""Arrays by name, one mapping a rank."""

_STEP_STRIDE = 1_000_003
"""Between the seeds of two steps."""


@dataclass(frozen=True)
class RunOptions:
    """How to run; as the arguments of compare_graphs, with `same_inputs` decided."""

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
class RunPlan:
    """What to fetch and to run in both graphs; nodes by name, `fetches` as tensors."""

    reductions: tuple[str, ...]
    results: tuple[str, ...]
    fetches: tuple[str, ...]
    updates: tuple[tuple[str, ...], ...]

    @property
    def roots(self) -> tuple[str, ...]:
        """All nodes that may run."""
        fetched = map(producer_name, self.fetches)
        return (*self.reductions, *self.results, *fetched, *(name for group in self.updates for name in group))


class GraphRun:
    """One graph on its ranks; a context manager. Steps are counted from 0; each is `fetch`, then `update`.

    Attributes:
        state_names: the variables that `state` reads.
    """

    def __init__(
        self, graph_def: GraphDef, plan: RunPlan, values: Mapping[str, np.ndarray], options: RunOptions
    ) -> None:
        """Makes the ranks.

        Args:
            graph_def: one rank's graph; stays as it is.
            plan: what to run.
            values: initial values of variables, by name.
            options: how to run.

        Raises:
            NumericCheckError: TensorFlow cannot import the graph.
        """
        self._part = fix_seeds(extract(graph_def, [*plan.roots, *values]))
        self._plan = plan
        self._options = options
        self._ranks = InProcessRanks(self._part, options.ranks, timeout_seconds=options.timeout_seconds)
        self._values = {name: value for name, value in values.items() if name in self._ranks.variables}
        self.state_names = tuple(self._values)
        self._fetches = _fetches(self._ranks.graph, plan)
        self._feeds: list[dict[str, Any]] = []

    def __enter__(self) -> GraphRun:
        self._ranks.__enter__()
        self._ranks.assign(self._values)
        return self

    def __exit__(self, *error: Any) -> None:
        self._ranks.__exit__(*error)

    def fetch(self, step: int) -> Arrays:
        """Reduced gradients, results and what the caller named, before the step's updates.

        Raises:
            NumericCheckError: an input cannot be made up, a kernel fails, or the ranks stall.
        """
        self._feeds = self._step_feeds(step)
        with _naming_made_up(self._feeds[0], self._options):
            found = self._ranks.run(self._fetches, self._feeds)
        return [{name.removesuffix(":0"): array for name, array in arrays.items()} for arrays in found]

    def update(self) -> None:
        """Runs all updates, with the inputs of the last fetch."""
        with _naming_made_up(self._feeds[0], self._options):
            for group in self._plan.updates:
                self._ranks.run((), self._feeds, group)

    def state(self) -> Arrays:
        """All variables, by name."""
        return self._ranks.read(self.state_names)

    def follow(self, state: Arrays) -> None:
        """Takes over the state of another graph, as far as the variables are the same."""
        self._ranks.assign([{name: each[name] for name in self.state_names if name in each} for each in state])

    def _step_feeds(self, step: int) -> list[dict[str, Any]]:
        options = self._options
        seed = options.seed + step * _STEP_STRIDE
        roots = {*map(producer_name, self._fetches), *(name for group in self._plan.updates for name in group)}
        random = random_feeds(self._part, roots, self._ranks.graph, options.fed, seed)
        given = self._ranks.rank_feeds(options.feeds or {})
        return [{**random(0 if options.same_inputs else rank), **given[rank]} for rank in range(options.ranks)]


def _fetches(graph: Any, plan: RunPlan) -> list[str]:
    """The tensors to fetch: reduced gradients, all numeric outputs of results, and what the caller names."""
    fetches = [f"{name}:0" for name in plan.reductions]
    fetches += [tensor for name in plan.results for tensor in _numeric_outputs(graph, name)]
    return fetches + [name for name in plan.fetches if name not in fetches]


def _numeric_outputs(graph: Any, name: str) -> list[str]:
    """The outputs of a node that are numbers or bools, as `name:port`."""
    outputs = graph.get_operation_by_name(rank_name(0, name)).outputs
    return [
        f"{name}:{port}"
        for port, tensor in enumerate(outputs)
        if tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_complex
    ]


@contextlib.contextmanager
def _naming_made_up(feeds: Mapping[str, Any], options: RunOptions) -> Iterator[None]:
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
