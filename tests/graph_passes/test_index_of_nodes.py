"""The index over nodes, its columns, and a rewritten graph seen over its original, against naive restatements."""

from __future__ import annotations

import random
import re

import pytest
from builders import FLOAT, Nodes, Type, index_of, random_graph
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.changes import changed_in_graph, changed_nodes
from graph_passes.columns import columns_by_node, columns_of_graph
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, graphs_of, paused_gc
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.overlay import Overlay

seeds = st.integers(0, 10**6)


def naive_producers(graph_def: GraphDef) -> list[list[int]]:
    """For each input of each node a search through all nodes."""

    def find(text: str) -> int:
        bare = text[1:] if text.startswith("^") else text.split(":")[0]
        return next(number for number, node in enumerate(graph_def.node) if node.name == bare)

    return [[find(text) for text in node.input] for node in graph_def.node]


def is_back_edge(source: NodeDef, target: NodeDef) -> bool:
    return source.op in ("NextIteration", "RefNextIteration") and target.op in ("Merge", "RefMerge")


def with_ports(seed: int, size: int) -> GraphDef:
    """A random graph in which some inputs name a port."""
    rng = random.Random(seed)
    graph_def = random_graph(seed, size)
    for node in graph_def.node:
        for position, text in enumerate(node.input):
            if not text.startswith("^") and rng.random() < 0.3:
                node.input[position] = f"{text}:{rng.randint(0, 3)}"
    return graph_def


def with_loop(graph_def: GraphDef) -> GraphDef:
    nodes = Nodes(graph_def.node)
    nodes.placeholder("loop/x", [])
    nodes.add("loop/merge", "Merge", "loop/enter", "loop/next")
    nodes.add("loop/enter", "Enter", "loop/x", frame_name="loop")
    nodes.add("loop/switch", "Switch", "loop/merge", "loop/merge:1")
    nodes.add("loop/next", "NextIteration", "loop/switch:1")
    nodes.add("loop/exit", "Exit", "loop/switch")
    return graph_def


@given(seeds, st.integers(0, 60), st.booleans())
def test_the_index_equals_a_quadratic_search(seed, size, loop):
    graph_def = with_ports(seed, size)
    graph_def = with_loop(graph_def) if loop else graph_def
    graph = index_of(graph_def)
    producers = naive_producers(graph_def)

    assert len(graph) == len(graph_def.node)
    assert graph.names == [node.name for node in graph_def.node]
    assert graph.ops == [node.op for node in graph_def.node]
    for number, node in enumerate(graph_def.node):
        assert graph.producers(number) == producers[number]
        assert sorted(graph.consumers(number)) == sorted(
            target
            for target, sources in enumerate(producers)
            for source in sources
            if source == number and not is_back_edge(node, graph_def.node[target])
        )
        assert graph.in_degrees[number] == sum(
            not is_back_edge(graph_def.node[source], node) for source in producers[number]
        )
        assert [str(text) for text in graph.inputs(number)] == [re.sub(":0$", "", text) for text in node.input]
    ported = {
        (owner, producers[owner][position], int(text.partition(":")[2]))
        for owner, node in enumerate(graph_def.node)
        for position, text in enumerate(node.input)
        if ":" in text
    }
    assert set(graph.ported) == ported


def odd_graph(seed: int) -> GraphDef:
    """Nodes as no builder makes them: no name, no op, long names, very many inputs, unknown fields."""
    rng = random.Random(seed)
    graph_def = GraphDef()
    for number in range(rng.randint(0, 60)):
        node = graph_def.node.add()
        node.name = "" if rng.random() < 0.01 else f"n{number}" + "x" * rng.choice([0, 0, 5, 120, 130, 20000])
        node.op = "" if rng.random() < 0.01 else "Op" + "y" * rng.choice([0, 0, 126, 128])
        for _ in range(rng.choice([0, 1, 1, 2, 5, 40])):
            node.input.append(rng.choice(["a", "", "^b", "c:1", "é" * 70, "z" * 300]))
        if rng.random() < 0.3:
            node.device = "/cpu:0"
        if rng.random() < 0.3:
            node.attr["T"].type = FLOAT
        if rng.random() < 0.1:
            node.MergeFromString(b"\xc2\x3e\x03abc")
    if rng.random() < 0.5:
        graph_def.versions.producer = 1
        graph_def.library.function.add().signature.name = "f"
        graph_def.MergeFromString(b"\xc2\x3e\x03abc")
    return graph_def


