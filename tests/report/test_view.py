"""Parts as text, on a terminal and as HTML; the progress line that no pipe ever sees."""

from __future__ import annotations

import io
import time
from html.parser import HTMLParser

import pytest

from graphopt.report.progress import progress
from graphopt.report.table import WIDTH, Table
from graphopt.report.view import Code, Heading, html_fragment, html_page, plain, show_parts, wrap

PARTS = [
    Heading("Rules"),
    "two of them: x[0] <b>",
    Table(("rule", "fired"), (("glu", "8"),), right=("fired",), notes=("see [1] & below",)),
    Code("- a[0]\n+ b", "changes:", diff=True),
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "GRAPHOPT_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_text() -> None:
    assert plain(PARTS) == (
        "Rules\n-----\ntwo of them: x[0] <b>\n\n"
        "rule  fired\nglu       8\n    see [1] & below\n\n"
        "changes:\n    - a[0]\n    + b"
    )


def test_a_pipe_gets_plain_text() -> None:
    out = io.StringIO()
    show_parts(PARTS, out)
    assert out.getvalue() == plain(PARTS) + "\n"


def test_a_terminal_gets_styles_and_every_word() -> None:
    out = Terminal()
    show_parts(PARTS, out)
    text = out.getvalue()
    assert "\x1b[" in text
    for word in ("x[0] <b>", "see [1] & below", "- a[0]", "changes:"):
        assert word in text


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_codes_where_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    out = Terminal()
    show_parts(PARTS, out)
    assert out.getvalue() == plain(PARTS) + "\n"


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    out = Terminal()
    show_parts(PARTS, out)
    assert out.getvalue() == plain(PARTS) + "\n"


def test_html_escapes_every_part() -> None:
    page = html_page("<title>", PARTS)
    assert page.startswith("<!doctype html>")
    for text in ("&lt;title&gt;", "x[0] &lt;b&gt;", "see [1] &amp; below"):
        assert text in page
    assert "<b>" not in page
    assert html_fragment(PARTS) in page


class Balance(HTMLParser):
    """Raises where a tag is closed that is not the one open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_closes_every_tag() -> None:
    checker = Balance()
    checker.feed(html_page("title", [*PARTS, Code("x\n" * 100, "long", diff=True)]))
    assert checker.open == []


def test_long_code_is_folded_in_html() -> None:
    assert "<details>" in html_fragment([Code("x\n" * 100)])
    assert "<details>" not in html_fragment([Code("x\n" * 3)])


def test_wrapped_lines_fit_and_hang() -> None:
    lines = wrap("  - " + "word " * 60).split("\n")
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.startswith("    word") for line in lines[1:])


def test_progress_writes_nothing_into_a_pipe() -> None:
    out = io.StringIO()
    with progress("work", stream=out, delay=0.0) as say:
        say("1 of 2")
        time.sleep(0.05)
    assert out.getvalue() == ""


def test_progress_shows_and_wipes_its_line_on_a_terminal() -> None:
    out = Terminal()
    with progress("work", stream=out, delay=0.0) as say:
        say("1 of 2")
        with progress("inner"):  # adds to the line that is there
            time.sleep(0.5)
    text = out.getvalue()
    assert "graphopt: work 1 of 2" in text
    assert "\x1b" not in text
    assert "\n" not in text
    assert text.rpartition("\r")[2] == ""  # the cursor is back at the start of an empty line
    assert text.split("\r")[-2].strip() == ""


def test_short_work_shows_no_progress() -> None:
    out = Terminal()
    with progress("work", stream=out):
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize(("name", "value"), [("GRAPHOPT_PROGRESS", "0"), ("TERM", "dumb")])
def test_progress_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    out = Terminal()
    with progress("work", stream=out, delay=0.0):
        time.sleep(0.05)
    assert out.getvalue() == ""


def test_progress_ends_when_the_work_fails() -> None:
    out = Terminal()

    def fails() -> None:
        with progress("work", stream=out, delay=0.0):
            time.sleep(0.3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert out.getvalue().endswith("\r")
    with progress("more", stream=out, delay=10.0):  # a line of its own again
        pass
