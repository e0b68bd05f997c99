"""Reduces a list of tensors over the ranks of a group: planned, fused, and in the order of the plan.

Works on tensors of a TensorFlow 1 graph, of a function that is being traced, and on eager tensors. Each bucket of the
plan is flattened into one buffer, the buffer is cut into pieces that are reduced side by side, and the pieces of a
segment wait for those of the segment before it.
"""

from __future__ import annotations

__all__ = ["GradientReducer", "npu_hccl_ops", "reduce_tensors"]

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graph_passes.messages import dtype_name
from hccl_fusion.errors import UsageError
from hccl_fusion.groups import group_key, group_ranks
from hccl_fusion.plan import Plan
from hccl_fusion.plan_file import PlanFile
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime import agreement, graph_order, lifecycle, sparse
from hccl_fusion.runtime.bucket_writer import BucketWriter, keys_of, piece_sizes
from hccl_fusion.runtime.collective_keys import GroupCollectives, KeyBook
from hccl_fusion.runtime.compression import Compression, wire_dtype
from hccl_fusion.runtime.graph_order import Bucket, NodeSpec, TensorPlan
from hccl_fusion.runtime.reduce_options import DEFAULT_PIECE_MIB, ReduceOptions
from hccl_fusion.runtime.sparse import SparsePolicy
from hccl_fusion.strategy import Strategy


@agreement.outside_autograph
def reduce_tensors(
    tensors: Sequence[Any],
    *,
    group: str = DEFAULT_GROUP,
    average: bool = True,
    sparse: SparsePolicy | str = SparsePolicy.ALLGATHER,
    compression: Compression | str | None = None,
    piece_mib: float = DEFAULT_PIECE_MIB,
    plan: Strategy | PlanFile | str | None = None,
    names: Sequence[str] | None = None,
    shapes: Sequence[Any] | None = None,
) -> list[Any]:
    """Reduces tensors over the ranks of a group; all of its ranks must call this with equal arguments.

    Every call takes new collective keys and compares its plan with the other ranks: code that runs more than once
    keeps a `GradientReducer`, or calls this inside a tf.function.

    Args:
        tensors: tensors, variables' IndexedSlices, or None, which stays None. A tensor that stands twice is reduced
            once.
        group, average, sparse, compression, piece_mib, plan: as in `ReduceOptions`.
        names: of the tensors, for messages and for the comparison among ranks.
        shapes: of the tensors where the caller knows them better.

    Raises:
        HcclFusionError: an option is illegal, a type cannot be reduced, or the ranks do not agree.
    """
    options = ReduceOptions.of(group, average, sparse, compression, piece_mib, plan)
    return GradientReducer(options).reduce(tensors, names, shapes)


@dataclass(frozen=True)
class _Job:
    """What one call reduces: each tensor once.

    Attributes:
        dense, slices: by position in the caller's list.
        names: of each position.
        scope: name scope, without a slash at its end.
        graph: where it is built; None in eager mode.
    """

    dense: dict[int, Any]
    slices: dict[int, Any]
    names: dict[int, str]
    shapes: dict[int, Any]
    scope: str
    graph: Any


