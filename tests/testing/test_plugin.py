"""The fixture writes a failure's script into pytest's temporary folder and says where."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from subjects import WRONG_RULES, Block, inputs, make_block, optimized

from graphopt.testing import EquivalenceError, inputs_like
from graphopt.testing.plugin import graphopt_equivalent  # noqa: F401

Check = Callable[..., Any]


@settings(max_examples=2)
@given(inputs_like(inputs()))
def test_what_is_right_passes(graphopt_equivalent: Check, drawn: tuple[Any, Any]) -> None:  # noqa: F811
    model = Block()
    found = graphopt_equivalent(model, optimized(model), *drawn)
    assert found.comparison.passed


def test_the_script_of_a_failure_is_written(graphopt_equivalent: Check) -> None:  # noqa: F811
    model = make_block()
    opt = optimized(model, rules=WRONG_RULES)
    with pytest.raises(EquivalenceError) as caught:
        graphopt_equivalent(model, opt, inputs(), factory=make_block)
    error = caught.value
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    place = re.search(r"the script is (\S+reproduce\.py)", said)
    assert place is not None
    assert Path(place[1]).read_text() == error.script
