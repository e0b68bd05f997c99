"""Inputs, wire format, devices, attributes, errors: the small modules that the passes stand on."""

from __future__ import annotations

import pytest
from builders import BOOL, FLOAT, Nodes, Shape, Type
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.attributes import int_attr, string_attr, type_attr
from graph_passes.devices import normalise_device
from graph_passes.errors import GraphError, HcclFusionError, PassError, ReductionError, summarise
from graph_passes.messages import AttrValue, GraphDef, NodeDef
from graph_passes.node_input import NodeInput, parse_input, producer_name
from graph_passes.text_blocks import text_blocks, unclosed_brace
from graph_passes.wire import WireError, field_bytes, fields, length_delimited

# ------------------------------------------------------------------------------------------------ node inputs

names = st.from_regex(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]{0,20}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a/b", NodeInput("a/b")),
        ("a/b:0", NodeInput("a/b", 0)),
        ("a/b:12", NodeInput("a/b", 12)),
        ("^a/b", NodeInput("a/b", -1)),
        ("a/b:out:0", NodeInput("a/b", 0, "out")),
        ("a/b:out:3", NodeInput("a/b", 3, "out")),
    ],
)
def test_the_four_forms_of_an_input(text, parsed):
    assert parse_input(text) == parsed
    assert parsed.is_control is text.startswith("^")
    assert producer_name(text) == "a/b"


@given(st.builds(NodeInput, names, st.integers(-1, 10**6), st.just("")))
def test_an_input_reads_back_as_it_was_written(one):
    assert parse_input(str(one)) == one


@given(st.builds(NodeInput, names, st.integers(0, 99), st.from_regex(r"[a-z_0-9]{1,8}", fullmatch=True)))
def test_an_input_in_a_function_reads_back_as_it_was_written(one):
    assert parse_input(str(one)) == one
    assert producer_name(str(one)) == one.name


@pytest.mark.parametrize(
    "text", ["a:", "a:x", "a:-1", ":0", "a:b:c:0", "a::0", "a:out:", "a:out:x", "a: 1", "a:1.5", "a:٣", "a:b:²"]
)
def test_what_is_none_of_the_forms(text):
    with pytest.raises(ValueError, match="is not an input"):
        parse_input(text)


# ----------------------------------------------------------------------------------------------------- wire


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_the_fields_of_a_message_are_those_that_protobuf_wrote(values, number, with_float):
    value = AttrValue()
    value.list.s.extend(values)
    message = NodeDef(name="n", input=["a", "b"])
    message.attr["x"].CopyFrom(value)
    message.attr["y"].i = number
    if with_float:
        message.attr["z"].f = 1.5
    content = message.SerializeToString(deterministic=True)

    found = list(fields(content))

    assert b"".join(content[field.start : field.end] for field in found) == content
    assert [field_bytes(content, field) for field in found[:3]] == [b"n", b"a", b"b"]
    assert all(length_delimited(field.number, field_bytes(content, field)) for field in found)
    rebuilt = b"".join(length_delimited(field.number, field_bytes(content, field)) for field in found)
    assert rebuilt == content
    for field in found[3:]:
        for entry in fields(content, field.payload, field.end):
            assert entry.end <= field.end


@given(st.integers(2**20, 2**29 - 1), st.binary(max_size=20000))
def test_a_field_is_written_as_protobuf_writes_it(number, payload):
    content = length_delimited(number, payload)

    (field,) = fields(content)
    assert (field.number, field_bytes(content, field)) == (number, payload)
    # As an unknown field it goes through protobuf and comes out as it was.
    assert NodeDef.FromString(content).SerializeToString() == content


@given(st.binary(max_size=40))
def test_what_is_refused_is_refused_by_protobuf_too(content):
    """Groups, which nobody writes any more, and numbers of more than 64 bits aside."""
    try:
        found = list(fields(content))
    except WireError as error:
        refused = error
    else:
        assert sum(field.end - field.start for field in found) == len(content)
        return
    if "wire type" not in str(refused) and "too long" not in str(refused):
        with pytest.raises(DecodeError):
            GraphDef.FromString(content)


@pytest.mark.parametrize(
    ("content", "is_cut", "reason"),
    [
        (b"\x80", True, "ends inside a number"),
        (b"\x0a\x05abc", True, "a field needs 5 bytes and 3 are left"),
        (b"\x09abc", True, "a field needs 8 bytes and 3 are left"),
        (b"\x0d", True, "a field needs 4 bytes and 0 are left"),
        (b"\x00\x01", False, "field number 0"),
        (b"\x0b", False, "unknown wire type 3"),
        (b"\x0f", False, "unknown wire type 7"),
        (b"\xff" * 11, False, "a number is too long"),
    ],
)
def test_what_is_no_message(content, is_cut, reason):
    with pytest.raises(WireError, match=reason) as caught:
        list(fields(content))
    assert caught.value.is_cut is is_cut


# ---------------------------------------------------------------------------------------------- text blocks


def blocks(text: str, field: str) -> list[str]:
    return [text[start:end] for start, end in text_blocks(text, field)]


