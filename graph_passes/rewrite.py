"""Turns a node into another op without losing what belongs to its name."""

from __future__ import annotations

__all__ = ["has_same_kept_attrs", "replace_node"]

from collections.abc import Mapping, Sequence

from graph_passes.messages import NodeDef


def replace_node(node: NodeDef, op: str, inputs: Sequence[str], types: Mapping[str, int]) -> None:
    """Turns a node into another op; name, device and the attributes that start with `_` stay."""
    node.op = op
    del node.input[:]
    node.input.extend(inputs)
    attributes = node.attr
    for name in [name for name in attributes if not name.startswith("_")]:
        del attributes[name]
    for name, dtype in types.items():
        attributes[name].type = dtype


def has_same_kept_attrs(before: NodeDef, after: NodeDef) -> bool:
    """True where the attributes that start with `_` (`_class`, `_output_shapes`, …) are the same."""
    old, new = before.attr, after.attr
    names = {name for name in old if name.startswith("_")}
    return names == {name for name in new if name.startswith("_")} and all(old[name] == new[name] for name in names)
