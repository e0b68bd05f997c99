"""Gradients of embeddings: IndexedSlices, whose number of rows differs from rank to rank."""

from __future__ import annotations

__all__ = ["SPARSE_KEYS", "SparsePolicy", "all_gather_slices", "densify"]

import enum
from typing import Any

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.collective_keys import KEYS_OF_ANY_LENGTH, GroupCollectives, round_up_length

SPARSE_KEYS = 1 + 2 * KEYS_OF_ANY_LENGTH
"""Keys that gathering one IndexedSlices takes: of row counts, values, indices."""


class SparsePolicy(enum.Enum):
    """What becomes of IndexedSlices."""

    ALLGATHER = "allgather"
    DENSIFY = "densify"

    @classmethod
    def of(cls, choice: SparsePolicy | str) -> SparsePolicy:
        """Reads what a caller may give.

        Raises:
            UsageError: no policy of this name.
        """
        try:
            return cls(choice)
        except ValueError:
            raise UsageError(
                "the policy for IndexedSlices is unknown", found=repr(choice), expected="allgather, densify"
            ) from None


def densify(slices: Any, shape: Any = None) -> Any:
    """The dense tensor that IndexedSlices stand for.

    Args:
        slices: a `tf.IndexedSlices`; rows of equal index are added.
        shape: of the dense tensor where the caller knows it, such as its variable's.
    """
    import tensorflow as tf

    if shape is not None and tf.TensorShape(shape).is_fully_defined():
        dense_shape: Any = tf.TensorShape(shape).as_list()
        rows: Any = dense_shape[0]
    elif slices.dense_shape is not None:
        known = tf.get_static_value(slices.dense_shape)
        dense_shape = known if known is not None else slices.dense_shape
        rows = dense_shape[0]
    else:
        raise UsageError(
            "IndexedSlices without a dense shape cannot be made dense",
            found=str(slices),
            expected="a dense_shape",
            remedy='sparse="allgather"',
        )
    total = tf.math.unsorted_segment_sum(slices.values, slices.indices, rows)
    return tf.reshape(total, dense_shape)


def all_gather_slices(slices: Any, collectives: GroupCollectives, name: str) -> Any:
    """The slices of all ranks one after another; ranks may have different numbers of rows, or none.

    TensorFlow gathers equal shapes only. So the row counts are gathered first, values and indices are padded to the
    largest count, and the padding is taken out again.
    """
    import tensorflow as tf

    with tf.name_scope(name):
        rows = tf.shape(slices.indices)[:1]
        counts = collectives.gather(rows, "rows")
        # An empty tensor must not be gathered.
        padded, offset = round_up_length(tf.maximum(tf.reduce_max(counts), 1))
        is_row = tf.reshape(tf.sequence_mask(counts, padded), [-1])
        values, indices = [
            tf.boolean_mask(_static(collectives.gather(_padded(part, padded - rows[0]), leaf, offset), part), is_row)
            for part, leaf in ((slices.values, "values"), (slices.indices, "indices"))
        ]
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def _padded(tensor: Any, rows: Any) -> Any:
    """Adds rows of zeros."""
    import tensorflow as tf

    padding = tf.concat([tf.reshape(rows, [1]), tf.shape(tensor)[1:]], 0)
    return _static(tf.concat([tensor, tf.zeros(padding, tensor.dtype)], 0), tensor)


def _static(tensor: Any, like: Any) -> Any:
    """Keeps what is known of the rows' shape."""
    import tensorflow as tf

    return tf.ensure_shape(tensor, tf.TensorShape([None]).concatenate(like.shape[1:]))
