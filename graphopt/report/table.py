"""Aligned text tables."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns that a plain table fits in."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A header and rows of text; the last column takes what width is left and wraps.

    Attributes:
        header: the column titles.
        rows: one tuple of cells each, as long as the header.
        right: titles of the columns that hold numbers, and so are aligned to the right.
        notes: a sentence below each row, "" for none; empty for a table without notes.

    Example:
        >>> print(Table(("rule", "fired"), (("glu", "8"),), right=("fired",)))
        rule  fired
        glu       8
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The table as plain text, at most `WIDTH` columns wide where cells allow it."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        last = max(20, WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1))
        lines = self._lines(self.header, widths, last)
        for i, row in enumerate(self.rows):
            lines += self._lines(row, widths, last)
            lines += _note(self.notes[i]) if self.notes else []
        return "\n".join(lines)

    def _lines(self, row: Sequence[str], widths: Sequence[int], last: int) -> list[str]:
        cells = [
            cell.rjust(width) if title in self.right else cell.ljust(width)
            for cell, width, title in zip(row, widths, self.header, strict=True)
        ]
        head = "".join(cell + "  " for cell in cells[:-1])
        tail = cells[-1] if self.header[-1] in self.right else row[-1]
        text = [tail]
        if row[-1] == tail:
            text = textwrap.wrap(tail, last, break_on_hyphens=False, break_long_words=False)
        lines = text or [""]
        return [(head + lines[0]).rstrip(), *(" " * len(head) + line for line in lines[1:])]


def _note(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )


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


def percent(less: float) -> str:
    """A share that is saved, as the change that it is.

    Example:
        >>> percent(0.304), percent(-0.02), percent(0.001)
        ('-30%', '+2%', '+0%')
    """
    text = f"{-100 * less:+.0f}%"
    return "+0%" if text == "-0%" else text


def flops_text(count: int) -> str:
    """A number of floating-point operations with its decimal unit.

    Example:
        >>> flops_text(999), flops_text(46_900_000)
        ('999 FLOP', '46.9 MFLOP')
    """
    value = float(count)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if value < 1000 or unit == "TFLOP":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "FLOP" else f"{value:.1f} {unit}"
