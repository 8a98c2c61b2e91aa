"""What a command says: its result on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from onnxtrain.device.loop.progress import ProgressDisplay, make_progress
from onnxtrain.errors import one_line, printable

Row = Sequence[Any]


class Console:
    """Shows results as text for people, or as JSON for programs."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(self, content: dict[str, Any], text: str = "") -> None:
        """Write the result of a command: the content as JSON if that was asked for, or the text.

        JSON has no word for numbers that are not finite: they are null.
        """
        if self.as_json:
            plain = json.loads(json.dumps(content, default=_plain), parse_constant=lambda _: None)
            print(json.dumps(plain, indent=2), flush=True)
        elif text and not self.quiet:
            print(printable(text), flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Write a table, unless JSON was asked for. Numbers stand to the right."""
        if self.as_json or self.quiet:
            return
        if sys.stdout.isatty():
            try:
                _rich_table(columns, rows)
                return
            except ModuleNotFoundError:
                pass
        print(plain_table(columns, rows), flush=True)

    def note(self, text: str) -> None:
        """Say something on the way."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """Say what is wrong, quiet or not."""
        print(printable(text), file=sys.stderr, flush=True)

    def progress(self) -> ProgressDisplay:
        """How to show training: a bar on a terminal, lines elsewhere, nothing if quiet."""
        if self.quiet:
            return make_progress(False)
        if _is_terminal(sys.stderr):
            try:
                from onnxtrain.cli.rich_bar import RichBar

                return RichBar()
            except ModuleNotFoundError:
                pass
        return make_progress(None)


def _plain(value: Any) -> Any:
    """Return numbers of numpy and paths as what JSON has."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _is_terminal(stream: TextIO) -> bool:
    return stream is not None and stream.isatty()


def megabytes(size: float) -> str:
    """Return a number of bytes as people read it."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1024 or unit == "MB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def plain_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table as lines of text."""
    cells = [
        [one_line(name) for name in columns],
        *([_cell(value) for value in row] for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if at_right else text.ljust(width)
            for text, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else one_line(value)


def _rich_table(columns: Sequence[str], rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        right = all(_is_number(row[index]) for row in rows)
        table.add_column(
            Text(one_line(name)), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    Terminal().print(table)
