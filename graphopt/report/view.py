"""What a result shows, as parts; and the parts as plain text, on a terminal, and as HTML.

A result lists its parts once: paragraphs, headings, tables, code. Its repr, `_repr_html_`, what the
command line prints and the report files are all made from that list.
"""

from __future__ import annotations

import dataclasses
import html
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from graphopt.report.table import WIDTH, Table


@dataclasses.dataclass(frozen=True)
class Heading:
    """The title of what follows."""

    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines of code; in a diff, those that begin with "+" and "-" are coloured.

    Attributes:
        text: the lines.
        title: one line above it, "" for none.
        diff: whether it is a diff.
    """

    text: str
    title: str = ""
    diff: bool = False


Part = str | Heading | Code | Table


def plain(parts: Iterable[Part]) -> str:
    """Parts as plain text, with an empty line between them.

    Example:
        >>> print(plain([Heading("Rules"), "two fired"]))
        Rules
        -----
        two fired
    """
    text = ""
    before: Part | None = None
    for part in parts:
        gap = "\n" if isinstance(before, Heading) else "\n\n"
        text += (gap if text else "") + _plain(part)
        before = part
    return text


def _plain(part: Part) -> str:
    if isinstance(part, Heading):
        return f"{part.text}\n{'-' * len(part.text)}"
    if isinstance(part, Code):
        body = "\n".join(f"    {line}".rstrip() for line in part.text.rstrip("\n").split("\n"))
        return f"{part.title}\n{body}" if part.title else body
    return str(part) if isinstance(part, Table) else "\n".join(map(wrap, part.split("\n")))


def wrap(line: str) -> str:
    """A line of text broken at `WIDTH`; below an indented one or an item, what follows is indented.

    Example:
        >>> wrap("  - a short line")
        '  - a short line'
    """
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return textwrap.fill(
        line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def wants_style(file: TextIO) -> bool:
    """Whether colours and bold type may be written: a terminal, `NO_COLOR` unset, rich there."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def show(text: str, tables: Sequence[Table] = (), file: TextIO | None = None) -> None:
    """Print a text and tables: with rich's styles on a terminal, plain everywhere else.

    Args:
        text: what to print first, "" for nothing.
        tables: what to print after it.
        file: where to, standard output by default.
    """
    parts: list[Part] = [text] if text else []
    show_parts([*parts, *tables], file)


def show_parts(parts: Sequence[Part], file: TextIO | None = None) -> None:
    """Print parts: with rich's styles on a terminal, as plain text everywhere else.

    Args:
        parts: what to print.
        file: where to, standard output by default.
    """
    file = sys.stdout if file is None else file
    if not wants_style(file):
        print(plain(parts), file=file)
        return
    from rich.console import Console

    console = Console(file=file)
    before: Part | None = None
    for part in parts:
        if before is not None and not isinstance(before, Heading):
            console.print()
        _print_styled(console, part)
        before = part


def _print_styled(console: Any, part: Part) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(part, Heading):
        console.print(Text(part.text, style="bold underline"))
    elif isinstance(part, Code):
        if part.title:
            console.print(Text(part.title, style="italic"))
        for line in part.text.rstrip("\n").split("\n"):
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "") if part.diff else ""
            console.print(Text(f"    {line}", style=style), soft_wrap=True)
    elif isinstance(part, Table):
        view = RichTable(box=None, header_style="bold", pad_edge=False)
        for title in part.header:
            view.add_column(title, justify="right" if title in part.right else "left")
        for row in part.rows:
            view.add_row(*map(Text, row))
        console.print(view if not part.notes else Text(str(part)))
    else:
        console.print(part, markup=False, highlight=False)


# ------------------------------------------------------------------------------- HTML


STYLE = """
.graphopt { font: 14px/1.45 system-ui, sans-serif; max-width: 1200px; color-scheme: light dark; }
.graphopt table { border-collapse: collapse; margin: .6em 0 1.2em; }
.graphopt th { text-align: left; border-bottom: 1px solid #8888; }
.graphopt th, .graphopt td { padding: .15em 1em .15em 0; vertical-align: top; }
.graphopt .n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.graphopt pre { background: #8881; padding: .6em .8em; overflow-x: auto; font-size: 12.5px; }
.graphopt .note { padding: 0 0 .5em 2em; opacity: .8; }
.graphopt p { white-space: pre-wrap; }
.graphopt .add { background: #2a82; } .graphopt .del { background: #d332; }
.graphopt summary { cursor: pointer; }
@media print { .graphopt pre { white-space: pre-wrap; } }
"""

LONG = 30
"""Code of more lines than this is folded in HTML."""


def html_fragment(parts: Iterable[Part]) -> str:
    """Parts as HTML for a notebook or a page; everything in them is escaped.

    Example:
        >>> "&lt;b&gt;" in html_fragment(["<b>"])
        True
    """
    return f"<style>{STYLE}</style><div class='graphopt'>{''.join(map(_html, parts))}</div>"


def html_page(title: str, parts: Iterable[Part]) -> str:
    """Parts as one file that needs no other and no network.

    Args:
        title: the page's title, plain text.
        parts: what it shows.
    """
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title></head><body>\n"
        f"{html_fragment(parts)}\n</body></html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h3>{html.escape(part.text)}</h3>\n"
    if isinstance(part, Table):
        return _html_table(part)
    if isinstance(part, Code):
        return _html_code(part)
    return f"<p>{html.escape(part)}</p>\n"


def _html_table(table: Table) -> str:
    kinds = [" class='n'" if title in table.right else "" for title in table.header]
    head = "".join(
        f"<th{k}>{html.escape(t)}</th>" for k, t in zip(kinds, table.header, strict=True)
    )
    rows = ""
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td{k}>{html.escape(c)}</td>" for k, c in zip(kinds, row, strict=True))
        rows += f"<tr>{cells}</tr>\n"
        if table.notes and table.notes[i]:
            note = html.escape(table.notes[i])
            rows += f"<tr><td colspan='{len(row)}' class='note'>{note}</td></tr>\n"
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>\n"


def _html_code(code: Code) -> str:
    lines = code.text.rstrip("\n").split("\n")
    kinds = {"+": " class='add'", "-": " class='del'"} if code.diff else {}
    body = "\n".join(f"<span{kinds.get(x[:1], '')}>{html.escape(x)}</span>" for x in lines)
    pre, title = f"<pre>{body}</pre>", html.escape(code.title)
    if len(lines) > LONG:
        summary = title or f"{len(lines)} lines"
        return f"<details><summary>{summary}</summary>{pre}</details>\n"
    return f"<p>{title}</p>{pre}\n" if title else f"{pre}\n"
