"""Aligned text tables: plain strings for a pipe or a repr, rich ones for a terminal."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

WIDTH = 100
"""Columns that a plain table fits in."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A header and rows of text; the last column takes what width is left and wraps.

    Attributes:
        header: the column titles.
        rows: one tuple of cells each, as long as the header.
        right: titles of the columns that hold numbers, and so are aligned to the right.

    Example:
        >>> print(Table(("rule", "fired"), (("glu", "8"),), right=("fired",)))
        rule  fired
        glu       8
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The table as plain text, at most `WIDTH` columns wide where cells allow it."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        last = max(20, WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1))
        return "\n".join(
            line for row in (self.header, *self.rows) for line in self._lines(row, widths, last)
        )

    def _lines(self, row: Sequence[str], widths: Sequence[int], last: int) -> list[str]:
        cells = [
            cell.rjust(width) if title in self.right else cell.ljust(width)
            for cell, width, title in zip(row, widths, self.header, strict=True)
        ]
        head = "".join(cell + "  " for cell in cells[:-1])
        tail = cells[-1] if self.header[-1] in self.right else row[-1]
        text = textwrap.wrap(tail, last, break_on_hyphens=False) if row[-1] == tail else [tail]
        lines = text or [""]
        return [(head + lines[0]).rstrip(), *(" " * len(head) + line for line in lines[1:])]


def show(text: str, tables: Sequence[Table] = (), file: TextIO | None = None) -> None:
    """Print a text and tables: with rich's colours on a terminal, plain everywhere else.

    Args:
        text: what to print first, "" for nothing.
        tables: what to print after it.
        file: where to, standard output by default.
    """
    file = sys.stdout if file is None else file
    if not file.isatty():
        print("\n\n".join(part for part in (text, *map(str, tables)) if part), file=file)
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(file=file)
    if text:
        console.print(text, markup=False, highlight=False)
    for i, table in enumerate(tables):
        if text or i:
            console.print()
        view = RichTable(box=None, header_style="bold", pad_edge=False)
        for title in table.header:
            view.add_column(title, justify="right" if title in table.right else "left")
        for row in table.rows:
            view.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(view)


def size(count: int | float) -> str:
    """A number of bytes with its binary unit, three digits at most before it.

    Example:
        >>> size(0), size(1536), size(-3 * 2**30)
        ('0 B', '1.5 KiB', '-3.0 GiB')
    """
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
