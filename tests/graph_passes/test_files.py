"""Every kind of graph file goes in and comes out as the same kind, with all but the graph kept byte for byte."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import sys
from pathlib import Path

import pytest
from builders import Streams, gradients_graph, meta_graph, saved_model, small_graph
from google.protobuf import text_format
from google.protobuf.message import Message

from graph_passes import files
from graph_passes.errors import GraphFileError
from graph_passes.files import read_graph, write_graph
from graph_passes.messages import GraphDef, MetaGraphDef, SavedModel
from graph_passes.sniff import GraphKind
from graph_passes.wire import length_delimited

# A field of a later TensorFlow: number 1000, a string.
UNKNOWN = length_delimited(1000, b"from the future")


def other_graph() -> GraphDef:
    return gradients_graph((1000, 3), (4,), (5,))


MESSAGES = {
    GraphKind.GRAPH_DEF: small_graph,
    GraphKind.META_GRAPH_DEF: meta_graph,
    GraphKind.SAVED_MODEL: saved_model,
}
each_kind = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.value)
each_form = pytest.mark.parametrize("is_text", [False, True], ids=["binary", "text"])
each_packing = pytest.mark.parametrize("is_gzip", [False, True], ids=["plain", "gzip"])


def serialised(message: Message, is_text: bool) -> bytes:
    if is_text:
        return text_format.MessageToString(message).encode()
    return message.SerializeToString(deterministic=True)


def parsed(kind: GraphKind, is_text: bool, content: bytes) -> Message:
    empty = type(MESSAGES[kind]())()
    return text_format.Parse(content.decode(), empty) if is_text else empty.FromString(content)


def with_graph(kind: GraphKind, graph_def: GraphDef) -> Message:
    """What a file of a kind must hold once its graph is another one."""
    if kind is GraphKind.GRAPH_DEF:
        return graph_def
    message = MESSAGES[kind]()
    meta = message if kind is GraphKind.META_GRAPH_DEF else message.meta_graphs[1]
    meta.graph_def.CopyFrom(graph_def)
    return message


@each_packing
@each_form
@each_kind
def test_the_kind_is_told_by_content_and_not_by_name(tmp_path, kind, is_text, is_gzip):
    content = serialised(MESSAGES[kind](), is_text)
    path = tmp_path / "holiday.jpeg"
    path.write_bytes(gzip.compress(content) if is_gzip else content)

    found = read_graph(str(path))

    assert (found.kind, found.is_text, found.is_gzip) == (kind, is_text, is_gzip)
    assert found.graph_def == small_graph()


@each_packing
@each_form
@each_kind
def test_another_graph_goes_out_as_the_same_kind_of_file(tmp_path, kind, is_text, is_gzip):
    source, target = tmp_path / "in", tmp_path / ("out.gz" if is_gzip else "out")
    source.write_bytes(serialised(MESSAGES[kind](), is_text))

    write_graph(read_graph(str(source)), other_graph(), str(target))

    content = target.read_bytes()
    content = gzip.decompress(content) if is_gzip else content
    assert parsed(kind, is_text, content) == with_graph(kind, other_graph())
    assert read_graph(str(target)).kind is kind


@each_form
@each_kind
def test_what_is_not_the_graph_stays_byte_for_byte(tmp_path, kind, is_text):
    content = serialised(MESSAGES[kind](), is_text)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(content)
    found = read_graph(str(source))

    write_graph(found, GraphDef.FromString(found.graph_def.SerializeToString()), str(target))

    if is_text:
        assert b" ".join(target.read_bytes().split()) == b" ".join(content.split())
    else:
        assert target.read_bytes() == content


def test_fields_in_an_order_of_their_own_and_unknown_ones_stay(tmp_path):
    """As another writer might do it: the graph last, an unknown field first, the saver in two pieces."""
    graph = small_graph().SerializeToString(deterministic=True)
    before = length_delimited(1, b"\x0a\x02v1\x22\x05train") + UNKNOWN + length_delimited(3, b"\x0a\x01a")
    after = length_delimited(3, b"\x1a\x01b") + UNKNOWN
    source, target = tmp_path / "in.meta", tmp_path / "out.meta"
    source.write_bytes(before + length_delimited(2, graph) + after)

    write_graph(read_graph(str(source)), other_graph(), str(target))

    new = other_graph().SerializeToString(deterministic=True)
    assert target.read_bytes() == before + length_delimited(2, new) + after


def test_unknown_fields_of_a_saved_model_stay(tmp_path):
    inner = meta_graph("train").SerializeToString(deterministic=True)
    source, target = tmp_path / "in.pb", tmp_path / "out.pb"
    source.write_bytes(b"\x08\x01" + UNKNOWN + length_delimited(2, inner + UNKNOWN) + UNKNOWN)

    write_graph(read_graph(str(source)), small_graph(), str(target))

    assert target.read_bytes() == source.read_bytes()


def test_unknown_fields_of_a_graph_and_of_its_nodes_stay(tmp_path):
    graph = small_graph()
    node = graph.node[0].SerializeToString(deterministic=True)
    del graph.node[0]
    content = length_delimited(1, node + UNKNOWN) + graph.SerializeToString(deterministic=True) + UNKNOWN
    source, target = tmp_path / "in.pb", tmp_path / "out.pb"
    source.write_bytes(content)
    found = read_graph(str(source))

    write_graph(found, found.graph_def, str(target))

    assert target.read_bytes() == content


@pytest.mark.parametrize(
    "info",
    [b"", b"\x0a\x02v1", b"\x22\x05train", b"\x0a\x02v1\x22\x05train\x2a\x062.21.0", b"\x0a\x02v1\x12\x00"],
    ids=["nothing", "version", "tags", "version and tags", "no op listed"],
)
def test_a_meta_graph_is_one_whatever_its_info_says(tmp_path, info):
    """The first field of a MetaGraphDef and that of a GraphDef have the same number."""
    path = tmp_path / "in"
    path.write_bytes(length_delimited(1, info) + length_delimited(2, small_graph().SerializeToString()))

    assert read_graph(str(path)).kind is GraphKind.META_GRAPH_DEF


def test_a_meta_graph_without_its_info_is_one(tmp_path):
    path = tmp_path / "in"
    meta = MetaGraphDef(graph_def=small_graph())
    path.write_bytes(meta.SerializeToString())
    assert read_graph(str(path)).kind is GraphKind.META_GRAPH_DEF


@pytest.mark.parametrize("field", ["versions", "version", "library"])
def test_a_graph_that_does_not_start_with_a_node_is_one(tmp_path, field):
    head = {"versions": b"\x22\x02\x08\x15", "version": b"\x18\x15"}.get(field, b"")
    if field == "library":
        head = length_delimited(2, small_graph().library.SerializeToString())
    path = tmp_path / "in"
    path.write_bytes(head + small_graph().SerializeToString())
    assert read_graph(str(path)).kind is GraphKind.GRAPH_DEF


def test_a_graph_of_functions_alone_is_one(tmp_path):
    graph = small_graph()
    del graph.node[:]
    path = tmp_path / "in"
    path.write_bytes(graph.SerializeToString())
    assert read_graph(str(path)).kind is GraphKind.GRAPH_DEF


@pytest.mark.parametrize(
    "text",
    [
        '# a comment\n\nnode { name: "x" op: "Placeholder" }',
        'node < name: "x" op: "Placeholder" >',
        'versions: { producer: 1 } node: { name: "x" op: "Placeholder" }',
        'library { function { signature { name: "f" } } } node { name: "x" op: "Placeholder" }',
        'meta_info_def { } graph_def: < node: { name: "x" op: "Placeholder" } >',
        'collection_def { key: "} graph_def { # \\"" } graph_def { node { name: "x" op: "Placeholder" } } # }',
        'saved_model_schema_version: 1 meta_graphs { graph_def { node { name: "x" op: "Placeholder" } } }',
        "graph_def { node { name: 'x' op: 'Placeholder' } }",
        'node {\r\n  name: "x"\r\n  op: "Placeholder"\r\n}\r\n',
    ],
)
def test_the_spellings_of_text_format(tmp_path, text):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(text.encode())
    found = read_graph(str(source))
    assert [(node.name, node.op) for node in found.graph_def.node] == [("x", "Placeholder")]

    write_graph(found, small_graph(), str(target))

    assert read_graph(str(target)).graph_def == small_graph()


@each_form
@each_kind
def test_the_same_graph_gives_the_same_bytes(tmp_path, kind, is_text):
    source = tmp_path / "in"
    source.write_bytes(serialised(MESSAGES[kind](), is_text))
    written = []
    for number in range(2):
        # Built in another order each time, where the order of a map's keys is nobody's concern.
        graph = gradients_graph((1,), (2,))
        attributes = {"_a": 1, "_b": 2, "_c": 3}
        for name in sorted(attributes, reverse=bool(number)):
            graph.node[0].attr[name].i = attributes[name]
        path = tmp_path / f"{number}.gz"
        write_graph(read_graph(str(source)), graph, str(path))
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_gzip_files_joined_end_to_end_are_one_file(tmp_path):
    content = small_graph().SerializeToString()
    cut = len(content) // 2
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(content[:cut]) + gzip.compress(content[cut:]) + b"\x00" * 16)
    assert read_graph(str(path)).graph_def == small_graph()


# --------------------------------------------------------------------------------------------- stdin and stdout


@each_packing
@each_form
@each_kind
def test_a_dash_is_stdin_and_stdout(monkeypatch, kind, is_text, is_gzip):
    content = serialised(MESSAGES[kind](), is_text)
    monkeypatch.setattr(sys, "stdin", Streams(gzip.compress(content) if is_gzip else content))
    monkeypatch.setattr(sys, "stdout", Streams())

    write_graph(read_graph("-"), other_graph(), "-")

    written = sys.stdout.buffer.getvalue()
    assert written.startswith(b"\x1f\x8b") is is_gzip
    content = gzip.decompress(written) if is_gzip else written
    assert parsed(kind, is_text, content) == with_graph(kind, other_graph())


def test_a_file_called_dash_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes(small_graph().SerializeToString())
    monkeypatch.setattr(sys, "stdout", Streams())
    write_graph(read_graph("./-"), small_graph(), "-")
    assert sys.stdout.buffer.getvalue()


def test_a_stdout_that_is_full_is_an_error_of_one_line(monkeypatch, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(small_graph().SerializeToString())
    found = read_graph(str(source))
    stream = Streams()
    stream.buffer = open("/dev/full", "wb")  # noqa: SIM115  # closing it fails too
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(GraphFileError, match=r"cannot write the file, -, found No space left"):
        write_graph(found, small_graph(), "-")
    with contextlib.suppress(OSError):
        stream.buffer.close()


# ------------------------------------------------------------------------------------------- SavedModel folders


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "model"
    (path / "variables").mkdir(parents=True)
    (path / "assets").mkdir()
    (path / "variables" / "variables.index").write_bytes(b"index")
    (path / "variables" / "variables.data-00000-of-00001").write_bytes(bytes(range(256)))
    (path / "assets" / "vocabulary.txt").write_text("a\nb\n")
    (path / "saved_model.pb").write_bytes(saved_model().SerializeToString(deterministic=True))
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("is_text", [False, True], ids=["binary", "text"])
def test_a_folder_goes_out_as_a_folder_with_variables_and_assets(tmp_path, folder, is_text):
    name = "saved_model.pb"
    if is_text:
        (folder / name).unlink()
        name = "saved_model.pbtxt"
        (folder / name).write_bytes(serialised(saved_model(), True))
    before = files_of(folder)

    write_graph(read_graph(str(folder)), other_graph(), str(tmp_path / "out"))

    assert files_of(folder) == before
    after = files_of(tmp_path / "out")
    assert parsed(GraphKind.SAVED_MODEL, is_text, after.pop(name)) == with_graph(GraphKind.SAVED_MODEL, other_graph())
    before.pop(name)
    assert after == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_new_folder_has_the_mode_that_the_umask_gives(tmp_path, folder):
    before = os.umask(0o027)
    try:
        write_graph(read_graph(str(folder)), other_graph(), str(tmp_path / "out"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_folder_is_updated_in_place_only_when_told_to(folder):
    found = read_graph(str(folder))
    before = files_of(folder)
    with pytest.raises(GraphFileError, match="would overwrite the input"):
        write_graph(found, other_graph(), f"{folder}/")
    assert files_of(folder) == before

    write_graph(found, other_graph(), str(folder), overwrite_input=True)

    assert read_graph(str(folder)).graph_def == other_graph()
    assert set(files_of(folder)) == set(before)


def test_another_folder_is_never_written_into(tmp_path, folder):
    (tmp_path / "there").mkdir()
    with pytest.raises(GraphFileError, match="the folder exists already"):
        write_graph(read_graph(str(folder)), other_graph(), str(tmp_path / "there"))
    assert list((tmp_path / "there").iterdir()) == []


def test_a_folder_is_not_copied_into_itself(folder):
    before = files_of(folder)
    with pytest.raises(GraphFileError, match="inside the one that is copied"):
        write_graph(read_graph(str(folder)), other_graph(), str(folder / "out"))
    assert files_of(folder) == before


def test_a_copy_that_fails_leaves_nothing(tmp_path, folder, monkeypatch):
    found = read_graph(str(folder))
    monkeypatch.setattr(os, "rename", _full)
    with pytest.raises(GraphFileError, match="No space left"):
        write_graph(found, other_graph(), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_saved_model_with_one_graph_needs_no_tag(tmp_path):
    path = tmp_path / "saved_model.pb"
    model = SavedModel(saved_model_schema_version=1, meta_graphs=[meta_graph("serve")])
    path.write_bytes(model.SerializeToString())
    assert read_graph(str(tmp_path)).graph_def == small_graph()


@each_form
def test_a_saved_model_without_a_training_graph_among_several_is_an_error(tmp_path, is_text):
    path = tmp_path / "in"
    model = SavedModel(saved_model_schema_version=1, meta_graphs=[meta_graph("serve"), meta_graph()])
    path.write_bytes(serialised(model, is_text))
    with pytest.raises(GraphFileError, match=r"cannot tell which meta graph.*2 meta graphs, none tagged train"):
        read_graph(str(path))


# ----------------------------------------------------------------------------------------------- safe writing


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "in.pb"
    path.write_bytes(small_graph().SerializeToString(deterministic=True))
    return path


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("through", ["same name", "symlink", "hard link", "parent"])
def test_the_input_is_not_overwritten(source, through):
    target = source
    if through == "symlink":
        target = source.with_name("link.pb")
        target.symlink_to(source)
    elif through == "hard link":
        target = source.with_name("link.pb")
        os.link(source, target)
    elif through == "parent":
        target = source.parent / ".." / source.parent.name / source.name
    before = source.read_bytes()

    with pytest.raises(GraphFileError, match=r"the output would overwrite the input.*--overwrite"):
        write_graph(read_graph(str(source)), other_graph(), str(target))
    assert source.read_bytes() == before


def test_the_input_is_overwritten_when_told_to_even_behind_a_link(source):
    link = source.with_name("link.pb")
    link.symlink_to(source.name)

    write_graph(read_graph(str(source)), other_graph(), str(link), overwrite_input=True)

    assert link.is_symlink()
    assert read_graph(str(source)).graph_def == other_graph()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_an_output_that_is_there_keeps_its_mode(source, mode):
    target = source.with_name("out.pb")
    target.write_bytes(b"old")
    target.chmod(mode)

    write_graph(read_graph(str(source)), other_graph(), str(target))

    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert read_graph(str(target)).graph_def == other_graph()


def test_a_new_output_has_the_mode_that_the_umask_gives(source):
    target = source.with_name("out.pb")
    before = os.umask(0o027)
    try:
        write_graph(read_graph(str(source)), other_graph(), str(target))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("broken", ["replace", "chmod", "fdopen"])
def test_a_full_disk_leaves_the_old_output_and_no_rest(source, monkeypatch, broken):
    target = source.with_name("out.pb")
    target.write_bytes(b"old")
    found = read_graph(str(source))
    monkeypatch.setattr(os, broken, _full)
    with pytest.raises(GraphFileError, match=r"cannot write the file.*No space left on device"):
        write_graph(found, other_graph(), str(target))
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.pb", "out.pb"]


def test_an_interrupt_while_writing_leaves_no_rest(source, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    found = read_graph(str(source))
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_graph(found, other_graph(), str(source.with_name("out.pb")))
    assert [path.name for path in source.parent.iterdir()] == ["in.pb"]


def test_a_device_is_written_to_and_not_replaced(source):
    write_graph(read_graph(str(source)), other_graph(), "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_is_written_to_and_not_replaced(source):
    pipe = source.with_name("pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_graph(read_graph(str(source)), small_graph(), str(pipe))
        assert os.read(reader, 1 << 16) == source.read_bytes()
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


@pytest.mark.parametrize("target", ["no/such/folder/out.pb", "", "in.pb/out.pb", "."])
def test_a_place_that_cannot_be_written_to_is_an_error_of_one_line(source, target, monkeypatch):
    monkeypatch.chdir(source.parent)
    with pytest.raises(GraphFileError, match="cannot write the file"):
        write_graph(read_graph(str(source)), small_graph(), target)
    assert [path.name for path in source.parent.iterdir()] == ["in.pb"]


# ------------------------------------------------------------------------------------------------------ 2 GiB


def test_the_limit_is_protobufs_own():
    assert files.MAX_MESSAGE_BYTES == 2**31 - 1


@each_form
@each_kind
def test_a_message_over_the_limit_is_not_written(tmp_path, monkeypatch, kind, is_text):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(serialised(MESSAGES[kind](), is_text))
    found = read_graph(str(source))
    write_graph(found, other_graph(), str(target))
    size = target.stat().st_size
    monkeypatch.setattr(files, "MAX_MESSAGE_BYTES", size)
    write_graph(found, other_graph(), str(target))
    target.unlink()

    monkeypatch.setattr(files, "MAX_MESSAGE_BYTES", size - 1)
    with pytest.raises(GraphFileError, match="too large to be written"):
        write_graph(found, other_graph(), str(target))
    assert not target.exists()


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(source, monkeypatch):
    content = source.read_bytes()
    source.write_bytes(gzip.compress(content))
    monkeypatch.setattr(files, "MAX_MESSAGE_BYTES", len(content) - 1)
    with pytest.raises(GraphFileError, match="the file is too large"):
        read_graph(str(source))
    monkeypatch.setattr(files, "MAX_MESSAGE_BYTES", len(content))
    assert read_graph(str(source)).graph_def == small_graph()
