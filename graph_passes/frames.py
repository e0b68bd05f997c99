"""Which while-loop frame a node runs in; edges must not be added across frames."""

from __future__ import annotations

__all__ = ["frames_of"]

from collections.abc import Sequence

from graph_passes.attributes import read_attr
from graph_passes.graph import Graph

_ENTER = frozenset({"Enter", "RefEnter"})
_EXIT = frozenset({"Exit", "RefExit"})


def frames_of(graph: Graph, order: Sequence[int]) -> list[str] | None:
    """The frame of each node, `outer/inner` where loops nest and "" outside; None where the graph has no loop.

    `order` is any topological order. O(nodes + edges).
    """
    if not _ENTER.intersection(graph.ops):
        return None
    frames = [""] * len(graph)
    for number in order:
        inherited = ""
        for source in graph.producers(number):
            frame = _after_exit(frames[source]) if graph.ops[source] in _EXIT else frames[source]
            if len(frame) > len(inherited):
                inherited = frame
        if graph.ops[number] in _ENTER:
            name = read_attr(graph.node(number), "frame_name").s.decode("utf-8", "replace").replace("/", "|")
            inherited = f"{inherited}/{name}" if inherited else name
        frames[number] = inherited
    return frames


def _after_exit(frame: str) -> str:
    return frame.rpartition("/")[0]
