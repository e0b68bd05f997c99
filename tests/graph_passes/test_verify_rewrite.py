"""Pass verify: it is content with every rewrite, and finds each way in which one could be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders import FLOAT, HALF, WORLD, Nodes, Shapes, Type, gradients_graph, node_of
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import VerificationError
from graph_passes.messages import GraphDef, NodeDef
from graph_passes.pipeline import GraphItem
from graph_passes.sections import Gradient
from graph_passes.verify import Verify, verify_rewrite
from hccl_fusion.fuse import fuse
from hccl_fusion.strategy import Strategy, StrategyKind


def training_graph() -> GraphDef:
    """Two segments of two types of shapes, a single, another reduction, a control edge, a colocation, a function."""
    nodes = Nodes()
    nodes.placeholder("before", ())
    nodes.constant("number", 1.0)
    nodes.add("many", "SplitV", "before", "before", "before", num_split=3, T=Type(FLOAT))
    for number, shape in enumerate([(2, 3), (3, 2), (4,), (4,), ()]):
        nodes.placeholder(f"g_{number}", shape)
        controls = ["^before"] if number == 1 else []
        nodes.all_reduce(f"ar_{number}", f"g_{number}", *controls, device="/cpu:0", _class=[b"loc:@g_0"])
        nodes.identity(f"out_{number}", f"ar_{number}", f"^ar_{number}")
    nodes.identity("tail", "many:2")
    nodes.gradient("largest", (2,), reduction="max")
    nodes.gradient("mine", (2,), group="some")
    nodes.gradient("yours", (2,), group="some")
    body = nodes.function("f", {"x": FLOAT}, {"y": (FLOAT, "one:output:0")})
    body.identity("gx", "x", _output_shapes=Shapes([(2, 2)]))
    body.all_reduce("one", "gx:output:0", group="inner")
    body.identity("gy", "x", _output_shapes=Shapes([(2, 2)]))
    body.all_reduce("two", "gy:output:0", group="inner")
    return nodes.graph_def


BEFORE = training_graph()


def rewritten(emit: str) -> tuple[GraphDef, tuple[Gradient, ...]]:
    """Segments [ar_0, ar_1, ar_2] and [ar_3, ar_4]; [mine, yours]; [one, two] of the function."""
    strategy = Strategy(StrategyKind.IDX, (2, 4))
    result = fuse(BEFORE, strategy, emit=emit, ranks=2, infer_shapes=False)
    copy = GraphDef()
    copy.CopyFrom(result.graph_def)
    return copy, result.gradients


def findings(change: Callable[[GraphDef], object], emit: str = "fused") -> list[str]:
    after, gradients = rewritten(emit)
    assert verify_rewrite(BEFORE, after, gradients) == []
    change(after)
    return verify_rewrite(BEFORE, after, gradients)


def int_of(node: NodeDef, *values: int) -> None:
    """Gives an integer Const other values."""
    tensor = node.attr["value"].tensor
    tensor.tensor_content = b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    if tensor.tensor_shape.dim:
        tensor.tensor_shape.dim[0].size = len(values)


def set_input(graph_def: GraphDef, name: str, position: int, text: str) -> None:
    node_of(graph_def, name).input[position] = text


def drop_input(graph_def: GraphDef, name: str, *positions: int) -> None:
    node = node_of(graph_def, name)
    for position in sorted(positions, reverse=True):
        del node.input[position]


def swap_inputs(graph_def: GraphDef, name: str, one: int, other: int) -> None:
    node = node_of(graph_def, name)
    node.input[one], node.input[other] = node.input[other], node.input[one]


def swap_first_inputs(graph_def: GraphDef, one: str, other: str) -> None:
    first, second = node_of(graph_def, one), node_of(graph_def, other)
    first.input[0], second.input[0] = second.input[0], first.input[0]


def remove(graph_def: GraphDef, name: str) -> None:
    for position, node in enumerate(graph_def.node):
        if node.name == name:
            del graph_def.node[position]
            return


def body(graph_def: GraphDef, name: str) -> NodeDef:
    return node_of(graph_def.library.function[0], name)


def add_node(graph_def: GraphDef, name: str, op: str, *inputs: str, **attrs: object) -> None:
    Nodes(graph_def.node).add(name, op, *inputs, **attrs)


WRONG: dict[str, tuple[str, Callable[[GraphDef], object], str]] = {
    # name: form, what is done to the rewritten graph, what the finding must name
    "split outputs swapped": ("fused", lambda g: swap_first_inputs(g, "ar_0", "ar_1"), "ar_"),
    "split outputs swapped among equal shapes": ("fused", lambda g: swap_inputs(g, "fused_0/concat", 0, 1), "ar_"),
    "two members read the same piece": ("fused", lambda g: set_input(g, "ar_1", 0, "fused_0/split"), "ar_1"),
    "a piece of the other segment": ("fused", lambda g: set_input(g, "ar_3", 0, "fused_0/split:2"), "ar_3"),
    "a piece that is not there": ("fused", lambda g: set_input(g, "ar_0", 0, "fused_0/split:9"), "ar_0"),
    "a concat input dropped, in front": ("fused", lambda g: drop_input(g, "fused_0/concat", 0), "ar_"),
    "a concat input dropped, at the end": ("fused", lambda g: drop_input(g, "fused_0/concat", 2), "ar_"),
    "all concat inputs but one dropped": ("fused", lambda g: drop_input(g, "fused_0/concat", 1, 2, 3), "ar_"),
    "an empty concat": ("fused", lambda g: (
        drop_input(g, "fused_0/concat", 0, 1, 2), setattr(node_of(g, "fused_0/concat").attr["N"], "i", 0)), "ar_"),
    "a matrix joined without being flattened": (
        "fused", lambda g: (set_input(g, "fused_0/concat", 0, "g_0"), remove(g, "fused_0/flat_0")), "ar_0"),
    "a member that is the whole reduction": (
        "fused", lambda g: set_input(g, "ar_2", 0, "fused_0/all_reduce"), "ar_2"),
    "a single in another shape": ("mock", lambda g: (
        setattr(node_of(g, "largest"), "op", "Reshape"), node_of(g, "largest").input.append("fused_0/shape_0")),
        "largest"),
    "no concat input left": ("fused", lambda g: drop_input(g, "fused_0/concat", 0, 1, 2, 3), "ar_"),
    "no split input left": ("fused", lambda g: drop_input(g, "fused_0/split", 0, 1, 2), "ar_"),
    "split without sizes": ("fused", lambda g: drop_input(g, "fused_0/split", 1, 2), "ar_"),
    "a reshape without shape": ("fused", lambda g: drop_input(g, "ar_0", 1), "ar_0"),
    "a reshape without input": ("fused", lambda g: drop_input(g, "ar_0", 0, 1), "ar_0"),
    "a reduction without input": ("fused", lambda g: drop_input(g, "fused_0/all_reduce", 0), "ar_"),
    "an input more in the concat": (
        "fused", lambda g: node_of(g, "fused_0/concat").input.insert(0, "g_4"), "ar_"),
    "wrong split sizes": ("fused", lambda g: int_of(node_of(g, "fused_0/split_sizes"), 5, 7, 4), "ar_"),
    "too few split sizes": ("fused", lambda g: int_of(node_of(g, "fused_0/split_sizes"), 6, 6), "ar_"),
    "wrong shape": ("fused", lambda g: int_of(node_of(g, "fused_0/shape_0"), 3, 2), "ar_"),
    "split along another axis": ("fused", lambda g: int_of(node_of(g, "fused_0/split_axis"), 1), "fused_0/split"),
    "joined along another axis": ("fused", lambda g: int_of(node_of(g, "fused_0/axis"), 1), "fused_0/concat"),
    "not flattened": ("fused", lambda g: int_of(node_of(g, "fused_0/flat_shape"), 1, -1), "ar_"),
    "another group": ("fused", lambda g: node_of(g, "fused_0/all_reduce").attr["group"].CopyFrom(
        node_of(g, "fused_0/all_reduce").attr["reduction"]), "ar_"),
    "another reduction": ("fused", lambda g: setattr(
        node_of(g, "fused_0/all_reduce").attr["reduction"], "s", b"max"), "ar_"),
    "another type": ("fused", lambda g: setattr(
        node_of(g, "fused_0/all_reduce").attr["T"], "type", HALF), "ar_"),
    "another group of a single": (
        "fused", lambda g: setattr(node_of(g, "largest").attr["group"], "s", b"x"), "largest"),
    "another reduction of a single": (
        "fused", lambda g: setattr(node_of(g, "largest").attr["reduction"], "s", b"sum"), "largest"),
    "a single reduces another tensor": ("fused", lambda g: set_input(g, "largest", 0, "g_2"), "largest"),
    "a single reads a second tensor": ("fused", lambda g: node_of(g, "largest").input.append("g_2"), "largest"),
    "a single is no reduction": ("fused", lambda g: setattr(node_of(g, "largest"), "op", "Identity"), "largest"),
    "a member is an identity of its own tensor": ("fused", lambda g: set_input(g, "ar_2", 0, "g_2"), "ar_2"),
    "a member reads something else": ("fused", lambda g: set_input(g, "ar_2", 0, "before"), "ar_2"),
    "a control input lost": ("fused", lambda g: node_of(g, "fused_0/all_reduce").input.remove("^before"), "ar_1"),
    "a group that is no text": ("fused", lambda g: setattr(
        node_of(g, "fused_0/all_reduce").attr["group"], "s", b"\xff"), "ar_"),
    "an old node removed": ("fused", lambda g: remove(g, "out_1"), "out_1"),
    "the last old node removed": ("fused", lambda g: remove(g, "yours/out"), "yours/out"),
    "all old nodes from one on removed": ("fused", lambda g: g.node.__delitem__(slice(5, None)), "out_1"),
    "an old node renamed": ("fused", lambda g: setattr(node_of(g, "tail"), "name", "head"), "tail"),
    "an untouched node of another op": ("fused", lambda g: setattr(node_of(g, "tail"), "op", "Neg"), "tail"),
    "an untouched node reads something else": ("fused", lambda g: set_input(g, "tail", 0, "many:1"), "tail"),
    "an untouched node with an attribute more": (
        "fused", lambda g: setattr(node_of(g, "tail").attr["x"], "i", 0), "tail"),
    "an untouched node with other contents": ("fused", lambda g: setattr(
        node_of(g, "number").attr["value"].tensor, "tensor_content", b"\0\0\0\0"), "number"),
    "an untouched node on another device": ("fused", lambda g: setattr(node_of(g, "tail"), "device", "/cpu:0"), "tail"),
    "a control consumer changed": ("fused", lambda g: set_input(g, "out_0", 1, "^ar_1"), "out_0"),
    "a member on another device": ("fused", lambda g: setattr(node_of(g, "ar_0"), "device", "/cpu:1"), "ar_0"),
    "a member of another type": ("fused", lambda g: setattr(node_of(g, "ar_0").attr["T"], "type", HALF), "ar_0"),
    "a colocation lost": ("fused", lambda g: node_of(g, "ar_0").attr.__delitem__("_class"), "ar_0"),
    "a colocation with another node": ("fused", lambda g: node_of(g, "ar_0").attr["_class"].list.s.__setitem__(
        0, b"loc:@g_1"), "ar_0"),
    "a reduction more": ("fused", lambda g: add_node(
        g, "extra", "HcomAllReduce", "g_0", T=Type(FLOAT), group=WORLD, reduction="sum"), "extra"),
    "a new reduction on another device": (
        "fused", lambda g: setattr(node_of(g, "fused_0/all_reduce"), "device", "/cpu:1"), "ar_"),
    "a new reduction that is fused again": (
        "fused", lambda g: setattr(node_of(g, "fused_0/all_reduce").attr["fusion"], "i", 1), "ar_"),
    "a variable updated": ("fused", lambda g: add_node(g, "extra", "AssignSub", "g_0", "g_0", T=Type(FLOAT)), "extra"),
    "a cycle": ("fused", lambda g: node_of(g, "fused_0/concat").input.append("^out_4"), "fused_0"),
    "a cycle of two new nodes": (
        "fused", lambda g: (add_node(g, "n1", "NoOp", "^n2"), add_node(g, "n2", "NoOp", "^n1")), "n1"),
    "a dangling input": ("fused", lambda g: set_input(g, "fused_0/concat", 0, "gone"), "fused_0/concat"),
    "a dangling control input": ("fused", lambda g: node_of(g, "ar_0").input.append("^gone"), "ar_0"),
    "a port out of range": ("fused", lambda g: set_input(g, "fused_0/flat_0", 0, "g_0:1"), "fused_0/flat_0"),
    "an unreadable input": ("fused", lambda g: set_input(g, "fused_0/concat", 0, "a:b:c:d"), "fused_0/concat"),
    "a name twice": ("fused", lambda g: add_node(g, "tail", "NoOp"), "tail"),
    "a new name twice": ("fused", lambda g: add_node(g, "fused_0/split", "NoOp"), "fused_0/split"),
    "fusion ids with another group": (
        "fusion-id", lambda g: setattr(node_of(g, "ar_0").attr["group"], "s", b"some"), "ar_0"),
    "fusion ids with another tensor": ("fusion-id", lambda g: set_input(g, "ar_0", 0, "g_1"), "ar_0"),
    # collectives
    "another merge_op": ("collective", lambda g: setattr(
        node_of(g, "fused_0/all_reduce/reduce/collective").attr["merge_op"], "s", b"Max"), "ar_"),
    "another final_op": ("collective", lambda g: setattr(
        node_of(g, "fused_0/all_reduce/reduce/collective").attr["final_op"], "s", b"Div"), "ar_"),
    "a shared instance key": ("collective", lambda g: set_input(
        g, "fused_0/all_reduce/reduce/collective", 3, "fused_1/all_reduce/reduce/instance_key"), "gradient"),
    "an equal instance key": ("collective", lambda g: node_of(g, "fused_0/all_reduce/reduce/instance_key").attr[
        "value"].CopyFrom(node_of(g, "fused_1/all_reduce/reduce/instance_key").attr["value"]), "gradient"),
    "another group key in one group": (
        "collective", lambda g: int_of(node_of(g, "fused_0/all_reduce/reduce/group_key"), 77), "gradient"),
    "another group's key": ("collective", lambda g: [node.attr["value"].CopyFrom(
        node_of(g, "largest/reduce/group_key").attr["value"]) for node in g.node if node.name.endswith("group_key")],
        "gradient"),
    "another group size": (
        "collective", lambda g: int_of(node_of(g, "fused_0/all_reduce/reduce/group_size"), 3), "gradient"),
    "a key that is no constant": (
        "collective", lambda g: set_input(g, "fused_0/all_reduce/reduce/collective", 2, "before"), "ar_"),
    "a collective without keys": (
        "collective", lambda g: drop_input(g, "fused_0/all_reduce/reduce/collective", 1, 2, 3), "ar_"),
    "a collective for another group": ("collective", lambda g: setattr(
        node_of(g, "fused_0/all_reduce/reduce/collective").attr["_hccl_group"], "s", b"some"), "ar_"),
    "a collective of a narrower type": ("collective", lambda g: (
        add_node(g, "narrow", "Cast", "fused_0/concat", SrcT=Type(FLOAT), DstT=Type(HALF), device="/cpu:0"),
        set_input(g, "fused_0/all_reduce/reduce/collective", 0, "narrow"),
        setattr(node_of(g, "fused_0/all_reduce/reduce/collective").attr["T"], "type", HALF),
        add_node(g, "widen", "Cast", "fused_0/all_reduce/reduce/collective", SrcT=Type(HALF), DstT=Type(FLOAT)),
        set_input(g, "fused_0/all_reduce", 0, "widen")), "ar_"),
    # mocks
    "a mock of another reduction": ("mock", lambda g: setattr(
        node_of(g, "fused_0/all_reduce/reduce/mock"), "op", "Pow"), "ar_"),
    "a mock that is none": ("mock", lambda g: node_of(g, "fused_0/all_reduce/reduce/mock").attr.__delitem__(
        "_hccl_mock_ranks"), "ar_"),
    "a mock of another number of ranks": ("mock", lambda g: setattr(
        node_of(g, "fused_0/all_reduce/reduce/ranks").attr["value"].tensor, "tensor_content", b"\0\0\x40\x40"), "ar_"),
    "one mock of another number of ranks": ("mock", lambda g: (
        setattr(node_of(g, "fused_0/all_reduce/reduce/mock").attr["_hccl_mock_ranks"], "i", 3),
        setattr(node_of(g, "fused_0/all_reduce/reduce/ranks").attr["value"].tensor, "tensor_content", b"\0\0\x40\x40")),
        "ar_"),
    # functions
    "split outputs swapped in a function": ("fused", lambda g: (
        body(g, "one").input.__setitem__(0, "fused_0/split:output:1"),
        body(g, "two").input.__setitem__(0, "fused_0/split:output:0")), "f/"),
    "an output that is not there in a function": (
        "fused", lambda g: body(g, "one").input.__setitem__(0, "fused_0/split:output:7"), "f/one"),
    "an output by a wrong name in a function": (
        "fused", lambda g: body(g, "fused_0/all_reduce").input.__setitem__(0, "fused_0/concat:result:0"),
        "fused_0/all_reduce"),
    "an old node removed from a function": (
        "fused", lambda g: g.library.function[0].node_def.__delitem__(slice(3, None)), "two"),
    "an untouched node changed in a function": ("fused", lambda g: setattr(body(g, "gx"), "op", "Neg"), "gx"),
    "a function's signature changed": (
        "fused", lambda g: setattr(g.library.function[0].signature.output_arg[0], "type", HALF), "f"),
    "a function's result changed": ("fused", lambda g: g.library.function[0].ret.__setitem__("y", "gx:output:0"), "f"),
    "a function's attribute changed": (
        "fused", lambda g: setattr(g.library.function[0].attr["_noinline"], "b", True), "f"),
    # the rest of the graph
    "versions changed": ("fused", lambda g: setattr(g.versions, "producer", 1), "versions"),
    "a function removed": ("fused", lambda g: g.library.function.__delitem__(0), "functions"),
    "a function added": ("fused", lambda g: setattr(g.library.function.add().signature, "name", "h"), "functions"),
    "a gradient function added": (
        "fused", lambda g: g.library.gradient.add(function_name="f", gradient_func="h"), "gradient"),
    "debug information changed": (
        "fused", lambda g: g.debug_info.files.append("x.py"), "debug_info"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewrite_is_found_and_its_node_named(name):
    emit, change, named = WRONG[name]
    found = findings(change, emit)
    assert found, "verify is content"
    assert named in "; ".join(found)
    assert not any("\n" in finding for finding in found)


@pytest.mark.parametrize("emit", ["fused", "fusion-id", "collective", "mock"])
def test_what_is_right_has_no_finding(emit):
    after, gradients = rewritten(emit)
    assert verify_rewrite(BEFORE, after, gradients) == []
    assert after != BEFORE


@pytest.mark.parametrize("first", [0, len(BEFORE.node)], ids=["all", "new"])
def test_nodes_may_stand_in_any_order(first):
    def reverse(after: GraphDef) -> None:
        moved = [NodeDef.FromString(node.SerializeToString()) for node in after.node[first:]]
        del after.node[first:]
        after.node.extend(reversed(moved))

    assert findings(reverse) == []


def test_a_name_twice_is_found_in_any_order():
    def change(after: GraphDef) -> None:
        after.node.add().CopyFrom(after.node[0])
        after.node[0].name = "another"

    assert findings(change)


def test_a_graph_that_nobody_rewrote_is_right():
    gradients = rewritten("fused")[1]
    assert verify_rewrite(BEFORE, BEFORE, gradients) == []


def test_a_constant_that_is_not_a_number_is_no_finding():
    nodes = Nodes(gradients_graph((2,), (3,)).node)
    graph_def = gradients_graph((2,), (3,))
    nodes = Nodes(graph_def.node)
    nodes.constant("nan", float("nan"))
    nodes.add("op", "SomeOp", x=float("nan"))
    assert fuse(graph_def, Strategy(StrategyKind.SINGLE), infer_shapes=False).modified


def test_the_pass_is_an_error_that_shows_five_findings(monkeypatch):
    item = GraphItem(BEFORE)
    assert Verify().run(item).notes == ("nothing was rewritten",)

    result = fuse(BEFORE, Strategy(StrategyKind.SINGLE), infer_shapes=False)
    monkeypatch.setattr("graph_passes.verify.verify_rewrite", lambda *_: [f"finding {n}" for n in range(7)])
    with pytest.raises(VerificationError, match=r"found finding 0; .*finding 4; and 2 more, expected the same values"):
        fuse(BEFORE, Strategy(StrategyKind.SINGLE), infer_shapes=False)
    assert result.modified


# Fields of a rewritten graph's new nodes and members, each of which matters.
@given(st.integers(0, 10**6), st.sampled_from(["fused", "collective", "mock"]))
def test_any_one_exchanged_tensor_input_is_found(seed, emit):
    """Every data input of a touched node is replaced by another tensor of the graph, one at a time."""
    after, gradients = rewritten(emit)
    size = len(BEFORE.node)
    touched = [node for number, node in enumerate(after.node) if number >= size or node != BEFORE.node[number]]
    places = [(node, p) for node in touched for p, text in enumerate(node.input) if not text.startswith("^")]
    node, position = places[seed % len(places)]
    others = [other.name for other in after.node if other.name != node.input[position]]
    other = others[seed // len(places) % len(others)]
    if equal_constants(after, node.input[position], other):
        return
    node.input[position] = other
    assert verify_rewrite(BEFORE, after, gradients), f"{node.name} now reads {other}"


def equal_constants(graph_def: GraphDef, one: str, other: str) -> bool:
    first, second = (node_of(graph_def, name.partition(":")[0]) for name in (one, other))
    return first.op == second.op == "Const" and first.attr["value"] == second.attr["value"] and ":" not in one
