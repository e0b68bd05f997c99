"""Makes an optimizer of Keras 3 reduce its gradients over the ranks.

The gradients are reduced on their way into the outermost `apply`, the one door through which `model.fit`, custom loops
and eager code all go. What comes after it sees the same gradients on every rank: loss scaling decides alike, clipping
cuts alike. With `gradient_accumulation_steps` every micro-step is reduced, and Keras accumulates what was reduced.
"""

from __future__ import annotations

__all__ = ["distribute", "is_distributed"]

import functools
from collections.abc import Sequence
from typing import Any

import keras  # type: ignore[import-untyped]  # Keras has no types

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.reduce import GradientReducer
from hccl_fusion.runtime.reduce_options import ReduceOptions

_REDUCER = "_hccl_fusion_reducer"


def distribute(optimizer: Any, options: ReduceOptions) -> Any:
    """Turns a Keras 3 optimizer into a distributed one, in place, and returns it.

    Its state, name and configuration stay. What it saves is what the plain optimizer saves: wrap it again after
    loading.

    Args:
        optimizer: any `keras.optimizers.Optimizer`, a `LossScaleOptimizer` included.
        options: how gradients are reduced.

    Raises:
        UsageError: Keras is older than 3, or runs on another backend than TensorFlow.
    """
    _require_keras_3()
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and is_distributed(inner):
        raise UsageError(
            "the inner optimizer is distributed already",
            where=type(optimizer).__name__,
            found=type(inner).__name__,
            expected="one distributed optimizer",
            remedy="using it as it is",
        )
    _teach_loss_scaling()
    kind: Any = type(optimizer)
    optimizer.__class__ = _distributed_class(kind)
    object.__setattr__(optimizer, _REDUCER, GradientReducer(options))
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether `distribute` has made it."""
    return hasattr(optimizer, _REDUCER)


@functools.cache
def _distributed_class(base: Any) -> Any:
    """A subclass that goes by the name of its base, so that what Keras saves can be loaded without this library."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduces the gradients over the ranks, then does what the plain optimizer does."""
        variables = None if trainable_variables is None else list(trainable_variables)
        return base.apply(self, _reduced(self, grads, variables), variables)

    body = {"apply": apply, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), body)


def _reduced(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
    """The reduced gradients; unreduced ones where a loss scaling around this optimizer has reduced them."""
    grads = list(grads)
    if getattr(optimizer, _REDUCER + "_is_passed", False):
        return grads
    # Without variables Keras takes those that the optimizer was built with, or raises an error of its own.
    known = getattr(optimizer, "_trainable_variables", ()) if variables is None else variables
    is_fit = len(known) == len(grads)
    reducer: GradientReducer = getattr(optimizer, _REDUCER)
    return reducer.reduce(
        grads,
        names=[str(getattr(variable, "path", variable.name)) for variable in known] if is_fit else None,
        shapes=[variable.shape for variable in known] if is_fit else None,
        scope=f"Distributed{type(optimizer).__name__}_Allreduce",
    )


@functools.cache
def _teach_loss_scaling() -> None:
    """A LossScaleOptimizer around a distributed optimizer reduces before it looks for infinities.

    Keras puts one around the optimizer by itself when a model is compiled for mixed_float16. If the inner optimizer
    reduced, a rank that skips its step alone would leave the others waiting.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    plain = scaling.apply

    @functools.wraps(plain)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if not is_distributed(inner):
            return plain(self, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        reduced = _reduced(inner, grads, variables)
        object.__setattr__(inner, _REDUCER + "_is_passed", True)
        try:
            return plain(self, reduced, variables)
        finally:
            object.__setattr__(inner, _REDUCER + "_is_passed", False)

    scaling.apply = apply


def _require_keras_3() -> None:
    version = keras.__version__
    if int(version.split(".")[0]) < 3:
        raise UsageError("Keras is too old", found=version, expected="Keras 3", remedy="tf.compat.v1.train optimizers")
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "Keras runs on another backend",
            found=keras.backend.backend(),
            expected="tensorflow",
            remedy="KERAS_BACKEND=tensorflow",
        )
