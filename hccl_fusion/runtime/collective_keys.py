"""Instance keys of collectives, and what all collectives of one reduction have in common.

A key names one collective of a group, on all ranks alike. Keys come from a counter per group that moves on in the
order of construction, so ranks that build the same things have the same keys; the ranks compare them before the first
step. A function that is traced again gets the keys that it had: what it reduces is the same, and ranks need not trace
equally often.
"""

from __future__ import annotations

__all__ = [
    "FIRST_KEY",
    "KEYS_OF_ANY_LENGTH",
    "GroupCollectives",
    "KeyBook",
    "round_up_length",
    "skip_keys",
    "take_keys",
]

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_KEY = 1 << 20
"""Keys below are left to graphs of `graph_passes.lower` and to hand-written collectives."""

_LAST_KEY = 1 << 30

_STEPS = 16
_MAX_SHIFT = 27  # lengths are int32

KEYS_OF_ANY_LENGTH = (_MAX_SHIFT + 2) * _STEPS
"""Keys that a collective takes whose first dimension is known only when it runs."""


class _Counters:
    """The next key of each group; every access holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next_key: dict[str, int] = {}


_counters = _Counters()


def take_keys(group: str, count: int) -> range:
    """Returns `count` keys that this process has not used in the group; they are never given out again."""
    with _counters.lock:
        start = _counters.next_key.get(group, FIRST_KEY)
        if start + count > _LAST_KEY:
            raise OverflowError(f"group {group!r} has used all of its collective keys")
        _counters.next_key[group] = start + count
    return range(start, start + count)


def skip_keys(group: str, end: int) -> None:
    """Gives out no key of the group below `end`: after ranks have taken different numbers of keys."""
    with _counters.lock:
        _counters.next_key[group] = max(end, _counters.next_key.get(group, FIRST_KEY))


class KeyBook:
    """The keys that one wrapper has taken, by what they are for.

    The n-th equal reduction in one graph has the keys of the n-th equal one in any other graph. Eager code reduces one
    thing after another and counts as the first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._taken: dict[tuple[str, int], range] = {}
        self._seen: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def keys(self, group: str, fingerprint: str, count: int, graph: Any = None) -> tuple[range, bool]:
        """Returns the keys, and whether they were taken just now.

        Args:
            group: of the collectives.
            fingerprint: of all that is reduced; equal texts need equal keys.
            count: how many.
            graph: where they are built; None in eager mode.
        """
        with self._lock:
            occurrence = 0
            if graph is not None:
                seen = self._seen.setdefault(graph, Counter())
                occurrence = seen[fingerprint]
                seen[fingerprint] += 1
            name = (fingerprint, occurrence)
            is_new = name not in self._taken
            if is_new:
                self._taken[name] = take_keys(group, count)
            return self._taken[name], is_new

    def give_up(self, fingerprint: str) -> None:
        """Forgets keys that the ranks did not agree on, so that they are not taken for agreed later."""
        with self._lock:
            for name in [name for name in self._taken if name[0] == fingerprint]:
                del self._taken[name]


def round_up_length(length: Any) -> tuple[Any, Any]:
    """The length to pad to, and which of its keys a collective of that length uses.

    TensorFlow keeps the shape of an instance key for ever. So lengths are rounded up by less than 13 %, to one of a few
    hundred, and each of these has a key of its own.

    Args:
        length: an int32 scalar of at least 1.
    """
    import tensorflow as tf

    limits = tf.constant([_STEPS << shift for shift in range(_MAX_SHIFT)], tf.int32)
    shift = tf.reduce_sum(tf.cast(length > limits, tf.int32))
    one = tf.bitwise.left_shift(1, shift)
    steps = 1 + (length - 1) // one
    return steps * one, shift * _STEPS + steps - 1


@dataclass(frozen=True)
class GroupCollectives:
    """Writes collectives of one group; each takes the next key.

    Attributes:
        size: ranks of the group.
        group_key: of the group.
        device: of the collectives.
        timeout_seconds: that a collective waits for other ranks.
        keys: instance keys in the order in which they are used.
    """

    size: int
    group_key: int
    device: str
    timeout_seconds: float
    keys: Iterator[int]

    def all_reduce(self, tensor: Any, name: str, offset: Any = None, after: Sequence[Any] = ()) -> Any:
        """The sum over the ranks.

        Args:
            tensor: it has at least one element: TensorFlow's process dies without.
            name: of the op.
            offset: of its key, from `round_up_length`, where the length is known only when it runs.
            after: tensors that must be there before it starts.
        """
        import tensorflow as tf

        with tf.device(self.device):
            common = self._common(offset)
            with tf.control_dependencies(list(after)):
                reduced = tf.raw_ops.CollectiveReduceV2(
                    input=tensor, ordering_token=[], merge_op="Add", final_op="Id", name=name, **common
                )
        return _side_by_side(reduced)

    def gather(self, tensor: Any, name: str, offset: Any = None) -> Any:
        """The tensors of all ranks, which have one shape, one below the other; arguments as in `all_reduce`."""
        import tensorflow as tf

        with tf.device(self.device):
            gathered = tf.raw_ops.CollectiveGatherV2(input=tensor, ordering_token=[], name=name, **self._common(offset))
        return _side_by_side(gathered)

    def broadcast(self, tensor: Any, is_root: bool, name: str) -> Any:
        """The root's tensor; `tensor` has the same static shape on all ranks."""
        import tensorflow as tf

        with tf.device(self.device):
            if is_root:
                return tf.raw_ops.CollectiveBcastSendV2(input=tensor, name=name, **self._common())
            shape = tf.constant(tensor.shape.as_list(), tf.int32)
            return tf.raw_ops.CollectiveBcastRecvV2(T=tensor.dtype, shape=shape, name=name, **self._common())

    def _common(self, offset: Any = None) -> dict[str, Any]:
        import tensorflow as tf

        key = tf.constant(next(self.keys), name="instance_key")
        if offset is not None:
            key = key + offset
            for _ in range(KEYS_OF_ANY_LENGTH - 1):
                next(self.keys)
        return {
            "group_size": tf.constant(self.size, name="group_size"),
            "group_key": tf.constant(self.group_key, name="group_key"),
            "instance_key": key,
            "timeout_seconds": self.timeout_seconds,
        }


def _side_by_side(tensor: Any) -> Any:
    """Inside tf.function: keeps TensorFlow from ordering this collective after all that were written before it."""
    if _is_symbolic(tensor):
        manager = getattr(tensor.graph, "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(tensor.op)
    return tensor


def _is_symbolic(tensor: Any) -> bool:
    import tensorflow as tf

    return not isinstance(tensor, tf.__internal__.EagerTensor)
