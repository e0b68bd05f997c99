"""Follows each gradient of the original through the rewritten graph to the one reduction that serves it.

Backwards from the member's node: to its piece of a SplitV (or straight) to the reduction, through ConcatV2 and a
flattening Reshape to the very tensor that the original reduced. Nothing else may stand on that way, and no new node may
stand off it.
"""

from __future__ import annotations

__all__ = ["check_reductions", "type_of"]

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from graph_passes.attributes import read_attr
from graph_passes.builder import tensor_bytes
from graph_passes.devices import normalise_device
from graph_passes.graph import Graph
from graph_passes.messages import NodeDef, dtype_name
from graph_passes.node_input import parse_input
from graph_passes.op_tables import (
    ALL_REDUCE_OP,
    COLLECTIVE_OP,
    GROUP_ATTR,
    MERGE_OP,
    MOCK_ATTR,
    REDUCTION_ATTR,
    WIDER_TYPE,
)
from graph_passes.overlay import Overlay
from graph_passes.sections import Gradient
from graph_passes.shapes import ShapeReader

_MOCK_OP = {"sum": "Mul", "prod": "Pow", "min": "Identity", "max": "Identity"}
_DATA_INPUTS = {ALL_REDUCE_OP: 1, COLLECTIVE_OP: 4, "Mul": 2, "Pow": 2, "Identity": 1}
_FUSION_ATTRS = ("fusion", "fusion_id")


class _TraceError(Exception):
    """The trace of one gradient ends in something that is no reduction of it."""


def type_of(node: NodeDef) -> int:
    """The element type that a member's node yields, whatever op it has become."""
    return int(read_attr(node, "DstT").type if node.op == "Cast" else read_attr(node, "T").type)


@dataclass(frozen=True)
class _Piece:
    """One tensor that a reduction reduces."""

    tensor: str
    is_flattened: bool


@dataclass(frozen=True)
class _Reduction:
    """One reduction of the rewritten graph; `dtype` is that of its pieces, before a cast to a wider type."""

    op: str
    group: str
    reduction: str
    dtype: int
    device: str
    inputs: frozenset[str]
    pieces: tuple[_Piece, ...]
    is_joined: bool


@dataclass
class _Uses:
    """Which inputs of which reductions serve a gradient, and what must be equal or different among collectives."""

    served: dict[tuple[int, int], str] = field(default_factory=dict)
    group_keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    instances: dict[int, int] = field(default_factory=dict)
    mock_ranks: set[int] = field(default_factory=set)


def check_reductions(before: Graph, after: Overlay, gradients: Sequence[Gradient]) -> list[str]:
    """What is wrong with the reductions; empty where each gradient is reduced exactly once, as it was."""
    tracer = _Tracer(before, after)
    findings = []
    for gradient in gradients:
        try:
            tracer.follow(gradient)
        except _TraceError as broken:
            findings.append(f"gradient {gradient.id}: {broken}")
    return findings or tracer.unserved()


