"""All ranks start from the variables of one rank.

broadcast_variables(model.variables)                               # eager code: now
session.run(broadcast_variables(tf.compat.v1.global_variables()))  # TensorFlow 1: an op
tf.compat.v1.train.MonitoredTrainingSession(hooks=[BroadcastHook()], …)
model.fit(…, callbacks=[BroadcastCallback()])
"""

from __future__ import annotations

__all__ = ["BroadcastCallback", "BroadcastHook", "broadcast_variables"]

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_passes.messages import types_pb2
from graph_passes.op_tables import WIDER_TYPE
from hccl_fusion import groups
from hccl_fusion.errors import UsageError
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime import agreement, lifecycle
from hccl_fusion.runtime.collective_keys import GroupCollectives, take_keys

_BROADCAST_TYPES = frozenset({
    types_pb2.DT_BOOL, types_pb2.DT_HALF, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT32,
    types_pb2.DT_INT64,
})  # fmt: skip
_WIDER = {**WIDER_TYPE, types_pb2.DT_BFLOAT16: types_pb2.DT_FLOAT}


@agreement.outside_autograph
def broadcast_variables(variables: Sequence[Any] | None = None, root_rank: int = 0, group: str = DEFAULT_GROUP) -> Any:
    """Gives all ranks of a group the values that its root's variables have.

    Args:
        variables: of TensorFlow or Keras, the same on all ranks in the same order; None takes the global variables of
            a TensorFlow 1 graph.
        root_rank: number inside the group of the rank whose values count.
        group: of the ranks; all of them must call this.

    Returns:
        In a graph an op that does it, in eager mode None.

    Raises:
        UsageError: variables are missing, a type or a shape cannot be broadcast, or there is no such root.
        AgreementError: the ranks have different variables.
    """
    is_eager = tf.executing_eagerly()
    if variables is None:
        if is_eager:
            raise UsageError("eager code has no list of all variables", expected="broadcast_variables(model.variables)")
        variables = tf.compat.v1.global_variables()
    ranks = groups.group_ranks(group)
    if not 0 <= root_rank < len(ranks):
        where = "broadcast_variables"
        raise UsageError("there is no such root", where=where, found=root_rank, expected=f"0 to {len(ranks) - 1}")
    updates = [] if len(ranks) == 1 else _broadcast(list(variables), ranks.index(lifecycle.rank()), root_rank, group)
    return None if is_eager else tf.group(*updates, name="broadcast_variables")


def _broadcast(variables: list[Any], rank: int, root_rank: int, group: str) -> list[Any]:
    wires = [_wire_dtype(variable) for variable in variables]
    with tf.name_scope("Broadcast"):
        keys = take_keys(group, len(variables))
        seconds = lifecycle.timeout_seconds()
        stated = tuple(
            agreement.StatedTensor(_name(v), str(v.shape), tf.as_dtype(v.dtype).name, "the broadcast")
            for v in variables
        )
        options, span = f"root_rank={root_rank}", (keys.start, len(keys))
        statement = agreement.PlanStatement(lifecycle.rank(), "broadcast_variables", options, stated, span)
        agreement.agree_on_plan(statement, group, seconds)
        size, key, device = groups.get_rank_size(group), groups.group_key(group), lifecycle.collective_device()
        collectives = GroupCollectives(size, key, device, seconds, iter(keys))
        updates = []
        for variable, wire in zip(variables, wires):
            if tf.TensorShape(variable.shape).num_elements():  # without an element there is nothing to send
                value = tf.cast(tf.convert_to_tensor(variable), wire)
                received = collectives.broadcast(value, rank == root_rank, "broadcast")
                updates.append(variable.assign(tf.cast(received, variable.dtype)))
        return updates


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def _wire_dtype(variable: Any) -> Any:
    """The type that travels.

    Raises:
        UsageError: TensorFlow cannot broadcast the variable.
    """
    dtype = tf.as_dtype(variable.dtype).base_dtype
    wire = dtype.as_datatype_enum if dtype.as_datatype_enum in _BROADCAST_TYPES else _WIDER.get(dtype.as_datatype_enum)
    if wire is None or not tf.TensorShape(variable.shape).is_fully_defined():
        raise UsageError(
            "a variable cannot be broadcast",
            where=_name(variable),
            found=f"{dtype.name} {variable.shape}",
            expected="a number type and a shape that is known",
            remedy="leaving it out of `variables`",
        )
    return tf.as_dtype(wire)


class BroadcastHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """Broadcasts all global variables once the session of TensorFlow 1 is there.

    A session that is made again after a failure broadcasts again.
    """

    def __init__(self, root_rank: int = 0, group: str = DEFAULT_GROUP) -> None:
        self.root_rank = root_rank
        self.group = group
        self._op: Any = None

    def begin(self) -> None:
        """Adds the op to the graph."""
        self._op = broadcast_variables(None, self.root_rank, self.group)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        del coord
        session.run(self._op)


def BroadcastCallback(root_rank: int = 0, group: str = DEFAULT_GROUP) -> Any:  # noqa: N802  # used as a class
    """A Keras callback that broadcasts a model's and its optimizer's variables when training starts.

    A model without weights yet is broadcast after its first batch, which builds it.
    """
    return _callback_class()(root_rank, group)


@functools.cache
def _callback_class() -> Any:
    import keras  # type: ignore[import-untyped]  # Keras has no types

    class Broadcast(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def __init__(self, root_rank: int, group: str) -> None:
            super().__init__()
            self.root_rank = root_rank
            self.group = group
            self.is_done = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.is_done = False
            if self.model.built and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            if self.model.built:
                self._run()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.is_done:
                self._run()

        def _run(self) -> None:
            broadcast_variables([*self.model.variables, *self.model.optimizer.variables], self.root_rank, self.group)
            self.is_done = True

    return Broadcast
