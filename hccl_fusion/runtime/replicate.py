"""N copies of one rank's graph in one graph: GraphDef in, GraphDef out.

What makes two copies collide, and what is done about it:

1. Names: node `x` of rank r becomes `rank<r>/x`, in inputs and in colocation entries (`loc:@x`) too.
2. State that kernels find by name (`shared_name`, `container`, `frame_name`): the same prefix, where it is not empty.
3. Places: all of rank r runs on `/device:CPU:<r>`. What stood in `device` before, in functions too, is dropped.

Functions are shared by all copies; a call runs where its caller stands, so their state is apart as well.

Collectives of different ranks find each other by their keys *and* by the loop frame that they run in. So where one
stands in a loop:

4. The loops of all copies keep the same `frame_name`. TensorFlow allows a frame one LoopCond, but does not count those
   with `LoopCounter` in their name: it is appended to the name of every LoopCond.
5. Functional loops and branches (While, If, Case) are not lowered to frames, which would be named after the node.
"""

from __future__ import annotations

__all__ = ["ancestors", "extract", "rank_name", "replicate"]

from collections.abc import Callable, Collection, Iterable

from graph_passes.frames import frames_of
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.node_input import producer_name
from graph_passes.order import breadth_first_order
from hccl_fusion.runtime.in_process_collectives import COLLECTIVES

# A VarHandleOp with this shared_name asks for a resource of its own; it must stay as it is.
_ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"
_STATE_NAMES = ("shared_name", "container")
_COLOCATION = b"loc:@"
_GROUP_SIZE = "hccl_group_size"


def rank_name(rank: int, name: str) -> str:
    """The name that node or tensor `name` has in the copy of a rank; `^name` keeps its mark."""
    return f"^rank{rank}/{name[1:]}" if name.startswith("^") else f"rank{rank}/{name}"


def replicate(graph_def: GraphDef, ranks: int) -> GraphDef:
    """One graph that holds a copy of `graph_def` for each rank.

    Args:
        graph_def: one rank's graph; stays as it is.
        ranks: how many copies, at least 1.
    """
    merged = GraphDef(versions=graph_def.versions, library=graph_def.library)
    for function in merged.library.function:
        for node in function.node_def:
            node.device = ""
    copier = _Copier(graph_def)
    for rank in range(ranks):
        for node in graph_def.node:
            copier.copy(merged.node.add(), node, rank)
    return merged


class _Copier:
    """Makes the copy of a node for a rank; rules 1 to 5."""

    def __init__(self, graph_def: GraphDef) -> None:
        reduces_in_loop = _reduces_in_loop(graph_def)
        bodies = [function.node_def for function in graph_def.library.function]
        self._keeps_calls = any(node.op in COLLECTIVES for body in bodies for node in body)
        self._state_names = _STATE_NAMES if reduces_in_loop else (*_STATE_NAMES, "frame_name")
        self._renamed = {
            node.name: f"{node.name}_LoopCounter"
            for node in graph_def.node
            if reduces_in_loop and node.op == "LoopCond"
        }

    def _name(self, rank: int, text: str) -> str:
        if self._renamed:
            name = producer_name(text)
            text = text.replace(name, self._renamed.get(name, name), 1)
        return rank_name(rank, text)

    def copy(self, copy: NodeDef, node: NodeDef, rank: int) -> None:
        """Fills `copy` with the rank's copy of `node`."""
        copy.CopyFrom(node)
        copy.name = self._name(rank, node.name)
        copy.device = f"/device:CPU:{rank}"
        copy.input[:] = [self._name(rank, text) for text in node.input]
        for attribute in self._state_names:
            if attribute in node.attr and node.attr[attribute].s not in (b"", _ANONYMOUS):
                copy.attr[attribute].s = f"rank{rank}/".encode() + node.attr[attribute].s
        if "_class" in node.attr:
            copy.attr["_class"].list.s[:] = [_move_class(entry, rank) for entry in node.attr["_class"].list.s]
        if self._keeps_calls:
            copy.attr.pop("_lower_using_switch_merge", None)


def _reduces_in_loop(graph_def: GraphDef) -> bool:
    if not any(node.op in COLLECTIVES for node in graph_def.node):
        return False
    graph = Graph(graph_def.node)
    frames = frames_of(graph, breadth_first_order(graph))
    return frames is not None and any(frame and op in COLLECTIVES for frame, op in zip(frames, graph.ops))


def _move_class(entry: bytes, rank: int) -> bytes:
    if not entry.startswith(_COLOCATION):
        return entry
    return _COLOCATION + f"rank{rank}/".encode() + entry[len(_COLOCATION) :]


def ancestors(graph: Graph, numbers: Iterable[int], is_cut: Callable[[int], bool] = lambda _: False) -> list[int]:
    """These nodes and all that they need, in node-list order; what comes before a cut node is not followed."""
    pending = list(numbers)
    needed = set(pending)
    while pending:
        number = pending.pop()
        if is_cut(number):
            continue
        fresh = set(graph.producers(number)) - needed
        needed |= fresh
        pending += fresh
    return sorted(needed)


def extract(graph_def: GraphDef, names: Iterable[str]) -> GraphDef:
    """The part of a graph that the nodes called `names` need, with all functions. Unknown names are left out.

    Colocation entries that name a node outside this part go; those of nodes inside stay.
    """
    graph = Graph(graph_def.node)
    needed = ancestors(graph, (graph.ids[name] for name in names if name in graph.ids))
    part = GraphDef(versions=graph_def.versions, library=graph_def.library)
    part.node.extend(graph_def.node[number] for number in needed)
    kept = {graph.names[number] for number in needed}
    for node in part.node:
        if "_class" in node.attr:
            _drop_classes(node, kept)
    return part


def _drop_classes(node: NodeDef, kept: Collection[str]) -> None:
    entries = node.attr["_class"].list.s
    inside = [e for e in entries if not e.startswith(_COLOCATION) or e[len(_COLOCATION) :].decode() in kept]
    if inside:
        entries[:] = inside
    else:
        del node.attr["_class"]
