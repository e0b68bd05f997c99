"""Follows each gradient of the original through the rewritten graph to the one reduction that serves it."""

from __future__ import annotations

__all__ = ["check_reductions", "type_of"]

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from graph_passes.graph import Graph
from graph_passes.messages import NodeDef
from graph_passes.node_input import parse_input
from graph_passes.op_tables import ALL_REDUCE_OP, COLLECTIVE_OP, GROUP_ATTR, MERGE_OP, MOCK_ATTR, REDUCTION_ATTR
from graph_passes.overlay import Overlay
from graph_passes.sections import Gradient
from graph_passes.shapes import ShapeReader

_MOCK_OP = {"sum": "Mul", "prod": "Pow", "min": "Identity", "max": "Identity"}


class _TraceError(Exception):
    """The trace of one gradient ends in something that is no reduction of it."""


def type_of(node: NodeDef) -> int:
    """The element type that a member's node yields, whatever op it has become."""
    return int(node.attr["DstT"].type if node.op == "Cast" else node.attr["T"].type)


@dataclass(frozen=True)
class _Reduction:
    """One reduction of the rewritten graph."""

    op: str
    group: str
    reduction: str
    inputs: frozenset[str]


@dataclass
class _Uses:
    """Which inputs of which reductions serve a gradient, and the keys of the collectives."""

    served: dict[tuple[int, int], str] = field(default_factory=dict)
    group_keys: dict[str, int] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    instances: dict[int, int] = field(default_factory=dict)


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
        self._reductions: dict[int, _Reduction] = {}

    def follow(self, gradient: Gradient) -> None:
        """Walks from the member's node back to its tensor."""
        node = self.after.node(gradient.node)
        if node.op == ALL_REDUCE_OP:
            self._same_reduction(gradient, node)
            return
        number, port = self._behind(gradient.node)
        if self.after.op(number) == "SplitV":
            self._split_piece(gradient, node, number, port)
            number, _ = self._behind(number)
        elif node.op == "Reshape":
            raise _TraceError("is reshaped without having been part of a fused reduction")
        else:
            port = 0
        self._right_kind(gradient, number)
        self._right_tensor(gradient, number, port)
        self._once(gradient, number, port)

    def unserved(self) -> list[str]:
        """Reductions, or inputs of them, that serve no gradient."""
        findings = []
        for number in self.after.fresh:
            is_old = number < len(self.before) and self.before.op(number) == self.after.op(number)
            if is_old or not self._is_reduction(number):
                continue
            count = self._joined_count(number)
            served = sum((number, port) in self.uses.served for port in range(count))
            if served != count:
                findings.append(f"reduction {self.after.name(number)} reduces {count - served} tensors for nobody")
        return findings

    def _is_mock(self, number: int) -> bool:
        if self.after.op(number) not in ("Mul", "Pow", "Identity") or number < self.after.arg_count:
            return False
        return MOCK_ATTR in self.after.node(number).attr

    def _is_reduction(self, number: int) -> bool:
        return self.after.op(number) in (ALL_REDUCE_OP, COLLECTIVE_OP) or self._is_mock(number)

    def _behind(self, number: int) -> tuple[int, int]:
        """The SplitV or reduction that a node's first input comes from, over Identity and Cast, and its output."""
        for _ in range(8):
            port = parse_input(self.after.node(number).input[0]).port
            number = self.after.producers(number)[0]
            if self.after.op(number) == "SplitV" or self._is_reduction(number):
                return number, port
            if self.after.op(number) not in ("Identity", "Cast"):
                break
        raise _TraceError(f"comes from {self.after.name(number)}, which is no reduction")

    def _same_reduction(self, gradient: Gradient, node: NodeDef) -> None:
        found = (node.attr["group"].s.decode(), node.attr["reduction"].s.decode(), node.input[0])
        if found != (gradient.group, gradient.reduction, gradient.tensor):
            raise _TraceError(f"is now reduced as {found}")
        self._has_controls(gradient, node.input)
        self._once(gradient, gradient.node, 0)

    def _split_piece(self, gradient: Gradient, node: NodeDef, split: int, port: int) -> None:
        sizes = self.reader.constant_ints(self.after.producers(split)[1])
        if sizes is None or port >= len(sizes) or sizes[port] != gradient.elements:
            raise _TraceError(f"gets piece {port} of {self.after.name(split)}, of another size")
        shape = gradient.shape
        if node.op == "Reshape":
            shape = self.reader.constant_ints(self.after.producers(gradient.node)[1])
        if shape != gradient.shape or (node.op == "Identity" and len(gradient.shape or ()) != 1):
            raise _TraceError(f"comes back in shape {shape}")

    def _right_kind(self, gradient: Gradient, number: int) -> None:
        reduction = self._reduction(number)
        if (reduction.group, reduction.reduction) != (gradient.group, gradient.reduction):
            raise _TraceError(f"is reduced as {(reduction.group, reduction.reduction)}")
        if reduction.op == COLLECTIVE_OP:
            self._right_collective(gradient, number)
        elif reduction.op != ALL_REDUCE_OP and reduction.op != _MOCK_OP[gradient.reduction]:
            raise _TraceError(f"is mocked by {reduction.op}")
        self._has_controls(gradient, reduction.inputs)

    def _reduction(self, number: int) -> _Reduction:
        """What a reduction says of itself; read once, since many gradients may share it."""
        found = self._reductions.get(number)
        if found is None:
            node = self.after.node(number)
            names = ("group", "reduction") if node.op == ALL_REDUCE_OP else (GROUP_ATTR, REDUCTION_ATTR)
            group, reduction = (node.attr[name].s.decode() if name in node.attr else "" for name in names)
            found = self._reductions[number] = _Reduction(node.op, group, reduction, frozenset(node.input))
        return found

    def _has_controls(self, gradient: Gradient, inputs: Collection[str]) -> None:
        if any(text[:1] == "^" and text not in inputs for text in self.before.node(gradient.node).input):
            raise _TraceError("lost a control input")

    def _right_collective(self, gradient: Gradient, number: int) -> None:
        node = self.after.node(number)
        if node.attr["merge_op"].s.decode() != MERGE_OP[gradient.reduction]:
            raise _TraceError(f"is merged by {node.attr['merge_op'].s.decode()}")
        keys = [self.reader.constant_ints(source) for source in self.after.producers(number)[1:4]]
        if any(key is None or len(key) != 1 for key in keys):
            raise _TraceError(f"has a collective {node.name} without constant keys")
        group_key, instance_key = (key[0] for key in keys[1:3] if key is not None)
        if self.uses.group_keys.setdefault(gradient.group, group_key) != group_key:
            raise _TraceError(f"has group key {group_key} beside another one of the same group")
        if self.uses.groups.setdefault(group_key, gradient.group) != gradient.group:
            raise _TraceError(f"shares group key {group_key} with another group")
        if self.uses.instances.setdefault(instance_key, number) != number:
            raise _TraceError(f"shares instance key {instance_key} with another reduction")

    def _reduced_input(self, number: int) -> int:
        """The producer of what a reduction reduces, over the cast to a wider type."""
        source = self.after.producers(number)[0]
        is_new = source >= len(self.before)
        return self.after.producers(source)[0] if is_new and self.after.op(source) == "Cast" else source

    def _joined_count(self, number: int) -> int:
        source = self._reduced_input(number)
        is_joined = source >= len(self.before) and self.after.op(source) == "ConcatV2"
        return int(self.after.node(source).attr["N"].i) if is_joined else 1

    def _right_tensor(self, gradient: Gradient, number: int, port: int) -> None:
        """Input `port` of the reduction is the gradient's own tensor, at most flattened."""
        consumer, position = number, 0
        for _ in range(4):
            if self.after.node(consumer).input[position] == gradient.tensor:
                return
            source = self.after.producers(consumer)[position]
            op = self.after.op(source)
            if source < len(self.before) or op not in ("Cast", "ConcatV2", "Reshape"):
                break
            consumer, position = source, port if op == "ConcatV2" else 0
        raise _TraceError(f"gets the value of {self.after.node(consumer).input[position]}, not of {gradient.tensor}")

    def _once(self, gradient: Gradient, number: int, port: int) -> None:
        other = self.uses.served.setdefault((number, port), gradient.name)
        if other != gradient.name:
            raise _TraceError(f"shares its piece of {self.after.name(number)} with {other}")
