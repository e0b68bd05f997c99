"""`DistributedOptimizer`: what a training script wraps its optimizer in."""

from __future__ import annotations

__all__ = ["DistributedOptimizer", "NPUDistributedOptimizer"]

import sys
from typing import Any

from hccl_fusion.errors import UsageError
from hccl_fusion.plan_file import PlanFile
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime.reduce_options import DEFAULT_PIECE_MIB, ReduceOptions
from hccl_fusion.strategy import Strategy


def DistributedOptimizer(  # noqa: N802  # named as in other libraries
    optimizer: Any,
    group: str = DEFAULT_GROUP,
    average: bool = True,
    sparse: str = "allgather",
    compression: str | None = None,
    piece_mib: float = DEFAULT_PIECE_MIB,
    plan: Strategy | PlanFile | str | None = None,
) -> Any:
    """An optimizer that reduces its gradients over the ranks of a group before it uses them.

    A `tf.compat.v1.train.Optimizer` is wrapped. A Keras 3 optimizer is turned into a distributed one in place, with its
    state, and returned.

    Args:
        optimizer: of TensorFlow 1 or of Keras 3.
        group: over which ranks.
        average: divide the sums by the number of ranks.
        sparse: what becomes of IndexedSlices: "allgather" or "densify".
        compression: None, "fp16" or "bf16": the type in which float32 and float64 gradients travel.
        piece_mib: fused buffers are reduced in pieces of this size side by side, in MiB.
        plan: a strategy, a plan file or its path; None takes what the script has registered for the group with
            `set_split_strategy_by_idx` or `set_split_strategy_by_size`, else HCCL's default.

    Raises:
        UsageError: another kind of optimizer, one that is distributed already, or an illegal option.
        StrategyError, PlanError: the group or the plan is illegal.
    """
    options = ReduceOptions.of(group, average, sparse, compression, piece_mib, plan)
    return _wrapped(optimizer, options, None)


def NPUDistributedOptimizer(  # noqa: N802  # HCCL's name
    optimizer: Any, is_weight_update_sharding: bool = False, name: str | None = None
) -> Any:
    """`DistributedOptimizer` with the signature of Huawei's TensorFlow adapter.

    Args:
        optimizer: of TensorFlow 1 or of Keras 3.
        is_weight_update_sharding: only False.
        name: prefix of the name scope for optimizers of TensorFlow 1.

    Raises:
        UsageError: weight update sharding is asked for, or the optimizer is of another kind.
    """
    if is_weight_update_sharding:
        raise UsageError(
            "weight update sharding exists on the NPU only",
            where="NPUDistributedOptimizer",
            found="is_weight_update_sharding=True",
            expected="False",
            remedy="DistributedOptimizer(optimizer), where every rank updates all weights with the same result",
        )
    return _wrapped(optimizer, ReduceOptions(), name)


def _wrapped(optimizer: Any, options: ReduceOptions, name: str | None) -> Any:
    import tensorflow as tf

    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from hccl_fusion.runtime.tf1_optimizer import DistributedTf1Optimizer

        if isinstance(optimizer, DistributedTf1Optimizer):
            raise _twice(optimizer)
        return DistributedTf1Optimizer(optimizer, options, name)
    keras = sys.modules.get("keras")  # who has a Keras optimizer has loaded Keras
    if keras is not None and isinstance(optimizer, keras.optimizers.Optimizer):
        from hccl_fusion.runtime.keras_optimizer import distribute, is_distributed

        if is_distributed(optimizer):
            raise _twice(optimizer)
        return distribute(optimizer, options)
    raise UsageError(
        "this is no optimizer that can be distributed",
        where="DistributedOptimizer",
        found=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        expected="a tf.compat.v1.train.Optimizer or a Keras 3 optimizer",
        remedy="keras.optimizers.SGD(…), for example; strings such as 'adam': keras.optimizers.get('adam')",
    )


def _twice(optimizer: Any) -> UsageError:
    return UsageError(
        "the optimizer is distributed already",
        where="DistributedOptimizer",
        found=type(optimizer).__name__,
        expected="an optimizer that reduces nothing",
        remedy="using it as it is",
    )
