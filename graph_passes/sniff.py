"""Finds out what a file holds by its content: which message, binary or text.

A GraphDef and a MetaGraphDef share their first field numbers, so the first nested message decides:
a NodeDef has an op name in field 2 where a MetaInfoDef has a list of op definitions, and so on.
"""

from __future__ import annotations

__all__ = ["GraphKind", "describe_foreign", "kind_of_binary", "kind_of_text"]

import enum
import re

from graph_passes.wire import BYTES, VARINT, Field, WireError, fields


class GraphKind(enum.Enum):
    """The message that a file holds."""

    GRAPH_DEF = "GraphDef"
    META_GRAPH_DEF = "MetaGraphDef"
    SAVED_MODEL = "SavedModel"


_OP_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_.>/-]*\Z")
_TEXT_FIELDS = {
    "node": GraphKind.GRAPH_DEF,
    "versions": GraphKind.GRAPH_DEF,
    "version": GraphKind.GRAPH_DEF,
    "library": GraphKind.GRAPH_DEF,
    "meta_info_def": GraphKind.META_GRAPH_DEF,
    "graph_def": GraphKind.META_GRAPH_DEF,
    "saver_def": GraphKind.META_GRAPH_DEF,
    "collection_def": GraphKind.META_GRAPH_DEF,
    "signature_def": GraphKind.META_GRAPH_DEF,
    "asset_file_def": GraphKind.META_GRAPH_DEF,
    "object_graph_def": GraphKind.META_GRAPH_DEF,
    "saved_model_schema_version": GraphKind.SAVED_MODEL,
    "meta_graphs": GraphKind.SAVED_MODEL,
}
_MAGIC = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "an executable",
    b"\x89HDF": "an HDF5 file",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
}


def describe_foreign(data: bytes) -> str | None:
    """The name of a well-known format that is no graph, for error messages; None where it is not known."""
    return next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)


def _first(data: bytes, field: Field, number: int) -> Field | None:
    """The first field `number` of the nested message in `field`."""
    return next((f for f in fields(data, field.payload, field.end) if f.number == number), None)


def _kind_by_field_1(data: bytes, field: Field) -> GraphKind | None:
    """None where it can be a node without an op as well as a MetaInfoDef without a list of ops."""
    if field.wire_type == VARINT:
        return GraphKind.SAVED_MODEL
    op = _first(data, field, 2)
    if op is not None and op.wire_type == BYTES and _OP_NAME.match(data[op.payload : op.end]):
        return GraphKind.GRAPH_DEF
    name = _first(data, field, 1)
    return None if op is None and name is not None else GraphKind.META_GRAPH_DEF


def _kind_by_field_2(data: bytes, field: Field) -> GraphKind:
    inner = _first(data, field, 1)
    if inner is None:
        return GraphKind.GRAPH_DEF
    leaf = _first(data, inner, 1)
    is_signature = leaf is not None and data[leaf.payload : leaf.payload + 1] == b"\n"
    return GraphKind.GRAPH_DEF if is_signature else GraphKind.META_GRAPH_DEF


def kind_of_binary(data: bytes) -> GraphKind:
    """The kind of a serialised message; only its first fields are looked at.

    Raises:
        WireError: the bytes are no protobuf message, or none of the three.
    """
    has_nodes = False
    for field in fields(data):
        kind = _kind_by_field(data, field)
        if kind is not None:
            return kind
        has_nodes |= field.number == 1
    if not has_nodes:
        raise WireError(0, "no field of a graph")
    # Nodes without an op are a broken GraphDef, and are reported as one further on.
    return GraphKind.GRAPH_DEF


def _kind_by_field(data: bytes, first: Field) -> GraphKind | None:
    """None where this field alone does not decide."""
    if first.number == 1:
        return _kind_by_field_1(data, first)
    if first.number == 2:
        return _kind_by_field_2(data, first)
    if first.number == 3:
        return GraphKind.GRAPH_DEF if first.wire_type == VARINT else GraphKind.META_GRAPH_DEF
    if first.number == 4:
        nested = next(fields(data, first.payload, first.end), None)
        is_versions = nested is None or nested.wire_type == VARINT
        return GraphKind.GRAPH_DEF if is_versions else GraphKind.META_GRAPH_DEF
    if first.number in (5, 6, 7):
        return GraphKind.META_GRAPH_DEF
    return None


def kind_of_text(text: str) -> GraphKind | None:
    """The kind of a text message by its first field; None where the text does not start like one."""
    match = re.match(r"(?:\s|#[^\n]*(?:\n|\Z))*([A-Za-z_]\w*)\s*[:{<]", text)
    return _TEXT_FIELDS.get(match.group(1)) if match else None
