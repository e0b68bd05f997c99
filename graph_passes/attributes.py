"""Reads node attributes with their types checked; a wrong type is one clear error."""

from __future__ import annotations

__all__ = ["int_attr", "read_attr", "string_attr", "type_attr"]

from typing import Any

from graph_passes.errors import ReductionError
from graph_passes.messages import AttrValue, NodeDef, dtype_name

_KIND_NAMES = {"s": "a string", "i": "an int", "f": "a float", "b": "a bool", "type": "a type",
               "shape": "a shape", "tensor": "a tensor", "list": "a list", "func": "a function",
               "placeholder": "a function's attribute"}  # fmt: skip


_NOTHING = AttrValue()


def read_attr(node: NodeDef, name: str) -> AttrValue:
    """An attribute to be read only, empty where the node has none; `node.attr[name]` would then add it to the node."""
    value: AttrValue = node.attr.get(name, _NOTHING)
    return value


def _attr(node: NodeDef, name: str, kind: str, where: str) -> Any:
    """The attribute's value in field `kind`; None where the node has no such attribute."""
    value = node.attr.get(name)
    if value is None:
        return None
    found = value.WhichOneof("value")
    if found != kind:
        shown = _KIND_NAMES.get(found, "no value")
        if found in ("i", "f", "b"):
            shown += f" ({getattr(value, found)})"
        elif found == "s":
            shown += f" ({value.s.decode('utf-8', 'replace')!r})"
        elif found == "type":
            shown += f" ({dtype_name(value.type)})"
        raise ReductionError(
            f"attribute {name} has the wrong type",
            where=where,
            found=shown,
            expected=_KIND_NAMES[kind],
            remedy="building the all-reduce anew",
        )
    return getattr(value, kind)


def string_attr(node: NodeDef, name: str, where: str) -> str:
    """A string attribute that must be there and not empty.

    Raises:
        ReductionError: it is missing, empty, no UTF-8 or no string.
    """
    value = _attr(node, name, "s", where)
    try:
        text = value.decode("utf-8") if value is not None else ""
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise ReductionError(
            f"attribute {name} is missing or empty",
            where=where,
            found="no such attribute" if value is None else repr(value),
            expected="a string",
            remedy=f"building the all-reduce with {name}=…",
        )
    return text


def int_attr(node: NodeDef, name: str, default: int, where: str) -> int:
    """An int attribute, or the default where the node has none.

    Raises:
        ReductionError: it is no int.
    """
    value = _attr(node, name, "i", where)
    return default if value is None else int(value)


def type_attr(node: NodeDef, name: str, where: str) -> int:
    """A type attribute that must be there, as a DataType number.

    Raises:
        ReductionError: it is missing or no type.
    """
    value = _attr(node, name, "type", where)
    if not value:
        raise ReductionError(
            f"attribute {name} is missing",
            where=where,
            found="no type",
            expected="the tensor's type",
            remedy="building the all-reduce anew",
        )
    return int(value)
