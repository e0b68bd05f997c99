"""The four ways in which a node names an input, parsed in one place.

| text         | meaning                                                       |
|--------------|---------------------------------------------------------------|
| `name`       | output 0 of a node, or an argument of the function around it  |
| `name:1`     | output 1                                                      |
| `^name`      | control edge                                                  |
| `name:arg:1` | element 1 of output `arg`; only inside function bodies        |
"""

from __future__ import annotations

__all__ = ["NodeInput", "parse_input", "producer_name"]

from typing import NamedTuple


class NodeInput(NamedTuple):
    """One input of a node. `arg` is empty outside function bodies; `port` is -1 on a control edge."""

    name: str
    port: int = 0
    arg: str = ""

    @property
    def is_control(self) -> bool:
        """True for `^name`."""
        return self.port < 0

    def __str__(self) -> str:
        if self.is_control:
            return f"^{self.name}"
        if self.arg:
            return f"{self.name}:{self.arg}:{self.port}"
        return f"{self.name}:{self.port}" if self.port else self.name


def parse_input(text: str) -> NodeInput:
    """Parses one entry of `NodeDef.input`.

    Raises:
        ValueError: the text is none of the four forms.
    """
    if text[:1] == "^":
        return NodeInput(text[1:], -1)
    if ":" not in text:
        return NodeInput(text)
    parts = text.split(":")
    if len(parts) > 3 or not all(parts) or not (parts[-1].isascii() and parts[-1].isdecimal()):
        raise ValueError(f"{text!r} is not an input (name, name:port, ^name or name:arg:port)")
    return NodeInput(parts[0], int(parts[-1]), parts[1] if len(parts) == 3 else "")


def producer_name(text: str) -> str:
    """The node that an input comes from; quick, for texts that are already known to be well formed."""
    if text.startswith("^"):
        return text[1:]
    colon = text.find(":")
    return text if colon < 0 else text[:colon]
