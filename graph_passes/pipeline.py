"""What a pass is, and how passes run one after another.

A pass is a small frozen dataclass: a class variable `name`, its options as fields, `requires(item)` and
`ensures(item)` that raise PassError, and `run(item) -> PassResult`. It never changes the item that it gets. The
shape is Grappler's: an item is a graph with its fetch, feed and keep lists, an optimizer has a `name` and
`optimize(item) -> GraphDef`. See docs/writing_a_pass.md.
"""

from __future__ import annotations

__all__ = ["GraphItem", "GraphPass", "Observer", "PassResult", "Pipeline"]

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from graph_passes.errors import HcclFusionError, PassError
from graph_passes.graph import Graph, graphs_of
from graph_passes.messages import GraphDef
from graph_passes.sections import Gradient, Part, Section, Single


@dataclass(frozen=True)
class GraphItem:
    """A graph and what is known of it so far.

    Attributes:
        graph_def: never changed in place.
        fetch, feed, keep: names of nodes (or tensors) that are fetched, fed, or to be left alone.
        original, original_graphs: the graph before it was rewritten and its index; None where it was not.
        gradients: every all-reduce, set by find.
        sections, singles: set by index; singles grows where plan finds more.
        parts: what to fuse, set by plan.
        orders: the breadth-first order of each graph of `graphs`, set by find.
    """

    graph_def: GraphDef = field(repr=False)
    fetch: tuple[str, ...] = ()
    feed: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    original: GraphDef | None = field(default=None, repr=False)
    original_graphs: tuple[Graph, ...] | None = field(default=None, repr=False)
    graphs: tuple[Graph, ...] | None = field(default=None, repr=False)
    orders: tuple[list[int], ...] | None = field(default=None, repr=False)
    gradients: tuple[Gradient, ...] | None = field(default=None, repr=False)
    sections: tuple[Section, ...] | None = field(default=None, repr=False)
    singles: tuple[Single, ...] = field(default=(), repr=False)
    parts: tuple[Part, ...] | None = field(default=None, repr=False)

    def rewritten(self, graph_def: GraphDef) -> GraphItem:
        """This item with another graph; what the first one was is kept for verify."""
        return replace(
            self,
            graph_def=graph_def,
            original=self.original or self.graph_def,
            original_graphs=self.original_graphs if self.original else self.graphs,
            graphs=None,
            orders=None,
        )

    def indexed(self) -> GraphItem:
        """This item with the index of its graphs, built where it is not there yet."""
        return self if self.graphs is not None else replace(self, graphs=graphs_of(self.graph_def))


@dataclass(frozen=True)
class PassResult:
    """A pass's outcome: the new item, whether the graph changed, and remarks for people."""

    item: GraphItem
    modified: bool = False
    notes: tuple[str, ...] = ()


class GraphPass(Protocol):
    """The contract of a pass."""

    name: ClassVar[str]

    def requires(self, item: GraphItem) -> None:
        """Raises PassError where the item lacks what this pass needs."""

    def run(self, item: GraphItem) -> PassResult:
        """Returns the rewritten item; the one given stays as it is."""

    def ensures(self, item: GraphItem) -> None:
        """Raises PassError where the result is not what this pass promises."""


Observer = Callable[[GraphPass, PassResult, int], None]
"""Called after each pass with the pass, its result and the time it took in ns."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. A failure names the pass, and those that ran before it."""

    passes: tuple[GraphPass, ...]
    name: str = "hccl-fusion"
    observe: Observer | None = None

    def run(self, item: GraphItem) -> PassResult:
        """Runs every pass.

        Raises:
            HcclFusionError: a pass refused the graph; `pass_name` and `passes_before` say where.
        """
        modified = False
        notes: list[str] = []
        done: list[str] = []
        for graph_pass in self.passes:
            start_ns = time.perf_counter_ns()
            try:
                graph_pass.requires(item)
                result = graph_pass.run(item)
                graph_pass.ensures(result.item)
            except HcclFusionError as error:
                error.pass_name = graph_pass.name
                error.passes_before = tuple(done)
                raise
            if self.observe is not None:
                self.observe(graph_pass, result, time.perf_counter_ns() - start_ns)
            item = result.item
            modified |= result.modified
            notes += result.notes
            done.append(graph_pass.name)
        return PassResult(item, modified, tuple(notes))

    def optimize(self, item: GraphItem) -> GraphDef:
        """The rewritten graph: the method that a Grappler optimizer has."""
        return self.run(item).item.graph_def


def require(condition: bool, pass_name: str, what: str, remedy: str) -> None:
    """Raises PassError unless the condition holds."""
    if not condition:
        raise PassError(f"pass {pass_name} cannot run: {what}", remedy=remedy)
