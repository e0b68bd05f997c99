"""Writes the reduction of one bucket of a plan: one buffer, reduced in pieces side by side."""

from __future__ import annotations

__all__ = ["BucketWriter", "keys_of", "piece_sizes"]

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graph_passes.messages import dtype_size_bytes
from hccl_fusion.runtime.collective_keys import KEYS_OF_ANY_LENGTH, GroupCollectives, round_up_length
from hccl_fusion.runtime.graph_order import Bucket

_ANY_LENGTH = (-1,)  # instead of the sizes of pieces: known only when it runs


def piece_sizes(bucket: Bucket, dtype: int, piece_mib: float) -> tuple[int, ...]:
    """Elements of each piece of the bucket's buffer, of which all are at most `piece_mib` and none is empty.

    Args:
        bucket: of a plan.
        dtype: number of the type that travels.
        piece_mib: in MiB.
    """
    if any(shape is None for shape in bucket.shapes):
        return _ANY_LENGTH
    elements = sum(math.prod(shape) for shape in bucket.shapes if shape is not None)
    piece_elements = max(1, int(piece_mib * 2**20) // (dtype_size_bytes(dtype) or 1))
    count = -(-elements // piece_elements)
    return tuple(elements * (i + 1) // count - elements * i // count for i in range(count))


def keys_of(pieces: tuple[int, ...]) -> int:
    """How many keys a bucket takes."""
    return KEYS_OF_ANY_LENGTH if pieces == _ANY_LENGTH else len(pieces)


@dataclass(frozen=True)
class BucketWriter:
    """Writes the reduction of one bucket."""

    collectives: GroupCollectives
    bucket: Bucket
    pieces: tuple[int, ...]
    wire: int
    sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(math.prod(shape) for shape in self.bucket.shapes if shape is not None))

    def write(self, tensors: Sequence[Any], after: Sequence[Any], divisor: int) -> tuple[list[Any], list[Any]]:
        """The reduced tensors, and the collectives' own results, which later buckets wait for."""
        import tensorflow as tf

        if not self.pieces:  # no tensor has an element
            return list(tensors), []
        with tf.name_scope(self.bucket.label):
            dtype = tensors[0].dtype.base_dtype
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            buffer = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
            buffer = tf.cast(buffer, tf.as_dtype(self.wire))
            is_unknown = self.pieces == _ANY_LENGTH
            reduced, ends = (self._reduce_any_length if is_unknown else self._reduce_pieces)(buffer, after)
            result = tf.cast(reduced, dtype)
            if divisor != 1:
                result = tf.realdiv(result, tf.cast(divisor, dtype))
            if is_unknown:
                return [tf.ensure_shape(tf.reshape(result, tf.shape(tensors[0])), tensors[0].shape)], ends
            parts = [result] if len(tensors) == 1 else tf.split(result, self.sizes)
            return [tf.reshape(part, shape) for part, shape in zip(parts, self.bucket.shapes)], ends

    def _reduce_pieces(self, buffer: Any, after: Sequence[Any]) -> tuple[Any, list[Any]]:
        import tensorflow as tf

        pieces = [buffer] if len(self.pieces) == 1 else tf.split(buffer, self.pieces)
        ends = [self.collectives.all_reduce(piece, "all_reduce", after=after) for piece in pieces]
        return (ends[0] if len(ends) == 1 else tf.concat(ends, 0)), ends

    def _reduce_any_length(self, buffer: Any, after: Sequence[Any]) -> tuple[Any, list[Any]]:
        import tensorflow as tf

        length = tf.size(buffer)
        padded, offset = round_up_length(tf.maximum(length, 1))
        filled = tf.pad(buffer, [[0, padded - length]])
        end = self.collectives.all_reduce(filled, "all_reduce", offset, after)
        return end[:length], [end]
