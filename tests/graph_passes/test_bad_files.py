"""Files that are no graphs: one clear error each, never a traceback of another kind."""

from __future__ import annotations

import gzip
import random
import re

import pytest
from builders import Streams, meta_graph, saved_model, small_graph
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import GraphFileError, HcclFusionError
from graph_passes.files import GraphFile, read_graph, write_graph

CONTENTS = {
    "graph": small_graph().SerializeToString(deterministic=True),
    "graph text": text_format.MessageToString(small_graph()).encode(),
    "meta graph": meta_graph().SerializeToString(deterministic=True),
    "meta graph text": text_format.MessageToString(meta_graph()).encode(),
    "saved model": saved_model().SerializeToString(deterministic=True),
    "saved model text": text_format.MessageToString(saved_model()).encode(),
}
CONTENTS["gzip"] = gzip.compress(CONTENTS["graph"], mtime=0)
each_content = pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)


def read(monkeypatch: pytest.MonkeyPatch, content: bytes) -> GraphFile:
    monkeypatch.setattr("sys.stdin", Streams(content))
    return read_graph("-")


def error_of(monkeypatch: pytest.MonkeyPatch, content: bytes) -> str:
    with pytest.raises(GraphFileError) as caught:
        read(monkeypatch, content)
    text = str(caught.value)
    assert "\n" not in text
    assert "found" in text
    assert "expected" in text
    return text


