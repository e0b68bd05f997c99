"""Makes an optimizer of TensorFlow 1 reduce its gradients over the ranks."""

from __future__ import annotations

__all__ = ["DistributedTf1Optimizer"]

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hccl_fusion.runtime.reduce import GradientReducer
from hccl_fusion.runtime.reduce_options import ReduceOptions


class DistributedTf1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # TensorFlow has no types
    """An optimizer whose `compute_gradients` returns gradients that are equal on all ranks.

    So clipping between `compute_gradients` and `apply_gradients` sees reduced gradients. Everything else is the inner
    optimizer's.

    Attributes:
        reducer: what reduces the gradients.
    """

    def __init__(self, optimizer: Any, options: ReduceOptions, name: str | None = None) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: any `tf.compat.v1.train.Optimizer`.
            options: how gradients are reduced.
            name: prefix of the name scope; `Distributed` and the optimizer's class where None.
        """
        self._optimizer = optimizer
        self.reducer = GradientReducer(options)
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=False)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes the gradients as the inner optimizer does, and reduces them."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        return self.reduce_gradients(pairs)

    def reduce_gradients(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduces (gradient, variable) pairs; None stays None."""
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        reduced = self.reducer.reduce(
            gradients,
            names=[variable.name for variable in variables],
            shapes=[variable.shape for variable in variables],
            scope=f"{self._name}_Allreduce",
        )
        return list(zip(reduced, variables))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner optimizer does."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner optimizer does."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner optimizer does."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def get_name(self) -> Any:
        """The inner optimizer's name."""
        return self._optimizer.get_name()

    def variables(self) -> Any:
        """The inner optimizer's variables."""
        return self._optimizer.variables()

    def __getattr__(self, name: str) -> Any:
        """Whatever else the inner optimizer has."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
