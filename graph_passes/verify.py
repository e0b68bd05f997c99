"""Pass verify: proves from the two graphs alone that a rewritten graph reduces what the original reduced.

It knows nothing of how the graph was rewritten. Checked are:

1. the graph is acyclic (while loops aside), names are unique, every input resolves, ports are in range;
2. every old node still exists; every node but the all-reduces is byte for byte what it was; an all-reduce's node has
   the type, device and `_` attributes that it had;
3. each gradient is reduced exactly once, with its own group and reduction, and comes back in its own shape;
4. functions keep their signatures, the rest of the graph and the library are what they were.
"""

from __future__ import annotations

__all__ = ["Verify", "verify_rewrite"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.attributes import read_attr
from graph_passes.changes import changed_in_graph, changed_nodes
from graph_passes.errors import GraphError, VerificationError, summarise
from graph_passes.graph import Graph, graphs_of
from graph_passes.messages import FunctionDef, GraphDef, NodeDef
from graph_passes.op_tables import fixed_outputs, has_output, output_counts
from graph_passes.overlay import Overlay
from graph_passes.pipeline import GraphItem, PassResult
from graph_passes.rewrite import has_same_kept_attrs
from graph_passes.sections import Gradient
from graph_passes.trace_reductions import check_reductions, type_of

_LOOKED_INTO = ("node", "library", "function")


@dataclass(frozen=True)
class Verify:
    """Verifies the rewritten graph against the original."""

    name: ClassVar[str] = "verify"

    def requires(self, item: GraphItem) -> None:
        """Any item will do; one that was not rewritten is fine as it is."""

    def run(self, item: GraphItem) -> PassResult:
        """Returns the item.

        Raises:
            VerificationError: with every finding of the first kind that was found.
        """
        if not item.edit:
            return PassResult(item, notes=("nothing was rewritten",))
        findings = verify_rewrite(item.source, item.graph_def, item.gradients or (), item.graphs, item.result.content)
        if findings:
            raise VerificationError(
                "the rewritten graph is not the original's equal",
                found=summarise(findings),
                expected="the same values under the same names",
                remedy="reporting this as a bug of hccl-fusion",
            )
        return PassResult(item, notes=(f"{len(item.gradients or ())} reductions verified",))

    def ensures(self, item: GraphItem) -> None:
        """Nothing is changed."""


def verify_rewrite(
    before: GraphDef,
    after: GraphDef,
    gradients: Sequence[Gradient],
    before_graphs: Sequence[Graph] | None = None,
    after_content: bytes | None = None,
) -> list[str]:
    """What is wrong with `after` as a rewritten `before`; empty where nothing is.

    `gradients` are those that find saw in `before`. `before_graphs`, its index, and `after_content`, the bytes that
    `after` was parsed from, spare making them again.
    """
    graphs = before_graphs if before_graphs is not None else graphs_of(before)
    findings = _compare_library(before, after)
    if findings:
        return findings
    containers = [after.node, *(function.node_def for function in after.library.function)]
    for position, (graph, container) in enumerate(zip(graphs, containers)):
        if len(container) < len(graph.container):
            findings += _gone(graph, container)
            continue
        changed = changed_nodes(graph, container) if position else changed_in_graph(graph, after, after_content)
        findings += _verify_graph(graph, container, changed, [g for g in gradients if g.graph == graph.label])
    return findings


def _verify_graph(
    graph: Graph, container: Sequence[NodeDef], changed: Sequence[int], gradients: Sequence[Gradient]
) -> list[str]:
    place = f" of function {graph.label}" if graph.label else ""
    if any(container[n - graph.arg_count].name != graph.names[n] for n in changed):
        # Somebody else may have written the nodes in another order: their names decide.
        gone = _gone(graph, container)
        if gone:
            return gone
        by_name = {node.name: node for node in container}
        if len(by_name) < len(container):
            return [f"node names{place} are not unique"]
        old_names = graph.names[graph.arg_count :]
        old = set(old_names)
        container = [by_name[name] for name in old_names] + [node for node in container if node.name not in old]
        changed = changed_nodes(graph, container)
    try:
        after = Overlay(graph, container, changed)
    except GraphError as error:
        return [str(error)]
    cycle = after.find_cycle()
    if cycle:
        return [f"the rewritten graph{place} has a cycle: {' -> '.join([*cycle[:8], cycle[0]])}"]
    return [
        *_check_ports(after, place),
        *_check_untouched(graph, after, changed, {g.node for g in gradients}, place),
        *check_reductions(graph, after, gradients),
    ]


def _gone(graph: Graph, container: Sequence[NodeDef]) -> list[str]:
    left = {node.name for node in container}
    place = f" of function {graph.label}" if graph.label else ""
    gone = [name for name in graph.names[graph.arg_count :] if name not in left]
    return [f"old node {name}{place} is gone" for name in gone]


def _check_ports(after: Overlay, place: str) -> list[str]:
    if after.label:
        return _check_named_ports(after, place)
    findings = []
    fixed = fixed_outputs()
    for consumer, producer, port in [*after.before.ported, *after.ported]:
        if port < fixed.get(after.op(producer), 1):
            continue
        if consumer not in after.replaced and not has_output(after.node(producer), port):
            findings.append(f"{after.name(consumer)}{place} reads output {port} of {after.name(producer)}")
    return findings


def _check_named_ports(after: Overlay, place: str) -> list[str]:
    """In a function's body an input names the output and counts within it; arguments have neither."""
    findings = []
    for consumer in after.fresh:
        for text, producer in zip(after.inputs(consumer), after.producers(consumer)):
            if text.is_control or producer < after.arg_count:
                continue
            counts = output_counts(after.node(producer))
            if counts is not None and text.port >= counts.get(text.arg, 0):
                findings.append(f"{after.name(consumer)}{place} reads output {text} of {after.op(producer)}")
    return findings


def _check_untouched(before: Graph, after: Overlay, changed: Sequence[int], members: set[int], place: str) -> list[str]:
    findings = []
    for number in changed:
        old, new = before.node(number), after.node(number)
        if number not in members:
            findings.append(f"node {old.name}{place} was changed though it is no all-reduce")
        elif (read_attr(old, "T").type, old.device) != (type_of(new), new.device):
            findings.append(f"node {old.name}{place} has another type or device")
        elif not has_same_kept_attrs(old, new):
            findings.append(f"node {old.name}{place} lost or changed an attribute")
    return findings


def _compare_library(before: GraphDef, after: GraphDef) -> list[str]:
    findings = []
    for what, one, other in (("graph", before, after), ("library", before.library, after.library)):
        for field in one.DESCRIPTOR.fields:
            if field.name not in _LOOKED_INTO and getattr(one, field.name) != getattr(other, field.name):
                findings.append(f"field {field.name} of the {what} was changed")
    old, new = before.library.function, after.library.function
    if [f.signature.name for f in old] != [f.signature.name for f in new]:
        findings.append("functions were added, removed or moved")
        return findings
    for one, other in zip(old, new):
        if one != other and _frame_of(one) != _frame_of(other):
            findings.append(f"function {one.signature.name} has another signature")
    return findings


def _frame_of(function: FunctionDef) -> bytes:
    """All of a function but its nodes."""
    copy = FunctionDef()
    copy.CopyFrom(function)
    del copy.node_def[:]
    return bytes(copy.SerializeToString(deterministic=True))
