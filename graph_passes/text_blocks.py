"""Finds a nested message in a text-format file, so that its text can be replaced and the rest kept byte for byte."""

from __future__ import annotations

__all__ = ["text_blocks", "unclosed_brace"]

import re

_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_][\w.]*|[{}<>:]""")


def text_blocks(text: str, field: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """The content ranges of every `field { … }` that stands at the outermost level of text[start:end].

    An unclosed block is left out; see `unclosed_brace`.
    """
    blocks: list[tuple[int, int]] = []
    depth = 0
    opened_at: int | None = None
    last_name = ""
    for match in _TOKEN.finditer(text, start, len(text) if end is None else end):
        token = match.group()
        if token in "{<":
            if depth == 0 and last_name == field:
                opened_at = match.end()
            depth += 1
        elif token in "}>":
            depth -= 1
            if depth == 0 and opened_at is not None:
                blocks.append((opened_at, match.start()))
                opened_at = None
        elif token != ":" and depth == 0 and token[0] not in "#\"'":
            last_name = token
    return blocks


def unclosed_brace(text: str) -> int | None:
    """Where the outermost brace stands that is never closed; None where all are."""
    opened: list[int] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in "{<":
            opened.append(match.start())
        elif token in "}>" and opened:
            opened.pop()
    return opened[0] if opened else None
