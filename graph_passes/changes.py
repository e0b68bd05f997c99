"""Which nodes of a rewritten graph differ from the original's, byte for byte.

Where the bytes of both graphs are at hand they are compared in runs: equal runs cost a memory comparison, and only
where a run differs is it halved until the node is found.
"""

from __future__ import annotations

__all__ = ["changed_in_graph", "changed_nodes"]

from collections.abc import Iterator, Sequence

import numpy as np

from graph_passes.columns import node_ranges
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, NodeDef


def changed_nodes(before: Graph, after: Sequence[NodeDef]) -> list[int]:
    """Numbers of the nodes whose bytes differ at the same place, one by one; nodes added at the end do not count."""
    return [
        position + before.arg_count
        for position, (old, new) in enumerate(zip(before.container, after))
        # Messages with a NaN in them are unequal to themselves; bytes are not.
        if old != new and old.SerializeToString(deterministic=True) != new.SerializeToString(deterministic=True)
    ]


def changed_in_graph(before: Graph, after: GraphDef, content: bytes | None = None) -> list[int]:
    """The same for a graph's own nodes; by runs of bytes, where they are at hand.

    `content` are the bytes that `after` was parsed from; those of the original are in its index.
    """
    columns = before.columns
    if content is None or columns.content is None or columns.starts is None or columns.stops is None:
        return changed_nodes(before, after.node)
    old, old_starts, old_stops, new = columns.content, columns.starts, columns.stops, content
    new_starts, new_stops = node_ranges(new)
    count = len(old_starts)
    resized = np.flatnonzero((old_stops - old_starts) != (new_stops - new_starts)[:count]).tolist()
    changed = list(resized)
    first = 0
    for last in [*resized, count]:
        # Between two resized nodes both graphs have the same layout, at some distance.
        changed += _unequal(old, new, old_starts, new_starts, old_stops, first, last)
        first = last + 1
    return sorted(changed)


def _unequal(
    old: bytes,
    new: bytes,
    old_starts: np.ndarray,
    new_starts: np.ndarray,
    old_stops: np.ndarray,
    first: int,
    last: int,
) -> Iterator[int]:
    """Nodes of first..last-1 that differ, all of them being of equal sizes."""
    pending = [(first, last)] if first < last else []
    while pending:
        low, high = pending.pop()
        start, stop = int(old_starts[low]), int(old_stops[high - 1])
        shift = int(new_starts[low]) - start
        if old[start:stop] == new[start + shift : stop + shift]:
            continue
        if high - low == 1:
            yield low
        else:
            middle = (low + high) // 2
            pending += [(low, middle), (middle, high)]
