"""The order in which HCCL's graph engine lists the nodes of a training graph.

A breadth-first topological order; a gradient's index is its all-reduce's rank in it. The rules are numbered as in
docs/index_order.md:

1. In-degree counts data and control edges; the back edge of a while loop does not count.
2. Nodes of in-degree 0 are roots. They wait in a list: data-like ones first, then all others, in node-list order.
3. A strict FIFO queue holds the ready nodes; a root is taken only when the queue is empty.
4. When a node is emitted, the successors that become ready are appended in the byte order of their names.
5. A list shorter than the graph means a cycle.
"""

from __future__ import annotations

__all__ = ["breadth_first_order", "find_cycle"]

from collections.abc import Sequence

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, paused_gc


def _is_data_like(op: str) -> bool:
    return op == "_Arg" or op.startswith(("Placeholder", "IteratorGetNext")) or op.endswith("Recv")


def breadth_first_order(graph: Graph) -> list[int]:
    """Node numbers in HCCL's order; O(nodes + edges), and a sort of the names released by one producer.

    Raises:
        GraphError: the graph has a cycle; one is printed.
    """
    with paused_gc():
        waiting = graph.in_degrees.copy()
        order = _emit(graph, waiting)
    if len(order) < len(graph):
        raise _cycle_error(graph, waiting)
    return order


def _emit(graph: Graph, waiting: list[int]) -> list[int]:
    """Rules 2-4. The emitted list is its own queue: `head` is the node emitted next."""
    starts, targets = graph.out_start, graph.out_dst
    rank_key = graph.names.__getitem__
    order: list[int] = []
    emit = order.append
    head = 0
    for root in _roots(graph, waiting):
        order.append(root)
        while head < len(order):
            node = order[head]
            head += 1
            released = len(order)
            for target in targets[starts[node] : starts[node + 1]]:
                left = waiting[target] - 1
                waiting[target] = left
                if not left:
                    emit(target)
            if len(order) - released > 1:
                # Code-point order of str is the byte order of its UTF-8 form.
                order[released:] = sorted(order[released:], key=rank_key)
    return order


def _roots(graph: Graph, waiting: Sequence[int]) -> list[int]:
    roots = [number for number, degree in enumerate(waiting) if not degree]
    # A stable sort: node-list order within the data-like ones and within the others.
    return sorted(roots, key=lambda number: not _is_data_like(graph.ops[number]))


def find_cycle(graph: Graph, waiting: Sequence[int]) -> list[int]:
    """One cycle among the nodes whose `waiting` is not 0, as node numbers along the edges."""
    node = next(number for number, degree in enumerate(waiting) if degree)
    position: dict[int, int] = {}
    path: list[int] = []
    while node not in position:
        position[node] = len(path)
        path.append(node)
        node = next(
            source for source in graph.producers(node) if waiting[source] and not graph.is_back_edge(source, node)
        )
    return path[position[node] :][::-1]


def _cycle_error(graph: Graph, waiting: Sequence[int]) -> GraphError:
    cycle = [graph.names[number] for number in find_cycle(graph, waiting)]
    shown = cycle if len(cycle) <= 8 else [*cycle[:4], f"… {len(cycle) - 7} more …", *cycle[-3:]]
    return GraphError(
        "the graph has a cycle",
        where=graph.where(cycle[0]),
        found=" -> ".join([*shown, cycle[0]]),
        expected="an acyclic graph (while loops aside)",
        remedy="removing one of these edges",
    )
