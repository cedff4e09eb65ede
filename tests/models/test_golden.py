"""No fusion dies, or appears, unseen: the counts of every rule on every model are committed."""

from __future__ import annotations

import pytest
from golden import CURE, MODELS, count, differences, golden


@pytest.mark.parametrize("name", MODELS)
def test_rules_fire_as_often_as_committed(name: str) -> None:
    expected = golden().get(name)
    assert expected is not None, f"{name} is not in the golden table: {CURE}"
    lines = differences(name, count(name), expected)
    assert not lines, "\n".join([*lines, CURE])


def test_the_table_holds_no_model_that_is_gone() -> None:
    assert set(golden()) == set(MODELS)


def test_a_fallen_and_a_risen_count_are_told() -> None:
    old = {"train": {"a": 2, "b": 1}, "eval": {}}
    new = {"train": {"a": 1, "b": 1}, "eval": {"c": 1}}
    assert differences("m", new, old) == [
        "m train: a fell from 2 to 1",
        "m eval: c rose from 0 to 1",
    ]
