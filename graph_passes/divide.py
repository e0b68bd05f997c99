"""Divides planned segments so that fusing them can close no cycle.

A fused reduction waits for the inputs of all its members, and all consumers of any member wait for it. So no member
may depend on the reduced value of another, be it directly, through other segments as they are fused, or through the
chain that orders the segments. The check is one topological sweep (Kahn) over the graph in which every part is
contracted to one node. When the sweep is stuck, a walk back along what is waited for finds a cycle; one part on
it is entered at a member of higher index than the one it is left from, and is divided at that member. (If every part
were left at or after the member it is entered at, the cycle would ascend in the original topological order.)

Linear in nodes and edges, plus the length of the walks; no reachability sets.
"""

from __future__ import annotations

__all__ = ["Division", "PlannedPart", "divide"]

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.graph import Graph, dependents


@dataclass(frozen=True)
class PlannedPart:
    """A part before the check: its members' node numbers in index order, and the chain it belongs to (-1: none)."""

    members: tuple[int, ...]
    chain: int


@dataclass(frozen=True)
class Division:
    """Why a part was divided: member `at` depends on the reduced value of `on` (node numbers).

    Attributes:
        part: number of the planned part.
        through: first members of the other parts that the dependence leads through.
        by_chain: the dependence is the order of the chain.
    """

    part: int
    at: int
    on: int
    through: tuple[int, ...] = ()
    by_chain: bool = False


def divide(
    graph: Graph, order: Sequence[int], parts: Sequence[PlannedPart]
) -> tuple[list[list[tuple[int, ...]]], list[Division]]:
    """The parts in force for each planned part, in index order, and why there are more than planned.

    `order` is the graph's topological order in which the members of each part ascend.
    """
    relevant = dependents((member for part in parts for member in part.members), graph.consumers)
    if not any(source in relevant for part in parts for m in part.members for source in graph.producers(m)):
        return [[part.members] for part in parts], []
    rank = {number: position for position, number in enumerate(order)}
    return _Sweep(graph, rank, relevant, parts).run()


class _Piece:
    """Members start..stop-1 of a part under the sweep.

    `front` is the position of the first member that still waits for an input; it only ever grows.
    """

    def __init__(self, planned: int, part: PlannedPart, start: int, stop: int) -> None:
        self.planned = planned
        self.part = part
        self.start = start
        self.stop = stop
        self.front = start
        self.is_emitted = False

    @property
    def chain(self) -> int:
        return self.part.chain

    @property
    def first(self) -> int:
        """Its first member."""
        return self.part.members[self.start]

    @property
    def members(self) -> tuple[int, ...]:
        return self.part.members[self.start : self.stop]