@given(seeds)
def test_columns_read_at_once_are_those_read_node_by_node(seed):
    graph_def = odd_graph(seed)

    at_once, by_node = columns_of_graph(graph_def), columns_by_node(graph_def.node)

    assert (at_once.names, at_once.ops, at_once.inputs) == (by_node.names, by_node.ops, by_node.inputs)
    assert at_once.counts.tolist() == by_node.counts.tolist()
    if at_once.content is not None:
        stored = [at_once.content[start:stop] for start, stop in zip(at_once.starts, at_once.stops)]
        assert [NodeDef.FromString(content) for content in stored] == list(graph_def.node)


@pytest.mark.parametrize("about", [127, 255, 2**14 - 1, 2**21 - 1])
def test_columns_of_nodes_at_the_limits_of_varints(about):
    """Names, inputs and whole nodes of sizes around those at which their length takes one byte more."""
    graph_def = GraphDef()
    for size in range(about - 8, about + 9):
        graph_def.node.add(name="n" * size, op="Op", input=["i" * size] * 3)
        graph_def.node.add(name=f"small_{size}", op="o" * (size - 20))
    for node in (graph_def.node[0], graph_def.node[4]):
        node.input.extend(["j" * about] * 5)  # few nodes have so many: these are counted one by one

    at_once, by_node = columns_of_graph(graph_def), columns_by_node(graph_def.node)

    assert at_once.content is not None
    assert (at_once.names, at_once.ops, at_once.inputs) == (by_node.names, by_node.ops, by_node.inputs)
    assert at_once.counts.tolist() == by_node.counts.tolist()
    assert [stop - start for start, stop in zip(at_once.starts, at_once.stops)] == [
        node.ByteSize() for node in graph_def.node
    ]


def test_the_quick_way_is_taken_by_ordinary_graphs():
    """Otherwise the test above would compare the slow way with itself."""
    assert columns_of_graph(random_graph(1, 40)).content is not None


def test_an_empty_graph_has_an_index():
    graph = index_of(GraphDef())
    assert (len(graph), graph.in_src, graph.out_dst) == (0, [], [])


def test_a_functions_arguments_come_first():
    nodes = Nodes()
    body = nodes.function("f", {"x": FLOAT, "y": FLOAT}, {"z": (FLOAT, "sum:sum:0")})
    body.add("split", "SplitV", "x", "y", "y", num_split=2, T=Type(FLOAT))
    body.add_n("sum", "split:output:1", "y", "^split")
    main, function = graphs_of(nodes.graph_def)

    assert len(main) == 0
    assert (function.label, function.arg_count) == ("f", 2)
    assert function.names == ["x", "y", "split", "sum"]
    assert function.ops == ["_Arg", "_Arg", "SplitV", "AddN"]
    assert function.producers(3) == [2, 1, 2]
    assert function.ported == [(3, 2, 1)]
    assert function.node(2).name == "split"
    assert [str(text) for text in function.inputs(3)] == ["split:output:1", "y", "^split"]
    assert function.inputs(0) == []
    assert function.where("sum") == "node sum of function f"
    assert main.where("sum") == "node sum"


def broken(*inputs: str, twice: str = "") -> GraphDef:
    nodes = Nodes()
    nodes.placeholder("a", [1])
    nodes.add_n("sum", *inputs)
    if twice:
        nodes.identity(twice, "a")
    return nodes.graph_def


