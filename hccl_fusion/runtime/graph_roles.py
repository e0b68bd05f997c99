"""What the nodes of a training graph are for: reductions, variables and their initialisers, updates, results."""

from __future__ import annotations

__all__ = ["Roles", "find_roles"]

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graph_passes.messages import GraphDef
from graph_passes.op_tables import ALL_REDUCE_OP, LOWERED_OPS, REDUCTION_ATTR, training_ops
from hccl_fusion.runtime.dependences import (
    CHECKPOINT,
    FOREIGN,
    OUTSIDE,
    REDUCTION,
    SOURCE,
    UNFEEDABLE,
    VARIABLE_BITS,
    Dependences,
    called_functions,
    data_source_types,
)
from hccl_fusion.runtime.in_process_collectives import COLLECTIVE_REDUCTIONS
from hccl_fusion.runtime.state_access import VARIABLE_OPS

_ASSIGNS = frozenset({"Assign", "AssignVariableOp"})
_UPDATE = re.compile(
    r"Assign(Add|Sub)(VariableOp)?|(Resource)?Scatter(Nd)?(Add|Sub|Update|Mul|Div|Min|Max)"
    r"|(Resource)?StridedSliceAssign|(Resource)?CountUpTo"
)
_PASS_ON = frozenset({"Cast", "Identity", "Reshape", "Slice", "Split", "SplitV"})
_NO_RESULT = VARIABLE_OPS | _ASSIGNS | frozenset({
    "Assert", "Const", "ControlTrigger", "NoOp", "Print", "PrintV2",
    "IsVariableInitialized", "ReadVariableOp", "VarIsInitializedOp", "VariableShape",
    "OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike",
})  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """The parts that nodes play; all by node name.

    Attributes:
        reductions: HcomAllReduce nodes whose value can be fetched, in node-list order.
        reduced: nodes that yield reduced gradients where the reductions are lowered or fused already.
        hidden: all-reduces inside loops and conditionals, and functions that reduce: their value cannot be fetched.
        variables: in node-list order.
        initialisers: by variable, the tensor of its initial value and the variables that this reads in turn.
        updates: groups of nodes that change variables; each group runs in one step, the groups in this order.
        results: nodes whose values nothing in the graph uses; their types are not looked at.
        unfeedable: data sources of string, resource or variant type that reductions or updates need.
        foreign: nodes, needed likewise, of ops that TensorFlow does not have.
    """

    reductions: tuple[str, ...]
    reduced: tuple[str, ...]
    hidden: tuple[str, ...]
    variables: tuple[str, ...]
    initialisers: Mapping[str, tuple[str, frozenset[str]]]
    updates: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]
    unfeedable: tuple[str, ...]
    foreign: tuple[str, ...]


def find_roles(graph_def: GraphDef, fed: Collection[str] = ()) -> Roles:
    """Finds the roles of the nodes of a graph; O((nodes + edges) · variables / 64).

    Args:
        graph_def: one rank's graph.
        fed: names of nodes whose outputs are fed, so that nothing before them matters.

    Raises:
        GraphError: the graph is no valid graph.
    """
    depends = Dependences(graph_def, fed)
    updating, reducing = _function_kinds(graph_def)
    members = [number for number, op in enumerate(depends.graph.ops) if op == ALL_REDUCE_OP]
    reductions = [number for number in members if not depends.depth[number]]
    reduced = [number for number in _reduced(depends) if not depends.depth[number]]
    initialisers = _initialisers(depends)
    updates = _Updates(depends, frozenset(initialisers.values()), updating)
    names = depends.graph.names
    needed = depends.needed([*reductions, *reduced, *updates.numbers])
    return Roles(
        reductions=tuple(names[number] for number in reductions),
        reduced=tuple(names[number] for number in reduced),
        hidden=(*(names[number] for number in members if depends.depth[number]), *sorted(reducing)),
        variables=tuple(names[number] for number in depends.bit_of),
        initialisers={names[variable]: _initial_value(depends, assign) for variable, assign in initialisers.items()},
        updates=tuple(tuple(names[number] for number in group) for group in updates.groups()),
        results=tuple(names[number] for number in _results(depends, updates, [*reductions, *reduced])),
        unfeedable=tuple(names[number] for number in needed if depends.own_bits(number) & UNFEEDABLE),
        foreign=tuple(names[number] for number in needed if depends.own_bits(number) & FOREIGN),
    )


def _reduced(depends: Dependences) -> list[int]:
    """Lowered reductions, and what their values pass through: the pieces of a fused buffer and the reshapes."""
    graph = depends.graph
    pending = [
        number
        for number, op in enumerate(graph.ops)
        if op in COLLECTIVE_REDUCTIONS or (op in LOWERED_OPS and REDUCTION_ATTR in graph.node(number).attr)
    ]
    found = set(pending)
    while pending:
        fresh = {c for c in _data_consumers(depends, pending.pop()) if graph.ops[c] in _PASS_ON} - found
        found |= fresh
        pending += fresh
    return sorted(found)


def _initialisers(depends: Dependences) -> dict[int, int]:
    """By variable the assignment called `<variable>/Assign`, else the first that needs nothing from outside."""
    chosen: dict[int, int] = {}
    names = depends.graph.names
    for number, op in enumerate(depends.graph.ops):
        variable = depends.variable_of(number) if op in _ASSIGNS else None
        if variable is None or depends.depth[number]:
            continue
        if _value_bits(depends, number) & (OUTSIDE | depends.bit_of[variable]):
            continue
        if variable not in chosen or names[number] == f"{names[variable]}/Assign":
            chosen[variable] = number
    return chosen


