"""How far apart two arrays are, and whether that counts as equal.

* Integers and bools: equal.
* Floats on 1 or 2 ranks: equal bit for bit, since x + y = y + x. A NaN equals a NaN.
* Floats on N > 2 ranks: within rounding. A fused reduction cuts its buffer into pieces elsewhere than a single one, so
  N numbers are added in another order, and the result moves by up to (N - 1) · eps · Σ|x|. Allowed is N times
  `_RELATIVE` (1e-5 for float32, 84 eps) of the largest absolute value in the tensor, which leaves room for the steps
  after the reduction. Use 2 ranks for a sharp check.
"""

from __future__ import annotations

__all__ = ["Differences", "OutputDifference", "compare_arrays"]

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RELATIVE = {
    "float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2, "complex64": 1e-5, "complex128": 1e-13,
}  # fmt: skip


@dataclass(frozen=True)
class OutputDifference:
    """One output of both graphs, over all ranks and steps.

    Attributes:
        name: the node's name; `name:1` for another output than the first.
        max_abs_diff: largest absolute difference of an element; infinite where shapes differ or a NaN meets a number.
        bit_equal: every bit is equal (NaNs count as equal).
    """

    name: str
    max_abs_diff: float
    bit_equal: bool


class Differences:
    """Gathers the differences of outputs over steps and ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._outputs: dict[str, OutputDifference] = {}
        self.all_equal = True
        """No difference so far that counts."""

    def add(self, before: Sequence[Mapping[str, np.ndarray]], after: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Compares what both graphs have of one step, one mapping a rank."""
        for name in before[0]:
            if name in after[0]:
                self._add_output(name, [arrays[name] for arrays in before], [arrays[name] for arrays in after])

    def add_missing(self, name: str) -> None:
        """Notes an output that only the first graph has."""
        self._outputs[name] = OutputDifference(name, math.inf, False)
        self.all_equal = False

    def outputs(self) -> tuple[OutputDifference, ...]:
        """One for each output, in the order in which they came."""
        return tuple(self._outputs.values())

    def _add_output(self, name: str, before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> None:
        found, is_equal = compare_arrays(name, before, after, self._ranks)
        known = self._outputs.get(name, found)
        largest = max(known.max_abs_diff, found.max_abs_diff)
        self._outputs[name] = OutputDifference(name, largest, known.bit_equal and found.bit_equal)
        self.all_equal &= is_equal


def compare_arrays(
    name: str, before: Sequence[np.ndarray], after: Sequence[np.ndarray], ranks: int
) -> tuple[OutputDifference, bool]:
    """The difference of one output, and whether it counts as equal.

    Args:
        name: of the output.
        before, after: its arrays in both graphs, one for each rank.
        ranks: how many ranks ran.
    """
    pairs = list(zip(before, after))
    bit_equal = all(_bit_equal(a, b) for a, b in pairs)
    if bit_equal:
        return OutputDifference(name, 0.0, True), True
    largest = max(_max_abs_diff(a, b) for a, b in pairs)
    allowed = 0.0
    relative = _RELATIVE.get(before[0].dtype.name)
    if ranks > 2 and relative is not None:
        allowed = ranks * relative * max(_magnitude(array) for pair in pairs for array in pair)
    return OutputDifference(name, largest, False), allowed > 0 and largest <= allowed


def _bit_equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.tobytes() == b.tobytes():
        return True
    if a.dtype.name not in _RELATIVE:
        return False
    if a.dtype.kind == "c":
        part = "f4" if a.dtype.itemsize == 8 else "f8"
        a, b = a.ravel().view(part), b.ravel().view(part)
    bits = f"u{a.dtype.itemsize}"
    same = a.ravel().view(bits) == b.ravel().view(bits)
    return bool(np.all(same | (np.isnan(a.ravel()) & np.isnan(b.ravel()))))


def _max_abs_diff(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if a.dtype.kind in "biu":
        low, high = np.minimum(a, b)[a != b], np.maximum(a, b)[a != b]
        return float(max((int(y) - int(x) for x, y in zip(low, high)), default=0))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        distance = np.where(agree, 0, np.abs(x - y))
    return float(np.where(np.isnan(distance), np.inf, distance).max(initial=0))


def _magnitude(array: np.ndarray) -> float:
    wide = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0))