@pytest.mark.parametrize(
    ("graph_def", "message"),
    [
        (broken("a", "gone"), r"an input names no node, node sum, found node sum <- gone"),
        (broken("^gone"), r"an input names no node, node sum, found node sum <- \^gone"),
        (broken("gone:1", "gone:2"), r"found node sum <- gone:1; node sum <- gone:2, expected"),
        (broken(""), "an input names no node, node sum"),
        (broken("a:x"), "an input cannot be read, node sum, found 'a:x'"),
        (broken("a:"), "an input cannot be read, node sum, found 'a:'"),
        (broken("a:1:2:3"), "an input cannot be read, node sum, found 'a:1:2:3'"),
        (broken("a::1"), "an input cannot be read, node sum, found 'a::1'"),
        (broken("a", twice="sum"), "node names are not unique, node sum, found sum more than once"),
    ],
)
def test_a_malformed_graph_is_an_error_that_names_the_node(graph_def, message):
    with pytest.raises(GraphError, match=message):
        index_of(graph_def)


def test_a_malformed_function_is_an_error_that_names_node_and_function():
    nodes = Nodes()
    nodes.function("f", {"x": FLOAT}, {}).identity("i", "y")
    with pytest.raises(GraphError, match="an input names no node, node i of function f"):
        graphs_of(nodes.graph_def)
    nodes.graph_def.library.function[0].node_def[0].name = "x"
    with pytest.raises(GraphError, match="node names are not unique, node x of function f"):
        graphs_of(nodes.graph_def)


def test_the_sixth_dangling_input_is_only_counted():
    with pytest.raises(GraphError, match="<- g4; and 2 more"):
        index_of(broken(*(f"g{number}" for number in range(7))))


def test_pausing_the_collector_leaves_it_as_it_was():
    import gc

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        with paused_gc(), paused_gc():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    gc.enable()


# --------------------------------------------------------------------------------------------- rewritten graphs


def rewrite(seed: int, graph_def: GraphDef) -> tuple[GraphDef, list[int]]:
    """Other inputs and ops for some nodes, new nodes at the end; and the numbers of those that differ.

    What closes a loop stays: no pass changes it, and verify reports who does.
    """
    rng = random.Random(seed)
    after = GraphDef()
    after.CopyFrom(graph_def)
    free = [number for number, node in enumerate(after.node) if node.op not in ("Merge", "NextIteration")]
    changed = sorted(rng.sample(free, rng.randint(0, len(free))))
    names = [node.name for node in after.node]
    for number in range(rng.randint(0, 4)):
        names.append(f"new_{number}")
        after.node.add(name=names[-1], op="AddN")
    for number in [*changed, *range(len(graph_def.node), len(after.node))]:
        node = after.node[number]
        node.op = rng.choice(["Identity", "Other"])
        del node.input[:]
        node.input.extend(rng.choice(names) + rng.choice(["", ":1"]) for _ in range(rng.randint(0, 3)))
    return after, changed


@given(seeds, st.integers(1, 40), st.booleans())
def test_an_overlay_equals_the_index_built_anew(seed, size, loop):
    before = random_graph(seed, size)
    before = with_loop(before) if loop else before
    after, changed = rewrite(seed, before)

    overlay, anew = Overlay(index_of(before), after.node, changed), index_of(after)

    assert len(overlay) == len(anew)
    for number in range(len(anew)):
        assert (overlay.name(number), overlay.op(number)) == (anew.name(number), anew.op(number))
        assert overlay.producers(number) == anew.producers(number)
        assert sorted(overlay.consumers(number)) == sorted(anew.consumers(number))
        assert overlay.inputs(number) == anew.inputs(number)
    fresh = set(overlay.fresh)
    assert set(overlay.ported) == {entry for entry in anew.ported if entry[0] in fresh}


