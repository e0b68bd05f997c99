"""What a pass is, and how passes run one after another.

A pass is a small frozen dataclass: a class variable `name`, its options as fields, `requires(item)` and
`ensures(item)` that raise PassError, and `run(item) -> PassResult`. It never changes the item that it gets. The
shape is Grappler's: an item is a graph with its fetch, feed and keep lists, an optimizer has a `name` and
`optimize(item) -> GraphDef`. See docs/writing_a_pass.md.
"""

from __future__ import annotations

__all__ = ["GraphItem", "GraphPass", "Observer", "PassResult", "Pipeline", "require"]

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from graph_passes.edit import Edit, Edited, EditWriter, GraphEdit
from graph_passes.errors import HcclFusionError, PassError
from graph_passes.graph import Graph, graphs_of, paused_gc
from graph_passes.messages import GraphDef
from graph_passes.sections import Gradient, Part, Section, Single


@dataclass(frozen=True)
class GraphItem:
    """A graph, what is known of it, and what is to change in it.

    Attributes:
        source: the graph that came in; never changed.
        fetch, feed, keep: names of nodes (or tensors) that are fetched, fed, or to be left alone.
        edit: what the passes so far change; `graph_def` is the source with it.
        graphs: the index of the source and of its functions.
        orders: the breadth-first order of each of `graphs`, set by find.
        gradients: every all-reduce, set by find.
        sections, singles: set by index; singles grows where plan finds more.
        parts: what to fuse, set by plan.
    """

    source: GraphDef = field(repr=False)
    fetch: tuple[str, ...] = ()
    feed: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    edit: Edit = field(default_factory=Edit, repr=False)
    graphs: tuple[Graph, ...] | None = field(default=None, repr=False)
    orders: tuple[list[int], ...] | None = field(default=None, repr=False)
    gradients: tuple[Gradient, ...] | None = field(default=None, repr=False)
    sections: tuple[Section, ...] | None = field(default=None, repr=False)
    singles: tuple[Single, ...] = field(default=(), repr=False)
    parts: tuple[Part, ...] | None = field(default=None, repr=False)

    @functools.cached_property
    def result(self) -> Edited:
        """The graph as the passes so far leave it, with its bytes where they are at hand."""
        return self.edit.apply(self.source, self.graphs or ())

    @property
    def graph_def(self) -> GraphDef:
        """The graph as the passes so far leave it; the source itself where they change nothing."""
        return self.result.graph_def

    def indexed(self) -> GraphItem:
        """This item with the index of its graphs, built where it is not there yet."""
        return self if self.graphs is not None else replace(self, graphs=graphs_of(self.source))

    def writers(self, labels: Iterable[str]) -> dict[str, EditWriter]:
        """A writer for each of these graphs ("" or a function's name), in the order of the library."""
        wanted = set(labels)
        return {
            graph.label: EditWriter(graph, self.edit.graphs.get(graph.label, GraphEdit()))
            for graph in self.graphs or ()
            if graph.label in wanted
        }

    def edited(self, writers: Mapping[str, EditWriter]) -> GraphItem:
        """This item with what the writers wrote."""
        finished = {label: writer.finish() for label, writer in writers.items()}
        return replace(self, edit=Edit({**self.edit.graphs, **finished}))


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
        with paused_gc():
            return self._run(item)

    def _run(self, item: GraphItem) -> PassResult:
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
