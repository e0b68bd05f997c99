"""The division of planned parts, against brute force over small random graphs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from builders import Nodes, index_of, random_graph
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.divide import PlannedPart, divide
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef
from graph_passes.order import breadth_first_order

Edges = dict[int, set[int]]


def reductions_in_order(graph: Graph, order: Sequence[int]) -> list[int]:
    return [number for number in order if graph.ops[number] == "HcomAllReduce"]


def contracted(graph: Graph, order: Sequence[int], parts: Iterable[tuple[Sequence[int], int]]) -> Edges:
    """Edges of the graph in which every part is one node, with the chains of the parts; node -1-i is part i."""
    parts = list(parts)
    rank = {node: position for position, node in enumerate(order)}
    owner = {member: -1 - number for number, (members, _) in enumerate(parts) for member in members}
    edges: Edges = {owner.get(node, node): set() for node in range(len(graph))}
    for target in range(len(graph)):
        for source in graph.producers(target):
            if not graph.is_back_edge(source, target):
                edges[owner.get(source, source)].add(owner.get(target, target))
    for chain in {chain for _, chain in parts if chain >= 0}:
        line = sorted((rank[members[0]], -1 - number) for number, (members, c) in enumerate(parts) if c == chain)
        for (_, one), (_, other) in zip(line, line[1:]):
            edges[one].add(other)
    return edges


def reachable(edges: Edges, start: int) -> set[int]:
    """Nodes at the end of a path of one edge or more."""
    found: set[int] = set()
    pending = [start]
    while pending:
        for target in edges[pending.pop()] - found:
            found.add(target)
            pending.append(target)
    return found


def is_acyclic(edges: Edges) -> bool:
    return not any(node in reachable(edges, node) for node in edges)


def greedy(graph: Graph, members: Sequence[int]) -> list[tuple[int, ...]]:
    """From left to right: a piece takes the next member unless that depends on one that the piece has."""
    edges = contracted(graph, range(len(graph)), [])
    after = {member: reachable(edges, member) for member in members}
    pieces: list[list[int]] = [[]]
    for member in members:
        if any(member in after[other] for other in pieces[-1]):
            pieces.append([])
        pieces[-1].append(member)
    return [tuple(piece) for piece in pieces]


def random_parts(
    rng: random.Random, members: Sequence[int], *, sections: int, devices: int, chained: bool, shared: bool
) -> list[PlannedPart]:
    """Sections of the members, each cut into contiguous segments, each of those split by device.

    Some sections are chained; with `shared` two may be in one chain, and their parts interleave.
    """
    section_of = [rng.randrange(sections) for _ in members]
    chains = [[section, section, -1, 0 if shared else -1] if chained else [-1] for section in range(sections)]
    chain_of = [rng.choice(candidates) for candidates in chains]
    parts = []
    for section in range(sections):
        mine = [member for member, owner in zip(members, section_of) if owner == section]
        while mine:
            size = rng.randint(1, 6)
            segment, mine = mine[:size], mine[size:]
            placed = [(member, rng.randrange(devices)) for member in segment]
            for device in range(devices):
                here = tuple(member for member, place in placed if place == device)
                if here:
                    parts.append(PlannedPart(here, chain_of[section]))
    return parts


def setup(
    seed: int, *, sections: int, devices: int = 1, shared: bool = False
) -> tuple[Graph, list[int], list[PlannedPart]]:
    graph_def = random_graph(seed, 4 + seed % 30, reductions=0.6, roots=0.25)
    graph = index_of(graph_def)
    order = breadth_first_order(graph)
    members = reductions_in_order(graph, order)
    how = {"sections": sections, "devices": devices, "chained": bool(seed % 3), "shared": shared}
    return graph, order, random_parts(random.Random(seed), members, **how)


seeds = st.integers(0, 10**6)


@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_the_contracted_graph_is_acyclic_and_no_member_is_lost(seed, sections, devices):
    graph, order, parts = setup(seed, sections=sections, devices=devices, shared=True)

    in_force, divisions = divide(graph, order, parts)

    assert [tuple(m for piece in pieces for m in piece) for pieces in in_force] == [part.members for part in parts]
    assert len(divisions) == sum(len(pieces) - 1 for pieces in in_force)
    flat = [(piece, part.chain) for part, pieces in zip(parts, in_force) for piece in pieces]
    assert is_acyclic(contracted(graph, order, flat))


@given(seeds, st.integers(1, 3))
def test_only_a_part_on_a_cycle_of_the_plan_is_divided(seed, sections):
    graph, order, parts = setup(seed, sections=sections)

    in_force, _ = divide(graph, order, parts)

    edges = contracted(graph, order, [(part.members, part.chain) for part in parts])
    for number, pieces in enumerate(in_force):
        assert len(pieces) == 1 or -1 - number in reachable(edges, -1 - number)


@given(seeds)
def test_one_section_is_divided_as_the_greedy_walk_does(seed):
    graph, order, parts = setup(seed, sections=1)

    in_force, _ = divide(graph, order, parts)

    assert in_force == [greedy(graph, part.members) for part in parts]


@given(seeds)
def test_a_division_names_a_member_and_what_it_depends_on(seed):
    graph, order, parts = setup(seed, sections=3, devices=2, shared=True)

    in_force, divisions = divide(graph, order, parts)

    members = {member for part in parts for member in part.members}
    heads = {piece[0] for pieces in in_force for piece in pieces[1:]}
    assert {division.at for division in divisions} == heads
    for division in divisions:
        assert division.at in parts[division.part].members
        assert division.on in parts[division.part].members
        assert set(division.through) <= members


@pytest.mark.parametrize("chain", [0, -1], ids=["chained", "unchained"])
def test_a_deep_chain_of_dependent_reductions_is_divided_one_by_one(chain):
    nodes = Nodes()
    tensor = nodes.placeholder("x", [4])
    for number in range(20_000):
        tensor = nodes.identity(f"id_{number}", nodes.all_reduce(f"ar_{number:05}", tensor))
    graph = index_of(nodes.graph_def)
    order = breadth_first_order(graph)
    members = tuple(reductions_in_order(graph, order))

    in_force, divisions = divide(graph, order, [PlannedPart(members, chain)])

    assert in_force == [[(member,) for member in members]]
    assert [(d.at, d.on) for d in divisions] == list(zip(members[1:], members))


# ------------------------------------------------------------------------ the shapes of other projects' bug reports


def divide_names(graph_def: GraphDef, *parts: Sequence[str], chain: int = -1) -> tuple[list[list[list[str]]], Graph]:
    graph = index_of(graph_def)
    planned = [PlannedPart(tuple(graph.ids[name] for name in part), chain) for part in parts]
    in_force, _ = divide(graph, breadth_first_order(graph), planned)
    return [[[graph.names[m] for m in piece] for piece in pieces] for pieces in in_force], graph


def test_two_groups_that_depend_on_each_other_crosswise():
    """Members of {a,b} and of {c,d} are independent pairwise, yet both cannot be fused (PyTorch 177688)."""
    nodes = Nodes()
    for name in "ad":
        nodes.all_reduce(name, nodes.placeholder(f"g_{name}", [2]))
    nodes.all_reduce("c", nodes.identity("g_c", "a"))
    nodes.all_reduce("b", nodes.identity("g_b", "d"))

    pieces, _ = divide_names(nodes.graph_def, ["a", "b"], ["d", "c"])

    assert sorted(map(len, pieces)) == [1, 2]


def test_a_gradient_scaled_by_a_reduced_one():
    """b = g * reduce_sum(all_reduce(a)): the indirect path is found (TensorFlow's scoped allocator breaks here)."""
    nodes = Nodes()
    nodes.all_reduce("a", nodes.placeholder("g_a", [2]))
    nodes.add("sum", "Sum", "a", nodes.constant("axis", [0], 3))
    nodes.all_reduce("b", nodes.add("scaled", "Mul", nodes.placeholder("g", [2]), "sum"))

    pieces, _ = divide_names(nodes.graph_def, ["a", "b"])

    assert pieces == [[["a"], ["b"]]]


def test_a_control_edge_from_an_update_into_a_later_gradient():
    """The update of variable 1 orders the computation of gradient 2 (MindSpore's Load and UpdateState)."""
    nodes = Nodes()
    nodes.all_reduce("first", nodes.placeholder("g_1", [2]))
    nodes.add("update", "ApplyGradientDescent", "first", "first", "first")
    nodes.all_reduce("second", nodes.identity("g_2", nodes.placeholder("x", [2]), "^update"))
    nodes.all_reduce("third", nodes.placeholder("g_3", [2]))

    pieces, _ = divide_names(nodes.graph_def, ["first", "third", "second"])

    assert pieces == [[["first", "third"], ["second"]]]


def test_independent_parts_stay_whole():
    nodes = Nodes()
    for name in "abcd":
        nodes.gradient(name, [2])

    pieces, _ = divide_names(nodes.graph_def, ["a", "b"], ["c", "d"], chain=0)

    assert pieces == [[["a", "b"]], [["c", "d"]]]


def test_the_chain_itself_can_close_a_cycle():
    """The chain puts {a,c} before {b,d} (a comes first), but c depends on the reduced b: {a,c} is divided."""
    nodes = Nodes()
    for name in "ab":
        nodes.all_reduce(name, nodes.placeholder(f"g_{name}", [2]))
    nodes.all_reduce("c", nodes.identity("g_c", "b"))
    nodes.all_reduce("d", nodes.placeholder("g_d", [2]))
    graph = index_of(nodes.graph_def)
    order = breadth_first_order(graph)
    rank = {graph.names[node]: position for position, node in enumerate(order)}
    assert rank["a"] < rank["b"] < rank["c"]
    parts = [("a", "c"), ("b",)]

    in_force, divisions = divide(
        graph, order, [PlannedPart(tuple(graph.ids[name] for name in part), 0) for part in parts]
    )

    assert [len(pieces) for pieces in in_force] == [2, 1]
    assert divisions[0].by_chain


def test_a_while_loop_beside_the_reductions_is_no_cycle():
    nodes = Nodes()
    nodes.placeholder("x", [])
    nodes.add("enter", "Enter", "x", frame_name="loop")
    nodes.add("merge", "Merge", "enter", "next")
    nodes.add("cond", "LoopCond", "merge")
    nodes.add("switch", "Switch", "merge", "cond")
    nodes.add("next", "NextIteration", "switch:1")
    nodes.add("exit", "Exit", "switch")
    nodes.all_reduce("a", "exit")
    nodes.all_reduce("b", "x")

    pieces, _ = divide_names(nodes.graph_def, ["b", "a"])

    assert pieces == [[["b", "a"]]]
