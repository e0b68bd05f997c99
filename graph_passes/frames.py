"""Which while-loop frame or branch of a conditional a node runs in; edges must not be added across either.

TensorFlow 1 only: later conditionals and loops have bodies that are functions. A node behind a Switch runs only if its
branch is taken, and whatever waits for it is dead with it, until a Merge joins the branches.
"""

from __future__ import annotations

__all__ = ["BRANCH", "frames_of", "is_branch"]

from collections.abc import Sequence

from graph_passes.attributes import read_attr
from graph_passes.graph import Graph

BRANCH = "(branch)"
"""The component of a frame's name that stands for a branch of a conditional."""

_ENTER = frozenset({"Enter", "RefEnter"})
_EXIT = frozenset({"Exit", "RefExit"})
_SWITCH = frozenset({"Switch", "RefSwitch"})
_MERGE = frozenset({"Merge", "RefMerge"})


def is_branch(frame: str) -> bool:
    """True where the innermost component of a frame's name is a branch."""
    return frame.endswith(BRANCH)


def frames_of(graph: Graph, order: Sequence[int]) -> list[str] | None:
    """The frame of each node, `outer/inner` where they nest and "" outside; None where the graph has none.

    `order` is any topological order. O(nodes + edges).
    """
    if not (_ENTER | _SWITCH).intersection(graph.ops):
        return None
    frames = [""] * len(graph)
    for number in order:
        inherited = ""
        for source in graph.producers(number):
            frame = _behind(graph.ops[source], frames[source])
            if len(frame) > len(inherited):
                inherited = frame
        frames[number] = _inside(graph, number, inherited)
    return frames


def _behind(op: str, frame: str) -> str:
    """The frame of what follows a node."""
    if op in _EXIT:
        return _outer(frame)
    if op in _SWITCH and (not frame or is_branch(frame)):  # a loop's own Switch stays inside the loop
        return _inner(frame, BRANCH)
    return frame


def _inside(graph: Graph, number: int, inherited: str) -> str:
    """The frame of a node whose inputs come from `inherited`."""
    op = graph.ops[number]
    if op in _ENTER:
        name = read_attr(graph.node(number), "frame_name").s.decode("utf-8", "replace")
        return _inner(inherited, name.replace("/", "|"))
    return _outer(inherited) if op in _MERGE and is_branch(inherited) else inherited


def _inner(frame: str, name: str) -> str:
    return f"{frame}/{name}" if frame else name


def _outer(frame: str) -> str:
    return frame.rpartition("/")[0]