def test_blocks_of_the_outermost_level_only():
    text = 'a { b { a { 1 } } } b: < 2 > a:{3} # a { no }\nc: "a { no" a { "}" }'
    assert blocks(text, "a") == [" b { a { 1 } } ", "3", ' "}" ']
    assert blocks(text, "b") == [" 2 "]


@pytest.mark.parametrize(
    ("text", "at"),
    [("a { b { } }", None), ("a { b { }", 2), ('a { "}" ', 2), ("a { # }\n", 2), ("a { } b { c {", 8), ("}", None)],
)
def test_the_outermost_brace_that_is_never_closed(text, at):
    assert unclosed_brace(text) == at


# -------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("device", "normal"),
    [
        ("", ""),
        ("/cpu:0", "/device:CPU:0"),
        ("/CPU:0", "/device:CPU:0"),
        ("/device:cpu:0", "/device:CPU:0"),
        ("/device:GPU:1", "/device:GPU:1"),
        ("/gpu:1", "/device:GPU:1"),
        ("/device:GPU", "/device:GPU:*"),
        ("/job:worker/replica:0/task:1/device:CPU:0", "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/task:1/job:worker/cpu:0", "/job:worker/task:1/device:CPU:0"),
        ("/job:ps", "/job:ps"),
        ("/device:NPU:3", "/device:NPU:3"),
        ("/npu:3", "/device:NPU:3"),
    ],
)
def test_one_spelling_for_each_device(device, normal):
    assert normalise_device(device) == normal
    assert normalise_device(normal) == normal


@pytest.mark.parametrize("pair", [("/job:a", "/job:b"), ("/gpu:0", "/gpu:1"), ("/cpu:0", "/gpu:0"), ("", "/cpu:0")])
def test_different_devices_stay_different(pair):
    assert normalise_device(pair[0]) != normalise_device(pair[1])


# ------------------------------------------------------------------------------------------------ attributes


def node_with(**attrs: object) -> NodeDef:
    nodes = Nodes()
    nodes.add("n", "Op", **attrs)
    return nodes.graph_def.node[0]


def test_attributes_of_the_right_type():
    node = node_with(s="text", i=-7, t=Type(FLOAT))
    assert string_attr(node, "s", "here") == "text"
    assert int_attr(node, "i", 1, "here") == -7
    assert int_attr(node, "absent", 1, "here") == 1
    assert type_attr(node, "t", "here") == FLOAT


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, r"an int \(3\)"),
        (1.5, r"a float \(1\.5\)"),
        (True, r"a bool \(True\)"),
        (Type(BOOL), r"a type \(bool\)"),
        (Shape([1]), "a shape"),
        ([1], "a list"),
        (AttrValue(), "no value"),
        (AttrValue(placeholder="T"), "a function's attribute"),
    ],
)
def test_an_attribute_of_the_wrong_type_shows_what_it_is(value, shown):
    with pytest.raises(ReductionError, match=f"attribute group has the wrong type, node n, found {shown}, expected a"):
        string_attr(node_with(group=value), "group", "node n")


@pytest.mark.parametrize("read", [lambda node: int_attr(node, "x", 1, "w"), lambda node: type_attr(node, "x", "w")])
def test_a_string_where_a_number_should_be(read):
    with pytest.raises(ReductionError, match=r"found a string \('1'\)"):
        read(node_with(x="1"))


@pytest.mark.parametrize(
    ("attrs", "found"), [({}, "no such attribute"), ({"group": ""}, "b''"), ({"group": b"\xff"}, "xff")]
)
def test_a_string_that_is_missing_empty_or_no_text(attrs, found):
    with pytest.raises(ReductionError, match="attribute group is missing or empty") as caught:
        string_attr(node_with(**attrs), "group", "node n")
    assert found in str(caught.value)


@pytest.mark.parametrize("attrs", [{}, {"T": Type(0)}])
def test_a_type_that_is_missing(attrs):
    with pytest.raises(ReductionError, match="attribute T is missing"):
        type_attr(node_with(**attrs), "T", "node n")


# --------------------------------------------------------------------------------------------------- errors


def test_an_error_is_one_line_of_all_that_is_known():
    error = GraphError("it is broken", where="node a", found="x\n  y", expected=3, remedy="another one")
    error.pass_name, error.passes_before = "fuse", ("find", "index")
    assert str(error) == (
        "it is broken, node a, in pass fuse (after find, index), found x y, expected 3; try another one"
    )


def test_an_error_shows_only_what_is_known():
    assert str(PassError("it is broken")) == "it is broken"
    assert str(PassError("it is broken", found=0)) == "it is broken, found 0"
    assert isinstance(ReductionError("x"), GraphError)
    assert isinstance(GraphError("x"), HcclFusionError)


def test_the_first_five_findings_and_then_a_count():
    assert summarise(["a", "b"]) == "a; b"
    assert summarise(list("abcde")) == "a; b; c; d; e"
    assert summarise(list("abcdefg")) == "a; b; c; d; e; and 2 more"
