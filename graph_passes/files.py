"""Reads and writes every kind of file that holds a graph.

GraphDef, MetaGraphDef and SavedModel (the file or its folder), binary or text, each also gzipped, `-` for
stdin and stdout. The kind is found by content. What came in as a MetaGraphDef or SavedModel goes out as one, with
all else kept byte for byte. An output appears whole or not at all.
"""

from __future__ import annotations

__all__ = ["MAX_MESSAGE_BYTES", "GraphFile", "read_graph", "write_graph"]

import gzip
import os
import sys
import zlib
from dataclasses import dataclass, field

from google.protobuf import text_format
from google.protobuf.message import DecodeError, EncodeError

from graph_passes.atomic import replace_file, replace_folder
from graph_passes.errors import GraphFileError
from graph_passes.messages import GraphDef
from graph_passes.sniff import GraphKind, describe_foreign, kind_of_binary, kind_of_text
from graph_passes.text_blocks import text_blocks, unclosed_brace
from graph_passes.wire import WireError, field_bytes, fields, length_delimited

MAX_MESSAGE_BYTES = 2**31 - 1
"""Protobuf's own limit for one message."""

_EXPECTED = "a GraphDef, MetaGraphDef or SavedModel (binary or text, also gzipped)"
_SAVED_MODEL_NAMES = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True)
class GraphFile:
    """A graph and what is needed to write it back as the same kind of file.

    Attributes:
        path: as the user gave it; `-` is stdin.
        kind: the message that the file holds.
        is_text: text format rather than binary.
        is_gzip: the content was gzipped.
        graph_def: the graph (of a SavedModel: of the meta graph in use).
        content: the whole decompressed file, for all that is not the graph.
        graph_range: where in `content` the graph's payload stands.
    """

    path: str
    kind: GraphKind
    is_text: bool
    is_gzip: bool
    graph_def: GraphDef = field(repr=False)
    content: bytes = field(default=b"", repr=False)
    graph_range: tuple[int, int] = (0, 0)


def read_graph(path: str) -> GraphFile:
    """Reads a graph of any kind.

    Raises:
        GraphFileError: the file is missing, empty, cut short, or holds something else.
    """
    raw = _read_bytes(path)
    is_gzip = raw.startswith(b"\x1f\x8b")
    data = _gunzip(path, raw) if is_gzip else raw
    if not data.strip():
        raise GraphFileError(
            "the file is empty",
            where=path,
            found=f"{len(data)} bytes",
            expected=_EXPECTED,
            remedy="writing the graph again",
        )
    text = _as_text(data)
    text_kind = kind_of_text(text) if text is not None else None
    if text is not None and text_kind is not None:
        return _read_text(path, data, text, text_kind, is_gzip)
    return _read_binary(path, data, is_gzip)


