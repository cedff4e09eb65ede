"""The code in docs/testing.md runs, and what it says of a failure is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from subjects import WRONG_RULES, inputs, make_block, optimized

from graphopt import testing

TEXT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")
def test_the_blocks_run() -> None:
    *blocks, by_fixture = (text for language, text in BLOCKS if language == "python")
    code = "\n".join(blocks).replace("max_examples=50", "max_examples=2")
    scope: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, "testing.md", "exec"), scope)
    scope["test_block"]()
    exec(compile(by_fixture, "testing.md", "exec"), scope)
    scope["test_block"](testing.assert_equivalent)


def test_the_failure_reads_as_shown() -> None:
    model = make_block()
    with pytest.raises(testing.EquivalenceError) as caught:
        testing.assert_equivalent(model, optimized(model, rules=WRONG_RULES), inputs())
    (shown,) = (text for language, text in BLOCKS if language == "text")
    lines = str(caught.value).partition('\n\n"""')[0].splitlines()
    for ours, theirs in zip(
        shown.splitlines(),
        ["graphopt.testing.failure.EquivalenceError: " + lines[0], *lines[1:]],
        strict=True,
    ):
        assert _plain(ours) == _plain(theirs)


def _plain(line: str) -> str:
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", line)


def test_every_public_name_is_there_and_on_the_page() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__doc__
    missing = [n for n in testing.__all__ if f"{n}" not in TEXT]
    assert missing == []
