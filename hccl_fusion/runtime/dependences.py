"""What each node of a training graph depends on, found in one sweep along its edges, data and control.

Data sources, reductions, access to files, foreign ops and every variable are bits of one integer per node.
"""

from __future__ import annotations

__all__ = [
    "FOREIGN",
    "OUTSIDE",
    "REDUCTION",
    "CHECKPOINT",
    "SOURCE",
    "UNFEEDABLE",
    "VARIABLE_BITS",
    "Dependences",
    "called_functions",
    "data_source_types",
]

from collections.abc import Collection, Iterable, Iterator

from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, NodeDef, types_pb2
from graph_passes.op_tables import ALL_REDUCE_OP, REDUCTION_ATTR, output_counts
from graph_passes.order import breadth_first_order
from hccl_fusion.runtime.in_process_collectives import COLLECTIVE_REDUCTIONS
from hccl_fusion.runtime.replicate import ancestors
from hccl_fusion.runtime.state_access import VARIABLE_OPS

SOURCE, UNFEEDABLE, REDUCTION, CHECKPOINT, FOREIGN = (1 << position for position in range(5))
OUTSIDE = SOURCE | UNFEEDABLE | REDUCTION | CHECKPOINT | FOREIGN
"""Bits of all that is not the graph's own state."""
_FIRST_VARIABLE = 5
VARIABLE_BITS = ~((1 << _FIRST_VARIABLE) - 1)

_CHECKPOINT_OPS = frozenset({
    "MergeV2Checkpoints", "Restore", "RestoreSlice", "RestoreV2", "Save", "SaveSlices", "SaveV2", "WriteFile",
})  # fmt: skip
_NEEDS_ITS_PROCESS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_UNFEEDABLE_TYPES = frozenset({types_pb2.DT_STRING, types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT})
_FUNCTION_ATTRS = ("f", "then_branch", "else_branch", "body", "cond", "branches")
_PASSES_REFERENCE = frozenset({"Identity", "RefIdentity", "Enter", "RefEnter", "Switch", "RefSwitch"})


def data_source_types(node: NodeDef) -> tuple[int, ...]:
    """The types of the outputs of a node through which data comes in from outside; () for all other nodes."""
    if node.op in ("Placeholder", "PlaceholderV2"):
        return (node.attr["dtype"].type,)
    if node.op in ("IteratorGetNext", "IteratorGetNextSync"):
        return tuple(node.attr["output_types"].list.type)
    if node.op.startswith("QueueDequeue"):
        return tuple(node.attr["component_types"].list.type)
    return ()


def called_functions(node: NodeDef) -> list[str]:
    """Names of the functions that a node may call: its op, and those that its attributes name."""
    names = [node.op]
    for attribute in _FUNCTION_ATTRS:
        if attribute in node.attr:
            value = node.attr[attribute]
            names += [value.func.name, *(func.name for func in value.list.func)]
    return names


class Dependences:
    """The sweep over one graph.

    Attributes:
        graph: the index of the graph.
        fed: names of nodes whose outputs are fed, so that nothing before them matters.
        bit_of: the bit of each variable, by node number.
        bits: of each node, its own and those of all nodes before it.
        depth: how many loops and conditionals a node is in; the value of a node in one cannot be fetched.
    """

    def __init__(self, graph_def: GraphDef, fed: Collection[str] = ()) -> None:
        self.graph = Graph(graph_def.node)
        self.fed = fed
        self._functions = {function.signature.name for function in graph_def.library.function}
        self._order = breadth_first_order(self.graph)
        variables = [number for number, op in enumerate(self.graph.ops) if op in VARIABLE_OPS]
        self.bit_of = {number: 1 << (_FIRST_VARIABLE + i) for i, number in enumerate(variables)}
        self.bits = self.spread([self.own_bits(number) for number in range(len(self.graph))])
        self.depth = self._guard_depth()

    def own_bits(self, number: int) -> int:
        """What a node is itself."""
        node = self.graph.node(number)
        bits = self.bit_of.get(number, 0)
        types = data_source_types(node)
        if types:
            bits |= SOURCE
            if node.name not in self.fed and _UNFEEDABLE_TYPES.issuperset(types):
                bits |= UNFEEDABLE
        if self.is_reduction(number):
            bits |= REDUCTION
        elif node.op in _CHECKPOINT_OPS:
            bits |= CHECKPOINT
        elif self._is_foreign(node):
            bits |= FOREIGN
        return bits

    def _is_foreign(self, node: NodeDef) -> bool:
        if node.op in _NEEDS_ITS_PROCESS:
            return True
        return node.op not in self._functions and output_counts(node) is None

    def is_reduction(self, number: int) -> bool:
        """True for an all-reduce, lowered or not, and for the node that stands where one was."""
        op = self.graph.ops[number]
        return op == ALL_REDUCE_OP or op in COLLECTIVE_REDUCTIONS or REDUCTION_ATTR in self.graph.node(number).attr

    def spread(self, bits: list[int]) -> list[int]:
        """Adds to each node's bits those of all nodes before it, in place; loops need more than one sweep."""
        cut = {self.graph.ids[name] for name in self.fed if name in self.graph.ids}
        starts, sources = self.graph.in_start, self.graph.in_src
        has_loops = any(op.endswith("NextIteration") for op in self.graph.ops)
        changed = True
        while changed:
            changed = False
            for number in self._order:
                if number in cut:
                    continue
                found = bits[number]
                for source in sources[starts[number] : starts[number + 1]]:
                    found |= bits[source]
                changed |= has_loops and found != bits[number]
                bits[number] = found
        return bits

    def _guard_depth(self) -> list[int]:
        depth = [0] * len(self.graph)
        for number in self._order:
            producers = self.graph.producers(number)
            inherited = max((depth[source] for source in producers), default=0)
            op = self.graph.ops[number]
            if op.endswith(("Enter", "Switch")):
                inherited += 1
            elif op in ("Exit", "RefExit"):
                inherited -= 2  # the loop's Enter, and the Switch that lets its values out
            elif op in ("Merge", "RefMerge") and not self._closes_loop(producers):
                inherited -= 1
            depth[number] = max(inherited, 0)
        return depth

    def _closes_loop(self, producers: list[int]) -> bool:
        return any(self.graph.ops[source].endswith("NextIteration") for source in producers)

    def variable_of(self, number: int) -> int | None:
        """The variable that a node's first input refers to."""
        producers = self.graph.producers(number)
        while producers:
            number = producers[0]
            if number in self.bit_of:
                return number
            if self.graph.ops[number] not in _PASSES_REFERENCE:
                return None
            producers = self.graph.producers(number)
        return None

    def variables_in(self, bits: int) -> Iterator[str]:
        """Names of the variables among these bits."""
        return (self.graph.names[number] for number, bit in self.bit_of.items() if bits & bit)

    def needed(self, numbers: Iterable[int]) -> list[int]:
        """These nodes and all before them, up to where data comes in."""
        graph = self.graph

        def is_cut(number: int) -> bool:
            return graph.names[number] in self.fed or bool(data_source_types(graph.node(number)))

        return ancestors(graph, numbers, is_cut)