def _read_bytes(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    if os.path.isdir(path):
        path = _inside_saved_model(path)
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise GraphFileError(
            "cannot read the file",
            where=path,
            found=getattr(error, "strerror", None) or str(error),
            expected=_EXPECTED,
            remedy="checking the path",
        ) from error


def _inside_saved_model(folder: str) -> str:
    for name in _SAVED_MODEL_NAMES:
        candidate = os.path.join(folder, name)
        if os.path.exists(candidate):
            return candidate
    raise GraphFileError(
        "the folder is no SavedModel",
        where=folder,
        found="no saved_model.pb in it",
        expected="a SavedModel folder or a graph file",
        remedy="naming the graph file itself",
    )


def _gunzip(path: str, raw: bytes) -> bytes:
    """The content of all members: gzip files may be joined end to end, and padded with zeros."""
    data = b""
    rest = raw
    while rest.strip(b"\x00"):
        inflater = zlib.decompressobj(wbits=31)
        try:
            data += inflater.decompress(rest, MAX_MESSAGE_BYTES + 1 - len(data))
        except zlib.error as error:
            raise GraphFileError(
                "the gzip data is damaged",
                where=path,
                found=str(error),
                expected=_EXPECTED,
                remedy="writing the file again",
            ) from error
        if len(data) > MAX_MESSAGE_BYTES:
            raise GraphFileError(
                "the file is too large",
                where=path,
                found="more than 2 GiB when unpacked",
                expected="at most 2 GiB, protobuf's limit for one message",
                remedy="storing large constants elsewhere",
            )
        if not inflater.eof:
            raise GraphFileError(
                "the gzip data is cut short",
                where=path,
                found=f"{len(raw)} bytes",
                expected="its end mark",
                remedy="copying the file again",
            )
        rest = inflater.unused_data
    return data


def _as_text(data: bytes) -> str | None:
    if b"\x00" in data[:4096]:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


# ---------------------------------------------------------------------------------------------------- reading


def _read_binary(path: str, data: bytes, is_gzip: bool) -> GraphFile:
    try:
        kind = kind_of_binary(data)
        start, end = _binary_graph_range(path, data, kind)
        graph_def = GraphDef.FromString(data[start:end] if (start, end) != (0, len(data)) else data)
    except (WireError, DecodeError) as error:
        raise _binary_error(path, data, error) from error
    _require_nodes(path, graph_def)
    content = data if kind is not GraphKind.GRAPH_DEF else b""
    return GraphFile(path, kind, False, is_gzip, graph_def, content, (start, end))


def _binary_error(path: str, data: bytes, error: Exception) -> GraphFileError:
    """Names the place where reading stopped; only now is the whole file walked."""
    foreign = describe_foreign(data)
    try:
        for _ in fields(data):
            pass
    except WireError as walk:
        if foreign is None and walk.is_cut:
            return GraphFileError(
                "the file is cut short or damaged",
                where=f"{path}, byte {walk.offset} of {len(data)}",
                found=walk.reason,
                expected=_EXPECTED,
                remedy="copying or writing the file again",
            )
    if foreign is None:
        foreign = (
            f"bytes {data[:8].hex(' ')}" if _as_text(data) is None else f"text {data[:20].decode('utf-8', 'replace')!r}"
        )
    if isinstance(error, DecodeError):
        foreign += ", a message that does not decode"
    return GraphFileError(
        "the file is no graph",
        where=path,
        found=foreign,
        expected=_EXPECTED,
        remedy="a file written by tf.io.write_graph or Saver",
    )


def _require_nodes(path: str, graph_def: GraphDef) -> None:
    if not graph_def.node and not graph_def.library.function:
        raise GraphFileError(
            "the file holds no node",
            where=path,
            found="a graph of 0 nodes",
            expected=_EXPECTED,
            remedy="a file written by tf.io.write_graph or Saver",
        )


def _binary_graph_range(path: str, data: bytes, kind: GraphKind) -> tuple[int, int]:
    if kind is GraphKind.GRAPH_DEF:
        return 0, len(data)
    start, end = 0, len(data)
    if kind is GraphKind.SAVED_MODEL:
        metas = [f for f in fields(data) if f.number == 2]
        tags = [_meta_graph_tags(data, f.payload, f.end) for f in metas]
        chosen = metas[_choose_meta_graph(path, tags)]
        start, end = chosen.payload, chosen.end
    graphs = [f for f in fields(data, start, end) if f.number == 2]
    _require_one_graph(path, len(graphs))
    return graphs[0].payload, graphs[0].end


def _meta_graph_tags(data: bytes, start: int, end: int) -> tuple[str, ...]:
    info = next((f for f in fields(data, start, end) if f.number == 1), None)
    if info is None:
        return ()
    tags = [f for f in fields(data, info.payload, info.end) if f.number == 4]
    return tuple(field_bytes(data, f).decode("utf-8", "replace") for f in tags)


def _choose_meta_graph(path: str, tags: list[tuple[str, ...]]) -> int:
    """The meta graph tagged `train`, else the only one.

    A SavedModel with several graphs and none for training leaves nothing to choose by.
    """
    train = [i for i, names in enumerate(tags) if "train" in names]
    if train or len(tags) == 1:
        return train[0] if train else 0
    raise GraphFileError(
        "cannot tell which meta graph to use",
        where=path,
        found=f"{len(tags)} meta graphs, none tagged train",
        expected="one, or one tagged train",
        remedy="saving the training graph alone",
    )


def _require_one_graph(path: str, count: int) -> None:
    if count != 1:
        raise GraphFileError(
            "the meta graph has no single graph",
            where=path,
            found=f"{count} graph_def fields",
            expected="one graph_def",
            remedy="saving the graph again",
        )


def _read_text(path: str, data: bytes, text: str, kind: GraphKind, is_gzip: bool) -> GraphFile:
    start, end = _text_graph_range(path, text, kind)
    # Leading blanks keep the parser's line and column numbers true to the file.
    padding = "\n" * text.count("\n", 0, start) + " " * (start - text.rfind("\n", 0, start) - 1)
    try:
        graph_def = text_format.Parse(padding + text[start:end] if start else text[:end], GraphDef())
    except text_format.ParseError as error:
        raise _text_error(path, error) from error
    except RecursionError as error:
        raise GraphFileError(
            "the text does not parse",
            where=path,
            found="messages nested too deeply",
            expected="a GraphDef in protobuf text format",
            remedy="writing the graph again",
        ) from error
    _require_nodes(path, graph_def)
    content = data if kind is not GraphKind.GRAPH_DEF else b""
    return GraphFile(path, kind, True, is_gzip, graph_def, content, (start, end))


def _text_graph_range(path: str, text: str, kind: GraphKind) -> tuple[int, int]:
    if kind is GraphKind.GRAPH_DEF:
        return 0, len(text)
    _require_closed(path, text)
    start, end = 0, len(text)
    if kind is GraphKind.SAVED_MODEL:
        metas = text_blocks(text, "meta_graphs")
        tags = [_text_tags(text, block) for block in metas]
        start, end = metas[_choose_meta_graph(path, tags)]
    graphs = text_blocks(text, "graph_def", start, end)
    _require_one_graph(path, len(graphs))
    return graphs[0]


def _require_closed(path: str, text: str) -> None:
    opened_at = unclosed_brace(text)
    if opened_at is not None:
        line, column = text.count("\n", 0, opened_at) + 1, opened_at - text.rfind("\n", 0, opened_at)
        raise GraphFileError(
            "the file is cut short or damaged",
            where=f"{path}, line {line}, column {column}",
            found="a brace that is never closed",
            expected=_EXPECTED,
            remedy="copying or writing the file again",
        )


def _text_tags(text: str, block: tuple[int, int]) -> tuple[str, ...]:
    info = text_blocks(text, "meta_info_def", *block)
    return ("train",) if info and 'tags: "train"' in text[info[0][0] : info[0][1]] else ()


def _text_error(path: str, error: text_format.ParseError) -> GraphFileError:
    line, column = error.GetLine() or 0, error.GetColumn() or 0
    found = str(error)
    prefix = f"{line}:{column} : "
    return GraphFileError(
        "the text does not parse",
        where=f"{path}, line {line}, column {column}",
        found=(found[len(prefix) :] if found.startswith(prefix) else found)[:200],
        expected="a GraphDef in protobuf text format",
        remedy="correcting that line",
    )


# ---------------------------------------------------------------------------------------------------- writing


def write_graph(source: GraphFile, graph_def: GraphDef, path: str, *, overwrite_input: bool = False) -> None:
    """Writes `graph_def` as the kind of file that `source` was; gzipped where the name ends in `.gz`.

    To stdout (`-`) it is gzipped where the source was. Equal graphs give equal bytes.

    Raises:
        GraphFileError: the output is the input and `overwrite_input` is not set, the message would pass protobuf's
            2 GiB, or the file cannot be written. Nothing is left half-written.
    """
    content = _serialise(source, graph_def, path)
    if path.endswith(".gz") or (path == "-" and source.is_gzip):
        content = gzip.compress(content, 6, mtime=0)
    _refuse_input(source, path, overwrite_input)
    try:
        if path == "-":
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        elif source.path != "-" and os.path.isdir(source.path):
            replace_folder(source.path, path, {_saved_model_name(source.path): content})
        else:
            replace_file(path, content)
    except BrokenPipeError:  # the reader of stdout has gone; no fault of ours
        raise
    except OSError as error:
        raise GraphFileError(
            "cannot write the file",
            where=path,
            found=error.strerror or str(error),
            expected="a writable place",
            remedy="another output path",
        ) from error


def _saved_model_name(folder: str) -> str:
    return os.path.basename(_inside_saved_model(folder))


def _refuse_input(source: GraphFile, path: str, overwrite_input: bool) -> None:
    if overwrite_input or "-" in (path, source.path) or not os.path.exists(path) or not os.path.exists(source.path):
        return
    if os.path.samefile(source.path, path):
        raise GraphFileError(
            "the output would overwrite the input",
            where=path,
            found="the same file",
            expected="another name",
            remedy="another output path, or --overwrite",
        )


def _serialise(source: GraphFile, graph_def: GraphDef, path: str) -> bytes:
    try:
        if source.is_text:
            payload = text_format.MessageToString(graph_def).encode("utf-8")
        else:
            payload = graph_def.SerializeToString(deterministic=True)
        content = _splice(source, payload)
    except (EncodeError, ValueError) as error:
        raise _too_large(path, f"a message that protobuf cannot encode ({error})") from error
    if len(content) > MAX_MESSAGE_BYTES:
        raise _too_large(path, f"{len(content):,} bytes")
    return content


def _too_large(path: str, found: str) -> GraphFileError:
    return GraphFileError(
        "the graph is too large to be written",
        where=path,
        found=found,
        expected="at most 2 GiB, protobuf's limit for one message",
        remedy="storing large constants as variables",
    )


def _splice(source: GraphFile, payload: bytes) -> bytes:
    """Puts the new graph in the old one's place."""
    content = source.content
    if source.kind is GraphKind.GRAPH_DEF:
        return payload
    if source.is_text:
        text = content.decode("utf-8")
        start, end = source.graph_range
        return (text[:start] + "\n" + payload.decode("utf-8") + text[end:]).encode("utf-8")
    if source.kind is GraphKind.META_GRAPH_DEF:
        return _splice_field(content, 0, len(content), source.graph_range[0], payload)
    meta = next(f for f in fields(content) if f.payload <= source.graph_range[0] < f.end)
    inner = _splice_field(content, meta.payload, meta.end, source.graph_range[0], payload)
    return content[: meta.start] + length_delimited(meta.number, inner) + content[meta.end :]


def _splice_field(content: bytes, start: int, end: int, payload_at: int, payload: bytes) -> bytes:
    old = next(f for f in fields(content, start, end) if f.payload == payload_at)
    return content[start : old.start] + length_delimited(old.number, payload) + content[old.end : end]
