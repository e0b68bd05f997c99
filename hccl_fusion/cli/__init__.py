"""The command line: thin commands, each in a file of its own, loaded when it is called."""

from __future__ import annotations

__all__ = ["main"]

from hccl_fusion.cli.main import main
