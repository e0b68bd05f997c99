"""Adds to a graph the nodes through which its variables are set and read from outside: GraphDef in, GraphDef out."""

from __future__ import annotations

__all__ = ["VARIABLE_OPS", "StateAccess", "add_state_access"]

from dataclasses import dataclass

from graph_passes.builder import NodeBuilder, fresh_scope
from graph_passes.messages import GraphDef, NodeDef

_REFERENCE_VARIABLES = frozenset({"Variable", "VariableV2"})
VARIABLE_OPS = _REFERENCE_VARIABLES | {"VarHandleOp"}


@dataclass(frozen=True)
class StateAccess:
    """Names of the nodes for one variable: feed `value` and run `assign` to set it, fetch `read` to read it."""

    value: str
    assign: str
    read: str


def add_state_access(graph_def: GraphDef) -> tuple[GraphDef, dict[str, StateAccess]]:
    """A copy of the graph with the new nodes, and their names by variable."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    variables = [node for node in graph_def.node if node.op in VARIABLE_OPS]
    builder = NodeBuilder({node.name for node in graph_def.node}, in_function=False)
    leaves = [f"{kind}_{i}" for i in range(len(variables)) for kind in ("value", "assign", "read")]
    scope = fresh_scope("hccl_state", leaves, builder.taken)
    names = {}
    for number, variable in enumerate(variables):
        access = StateAccess(*(f"{scope}/{kind}_{number}" for kind in ("value", "assign", "read")))
        _add_access(builder, variable, access)
        names[variable.name] = access
    result.node.extend(builder.added)
    return result, names


def _add_access(builder: NodeBuilder, variable: NodeDef, access: StateAccess) -> None:
    dtype = variable.attr["dtype"].type
    value = builder.add(access.value, "Placeholder", (), types={"dtype": dtype})
    value.attr["shape"].shape.unknown_rank = True
    if variable.op in _REFERENCE_VARIABLES:
        assign = builder.add(access.assign, "Assign", (variable.name, value.name), types={"T": dtype})
        assign.attr["use_locking"].b = True
        assign.attr["validate_shape"].b = False
        builder.add(access.read, "Identity", (variable.name,), types={"T": dtype})
    else:
        builder.add(access.assign, "AssignVariableOp", (variable.name, value.name), types={"dtype": dtype})
        builder.add(access.read, "ReadVariableOp", (variable.name,), types={"dtype": dtype})
