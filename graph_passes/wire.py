"""Protobuf's wire format at the level of one message's fields.

Reading and writing a MetaGraphDef or SavedModel must keep everything but the graph byte for byte, so the graph's
bytes are cut out of the file and the new ones put in their place; nothing else is ever decoded.
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

__all__ = ["Field", "WireError", "fields", "field_bytes", "length_delimited"]

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a protobuf message; `offset` is where reading failed, `is_cut` that they ended too early."""

    def __init__(self, offset: int, reason: str, *, is_cut: bool = False) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.offset = offset
        self.reason = reason
        self.is_cut = is_cut


class Field(NamedTuple):
    """One field of a message: tag at `start`, payload in [`payload`, `end`) of the buffer."""

    number: int
    wire_type: int
    start: int
    payload: int
    end: int


def _varint(data: memoryview, offset: int, end: int) -> tuple[int, int]:
    """Value and the offset after it."""
    value = shift = 0
    start = offset
    while offset < end and shift < 70:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset += 1
        if byte < 0x80:
            return value, offset
        shift += 7
    if offset >= end:
        raise WireError(start, "the data ends inside a number", is_cut=True)
    raise WireError(start, "a number is too long")


def fields(data: bytes | memoryview, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message in data[start:end], in file order, nested messages unopened.

    Raises:
        WireError: the bytes are no message, or end inside a field.
    """
    view = memoryview(data)
    stop = len(view) if end is None else end
    offset = start
    while offset < stop:
        tag, payload = _varint(view, offset, stop)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise WireError(offset, "field number 0")
        if wire_type == VARINT:
            _, after = _varint(view, payload, stop)
        elif wire_type == BYTES:
            size, payload = _varint(view, payload, stop)
            after = payload + size
        elif wire_type in (FIXED64, FIXED32):
            after = payload + (8 if wire_type == FIXED64 else 4)
        else:
            raise WireError(offset, f"unknown wire type {wire_type}")
        if after > stop:
            needed = f"a field needs {after - payload} bytes and {stop - payload} are left"
            raise WireError(offset, needed, is_cut=True)
        yield Field(number, wire_type, offset, payload, after)
        offset = after


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, payload: bytes) -> bytes:
    """A length-delimited field (string, bytes or message) as it stands in a file."""
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(payload)) + payload


def field_bytes(data: bytes | memoryview, field: Field) -> bytes:
    """The payload of a field."""
    return bytes(memoryview(data)[field.payload : field.end])
