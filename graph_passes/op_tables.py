"""What the passes need to know of TensorFlow's ops, read from the tables made from its op registry.

The tables are written by `python -m hccl_fusion.runtime.op_tables`.
"""

from __future__ import annotations

__all__ = [
    "ALL_REDUCE_OP",
    "COLLECTIVE_OP",
    "GROUP_ATTR",
    "LOWERED_OPS",
    "MERGE_OP",
    "MOCK_ATTR",
    "REDUCTION_ATTR",
    "TrainingOp",
    "WIDER_TYPE",
    "flat_port",
    "fixed_outputs",
    "has_output",
    "output_counts",
    "training_ops",
]

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graph_passes.messages import NodeDef, types_pb2

ALL_REDUCE_OP = "HcomAllReduce"
COLLECTIVE_OP = "CollectiveReduceV2"
LOWERED_OPS = frozenset({COLLECTIVE_OP, "Mul", "Pow", "Identity"})
"""The ops that a lowered all-reduce can be; it carries the attributes below."""

GROUP_ATTR = "_hccl_group"
REDUCTION_ATTR = "_hccl_reduction"
MOCK_ATTR = "_hccl_mock_ranks"

WIDER_TYPE = {
    types_pb2.DT_INT8: types_pb2.DT_INT32, types_pb2.DT_INT16: types_pb2.DT_INT32,
    types_pb2.DT_UINT8: types_pb2.DT_INT32, types_pb2.DT_UINT16: types_pb2.DT_INT32,
    types_pb2.DT_UINT32: types_pb2.DT_INT64,
}  # fmt: skip
"""The type that stands in for one which TensorFlow's collectives cannot reduce: it holds all the other's values."""

MERGE_OP = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}
"""What a collective calls each reduction."""


@dataclass(frozen=True)
class TrainingOp:
    """Input positions of an op that updates a variable from a gradient; `indices` only for sparse gradients."""

    var: int
    grad: int
    indices: int | None = None


def _load(name: str) -> dict[str, Any]:
    path = os.path.join(os.path.dirname(__file__), "tables", f"{name}.json")
    with open(path, encoding="utf-8") as stream:
        table: dict[str, Any] = json.load(stream)
    return table


@functools.cache
def training_ops() -> Mapping[str, TrainingOp]:
    """Every training op of TensorFlow by name."""
    return {op: TrainingOp(**positions) for op, positions in _load("training_ops").items()}


@functools.cache
def _outputs() -> dict[str, Any]:
    return {**_load("outputs"), ALL_REDUCE_OP: "output"}


@functools.cache
def fixed_outputs() -> Mapping[str, int]:
    """The number of outputs of each op that always has the same."""
    return {op: len(args.split()) for op, args in _outputs().items() if ":" not in args}


def has_output(node: NodeDef, port: int) -> bool:
    """False where a node is known to have no output of this number."""
    counts = output_counts(node)
    return counts is None or port < sum(counts.values())


def output_counts(node: NodeDef) -> dict[str, int] | None:
    """Number of tensors of each output of a node, in order; None for an op that is not TensorFlow's."""
    described = _outputs().get(node.op)
    if described is None:
        return None
    return {arg.partition(":")[0]: _arg_count(node, arg) for arg in described.split()}


def flat_port(node: NodeDef, arg: str, port: int) -> int | None:
    """The number that output `arg:port` of a node has among all its outputs; None where the op does not tell."""
    if not arg:
        return port
    before = 0
    for name, count in (output_counts(node) or {}).items():
        if name == arg:
            return before + port
        before += count
    return None


def _arg_count(node: NodeDef, arg: str) -> int:
    _, colon, attr = arg.partition(":")
    if not colon:
        return 1
    value = node.attr.get(attr)
    if value is None:
        return 0
    return int(value.i) if value.WhichOneof("value") == "i" else len(value.list.type)