class GradientReducer:
    """Reduces lists of tensors, again and again; equal lists have equal keys and are agreed on once.

    Attributes:
        options: how.
        last_plan: of the last call that planned; None before, and in a group of one rank.
    """

    def __init__(self, options: ReduceOptions) -> None:
        self.options = options
        self.last_plan: TensorPlan | None = None
        self._book = KeyBook()
        self._eager_plans: dict[Any, TensorPlan] = {}

    @agreement.outside_autograph
    def reduce(
        self,
        tensors: Sequence[Any],
        names: Sequence[str] | None = None,
        shapes: Sequence[Any] | None = None,
        scope: str = "Allreduce",
    ) -> list[Any]:
        """The reduced tensors; arguments and errors as in `reduce_tensors`.

        Args:
            scope: the name scope of what is added to the graph; TensorFlow makes it unique.
        """
        size = len(group_ranks(self.options.group))
        if size == 1 or all(tensor is None for tensor in tensors):
            return list(tensors)
        return self._reduce(list(tensors), names, shapes, scope, size)

    def _reduce(self, tensors: list[Any], names: Any, shapes: Any, scope: str, size: int) -> list[Any]:
        import tensorflow as tf

        first_of: dict[Any, int] = {}
        owner = [None if t is None else first_of.setdefault(id(t), at) for at, t in enumerate(tensors)]
        with tf.name_scope(scope) as full_scope:
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            job = self._job({at: tensors[at] for at in first_of.values()}, names, shapes, full_scope.rstrip("/"), graph)
            if self.options.average:
                _require_division(job)
            hccl_ops = npu_hccl_ops()
            if hccl_ops is not None:
                reduced = _reduce_on_npu(job, self.options, size, hccl_ops)
            else:
                reduced = self._reduce_with_collectives(job, size)
        return [None if at is None else reduced[at] for at in owner]

    def _job(self, tensors: dict[int, Any], names: Any, shapes: Any, scope: str, graph: Any) -> _Job:
        import tensorflow as tf

        known = {at: shapes[at] if shapes else None for at in tensors}
        dense, slices = {}, {}
        for at, tensor in tensors.items():
            if not isinstance(tensor, tf.IndexedSlices):
                dense[at] = tf.convert_to_tensor(tensor)
            elif self.options.sparse is SparsePolicy.DENSIFY:
                dense[at] = sparse.densify(tensor, known[at])
            else:
                slices[at] = tensor
        labels = {at: names[at] if names else _tensor_name(tensor, at) for at, tensor in tensors.items()}
        return _Job(dense, slices, labels, known, scope, graph)

    def _reduce_with_collectives(self, job: _Job, size: int) -> dict[int, Any]:
        plan = self._plan(job)
        self.last_plan = plan
        wires = {
            bucket.label: wire_dtype(_dtype(job, bucket), self.options.compression, f"{job.scope}/{bucket.label}")
            for bucket in plan.buckets
        }
        pieces = {
            bucket.label: piece_sizes(bucket, wires[bucket.label], self.options.piece_mib) for bucket in plan.buckets
        }
        count = sum(map(keys_of, pieces.values())) + sparse.SPARSE_KEYS * len(job.slices)
        collectives = self._collectives(job, plan, count, size)
        reduced: dict[int, Any] = {}
        last_of_chain: dict[int, list[Any]] = {}
        for bucket in plan.buckets:
            writer = BucketWriter(collectives, bucket, pieces[bucket.label], wires[bucket.label])
            tensors, ends = writer.write(
                [job.dense[at] for at in bucket.positions],
                last_of_chain.get(bucket.chain, []),
                size if self.options.average else 1,
            )
            reduced.update(zip(bucket.positions, tensors))
            if bucket.chain >= 0 and ends:
                last_of_chain[bucket.chain] = ends
        for number, (at, slices) in enumerate(job.slices.items()):
            gathered = sparse.all_gather_slices(slices, collectives, f"sparse_{number}")
            reduced[at] = _divided_slices(gathered, size) if self.options.average else gathered
        return reduced

    def _plan(self, job: _Job) -> TensorPlan:
        """The plan of the dense tensors; positions are those of the caller's list."""
        if not job.dense:
            return TensorPlan(Plan((), (), ()), ())
        order = list(job.dense)
        specs = tuple(_spec(tensor, job.shapes[at]) for at, tensor in job.dense.items())
        group, source = self.options.group, self.options.plan
        if job.graph is None:
            plan = self._eager_plans.get(specs)
            if plan is None:
                plan = self._eager_plans[specs] = graph_order.plan_listed_tensors(specs, job.scope, group, source)
        else:
            plan = graph_order.plan_graph_tensors(job.graph.as_graph_def(), specs, job.scope, group, source)
        moved = [replace(b, positions=tuple(order[at] for at in b.positions)) for b in plan.buckets]
        return TensorPlan(plan.plan, tuple(moved))

    def _collectives(self, job: _Job, plan: TensorPlan, count: int, size: int) -> GroupCollectives:
        """Takes the keys; the ranks compare a plan when it comes up first.

        Raises:
            AgreementError: they differ.
        """
        group, seconds = self.options.group, lifecycle.timeout_seconds()
        statement = self._statement(job, plan)
        fingerprint = statement.fingerprint
        keys, is_new = self._book.keys(group, fingerprint, count, job.graph)
        if is_new:
            try:
                agreement.agree_on_plan(replace(statement, keys=(keys.start, count)), group, seconds)
            except BaseException:
                self._book.give_up(fingerprint)
                raise
        device = lifecycle.collective_device(_device_kind(job))
        return GroupCollectives(size, group_key(group), device, seconds, iter(keys))

    def _statement(self, job: _Job, plan: TensorPlan) -> agreement.PlanStatement:
        tensors = [
            agreement.StatedTensor(job.names[at], _shape_text(shape), job.dense[at].dtype.base_dtype.name, bucket.label)
            for bucket in plan.buckets
            for at, shape in zip(bucket.positions, bucket.shapes)
        ]
        for at, slices in job.slices.items():
            shape = str(slices.values.shape[1:].as_list()) if slices.values.shape.rank is not None else "unknown"
            tensors.append(agreement.StatedTensor(job.names[at], shape, slices.values.dtype.name, "gathered slices"))
        rank = lifecycle.rank()
        return agreement.PlanStatement(rank, job.scope or "reduce_tensors", str(self.options), tuple(tensors))


