"""Follows a reduced gradient forward to the variable that it updates; a gradient has its variable's shape.

From the all-reduce through scaling, clipping and casts to a training op (or a plain assignment), then from that op's
first input back to the variable.
"""

from __future__ import annotations

__all__ = ["UpdatedVariable", "updated_variable"]

from dataclasses import dataclass

from graph_passes.attributes import read_attr
from graph_passes.graph import Graph
from graph_passes.op_tables import training_ops
from graph_passes.sections import Shape
from graph_passes.shapes import shape_of_proto

_MAX_VISITED = 256
_PASS_THROUGH = frozenset({
    "Add", "AddV2", "AddN", "Cast", "CheckNumerics", "ClipByValue", "Div", "DivNoNan", "HcomAllReduce", "Identity",
    "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Select", "SelectV2", "StopGradient", "Sub",
})  # fmt: skip
_ASSIGNMENTS = frozenset({"AssignAdd", "AssignSub", "AssignAddVariableOp", "AssignSubVariableOp"})
_VARIABLES = frozenset({"VariableV2", "Variable", "VarHandleOp"})
_BACK = frozenset({"Identity", "Enter", "RefEnter"})


@dataclass(frozen=True)
class UpdatedVariable:
    """The variable's name and its static shape."""

    name: str
    shape: Shape


def updated_variable(graph: Graph, number: int) -> UpdatedVariable | None:
    """The one variable that the output of node `number` updates; None where there is none or more than one.

    A training op wins over plain assignments, which also serve slots and accumulators.
    """
    trained, assigned = _reached_variables(graph, number)
    found = trained or assigned
    if len(found) != 1:
        return None
    variable = next(iter(found))
    node = graph.node(variable)
    return UpdatedVariable(node.name, shape_of_proto(read_attr(node, "shape").shape) if "shape" in node.attr else None)


def _reached_variables(graph: Graph, start: int) -> tuple[set[int], set[int]]:
    """Variables reached through training ops, and those through plain assignments."""
    trained: set[int] = set()
    assigned: set[int] = set()
    visited, pending = {start}, [start]
    trains, ops = training_ops(), graph.ops
    while pending and len(visited) < _MAX_VISITED:
        current = pending.pop()
        for consumer in dict.fromkeys(graph.consumers(current)):
            op = ops[consumer]
            if op in trains and _feeds(graph, current, consumer, trains[op].grad):
                _add_variable(graph, consumer, trained)
            elif op in _ASSIGNMENTS and _feeds(graph, current, consumer, 1):
                _add_variable(graph, consumer, assigned)
            elif op in _PASS_THROUGH and consumer not in visited and _feeds(graph, current, consumer):
                visited.add(consumer)
                pending.append(consumer)
    return trained, assigned


def _feeds(graph: Graph, producer: int, consumer: int, position: int | None = None) -> bool:
    """True where an edge from producer to consumer carries data (to input `position`, if given)."""
    producers = graph.producers(consumer)
    texts = graph.node(consumer).input
    positions = range(len(producers)) if position is None else (position,) if position < len(producers) else ()
    return any(producers[at] == producer and texts[at][:1] != "^" for at in positions)


def _add_variable(graph: Graph, training_op: int, found: set[int]) -> None:
    number = training_op
    for _ in range(_MAX_VISITED):
        sources = graph.producers(number)
        if not sources:
            return
        number = sources[0]
        if graph.ops[number] in _VARIABLES:
            found.add(number)
            return
        if graph.ops[number] not in _BACK:
            return
