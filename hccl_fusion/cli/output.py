"""How results are printed: tables by rich, JSON, byte sizes, progress."""

from __future__ import annotations

__all__ = ["Progress", "human_bytes", "print_json", "print_table"]

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

import click

from graph_passes.pipeline import GraphPass, PassResult

_PIPE_WIDTH = 100_000


def human_bytes(size_bytes: int | None) -> str:
    """`97.5 MiB`; `?` where the size is not known."""
    if size_bytes is None:
        return "?"
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout, in ASCII: no terminal or pipe can spoil it."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table on stdout. Column names that end in `>` are right-aligned. In a pipe nothing is cut or folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        justify = "right" if column.endswith(">") else "left"
        table.add_column(column.rstrip(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(table)
    # rich pads every line to the table's width; trailing blanks only disturb diffs of saved output.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


class Progress:
    """A bar on stderr for work that takes longer than a second, when stderr is a terminal."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self._steps = steps
        self._done = 0
        self._current = "reading the graph"
        self._bar: Any = None
        self._is_over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(1.0, self._show)
        self._timer.daemon = True
        self._is_shown = sys.stderr.isatty() and not quiet

    def __enter__(self) -> Progress:
        if self._is_shown:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()

    def __call__(self, graph_pass: GraphPass, result: PassResult, _: int) -> None:
        """An observer of a pipeline: one step a pass."""
        self.step(f"pass {graph_pass.name}: {', '.join(result.notes)}")

    def step(self, text: str) -> None:
        """One step is done."""
        with self._lock:
            self._done += 1
            self._current = text
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done, description=text)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with self._lock:
            if self._is_over:  # while rich was being loaded
                return
            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._current, total=self._steps, completed=self._done)
            self._bar.start()