def _spec(tensor: Any, shape: Any) -> NodeSpec:
    """What the plan must know of a tensor; TensorFlow's shape and the caller's are taken together."""
    import tensorflow as tf

    merged = tensor.shape.merge_with(tf.TensorShape(shape)) if shape is not None else tensor.shape
    known = tuple(merged.as_list()) if merged.is_fully_defined() else None
    is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
    name = "" if is_eager else tensor.name[:-2] if tensor.name.endswith(":0") else tensor.name
    return NodeSpec(name, tensor.dtype.base_dtype.as_datatype_enum, known, "" if is_eager else tensor.device)


def _dtype(job: _Job, bucket: Bucket) -> int:
    return int(job.dense[bucket.positions[0]].dtype.base_dtype.as_datatype_enum)


def _device_kind(job: _Job) -> str:
    """GPU where a gradient is on one, so that NCCL reduces it."""
    devices = [tensor.device or "" for tensor in job.dense.values()]
    return "GPU" if any("GPU:" in device.upper() for device in devices) else "CPU"


def _tensor_name(tensor: Any, at: int) -> str:
    import tensorflow as tf

    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    if isinstance(values, tf.__internal__.EagerTensor) or not hasattr(values, "name"):
        return f"tensor {at}"
    return str(values.name)


def _shape_text(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else str(list(shape))


def _require_division(job: _Job) -> None:
    for at, tensor in {**job.dense, **{at: slices.values for at, slices in job.slices.items()}}.items():
        if not tensor.dtype.is_floating:
            raise UsageError(
                "an average of integers is none",
                where=job.names[at],
                found=dtype_name(tensor.dtype.base_dtype.as_datatype_enum),
                expected="a floating-point type",
                remedy="average=False, or casting it first",
            )


def _divided_slices(slices: Any, size: int) -> Any:
    import tensorflow as tf

    values = tf.realdiv(slices.values, tf.cast(size, slices.values.dtype))
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


# -------------------------------------------------------------------------------------------------------- NPU


@functools.cache
def npu_hccl_ops() -> Any:
    """The module `npu_bridge.hccl.hccl_ops` of an NPU's TensorFlow; None elsewhere, and for our stand-in of it."""
    try:
        module = importlib.import_module("npu_bridge.hccl.hccl_ops")
    except ImportError:
        return None
    is_ours = getattr(module.allreduce, "__module__", "").startswith("hccl_fusion.")
    return None if is_ours else module


def _reduce_on_npu(job: _Job, options: ReduceOptions, size: int, hccl_ops: Any) -> dict[int, Any]:
    """One HcomAllReduce a tensor: the NPU's graph engine fuses them by the registered strategy."""
    reduced = {at: hccl_ops.allreduce(tensor, "sum", 1, -1, options.group) for at, tensor in job.dense.items()}
    if options.average:
        import tensorflow as tf

        reduced = {at: tf.realdiv(tensor, tf.cast(size, tensor.dtype)) for at, tensor in reduced.items()}
    for at, slices in job.slices.items():
        values, indices = [hccl_ops.allgather(part, size, options.group) for part in (slices.values, slices.indices)]
        gathered = type(slices)(values, indices, slices.dense_shape)
        reduced[at] = _divided_slices(gathered, size) if options.average else gathered
    return reduced
