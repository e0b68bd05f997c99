"""The type in which a gradient travels: its own, a narrower one to save bytes, or a wider one where it must be."""

from __future__ import annotations

__all__ = ["Compression", "wire_dtype"]

import enum
import logging

from graph_passes.lower import COLLECTIVE_TYPES
from graph_passes.messages import dtype_name, types_pb2
from graph_passes.op_tables import WIDER_TYPE
from hccl_fusion.errors import UsageError

_logger = logging.getLogger("hccl_fusion")
_WIDE_FLOATS = (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)


class Compression(enum.Enum):
    """What float32 and float64 gradients are cast to while they are reduced."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def of(cls, choice: Compression | str | None) -> Compression:
        """Reads what a caller may give.

        Raises:
            UsageError: no compression of this name.
        """
        try:
            return cls.NONE if choice is None else cls(choice)
        except ValueError:
            raise UsageError("the compression is unknown", found=repr(choice), expected="None, fp16, bf16") from None


_NARROW = {Compression.FP16: types_pb2.DT_HALF, Compression.BF16: types_pb2.DT_BFLOAT16}


def wire_dtype(dtype: int, compression: Compression, what: str) -> int:
    """The number of the type in which tensors of type `dtype` are reduced.

    Args:
        dtype: number of the gradient's type.
        compression: applies to float32 and float64 only.
        what: the gradient, for messages.

    Raises:
        UsageError: TensorFlow's collectives can reduce neither the type nor a wider one.
    """
    if dtype in _WIDE_FLOATS and compression in _NARROW:
        return int(_NARROW[compression])
    if dtype in COLLECTIVE_TYPES:
        return dtype
    wide = WIDER_TYPE.get(dtype)
    if wide is None:
        raise UsageError(
            "TensorFlow's collectives cannot reduce this type",
            where=what,
            found=dtype_name(dtype),
            expected="bfloat16, float16, float32, float64, or an integer of at most 64 bits",
            remedy="casting the gradient before it is reduced",
        )
    _logger.info("%s: %s is reduced as %s", what, dtype_name(dtype), dtype_name(wide))
    return int(wide)
