"""The plain data that travels between the passes: gradients, sections, segments.

Words as in docs/index_order.md: a *gradient* is a tensor that one all-reduce reduces; a *section* holds the all-reduces
of one graph that may be fused together; a *segment* is a run of consecutive gradient indices of a section.
"""

from __future__ import annotations

__all__ = ["Gradient", "GradientId", "Part", "Reason", "Section", "SectionKey", "Single"]

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

from graph_passes.messages import dtype_name, dtype_size_bytes

Shape = Optional[tuple[int, ...]]


class GradientId(NamedTuple):
    """Names one all-reduce: the function's name ("" for the graph itself) and the node's."""

    graph: str
    name: str

    def __str__(self) -> str:
        return f"{self.graph}/{self.name}" if self.graph else self.name


class Reason(enum.Enum):
    """Why a gradient is reduced alone. Every gradient that is not fused has exactly one."""

    UNKNOWN_SHAPE = "unknown-shape"
    REDUCTION = "reduction"
    FUSION_0 = "fusion=0"
    ALONE = "alone"
    ONE_PER_SEGMENT = "one-per-segment"
    FRAME = "frame"
    BRANCH = "branch"
    FETCHED = "fetched"
    KEPT = "kept"
    DEVICE = "device"
    DTYPE = "dtype"
    DEPENDENCE = "dependence"
    UNFUSED = "no-fusion"


class SectionKey(NamedTuple):
    """All-reduces with equal keys may be fused together; HCCL counts gradients per key."""

    graph: str
    group: str
    fusion_id: int
    dtype: int
    reduction: str

    def __str__(self) -> str:
        where = f" of function {self.graph}" if self.graph else ""
        fusion = f", fusion_id {self.fusion_id}" if self.fusion_id != -1 else ""
        return f"{self.group} {dtype_name(self.dtype)} {self.reduction}{fusion}{where}"


@dataclass(frozen=True)
class Gradient:
    """One all-reduce and the tensor that it reduces.

    Attributes:
        node: number of the all-reduce in its graph's index.
        rank: its position in the breadth-first order of all nodes.
        tensor: the reduced tensor, as the all-reduce names its input.
        variable: the variable that it updates, where that is known.
        shape: None where it is not fully known.
        device: the normalised device string.
        frame: name of the while loop's frame around it, "" outside loops.
    """

    graph: str
    name: str
    node: int
    tensor: str
    group: str
    reduction: str
    fusion: int
    fusion_id: int
    dtype: int
    shape: Shape
    variable: str | None = None
    device: str = ""
    frame: str = ""
    rank: int = 0

    @property
    def id(self) -> GradientId:
        """The all-reduce's own name."""
        return GradientId(self.graph, self.name)

    @property
    def key(self) -> SectionKey:
        """The section that the gradient belongs to, if it can be fused at all."""
        return SectionKey(self.graph, self.group, self.fusion_id, self.dtype, self.reduction)

    @property
    def elements(self) -> int | None:
        """Number of elements; None where the shape is not known."""
        return None if self.shape is None else math.prod(self.shape)

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the tensor, without padding; None where the shape is not known."""
        element_bytes = dtype_size_bytes(self.dtype)
        if self.elements is None or element_bytes is None:
            return None
        return self.elements * element_bytes


@dataclass(frozen=True)
class Section:
    """The gradients of one section in index order: gradient i has index i."""

    key: SectionKey
    fusion: int
    gradients: tuple[Gradient, ...]

    @property
    def takes_strategy(self) -> bool:
        """True where HCCL asks its strategy: two or more members and fusion 1."""
        return self.fusion == 1 and len(self.gradients) > 1


@dataclass(frozen=True)
class Single:
    """A gradient that is reduced alone, and why."""

    id: GradientId
    reason: Reason
    detail: str = ""


@dataclass(frozen=True)
class Part:
    """What becomes one reduction: all of a segment, or its share on one device.

    Attributes:
        key: the section.
        segment: number of the segment in the plan of its group, from 0; equal in all parts of one segment.
        gradients: in index order. One gradient stays as it is, and takes its place in the chain.
        chain: parts of equal chain run one after another, in the order given; -1 is outside any chain.
    """

    key: SectionKey
    segment: int
    gradients: tuple[GradientId, ...]
    chain: int = -1