class _Tracer:
    def __init__(self, before: Graph, after: Overlay) -> None:
        self.before = before
        self.after = after
        self.reader = ShapeReader(after)
        self.uses = _Uses()
        self.visited: set[int] = set()
        self._reductions: dict[int, _Reduction] = {}

    def follow(self, gradient: Gradient) -> None:
        """Walks from the member's node back to its tensor."""
        node = self.after.node(gradient.node)
        if node.op == ALL_REDUCE_OP:
            self._same_reduction(gradient, node)
            return
        number, port = self._behind(gradient, gradient.node, "SplitV")
        if self.after.op(number) == "SplitV":
            split = number
            number, _ = self._behind(gradient, split)
            self._split_piece(gradient, node, split, port, self._reduction(number))
        elif node.op == "Reshape" or self._reduction(number).is_joined:
            raise _TraceError("is not cut out of the reduction that it is part of")
        else:
            port = 0
        self._right_kind(gradient, number, port)
        self._once(gradient, number, port)

    def unserved(self) -> list[str]:
        """Reductions, or inputs of them, that serve no gradient, and new nodes that belong to no reduction."""
        findings = []
        for number, reduction in self._reductions.items():
            idle = sum((number, port) not in self.uses.served for port in range(len(reduction.pieces)))
            if idle:
                findings.append(f"reduction {self.after.name(number)} reduces {idle} tensors for nobody")
        for number in self.after.fresh:
            if number >= len(self.before) and number not in self.visited:
                findings.append(f"new node {self.after.name(number)} ({self.after.op(number)}) serves no gradient")
        return findings

    # ----------------------------------------------------------------------------------------- steps back

    def _data(self, number: int, position: int = 0) -> tuple[int, int]:
        """The producer of a data input, and the output's number under its name."""
        inputs = self.after.node(number).input if number >= self.after.arg_count else ()
        if position >= len(inputs) or inputs[position].startswith("^"):
            raise _TraceError(f"finds {self.after.name(number)} without input {position}")
        source = self.after.producers(number)[position]
        self.visited.add(source)
        return source, parse_input(inputs[position]).port

    def _is_new(self, number: int, op: str) -> bool:
        return number >= len(self.before) and self.after.op(number) == op

    def _is_mock(self, number: int) -> bool:
        if self.after.op(number) not in ("Mul", "Pow", "Identity") or number < self.after.arg_count:
            return False
        return MOCK_ATTR in self.after.node(number).attr

    def _is_reduction(self, number: int) -> bool:
        return self.after.op(number) in (ALL_REDUCE_OP, COLLECTIVE_OP) or self._is_mock(number)

    def _behind(self, gradient: Gradient, number: int, or_op: str = "") -> tuple[int, int]:
        """The reduction (or op) that a node's first input comes from, over Identity and Cast, and its output."""
        dtype = gradient.dtype
        for _ in range(4):
            if self.after.op(number) == "Cast":
                dtype = read_attr(self.after.node(number), "SrcT").type
            number, port = self._data(number)
            if self.after.op(number) == or_op or self._is_reduction(number):
                self._of_type(number, dtype)
                return number, port
            if self.after.op(number) not in ("Identity", "Cast"):
                break
            self._of_type(number, dtype)
        raise _TraceError(f"comes from {self.after.name(number)}, which is no reduction")

    def _of_type(self, number: int, dtype: int) -> None:
        found = type_of(self.after.node(number))
        if found != dtype:
            raise _TraceError(f"is {dtype_name(dtype)}, and {self.after.name(number)} gives {dtype_name(found)}")

    def _constant(self, number: int, position: int, expected: tuple[int, ...]) -> None:
        source, _ = self._data(number, position)
        if self.reader.constant_ints(source) != expected:
            raise _TraceError(f"needs {list(expected)} as input {position} of {self.after.name(number)}")

    # ------------------------------------------------------------------------------------- a reduction itself

    def _reduction(self, number: int) -> _Reduction:
        """What a reduction says of itself and of its inputs; read once, since many gradients may share it."""
        found = self._reductions.get(number)
        if found is None:
            found = self._reductions[number] = self._read_reduction(number)
        return found

    def _read_reduction(self, number: int) -> _Reduction:
        node = self.after.node(number)
        if sum(not text.startswith("^") for text in node.input) != _DATA_INPUTS[node.op]:
            raise _TraceError(f"is reduced by {node.name}, which has another number of inputs")
        names = ("group", "reduction") if node.op == ALL_REDUCE_OP else (GROUP_ATTR, REDUCTION_ATTR)
        group, reduction = (
            read_attr(node, name).s.decode("utf-8", "replace") if name in node.attr else "" for name in names
        )
        if self._is_new(number, ALL_REDUCE_OP) and read_attr(node, "fusion").i != 0:
            raise _TraceError(f"is reduced by {node.name}, which would be fused once more")
        consumer, dtype = self._widened(number, node)
        pieces, is_joined = self._pieces(consumer, dtype)
        device = normalise_device(node.device)
        return _Reduction(node.op, group, reduction, dtype, device, frozenset(node.input), pieces, is_joined)

    def _widened(self, number: int, node: NodeDef) -> tuple[int, int]:
        """The node that reads the pieces, a cast to a wider type or the reduction itself, and their type."""
        dtype = int(read_attr(node, "T").type)
        source, _ = self._data(number)
        if node.op != COLLECTIVE_OP or not self._is_new(source, "Cast"):
            return number, dtype
        self._of_type(source, dtype)
        narrow = int(read_attr(self.after.node(source), "SrcT").type)
        if WIDER_TYPE.get(narrow) != dtype:
            raise _TraceError(f"is cast to {dtype_name(dtype)} before it is reduced")
        return source, narrow

    def _pieces(self, consumer: int, dtype: int) -> tuple[tuple[_Piece, ...], bool]:
        source, _ = self._data(consumer)
        if not self._is_new(source, "ConcatV2"):
            return (self._piece(consumer, 0, dtype),), False
        self._of_type(source, dtype)
        node = self.after.node(source)
        count = sum(not text.startswith("^") for text in node.input) - 1
        if count != read_attr(node, "N").i or count < 1:
            raise _TraceError(f"is joined by {node.name}, which has another number of inputs")
        self._constant(source, count, (0,))
        return tuple(self._piece(source, position, dtype) for position in range(count)), True

    def _piece(self, consumer: int, position: int, dtype: int) -> _Piece:
        source, _ = self._data(consumer, position)
        is_flattened = self._is_new(source, "Reshape")
        if is_flattened:
            self._of_type(source, dtype)
            self._constant(source, 1, (-1,))
            consumer, position = source, 0
            self._data(consumer)
        return _Piece(self.after.node(consumer).input[position], is_flattened)

    # ---------------------------------------------------------------------------- a gradient and its reduction

    def _same_reduction(self, gradient: Gradient, node: NodeDef) -> None:
        self._once(gradient, gradient.node, 0)
        if gradient.node not in self.after.replaced:
            return
        old = self.before.node(gradient.node)
        data = [text for text in node.input if not text.startswith("^")]
        if data != [gradient.tensor] or node.input[0] != gradient.tensor:
            raise _TraceError(f"now reduces {data}")
        names = [name for name in old.attr if name not in _FUSION_ATTRS]
        if set(names) != {name for name in node.attr if name not in _FUSION_ATTRS}:
            raise _TraceError("has other attributes")
        changed = [name for name in names if read_attr(old, name) != read_attr(node, name)]
        if changed:
            raise _TraceError(f"has another {', '.join(changed)}")
        self._has_controls(gradient, node.input)

    def _split_piece(self, gradient: Gradient, node: NodeDef, split: int, port: int, reduction: _Reduction) -> None:
        name = self.after.name(split)
        sizes = self.reader.constant_ints(self._data(split, 1)[0])
        self._constant(split, 2, (0,))
        if sizes is None or port >= len(sizes) or sizes[port] != gradient.elements:
            raise _TraceError(f"gets piece {port} of {name}, of another size")
        if not reduction.is_joined or len(reduction.pieces) != len(sizes):
            raise _TraceError(f"is cut by {name} out of {len(reduction.pieces)} tensors")
        shape = gradient.shape
        if node.op == "Reshape":
            shape = self.reader.constant_ints(self._data(gradient.node, 1)[0])
        if shape != gradient.shape or (node.op == "Identity" and len(gradient.shape or ()) != 1):
            raise _TraceError(f"comes back in shape {shape}")
        if gradient.frame:
            raise _TraceError("is fused with others inside a while loop")

    def _right_kind(self, gradient: Gradient, number: int, port: int) -> None:
        reduction = self._reduction(number)
        if (reduction.group, reduction.reduction) != (gradient.group, gradient.reduction):
            raise _TraceError(f"is reduced as {(reduction.group, reduction.reduction)}")
        if (reduction.dtype, reduction.device) != (gradient.dtype, gradient.device):
            raise _TraceError(f"is reduced as {dtype_name(reduction.dtype)} on {reduction.device or 'no device'}")
        if port >= len(reduction.pieces):
            raise _TraceError(f"is piece {port} of {len(reduction.pieces)}")
        piece = reduction.pieces[port]
        if piece.tensor != gradient.tensor:
            raise _TraceError(f"gets the value of {piece.tensor}, not of {gradient.tensor}")
        if reduction.is_joined and not piece.is_flattened and len(gradient.shape or ()) != 1:
            raise _TraceError("is joined without being flattened")
        if reduction.op == COLLECTIVE_OP:
            self._right_collective(gradient, number)
        elif reduction.op != ALL_REDUCE_OP:
            self._right_mock(gradient, number)
        self._has_controls(gradient, reduction.inputs)

    def _has_controls(self, gradient: Gradient, inputs: Collection[str]) -> None:
        if any(text[:1] == "^" and text not in inputs for text in self.before.node(gradient.node).input):
            raise _TraceError("lost a control input")

    def _right_mock(self, gradient: Gradient, number: int) -> None:
        node = self.after.node(number)
        ranks = int(read_attr(node, MOCK_ATTR).i)
        is_square = gradient.reduction == "prod" and ranks == 2
        if node.op != ("Mul" if is_square else _MOCK_OP[gradient.reduction]):
            raise _TraceError(f"is mocked by {node.op}")
        self.uses.mock_ranks.add(ranks)
        if len(self.uses.mock_ranks) > 1:
            raise _TraceError(f"is mocked for {ranks} ranks, and others for another number")
        if is_square and node.input[0] != node.input[1]:
            raise _TraceError(f"is multiplied with {node.input[1]}")
        if is_square or node.op == "Identity":
            return
        constant = self.after.node(self._data(number, 1)[0])
        value = read_attr(constant, "value").tensor
        if constant.op != "Const" or value.tensor_content != tensor_bytes(ranks, int(read_attr(node, "T").type)):
            raise _TraceError(f"is not mocked for {ranks} ranks by {constant.name}")

    def _right_collective(self, gradient: Gradient, number: int) -> None:
        node = self.after.node(number)
        kind = (
            read_attr(node, "merge_op").s.decode("utf-8", "replace"),
            read_attr(node, "final_op").s.decode("utf-8", "replace"),
        )
        if kind != (MERGE_OP[gradient.reduction], "Id"):
            raise _TraceError(f"is merged by {' and '.join(kind)}")
        keys = [self.reader.constant_ints(self._data(number, position)[0]) for position in (1, 2, 3)]
        if any(key is None or len(key) != 1 for key in keys):
            raise _TraceError(f"has a collective {node.name} without constant keys")
        size, group_key, instance_key = (key[0] for key in keys if key is not None)
        if self.uses.group_keys.setdefault(gradient.group, (size, group_key)) != (size, group_key):
            raise _TraceError(f"has group size {size} and key {group_key} beside others of the same group")
        if self.uses.groups.setdefault(group_key, gradient.group) != gradient.group:
            raise _TraceError(f"shares group key {group_key} with another group")
        if self.uses.instances.setdefault(instance_key, number) != number:
            raise _TraceError(f"shares instance key {instance_key} with another reduction")

    def _once(self, gradient: Gradient, number: int, port: int) -> None:
        other = self.uses.served.setdefault((number, port), gradient.name)
        if other != gradient.name:
            raise _TraceError(f"shares its piece of {self.after.name(number)} with {other}")
