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

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.errors import GraphError, VerificationError, summarise
from graph_passes.graph import Graph, graphs_of
from graph_passes.messages import FunctionDef, GraphDef, NodeDef
from graph_passes.op_tables import output_counts
from graph_passes.order import breadth_first_order
from graph_passes.pipeline import GraphItem, PassResult
from graph_passes.rewrite import kept_attrs
from graph_passes.sections import Gradient
from graph_passes.trace_reductions import check_reductions, type_of


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
        if item.original is None:
            return PassResult(item, notes=("nothing was rewritten",))
        findings = verify_rewrite(item.original, item.graph_def, item.gradients or (), item.original_graphs)
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
) -> list[str]:
    """What is wrong with `after` as a rewritten `before`; empty where nothing is.

    `gradients` are those that find saw in `before`; `before_graphs` spares building its index again.
    """
    graphs = before_graphs if before_graphs is not None else graphs_of(before)
    findings = _compare_library(before, after)
    if findings:
        return findings
    after_containers = [after.node, *(function.node_def for function in after.library.function)]
    for graph, container in zip(graphs, after_containers):
        findings += _verify_graph(graph, container, [g for g in gradients if g.graph == graph.label])
    return findings


def _verify_graph(graph: Graph, container: Sequence[NodeDef], gradients: Sequence[Gradient]) -> list[str]:
    place = f" of function {graph.label}" if graph.label else ""
    if len(container) < len(graph.container):
        return [f"{len(graph.container) - len(container)} old nodes{place} are gone"]
    changed = [
        position + graph.arg_count
        for position, differs in enumerate(map(operator.ne, graph.container, container))
        if differs
    ]
    renamed = [n for n in changed if container[n - graph.arg_count].name != graph.names[n]]
    if renamed:
        return [f"old node {graph.names[n]}{place} is not at its place" for n in renamed]
    try:
        after = graph.rewritten(container, changed)
        breadth_first_order(after)
    except GraphError as error:
        return [str(error)]
    return [
        *_check_ports(after, place),
        *_check_untouched(graph, after, changed, {g.node for g in gradients}, place),
        *check_reductions(graph, after, gradients),
    ]


def _check_ports(after: Graph, place: str) -> list[str]:
    findings = []
    for consumer, producer, port in after.ported:
        if producer < after.arg_count:
            continue
        counts = output_counts(after.node(producer))
        if counts is not None and not after.label and port >= sum(counts.values()):
            findings.append(f"{after.names[consumer]}{place} reads output {port} of {after.names[producer]}")
    return findings


def _check_untouched(before: Graph, after: Graph, changed: Sequence[int], members: set[int], place: str) -> list[str]:
    findings = []
    for number in changed:
        old, new = before.node(number), after.node(number)
        if number not in members:
            # Messages with a NaN in them are unequal to themselves; bytes are not.
            if old.SerializeToString(deterministic=True) != new.SerializeToString(deterministic=True):
                findings.append(f"node {old.name}{place} was changed though it is no all-reduce")
        elif (old.attr["T"].type, old.device) != (type_of(new), new.device):
            findings.append(f"node {old.name}{place} has another type or device")
        elif kept_attrs(old) != kept_attrs(new):
            findings.append(f"node {old.name}{place} lost or changed an attribute")
    return findings


def _compare_library(before: GraphDef, after: GraphDef) -> list[str]:
    findings = []
    if before.versions != after.versions or before.version != after.version:
        findings.append("the versions of the graph were changed")
    if list(before.library.gradient) != list(after.library.gradient):
        findings.append("the gradient functions of the library were changed")
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
