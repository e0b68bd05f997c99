"""Errors of the graph passes.

    HcclFusionError                 root of every error of both packages
    ├── GraphFileError              a file cannot be read or written as a graph
    ├── GraphError                  a graph is not a valid graph (dangling input, duplicate name, cycle)
    │   └── ReductionError          an all-reduce has a missing or illegal attribute
    └── PassError                   a pass's precondition or postcondition does not hold
        └── VerificationError       a rewritten graph does not compute what the original computes

`hccl_fusion.errors` continues the tree with the errors of strategies and plans.
"""

from __future__ import annotations

__all__ = [
    "HcclFusionError",
    "GraphFileError",
    "GraphError",
    "ReductionError",
    "PassError",
    "VerificationError",
    "summarise",
]

from collections.abc import Sequence


class HcclFusionError(Exception):
    """What went wrong, where, what was found, what was expected, and what to do, in one line."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        found: object = None,
        expected: object = None,
        remedy: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy
        # Set by the pipeline when a pass raises this.
        self.pass_name = ""
        self.passes_before: tuple[str, ...] = ()

    def in_file(self, path: str) -> None:
        """Puts the file in front of the place, where the place does not name it already."""
        if path not in self.where:
            self.where = f"{path}, {self.where}" if self.where else path

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f", {self.where}"
        if self.pass_name:
            before = f" (after {', '.join(self.passes_before)})" if self.passes_before else ""
            text += f", in pass {self.pass_name}{before}"
        if self.found is not None:
            text += f", found {self.found}"
        if self.expected is not None:
            text += f", expected {self.expected}"
        if self.remedy:
            text += f"; try {self.remedy}"
        return " ".join(text.split())


class GraphFileError(HcclFusionError):
    """A file cannot be read or written as a graph."""


class GraphError(HcclFusionError):
    """A graph is not a valid graph."""


class ReductionError(GraphError):
    """An all-reduce has a missing or illegal attribute."""


class PassError(HcclFusionError):
    """A pass's precondition or postcondition does not hold."""


class VerificationError(PassError):
    """A rewritten graph does not compute what the original computes."""


def summarise(findings: Sequence[str], limit: int = 5) -> str:
    """Joins findings of one kind: the first `limit` in full, then how many more there are."""
    shown = "; ".join(findings[:limit])
    rest = len(findings) - limit
    return f"{shown}; and {rest} more" if rest > 0 else shown