class _Sweep:
    """Kahn's algorithm over the contracted graph."""

    def __init__(self, graph: Graph, rank: dict[int, int], relevant: set[int], parts: Sequence[PlannedPart]) -> None:
        self.graph = graph
        self.rank = rank
        self.divisions: list[Division] = []
        self.pieces = [_Piece(number, part, 0, len(part.members)) for number, part in enumerate(parts)]
        self.piece_of = {member: piece for piece in self.pieces for member in piece.members}
        self.chains: dict[int, list[_Piece]] = {}
        for piece in self.pieces:
            if piece.chain >= 0:
                self.chains.setdefault(piece.chain, []).append(piece)
        for chain in self.chains.values():
            chain.sort(key=self._position, reverse=True)  # the head is last: popped at no cost
        self.waiting = dict.fromkeys(relevant, 0)
        for node in relevant:
            for consumer in graph.consumers(node):
                self.waiting[consumer] += 1
        self.ready_nodes = [n for n in relevant if not self.waiting[n] and n not in self.piece_of]
        self.maybe_ready = list(self.pieces)

    def run(self) -> tuple[list[list[tuple[int, ...]]], list[Division]]:
        planned = len(self.pieces)
        self._drain()
        first = 0
        while first < len(self.pieces):  # grows with every cut
            if self.pieces[first].is_emitted:
                first += 1
            else:
                self._break_cycle(self.pieces[first])
                self._drain()
        found: list[list[tuple[int, ...]]] = [[] for _ in range(planned)]
        for piece in sorted(self.pieces, key=self._position):
            found[piece.planned].append(piece.members)
        return found, self.divisions

    def _position(self, piece: _Piece) -> int:
        return self.rank[piece.first]

    def _is_head(self, piece: _Piece) -> bool:
        return piece.chain < 0 or self.chains[piece.chain][-1] is piece

    def _has_inputs(self, piece: _Piece) -> bool:
        while piece.front < piece.stop and not self.waiting[piece.part.members[piece.front]]:
            piece.front += 1
        return piece.front == piece.stop

    def _drain(self) -> None:
        """Emits whatever is ready."""
        while self.ready_nodes or self.maybe_ready:
            if self.ready_nodes:
                self._release(self.ready_nodes.pop())
            else:
                self._try_emit(self.maybe_ready.pop())

    def _release(self, node: int) -> None:
        """Counts one node as emitted."""
        for consumer in self.graph.consumers(node):
            self.waiting[consumer] -= 1
            if not self.waiting[consumer]:
                piece = self.piece_of.get(consumer)
                if piece is None:
                    self.ready_nodes.append(consumer)
                else:
                    self.maybe_ready.append(piece)

    def _try_emit(self, piece: _Piece) -> None:
        """Emits a piece whose members all have their inputs and whose turn in its chain it is."""
        if piece.is_emitted or not self._is_head(piece) or not self._has_inputs(piece):
            return
        piece.is_emitted = True
        if piece.chain >= 0:
            chain = self.chains[piece.chain]
            chain.pop()
            self.maybe_ready += chain[-1:]
        for member in piece.members:
            self._release(member)

    # ------------------------------------------------------------------------------------------ cycles

    def _break_cycle(self, start: _Piece) -> None:
        """Finds a cycle from a stuck piece and divides one piece on it; that piece's front is emitted next."""
        path: list[_Step] = []
        at: dict[int, int] = {}
        piece, exit_member = start, None
        while id(piece) not in at:
            at[id(piece)] = len(path)
            path.append(_Step(piece, self._entry(piece), exit_member))
            piece, exit_member = self._walk_back(piece)
        cycle = path[at[id(piece)] :]
        cycle[0] = _Step(piece, cycle[0].entry, exit_member)
        divisible = [step for step in cycle if step.is_divisible(self.rank)]
        self._cut(max(divisible, key=lambda step: self._position(step.piece)), cycle)

    def _entry(self, piece: _Piece) -> int:
        """Position of the member at which a stuck piece waits; its start where it waits for its turn in the chain."""
        if not self._is_head(piece):
            return piece.start
        self._has_inputs(piece)
        return piece.front

    def _walk_back(self, piece: _Piece) -> tuple[_Piece, int | None]:
        """The piece that this one waits for, and the member it is waited for at (None: at its turn in the chain)."""
        if not self._is_head(piece):
            return self.chains[piece.chain][-1], None
        node = piece.part.members[self._entry(piece)]
        while True:
            node = next(
                source
                for source in self.graph.producers(node)
                if self._is_pending(source) and not self.graph.is_back_edge(source, node)
            )
            if node in self.piece_of:
                return self.piece_of[node], node

    def _is_pending(self, node: int) -> bool:
        piece = self.piece_of.get(node)
        return self.waiting.get(node, 0) > 0 if piece is None else not piece.is_emitted

    def _cut(self, step: _Step, cycle: list[_Step]) -> None:
        """The tail from the entered member on becomes a piece of its own, in its place in the chain.

        The smaller side is the one that moves to a new piece, so that many cuts of one part cost no more than n log n.
        """
        piece = step.piece
        on = piece.first if step.exit is None else step.exit
        through = tuple(other.piece.first for other in cycle if other.piece is not piece)
        head = tail = piece
        if step.entry - piece.start < piece.stop - step.entry:
            head = moved = _Piece(piece.planned, piece.part, piece.start, step.entry)
            piece.start = step.entry
        else:
            tail = moved = _Piece(piece.planned, piece.part, step.entry, piece.stop)
            piece.stop = step.entry
        head.front = head.stop  # what comes before the entry waits for no input
        self.pieces.append(moved)
        self.piece_of.update(dict.fromkeys(moved.members, moved))
        if piece.chain >= 0:
            self._put_behind(head, tail)
        self.divisions.append(Division(piece.planned, tail.first, on, through, step.exit is None))
        self.maybe_ready += [tail, head]

    def _put_behind(self, head: _Piece, tail: _Piece) -> None:
        """Puts the two sides of the chain's first piece into the chain in its stead."""
        chain = self.chains[head.chain]
        chain[-1] = head
        place = len(chain) - 1
        while place and self._position(chain[place - 1]) < self._position(tail):
            place -= 1
        chain.insert(place, tail)


@dataclass(frozen=True)
class _Step:
    """One piece on a cycle: entered at member number `entry`, left from node `exit` (None: by the chain)."""

    piece: _Piece
    entry: int
    exit: int | None

    def is_divisible(self, rank: dict[int, int]) -> bool:
        """True where cutting at the entry separates it from the exit."""
        if self.entry == self.piece.start:
            return False
        return self.exit is None or rank[self.exit] < rank[self.piece.part.members[self.entry]]
