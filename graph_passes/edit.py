"""What a rewrite changes: new versions of some nodes, and nodes added at the end.

Passes describe their work as an edit and hand it on; the graph is put together once, when somebody asks for it. It is
put together from bytes: what no pass touched is copied as it stands.
"""

from __future__ import annotations

__all__ = ["Edit", "Edited", "EditWriter", "GraphEdit"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graph_passes.builder import NodeBuilder
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.wire import length_delimited


@dataclass(frozen=True)
class GraphEdit:
    """The edit of one graph. Node numbers are those of its index; added nodes follow on."""

    changed: Mapping[int, NodeDef] = field(default_factory=dict)
    added: tuple[NodeDef, ...] = ()


@dataclass(frozen=True)
class Edited:
    """An edited graph, and the bytes that it was parsed from where it was put together from bytes."""

    graph_def: GraphDef
    content: bytes | None = None


@dataclass(frozen=True)
class Edit:
    """The edits of a graph and of its functions, by label; a label without one is untouched."""

    graphs: Mapping[str, GraphEdit] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.graphs)

    def apply(self, source: GraphDef, graphs: Sequence[Graph]) -> Edited:
        """The edited graph; `graphs` is the index of `source`, which stays as it is."""
        if not self:
            return Edited(source)
        main, *functions = graphs
        edited = self._edited_main(source, main)
        touched = [label for label in self.graphs if label]
        for function, graph in zip(edited.graph_def.library.function, functions):
            if graph.label in touched:
                _edit_in_place(function.node_def, graph, self.graphs[graph.label])
        return Edited(edited.graph_def) if touched else edited

    def _edited_main(self, source: GraphDef, graph: Graph) -> Edited:
        edit = self.graphs.get("", GraphEdit())
        columns = graph.columns
        output = GraphDef()
        if columns.content is None or columns.stops is None:
            output.CopyFrom(source)
            _edit_in_place(output.node, graph, edit)
            return Edited(output)
        content = _spliced(columns.content, columns.stops.tolist(), edit)
        output.MergeFromString(content)
        return Edited(output, content)


def _encoded(node: NodeDef) -> bytes:
    return length_delimited(1, node.SerializeToString(deterministic=True))


def _spliced(content: bytes, stops: Sequence[int], edit: GraphEdit) -> bytes:
    """The bytes of the graph with the changed nodes replaced, and the added ones behind the last old one."""
    pieces = []
    copied = 0
    for number in sorted(edit.changed):
        start = stops[number - 1] if number else 0
        pieces += [content[copied:start], _encoded(edit.changed[number])]
        copied = stops[number]
    end = stops[-1] if stops else 0
    pieces += [content[copied:end], *map(_encoded, edit.added), content[end:]]
    return b"".join(pieces)


def _edit_in_place(container: object, graph: Graph, edit: GraphEdit) -> None:
    for number, node in edit.changed.items():
        container[number - graph.arg_count].CopyFrom(node)  # type: ignore[index]
    container.extend(edit.added)  # type: ignore[attr-defined]


class EditWriter:
    """Makes the next edit of one graph, on top of what earlier passes did."""

    def __init__(self, graph: Graph, before: GraphEdit) -> None:
        self.graph = graph
        self._before = before
        self._changed: dict[int, NodeDef] = {}
        self._names = _Names(graph, before)
        self.builder = NodeBuilder(self._names, bool(graph.label))

    def current(self, number: int) -> NodeDef:
        """A node as it stands now, to be read only."""
        for version in (self._changed, self._before.changed):
            if number in version:
                return version[number]
        following = number - len(self.graph)
        return self.graph.node(number) if following < 0 else self._before.added[following]

    def node(self, number: int) -> NodeDef:
        """A node to be changed."""
        if number not in self._changed:
            copy = NodeDef()
            copy.CopyFrom(self.current(number))
            self._changed[number] = copy
        return self._changed[number]

    def numbers_of(self, op: str) -> Iterator[int]:
        """Every node that has this op now."""
        changed = self._before.changed
        for number, old_op in enumerate(self.graph.ops):
            if (changed[number].op if number in changed else old_op) == op:
                yield number
        for position, node in enumerate(self._before.added):
            if node.op == op:
                yield len(self.graph) + position

    def finish(self) -> GraphEdit:
        """Both edits as one."""
        size = len(self.graph)
        added = tuple(self._changed.get(size + position, node) for position, node in enumerate(self._before.added))
        changed = {number: node for number, node in self._changed.items() if number < size}
        return GraphEdit({**self._before.changed, **changed}, (*added, *self.builder.added))


class _Names(set):  # type: ignore[type-arg]
    """The names of a graph without copying them: its index, and what was added since."""

    def __init__(self, graph: Graph, edit: GraphEdit) -> None:
        super().__init__(node.name for node in edit.added)
        self._ids = graph.ids

    def __contains__(self, name: object) -> bool:
        return name in self._ids or super().__contains__(name)