@given(seeds, st.integers(1, 25), st.booleans())
def test_an_overlay_finds_a_cycle_exactly_where_there_is_one(seed, size, loop):
    before = random_graph(seed, size)
    before = with_loop(before) if loop else before
    after, changed = rewrite(seed, before)
    overlay = Overlay(index_of(before), after.node, changed)

    cycle = overlay.find_cycle()

    anew = index_of(after)
    assert bool(cycle) is not is_acyclic(anew)
    numbers = [anew.ids[name] for name in cycle]
    for source, target in zip(numbers, numbers[1:] + numbers[:1]):
        assert target in anew.consumers(source)


def is_acyclic(graph: Graph) -> bool:
    left = set(range(len(graph)))
    while True:
        free = {n for n in left if not any(p in left and not graph.is_back_edge(p, n) for p in graph.producers(n))}
        if not free:
            return not left
        left -= free


def test_an_overlay_of_a_function_counts_its_arguments():
    nodes = Nodes()
    body = nodes.function("f", {"x": FLOAT, "y": FLOAT}, {})
    body.identity("a", "x")
    body.identity("b", "a:output:0")
    before = graphs_of(nodes.graph_def)[1]
    after = GraphDef()
    after.CopyFrom(nodes.graph_def)
    function = after.library.function[0]
    function.node_def[1].input[0] = "new:output:0"
    function.node_def.add(name="new", op="Identity", input=["y"])

    changed = changed_nodes(before, function.node_def)
    overlay, anew = Overlay(before, function.node_def, changed), graphs_of(after)[1]

    assert changed == [3]
    assert overlay.fresh == [3, 4]
    for number in range(5):
        assert (overlay.name(number), overlay.op(number)) == (anew.name(number), anew.op(number))
        assert overlay.producers(number) == anew.producers(number)
        assert sorted(overlay.consumers(number)) == sorted(anew.consumers(number))
    assert [overlay.node(number).name for number in (2, 3, 4)] == ["a", "b", "new"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a", "a", "node names are not unique, node a"),
        ("new", "gone", "an input names no node"),
        ("new", "a:x", "read"),
    ],
)
def test_a_malformed_addition_is_an_error(name, text, message):
    before = broken("a")
    after = GraphDef()
    after.CopyFrom(before)
    after.node.add(name=name, op="Identity", input=[text])
    with pytest.raises(GraphError, match=message):
        Overlay(index_of(before), after.node, [])


def test_two_additions_of_one_name_are_an_error():
    before = broken("a")
    after = GraphDef()
    after.CopyFrom(before)
    for _ in range(2):
        after.node.add(name="new", op="NoOp")
    with pytest.raises(GraphError, match="node names are not unique, node new"):
        Overlay(index_of(before), after.node, [])


@given(seeds, st.integers(0, 60))
def test_changed_nodes_are_found_in_runs_as_one_by_one(seed, size):
    rng = random.Random(seed)
    before = random_graph(seed, size)
    after = GraphDef()
    after.CopyFrom(before)
    expected = sorted(rng.sample(range(size), min(size, rng.choice([0, 1, 2, 5, size]))))
    for number in expected:
        if rng.random() < 0.5:
            after.node[number].attr["x"].i = 7
        else:
            after.node[number].op = after.node[number].op[::-1] + "!"[: rng.randint(0, 1)]
    expected = [n for n in expected if before.node[n] != after.node[n]]
    for number in range(rng.randint(0, 3)):
        after.node.add(name=f"new_{number}", op="NoOp")
    graph = index_of(before)

    assert changed_in_graph(graph, after) == expected
    assert changed_in_graph(graph, after, after.SerializeToString(deterministic=True)) == expected
    assert changed_nodes(graph, after.node) == expected


def test_a_constant_that_is_not_a_number_is_not_changed():
    nodes = Nodes()
    nodes.constant("c", float("nan"))
    nodes.add("a", "Op", x=float("nan"))
    after = GraphDef()
    after.CopyFrom(nodes.graph_def)
    graph = index_of(nodes.graph_def)
    assert changed_nodes(graph, after.node) == []
    assert changed_in_graph(graph, after) == []
