"""Pass lower: turns every HcomAllReduce into ops that stock TensorFlow can run.

`collective`: CollectiveReduceV2 of TensorFlow's own runtime, for real ranks. `mock`: one process, as if all N ranks
held the same tensor: sum = x*N, prod = x^N, min = max = x.

The all-reduce's node keeps its name and becomes an Identity (or the Cast back) of the new reduction, so consumers need
no change, in function bodies either, where an output's name depends on its op.
"""

from __future__ import annotations

__all__ = ["COLLECTIVE_TYPES", "Form", "Lower", "group_keys", "lower_reductions"]

import enum
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.attributes import read_attr
from graph_passes.builder import NodeBuilder, cut_scope, fresh_scope
from graph_passes.edit import EditWriter
from graph_passes.errors import PassError
from graph_passes.frames import frames_of
from graph_passes.messages import GraphDef, NodeDef, dtype_name, types_pb2
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
from graph_passes.order import breadth_first_order
from graph_passes.pipeline import GraphItem, PassResult
from graph_passes.rewrite import replace_node

WORLD_GROUP = "hccl_world_group"

COLLECTIVE_TYPES = frozenset({
    types_pb2.DT_BFLOAT16, types_pb2.DT_HALF, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT32,
    types_pb2.DT_INT64,
})  # fmt: skip
"""Types that TensorFlow's collective runtime reduces."""

_LEAVES = ("mock", "ranks", "cast", "group_size", "group_key", "instance_key", "collective", "narrow")


class Form(enum.Enum):
    """What an HcomAllReduce becomes."""

    COLLECTIVE = "collective"
    MOCK = "mock"


@dataclass(frozen=True)
class Lower:
    """Lowers all reductions.

    Attributes:
        form: what they become.
        ranks: number of ranks, at least 1.
        timeout_seconds: after which a collective that waits for another rank fails.
    """

    form: Form
    ranks: int
    timeout_seconds: float = 120.0
    name: ClassVar[str] = "lower"

    def requires(self, item: GraphItem) -> None:
        """A number of ranks."""
        if self.ranks < 1:
            raise PassError(
                "lowering needs a number of ranks", found=self.ranks, expected="at least 1", remedy="--ranks N"
            )

    def run(self, item: GraphItem) -> PassResult:
        """Returns the lowered graph; the very graph that came in where it has no HcomAllReduce.

        Raises:
            PassError: a type or a reduction that the form cannot express.
        """
        item = item.indexed()
        writers = item.writers(graph.label for graph in item.graphs or ())
        numbers = {label: list(writer.numbers_of(ALL_REDUCE_OP)) for label, writer in writers.items()}
        count = sum(map(len, numbers.values()))
        if not count:
            return PassResult(item, notes=("nothing to lower",))
        nodes = [writers[label].current(number) for label, found in numbers.items() for number in found]
        keys = group_keys(read_attr(node, "group").s.decode("utf-8") for node in nodes)
        touched = {label: writer for label, writer in writers.items() if numbers[label]}
        instance, casts = 0, []
        for label, writer in touched.items():
            lowered = _lower_graph(writer, numbers[label], self, keys, instance)
            instance += len(lowered)
            casts += [note for note in lowered if note]
        note = f"{count} reductions lowered to {self.form.value}"
        return PassResult(item.edited(touched), True, (note, *casts))

    def ensures(self, item: GraphItem) -> None:
        """Pass verify checks the result."""


def lower_reductions(graph_def: GraphDef, form: str, ranks: int, timeout_seconds: float = 120.0) -> GraphDef:
    """A graph that stock TensorFlow runs: every HcomAllReduce as `collective` or `mock` for `ranks` ranks.

    Raises:
        PassError: a type or a reduction that the form cannot express.
    """
    lower = Lower(Form(form), ranks, timeout_seconds)
    item = GraphItem(graph_def)
    lower.requires(item)
    return lower.run(item).item.graph_def


def group_keys(groups: Iterable[str]) -> dict[str, int]:
    """A collective group key for each group: 1 for the world, else a hash of the name; no two are equal."""
    keys: dict[str, int] = {}
    for group in sorted(set(groups)):
        key = 1 if group == WORLD_GROUP else 2 + zlib.crc32(group.encode("utf-8")) % (2**31 - 4)
        while key in keys.values():
            key = key % (2**31 - 2) + 1
        keys[group] = key
    return keys


def _lower_graph(
    writer: EditWriter, numbers: Sequence[int], lower: Lower, keys: dict[str, int], instance: int
) -> list[str]:
    """Lowers one graph; one note for each reduction, "" where there is nothing to say."""
    graph = writer.graph
    frames = frames_of(graph, breadth_first_order(graph)) if "Enter" in graph.ops else None
    notes = []
    for position, number in enumerate(numbers):
        node = writer.node(number)
        # What fuse has added stands outside all loops: it fuses nothing inside one.
        is_in_frame = bool(frames and number < len(graph) and frames[number])
        reduction = _Writer(writer.builder, node, is_in_frame)
        if lower.form is Form.MOCK:
            notes.append(reduction.mock(lower.ranks))
        else:
            key = keys[read_attr(node, "group").s.decode("utf-8")]
            notes.append(reduction.collective(lower, key, instance + position + 1))
    return notes