def outcome(content: bytes) -> GraphFile | str:
    """The file or the error's text; any other exception fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            return read(patch, content)
        except HcclFusionError as error:
            return str(error)


@pytest.mark.parametrize(
    "content",
    [b"", b" ", b"\n\n\t \r\n", gzip.compress(b"", mtime=0), gzip.compress(b"  \n", mtime=0)],
    ids=["nothing", "a blank", "blanks", "gzip of nothing", "gzip of blanks"],
)
def test_an_empty_file(monkeypatch, content):
    assert "the file is empty" in error_of(monkeypatch, content)


@each_content
def test_a_file_cut_short_at_any_byte(content):
    """A cut between two nodes cannot be told from a smaller graph; at any other place it must be told."""
    whole = outcome(content)
    for size in range(len(content)):
        found = outcome(content[:size])
        if isinstance(found, GraphFile):
            kept = list(found.graph_def.node)
            assert kept == list(whole.graph_def.node)[: len(kept)]
            assert kept or found.graph_def.library.function
        else:
            assert "\n" not in found


@pytest.mark.parametrize("name", ["graph", "meta graph", "saved model"])
def test_a_binary_file_cut_inside_a_field_says_where(monkeypatch, name):
    content = CONTENTS[name]
    text = error_of(monkeypatch, content[: len(content) // 3])
    assert re.search(rf"cut short or damaged, -, byte \d+ of {len(content) // 3}, found a field needs \d+ bytes", text)


@pytest.mark.parametrize("name", ["meta graph text", "saved model text"])
@pytest.mark.parametrize("at", ["inside the graph", "behind the graph"])
def test_a_text_file_cut_short_says_so_wherever_the_cut_is(monkeypatch, name, at):
    content = CONTENTS[name]
    cut = content.rindex(b"op:") if at == "inside the graph" else content.rindex(b"value {")
    text = error_of(monkeypatch, content[: cut + 5])
    assert re.search(r"cut short or damaged, -, line \d+, column \d+, found a brace that is never closed", text)


def test_the_brace_that_is_never_closed_is_named_by_line_and_column(monkeypatch):
    text = error_of(monkeypatch, b'\n meta_info_def { }\n  graph_def {\n node { name: "a" }\n')
    assert "line 3, column 13, found a brace that is never closed" in text


def test_a_text_graph_cut_short_names_line_and_column(monkeypatch):
    text = error_of(monkeypatch, b'node { name: "a" op: "b" }\nnode {\n  name: "c"\n')
    assert re.search(r"does not parse, -, line [23], column \d+,", text)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ('node {\n  name: "a"\n  opp: "b"\n}\n', "opp"),
        ('node { name: "a" op: "b" }\nnodee { }\n', "nodee"),
        ('node { name: "a\n" }', '"a'),
        ('versions { producer: 99999999999 } node { name: "a" op: "b" }', "99999999999"),
        ('meta_info_def { }\ngraph_def {\n  node {\n    name: "a"\n    opp: "b"\n  }\n}\n', "opp"),
        ('meta_info_def { } graph_def { node { name: "a" opp: "b" } }', "opp"),
        ('\n\ngraph_def {\nnode { name: "a" opp: "b" } }', "opp"),
        ('saved_model_schema_version: 1\nmeta_graphs { graph_def {\nnode { nam: "a" } } }', "nam:"),
    ],
)
def test_a_typo_in_text_names_line_and_column(monkeypatch, content, wrong):
    text = error_of(monkeypatch, content.encode())
    line, column = map(int, re.search(r"the text does not parse, -, line (\d+), column (\d+), found", text).groups())
    at = content.index(wrong)
    assert line == content.count("\n", 0, at) + 1
    # Protobuf's versions differ in whether they point at a word's first character or behind its last one.
    assert 0 < column - (at - content.rfind("\n", 0, at) - 1) <= len(wrong) + 1


def test_text_nested_without_end(monkeypatch):
    content = b'node { name: "a" op: "b" attr { key: "f" value { ' + b'func { attr { key: "f" value { ' * 5000
    assert "does not parse" in error_of(monkeypatch, content + b"} } } " * 5000 + b"} } }")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(range(200)), "a PNG image"),
        (b"PK\x03\x04" + bytes(range(200)), "a zip archive"),
        (b"%PDF-1.7\nstream", "a PDF document"),
        (b"\x7fELF\x02\x01\x01" + bytes(60), "an executable"),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file"),
        (b"Dear Sir or Madam, hello", "text 'Dear Sir or Madam, h'"),
        (b'{"node": []}', "text '{\"node\": []}'"),
        (b"\xff\xfe\x00\x01\x02\x03\x04\x05", "bytes ff fe 00 01 02 03 04 05"),
        (gzip.compress(gzip.compress(CONTENTS["graph"])), "bytes 1f 8b 08 00"),
    ],
    ids=["png", "zip", "pdf", "elf", "hdf5", "prose", "json", "bytes", "gzip twice"],
)
def test_a_file_of_another_kind(monkeypatch, content, found):
    text = error_of(monkeypatch, content)
    assert f"found {found}" in text or "cut short or damaged" in text
    if content[:1] in (b"\x89", b"P", b"%", b"\x7f"):
        assert f"found {found}" in text


@pytest.mark.parametrize("cut", [3, 12, -9, -1])
def test_gzip_data_cut_short(monkeypatch, cut):
    assert "the gzip data is cut short" in error_of(monkeypatch, CONTENTS["gzip"][:cut])


def test_gzip_data_that_is_damaged(monkeypatch):
    content = bytearray(CONTENTS["gzip"])
    content[len(content) // 2] ^= 0xFF
    assert "the gzip data is" in error_of(monkeypatch, bytes(content))
    content = bytearray(CONTENTS["gzip"])
    content[-6] ^= 0xFF  # the checksum
    assert "the gzip data is damaged" in error_of(monkeypatch, bytes(content))


def test_gzip_data_with_rubbish_behind_it(monkeypatch):
    assert "the gzip data is damaged" in error_of(monkeypatch, CONTENTS["gzip"] + b"rubbish")


@pytest.mark.parametrize("content", [b"versions { producer: 21 }", b"\x22\x02\x08\x15", b"library { }"])
def test_a_graph_without_nodes(monkeypatch, content):
    assert "the file holds no node" in error_of(monkeypatch, content)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"meta_info_def { }", "0 graph_def fields"),
        (b'graph_def { node { name: "a" } } graph_def { node { name: "b" } }', "2 graph_def fields"),
        (b"saved_model_schema_version: 1", "0 meta graphs"),
        (b"\x08\x01", "0 meta graphs"),
    ],
)
def test_a_meta_graph_without_exactly_one_graph(monkeypatch, content, found):
    assert found in error_of(monkeypatch, content)


def test_a_message_of_unknown_fields_alone(monkeypatch):
    """A protobuf message it is, but of another schema."""
    assert "the file is no graph" in error_of(monkeypatch, b"\xc2\x3e\x03abc")


@pytest.mark.parametrize("path", ["no/such/file.pb", "", "a\0b", "x" * 5000])
def test_a_file_that_is_not_there(path):
    with pytest.raises(GraphFileError, match="cannot read the file"):
        read_graph(path)


def test_a_folder_that_is_no_saved_model(tmp_path):
    with pytest.raises(GraphFileError, match=r"the folder is no SavedModel.*no saved_model\.pb in it"):
        read_graph(str(tmp_path))


def test_a_reader_that_went_away_is_no_error_of_the_file(monkeypatch):
    class Closed:
        def write(self, _: bytes) -> None:
            raise BrokenPipeError

    found = read(monkeypatch, CONTENTS["graph"])
    stream = Streams()
    stream.buffer = Closed()
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(BrokenPipeError):
        write_graph(found, found.graph_def, "-")


@given(st.binary(max_size=60))
def test_random_bytes_never_give_another_exception(content):
    outcome(content)
    outcome(b"\x1f\x8b" + content)
    outcome(b"\x0a" + content)


@given(st.sampled_from(sorted(CONTENTS)), st.integers(0, 10**9), st.integers(1, 4))
def test_damaged_files_never_give_another_exception(name, seed, bytes_changed):
    rng = random.Random(seed)
    content = bytearray(CONTENTS[name])
    for _ in range(bytes_changed):
        content[rng.randrange(len(content))] = rng.randrange(256)
    outcome(bytes(content))


@given(st.text(alphabet="node {}<>:\"\\#\n'aé", max_size=40))
def test_random_text_never_gives_another_exception(text):
    outcome(("node {" + text).encode())
    outcome(("graph_def {" + text + "}").encode())
    outcome(("meta_graphs {" + text).encode())