def _value_bits(depends: Dependences, assign: int) -> int:
    return depends.bits[depends.graph.producers(assign)[1]]


def _initial_value(depends: Dependences, assign: int) -> tuple[str, frozenset[str]]:
    value = depends.graph.node(assign).input[1]
    return value, frozenset(depends.variables_in(_value_bits(depends, assign)))


class _Updates:
    """The nodes that change variables, and which of them may run in one step."""

    def __init__(self, depends: Dependences, initialisers: Collection[int], updating: Collection[str]) -> None:
        self.depends = depends
        self._initialisers = initialisers
        self._updating = updating
        count = len(depends.graph)
        self.numbers = [number for number in range(count) if self._is_update(number)]
        bits = [0] * count
        for position, number in enumerate(self.numbers):
            bits[number] = 1 << position
        self.before = depends.spread(bits)
        """For each node the updates that happen before it, as bits."""

    def _is_update(self, number: int) -> bool:
        """No initialiser, no restorer, no setter that only passes data in."""
        depends, op = self.depends, self.depends.graph.ops[number]
        if depends.bits[number] & CHECKPOINT:
            return False
        if op in _ASSIGNS:
            is_computed = _value_bits(depends, number) & (REDUCTION | VARIABLE_BITS)
            return bool(is_computed) and number not in self._initialisers
        if op in training_ops() or _UPDATE.fullmatch(op):
            return True
        return any(name in self._updating for name in called_functions(depends.graph.node(number)))

    def groups(self) -> Iterator[list[int]]:
        """Updates that one node waits for run together; others join them where no variable is in dispute."""
        left = (1 << len(self.numbers)) - 1
        group: list[int] = []
        for end in self._ends():
            fresh = self._of(end & left)
            left &= ~end
            if group and fresh and self._in_dispute(group, fresh):
                yield group
                group = []
            group += fresh
        if group:
            yield group

    def _ends(self) -> list[int]:
        """Sets of updates, as bits, that the ends of the graph wait for; the largest first."""
        graph = self.depends.graph
        ends = {self.before[number] for number in range(len(graph)) if not graph.consumers(number)}
        return sorted(ends, key=lambda bits: (-bin(bits).count("1"), bits))

    def _of(self, bits: int) -> list[int]:
        return [number for position, number in enumerate(self.numbers) if bits >> position & 1]

    def _in_dispute(self, first: Sequence[int], second: Sequence[int]) -> bool:
        return bool(self._written(first) & self._read(second) or self._written(second) & self._read(first))

    def _read(self, updates: Sequence[int]) -> int:
        bits = 0
        for number in updates:
            bits |= self.depends.bits[number]
        return bits & VARIABLE_BITS

    def _written(self, updates: Sequence[int]) -> int:
        bits = 0
        for number in updates:
            variable = self.depends.variable_of(number)
            bits |= self._read([number]) if variable is None else self.depends.bit_of[variable]
        return bits

    def written_before(self, numbers: Sequence[int]) -> tuple[int, int]:
        """The updates that happen before these nodes, and the variables that those write; both as bits."""
        happened = 0
        for number in numbers:
            happened |= self.before[number]
        return happened, self._written(self._of(happened))


def _results(depends: Dependences, updates: _Updates, reductions: Sequence[int]) -> Iterator[int]:
    """Ends of what is computed from data or variables.

    Left out is what runs an update that the reductions do not run anyway, or reads a variable that they change.
    """
    happened, written = updates.written_before(reductions)
    silent = [_is_silent(op) for op in depends.graph.ops]
    for number, bits in enumerate(depends.bits):
        if silent[number] or not _may_be_result(depends, number):
            continue
        if bits & (UNFEEDABLE | CHECKPOINT | FOREIGN | written) or not bits & (SOURCE | VARIABLE_BITS):
            continue
        runs_more = updates.before[number] & ~happened
        if not runs_more and all(silent[consumer] for consumer in _data_consumers(depends, number)):
            yield number


def _is_silent(op: str) -> bool:
    """True for ops whose value is no result: variables, constants, shapes, summaries, prints, savers."""
    return op in _NO_RESULT or "Summary" in op or op.startswith("Save")


def _may_be_result(depends: Dependences, number: int) -> bool:
    if depends.depth[number] or depends.is_reduction(number) or data_source_types(depends.graph.node(number)):
        return False
    is_read = depends.graph.ops[number] == "Identity" and depends.graph.producers(number)[0] in depends.bit_of
    return not is_read


def _data_consumers(depends: Dependences, number: int) -> Iterator[int]:
    graph = depends.graph
    for consumer in graph.consumers(number):
        texts = graph.node(consumer).input
        if any(s == number and not t.startswith("^") for s, t in zip(graph.producers(consumer), texts)):
            yield consumer


def _function_kinds(graph_def: GraphDef) -> tuple[set[str], set[str]]:
    """Functions that change variables by more than assignment, and functions that reduce, by others' help too."""
    bodies = {function.signature.name: function.node_def for function in graph_def.library.function}
    updating, reducing = set(), set()
    for name, body in bodies.items():
        if any(node.op in training_ops() or _UPDATE.fullmatch(node.op) for node in body):
            updating.add(name)
        if any(node.op == ALL_REDUCE_OP or node.op in COLLECTIVE_REDUCTIONS for node in body):
            reducing.add(name)
    for found in (updating, reducing):
        size = -1
        while size != len(found):
            size = len(found)
            found.update(
                name for name, body in bodies.items() if any(found.intersection(called_functions(n)) for n in body)
            )
    return updating, reducing