class _Writer:
    """Writes what one all-reduce becomes."""

    def __init__(self, builder: NodeBuilder, node: NodeDef, is_in_frame: bool) -> None:
        self.builder = builder
        self.node = node
        self.name = node.name
        self.device = node.device
        self.dtype = read_attr(node, "T").type
        self.reduction = read_attr(node, "reduction").s.decode("utf-8")
        self.group = read_attr(node, "group").s.decode("utf-8")
        self.tensor = node.input[0]
        self.controls = [text for text in node.input if text.startswith("^")]
        if self.reduction not in MERGE_OP:
            raise PassError(
                "an all-reduce has an unknown reduction",
                where=f"node {self.name}",
                found=repr(self.reduction),
                expected="sum, prod, min or max",
                remedy="one of these",
            )
        self.scope = fresh_scope(f"{cut_scope(self.name)}/reduce", _LEAVES, builder.taken)
        # Inside a while loop a constant must belong to the loop's frame.
        self.frame_control = [f"^{parse_input(self.tensor).name}"] if is_in_frame else []

    def _constant(self, leaf: str, value: int, dtype: int) -> str:
        return self.builder.constant(f"{self.scope}/{leaf}", value, dtype, self.device, self.frame_control)

    def _finish(self, reduced: NodeDef, result: str, op: str = "Identity", **types: int) -> None:
        """The all-reduce's own node now passes the result on."""
        for attr, text in ((GROUP_ATTR, self.group), (REDUCTION_ATTR, self.reduction)):
            reduced.attr[attr].s = text.encode("utf-8")
        replace_node(self.node, op, [result], types or {"T": self.dtype})

    def mock(self, ranks: int) -> str:
        """sum: x*N; prod: x^N; min, max: x."""
        leaf = f"{self.scope}/mock"
        if self.reduction in ("min", "max"):
            op, inputs = "Identity", [self.tensor]
        elif self.reduction == "prod" and ranks == 2:
            # Bit-equal to what two real ranks compute, which x to the power of 2 is not.
            op, inputs = "Mul", [self.tensor, self.tensor]
        else:
            op = "Mul" if self.reduction == "sum" else "Pow"
            inputs = [self.tensor, self._ranks_constant(ranks)]
        reduced = self.builder.add(leaf, op, inputs + self.controls, self.device, types={"T": self.dtype})
        reduced.attr[MOCK_ATTR].i = ranks
        self._finish(reduced, self.builder.ref(leaf, {"Mul": "z", "Pow": "z"}.get(op, "output")))
        return ""

    def _ranks_constant(self, ranks: int) -> str:
        try:
            return self._constant("ranks", ranks, self.dtype)
        except (KeyError, OverflowError, FloatingPointError) as error:
            raise PassError(
                "the form mock cannot compute with this type",
                where=f"node {self.name}",
                found=f"{dtype_name(self.dtype)} and {ranks} ranks",
                expected="a numeric type that can hold the number of ranks",
                remedy="fewer ranks, or the form collective",
            ) from error

    def collective(self, lower: Lower, group_key: int, instance_key: int) -> str:
        """CollectiveReduceV2, with casts around it where the runtime lacks the type."""
        if self.dtype in COLLECTIVE_TYPES:
            self._collective(lower, self.tensor, self.dtype, group_key, instance_key)
            return ""
        wide = WIDER_TYPE.get(self.dtype)
        if wide is None:
            raise PassError(
                "TensorFlow's collectives cannot reduce this type",
                where=f"node {self.name}",
                found=dtype_name(self.dtype),
                expected="bfloat16, float16, float32, float64, or an integer of at most 64 bits",
                remedy="casting the gradient before it is reduced",
            )
        cast = f"{self.scope}/cast"
        self.builder.add(cast, "Cast", [self.tensor], self.device, types={"SrcT": self.dtype, "DstT": wide})
        self._collective(lower, self.builder.ref(cast, "y"), wide, group_key, instance_key)
        return f"{self.name}: {dtype_name(self.dtype)} is reduced as {dtype_name(wide)}"

    def _collective(self, lower: Lower, tensor: str, dtype: int, group_key: int, instance_key: int) -> None:
        keys = [
            self._constant("group_size", lower.ranks, types_pb2.DT_INT32),
            self._constant("group_key", group_key, types_pb2.DT_INT32),
            self._constant("instance_key", instance_key, types_pb2.DT_INT32),
        ]
        leaf = f"{self.scope}/collective"
        reduced = self.builder.add(
            leaf,
            COLLECTIVE_OP,
            [tensor, *keys, *self.controls],
            self.device,
            types={"T": dtype},
            strings={"merge_op": MERGE_OP[self.reduction], "final_op": "Id"},
        )
        reduced.attr["timeout_seconds"].f = lower.timeout_seconds
        result = self.builder.ref(leaf, "data")
        if dtype == self.dtype:
            self._finish(reduced, result)
            return
        narrow = f"{self.scope}/narrow"
        self.builder.add(narrow, "Cast", [result], self.device, types={"SrcT": dtype, "DstT": self.dtype})
        self._finish(reduced, self.builder.ref(narrow, "y"))
