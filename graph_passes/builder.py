"""Adds nodes to a graph or a function body: unique legal names, constants, and the right way to refer to an output."""

from __future__ import annotations

__all__ = ["NodeBuilder", "cut_scope", "fresh_scope", "scope_of", "tensor_bytes"]

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Union

import numpy as np

from graph_passes.messages import NodeDef, types_pb2

Numbers = Union[int, float, Sequence[int]]

MAX_NAME = 250
_SUFFIX_ROOM = 50
_NUMPY = {
    types_pb2.DT_FLOAT: np.float32, types_pb2.DT_DOUBLE: np.float64, types_pb2.DT_HALF: np.float16,
    types_pb2.DT_INT8: np.int8, types_pb2.DT_INT16: np.int16, types_pb2.DT_INT32: np.int32,
    types_pb2.DT_INT64: np.int64, types_pb2.DT_UINT8: np.uint8, types_pb2.DT_UINT16: np.uint16,
    types_pb2.DT_UINT32: np.uint32, types_pb2.DT_UINT64: np.uint64, types_pb2.DT_COMPLEX64: np.complex64,
    types_pb2.DT_COMPLEX128: np.complex128,
}  # fmt: skip


def scope_of(name: str) -> str:
    """The name scope of a node, "" at the top, cut to leave room for new names below it."""
    return cut_scope(name.rpartition("/")[0])


def cut_scope(scope: str) -> str:
    """The scope itself, or its front and a hash where names below it would pass 250 characters."""
    if len(scope) + _SUFFIX_ROOM <= MAX_NAME:
        return scope
    digest = hashlib.sha256(scope.encode("utf-8")).hexdigest()[:8]
    return f"{scope[: MAX_NAME - _SUFFIX_ROOM - 10]}_{digest}"


def fresh_scope(wanted: str, leaves: Iterable[str], taken: Collection[str]) -> str:
    """`wanted`, or `wanted_1`, … : the first under which none of the leaf names is taken."""
    leaves = tuple(leaves)
    scope, number = wanted, 0
    while any(f"{scope}/{leaf}" in taken for leaf in leaves):
        number += 1
        scope = f"{wanted}_{number}"
    return scope


def tensor_bytes(values: Numbers, dtype: int) -> bytes:
    """How a constant of this type holds a number or a list of numbers."""
    if dtype == types_pb2.DT_BFLOAT16:
        bits = np.asarray(values, np.float32).view(np.uint32)
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())
    with np.errstate(over="raise"):
        return np.asarray(values, _NUMPY[dtype]).tobytes()


class NodeBuilder:
    """Makes the NodeDefs to be added to a graph or a function body.

    `taken` must hold every name of the graph; it grows with each node. In a function body (`in_function`) an output
    is written `name:arg:index`, elsewhere `name:index`.
    """

    def __init__(self, taken: set[str], in_function: bool) -> None:
        self.added: list[NodeDef] = []
        self.taken = taken
        self.in_function = in_function

    def ref(self, name: str, arg: str, index: int = 0) -> str:
        """How a node of the same graph names this output."""
        if self.in_function:
            return f"{name}:{arg}:{index}"
        return f"{name}:{index}" if index else name

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[str],
        device: str = "",
        types: Mapping[str, int] | None = None,
        ints: Mapping[str, int] | None = None,
        strings: Mapping[str, str] | None = None,
    ) -> NodeDef:
        """Appends a node; the name must be fresh."""
        if name in self.taken:
            raise ValueError(f"the name {name} is taken")
        self.taken.add(name)
        node = NodeDef(name=name, op=op, device=device, input=inputs)
        self.added.append(node)
        for key, dtype in (types or {}).items():
            node.attr[key].type = dtype
        for key, number in (ints or {}).items():
            node.attr[key].i = number
        for key, text in (strings or {}).items():
            node.attr[key].s = text.encode("utf-8")
        return node

    def constant(self, name: str, values: Numbers, dtype: int, device: str = "", control: Sequence[str] = ()) -> str:
        """Appends a Const of a number or a list of numbers, and returns how to refer to it.

        Raises:
            KeyError, OverflowError, FloatingPointError: no constant of the type can be written, or it cannot hold one.
        """
        content = tensor_bytes(values, dtype)
        node = self.add(name, "Const", list(control), device, types={"dtype": dtype})
        tensor = node.attr["value"].tensor
        tensor.dtype = dtype
        tensor.tensor_shape.SetInParent()
        for size in np.shape(values):
            tensor.tensor_shape.dim.add().size = size
        tensor.tensor_content = content
        return self.ref(name, "output")
