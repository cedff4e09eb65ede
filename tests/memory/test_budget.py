"""What may be written as a budget."""

from __future__ import annotations

import pytest

from graphopt.errors import BudgetError, OptionError
from graphopt.memory.budget import Budget, check_budget, check_resident, unreachable
from graphopt.memory.oracle import Holder

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (12 * GIB, 12 * GIB),
        ("12GiB", 12 * GIB),
        ("900MB", 900 * 10**6),
        ("0.5 GB", 5 * 10**8),
        (" 1.5gib ", 3 * GIB // 2),
        ("2048B", 2048),
    ],
)
def test_bytes(given, size):
    assert check_budget(given) == Budget(size=size)


@pytest.mark.parametrize("share", [0.5, 1.0, 1e-3])
def test_a_float_is_a_fraction(share):
    assert check_budget(share) == Budget(fraction=share)
    assert check_budget(share).bytes_of(10**6) == int(share * 10**6)


def test_none_is_no_budget():
    assert check_budget(None) is None


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (1, "1.0"),
        (0, "12GiB"),
        (-5, "12GiB"),
        (True, "fraction"),
        (0.0, "fraction"),
        (-0.5, "fraction"),
        (1.5, "fraction"),
        (8e9, "8000000000"),
        (float("nan"), "fraction"),
        (float("inf"), "fraction"),
        ("12", "'12GiB'"),
        ("12G", "'12GiB'"),
        ("12 parsecs", "12GiB"),
        ("50%", "0.5"),
        ("", "12GiB"),
        ("3B", "12GiB"),
        ([1], "12GiB"),
        (1j, "12GiB"),
    ],
)
def test_anything_else_is_refused(given, cure):
    with pytest.raises(OptionError, match="memory_budget is") as caught:
        check_budget(given)
    assert cure in (caught.value.try_ or "")


def test_a_number_as_text_is_told_what_it_may_mean():
    with pytest.raises(OptionError) as caught:
        check_budget("0.5")
    assert caught.value.try_ == "0.5, a float, for that part of the peak without a plan; '0.5GiB'"


def test_where_only_bytes_are_meant_no_fraction_is_named():
    with pytest.raises(OptionError) as caught:
        check_budget("x", "memory", None)
    assert "fraction" not in str(caught.value)


@pytest.mark.parametrize(("given", "count"), [(0, 0), (4096, 4096), ("2KiB", 2048)])
def test_resident_bytes(given, count):
    assert check_resident(given) == count


@pytest.mark.parametrize("given", [-1, 0.5, True, None, "much"])
def test_wrong_resident_bytes(given):
    with pytest.raises(OptionError, match="resident_bytes is"):
        check_resident(given)


def test_the_error_names_the_smallest_peak_and_what_holds_it():
    live = [
        Holder(f"v{i}", "forward", "activations", 100 + i, "op", "float32", (5, 5))
        for i in range(9)
    ]
    error = unreachable(Budget(fraction=0.25), 1024, 3 * 2**20 + 1, 4096, live)
    assert isinstance(error, BudgetError)
    assert "0.25 (1KiB of the 4KiB without a plan)" in error.what
    assert "3MiB" in error.what
    assert "v8  float32[5x5]" in error.why
    assert "in 3 others" in error.why
    assert "'3.01MiB'" in error.try_  # a budget that is kept


@pytest.mark.parametrize("given", [1.0, 0.5, 1e-5, "12GiB", 4096])
def test_a_budget_is_shown_as_it_can_be_given_again(given):
    shown = str(check_budget(given))
    again = shown if shown.endswith("B") else float(shown)
    assert "." in shown or "e" in shown or shown.endswith("B")
    assert check_budget(again) == check_budget(given)
