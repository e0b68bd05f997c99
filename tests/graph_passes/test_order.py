"""HCCL's breadth-first order, against a slow literal restatement of its rules, and what follows from them."""

from __future__ import annotations

import random

import pytest
from builders import Nodes, index_of, random_graph
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, graphs_of
from graph_passes.messages import GraphDef
from graph_passes.order import breadth_first_order

seeds = st.integers(0, 10**6)


def literal_order(graph_def: GraphDef) -> list[str]:
    """The rules of hccl.md §4, one after another, on names alone; counts again whenever it asks."""
    nodes = {node.name: node for node in graph_def.node}
    edges = []
    for node in graph_def.node:
        for text in node.input:
            source = text.lstrip("^").split(":")[0]
            is_back = nodes[source].op == "NextIteration" and node.op == "Merge"
            if not is_back:
                edges.append((source, node.name))

    def in_degree(name: str) -> int:
        return sum(target == name and source not in emitted for source, target in edges)

    def is_data_like(name: str) -> bool:
        op = nodes[name].op
        return op.startswith(("Placeholder", "IteratorGetNext")) or op == "_Arg" or op.endswith("Recv")

    emitted: list[str] = []
    roots = [name for name in nodes if in_degree(name) == 0]
    waiting = [name for name in roots if is_data_like(name)] + [name for name in roots if not is_data_like(name)]
    queue: list[str] = []
    while queue or waiting:
        name = queue.pop(0) if queue else waiting.pop(0)
        emitted.append(name)
        successors = {target for source, target in edges if source == name}
        ready = [target for target in successors if in_degree(target) == 0]
        queue += sorted(ready, key=lambda target: target.encode("utf-8"))
    return emitted


def names_in_order(graph_def: GraphDef) -> list[str]:
    graph = index_of(graph_def)
    return [graph.names[number] for number in breadth_first_order(graph)]


def add_loop(graph_def: GraphDef, source: str, sink: str) -> None:
    nodes = Nodes(graph_def.node)
    nodes.add("loop/next", "NextIteration", "loop/switch:1")
    nodes.add("loop/enter", "Enter", source)
    nodes.add("loop/merge", "Merge", "loop/enter", "loop/next")
    nodes.add("loop/switch", "Switch", "loop/merge", "loop/merge:1")
    nodes.add(sink, "Exit", "loop/switch")


@given(seeds, st.integers(1, 40), st.floats(0.05, 0.9), st.floats(0, 1), st.booleans())
def test_the_order_is_the_literal_one(seed, size, roots, control, loop):
    graph_def = random_graph(seed, size, roots=roots, control=control)
    if loop:
        add_loop(graph_def, graph_def.node[seed % size].name, "loop/exit")
    assert names_in_order(graph_def) == literal_order(graph_def)


def test_a_wave_of_names_is_sorted_by_bytes():
    """a_10 comes before a_2, upper case before lower case, and what is not ASCII last, as bytes order it."""
    names = ["a_2", "a_10", "a", "B", "a/b", "a.b", "a_2/b", "z", "é", "𝄞", "ｚ"]
    nodes = Nodes()
    nodes.placeholder("x", [1])
    for name in names:
        nodes.identity(name, "x")
    assert names_in_order(nodes.graph_def) == ["x", *sorted(names, key=lambda name: name.encode("utf-8"))]
    assert names_in_order(nodes.graph_def)[1:8] == ["B", "a", "a.b", "a/b", "a_10", "a_2", "a_2/b"]


def test_data_like_roots_come_first_and_roots_keep_the_order_of_the_list():
    nodes = Nodes()
    for name, op in [
        ("b", "Const"), ("a", "Const"), ("z", "Placeholder"), ("y", "PlaceholderV2"), ("x", "_Arg"), ("w", "_HostRecv"),
        ("v", "IteratorGetNextSync"), ("u", "VariableV2"), ("t", "_Recv"), ("s", "Receiver"),
    ]:  # fmt: skip
        nodes.add(name, op)
    assert names_in_order(nodes.graph_def) == ["z", "y", "x", "w", "v", "t", "b", "a", "u", "s"]


def test_a_root_is_taken_only_when_the_queue_is_empty():
    nodes = Nodes()
    nodes.add("r1", "Const")
    nodes.add("r2", "Const")
    nodes.identity("a", "r1")
    nodes.identity("b", "a")
    assert names_in_order(nodes.graph_def) == ["r1", "a", "b", "r2"]


def test_a_node_waits_for_all_its_edges_control_and_repeated_ones_too():
    nodes = Nodes()
    nodes.add("r1", "Const")
    nodes.add("r2", "Const")
    nodes.add_n("a", "r1", "r1", "^r2")
    nodes.identity("b", "r1")
    assert names_in_order(nodes.graph_def) == ["r1", "b", "r2", "a"]


def test_a_functions_arguments_are_data_like_roots():
    nodes = Nodes()
    body = nodes.function("f", {"x": 1, "y": 1}, {})
    body.constant("c", 1.0)
    body.add_n("sum", "y", "c")
    body.identity("copy", "x")
    graph = graphs_of(nodes.graph_def)[1]
    assert [graph.names[n] for n in breadth_first_order(graph)] == ["x", "copy", "y", "c", "sum"]


def ancestors_of(graph: Graph, wanted: set[int]) -> set[int]:
    pending = list(wanted)
    found = set(wanted)
    while pending:
        for source in graph.producers(pending.pop()):
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


@given(seeds, st.integers(1, 60), st.integers(0, 3))
def test_what_no_all_reduce_depends_on_does_not_change_the_order(seed, size, rounds):
    """Savers, summaries and initialisers may come and go; deleting some such nodes, or all, changes no index."""
    graph_def = random_graph(seed, size, control=0.6)
    graph = index_of(graph_def)
    reductions = {number for number, op in enumerate(graph.ops) if op == "HcomAllReduce"}
    needed = {graph.names[number] for number in ancestors_of(graph, reductions)}
    rng = random.Random(seed)
    kept = set(needed)
    for node in names_in_order(graph_def)[:: rounds + 1]:  # what is kept must keep its inputs: take ancestors along
        if rounds and rng.random() < 0.5:
            kept |= {graph.names[number] for number in ancestors_of(graph, {graph.ids[node]})}
    smaller = GraphDef(node=[node for node in graph_def.node if node.name in kept])

    def indices(one: GraphDef) -> list[str]:
        ops = {node.name: node.op for node in one.node}
        return [name for name in names_in_order(one) if ops[name] == "HcomAllReduce"]

    assert indices(smaller) == indices(graph_def)


@given(seeds, st.integers(2, 40))
def test_a_cycle_is_printed_along_its_edges(seed, size):
    graph_def = random_graph(seed, size, roots=0.1)
    rng = random.Random(seed)
    graph = index_of(graph_def)
    order = breadth_first_order(graph)
    for _ in range(rng.randint(1, 3)):
        early, late = sorted(rng.sample(range(size), 2))
        graph_def.node[order[early]].input.append(f"^{graph.names[order[late]]}")
    graph = index_of(graph_def)
    found, error = order_or_error(graph)
    if error is None:
        rank = {node: position for position, node in enumerate(found)}
        assert sorted(found) == list(range(size))
        assert all(rank[source] < rank[node] for node in found for source in graph.producers(node))
        return
    cycle = str(error.found).split(" -> ")
    shown = [name for name in cycle if "more" not in name]
    assert error.where == f"node {cycle[0]}"
    assert cycle[0] == cycle[-1]
    assert len(set(shown)) == len(shown) - 1
    for source, target in zip(cycle, cycle[1:]):
        if source in shown and target in shown:
            assert graph.ids[target] in graph.consumers(graph.ids[source])


def order_or_error(graph: Graph) -> tuple[list[int], GraphError | None]:
    try:
        return breadth_first_order(graph), None
    except GraphError as error:
        return [], error


def ring(size: int) -> GraphDef:
    nodes = Nodes()
    for number in range(size):
        nodes.identity(f"n{number}", f"n{(number - 1) % size}")
    return nodes.graph_def


def test_a_short_cycle_is_printed_whole_and_a_long_one_shortened():
    with pytest.raises(GraphError, match="the graph has a cycle") as short:
        names_in_order(ring(3))
    assert sorted(str(short.value.found).split(" -> ")[1:]) == ["n0", "n1", "n2"]
    with pytest.raises(GraphError, match=r"… 3 more …") as long:
        names_in_order(ring(10))
    assert len(str(long.value.found).split(" -> ")) == 9


def test_a_cycle_through_a_loop_is_still_a_cycle():
    nodes = Nodes()
    nodes.placeholder("x", [])
    add_loop(nodes.graph_def, "x", "exit")
    nodes.graph_def.node[2].input.append("exit")  # the loop's Enter waits for its exit
    with pytest.raises(GraphError, match="the graph has a cycle"):
        names_in_order(nodes.graph_def)


def test_a_very_deep_graph_needs_no_recursion():
    nodes = Nodes()
    tensor = nodes.placeholder("x", [1])
    for number in range(20_000):
        tensor = nodes.identity(f"n{number}", tensor)
    assert names_in_order(nodes.graph_def)[-1] == "n19999"
