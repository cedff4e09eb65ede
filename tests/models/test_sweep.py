"""The architectures that must be captured are equal to eager; no other one is ever wrong.

The first 22 run here at one shape. `GRAPHOPT_SWEEP=1` runs all of them, at two (a quarter of an
hour); `sweep.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, Architecture
from sweep import MARKS, Result, _apart, _over_many, into, sweep, table
from torch import nn
from zoo import Entry

from graphopt.luck import only_mean_failed
from graphopt.numerics import ENOUGH, Comparison, compare

FIRST = [a.name for a in ARCHITECTURES if a.first]
REST = [a.name for a in ARCHITECTURES if not a.first]


@pytest.mark.parametrize("name", FIRST)
def test_the_first_are_equal(name: str) -> None:
    found = sweep(BY_NAME[name], shapes=1)
    assert (found.verdict, found.reason) == ("equal", "")
    assert found.runs == 2 * len(BY_NAME[name].masks)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GRAPHOPT_SWEEP"), reason="only with GRAPHOPT_SWEEP=1")
@pytest.mark.parametrize("name", FIRST + REST)
def test_none_is_wrong(name: str) -> None:
    found = sweep(BY_NAME[name])
    assert found.verdict != "wrong", found.reason
    assert name not in FIRST or found.verdict == "equal", found.reason


def test_the_numbers_of_architectures() -> None:
    assert sum(not n.startswith("timm.") for n in REST) >= 20
    assert sum(n.startswith("timm.") for n in REST) >= 20
    assert len(FIRST) == 22


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.linear(pixel_values if pixel_values.sum() > 0 else -pixel_values)


def test_a_refusal_has_its_line() -> None:
    entry = Entry("branch", _Branch, lambda shape: {"pixel_values": torch.ones(2 + shape, 4)})
    found = sweep(Architecture(entry))
    assert found.verdict == "refused"
    assert "test_sweep.py:" in found.reason
    assert "data-dependent" in found.reason


def test_a_program_captured_wrongly_is_wrong() -> None:
    x = torch.randn(200, dtype=torch.float64)
    run = {"output/0": x.float()}
    assert "float64" in _apart(compare(run, run, {"output/0": x * 1.5}))
    assert _apart(compare(run, run, {"output/0": x})) == ""


def test_the_table_counts() -> None:
    results = [Result("a"), dataclasses.replace(Result("b"), verdict="refused", reason="x|y")]
    text = table(results)
    assert text.endswith("2 models: 1 equal, 1 refused, 0 wrong.")
    assert "| b |  |  | 0 | 0 | 0.000 | 0.00 | x/y |" in text


def test_a_mean_above_the_bound_is_taken_over_more_batches() -> None:
    x = torch.randn(2000, dtype=torch.float64)
    names = [f"output/{i}" for i in range(ENOUGH)]
    off = {k: dict.fromkeys(names, (x * (1 + k)).float()) for k in (1e-6, 1.2e-6, 0.8e-6)}
    one = {k: compare(off[1e-6], run, dict.fromkeys(names, x)) for k, run in off.items()}
    seen: list[int] = []

    def judged(k: int) -> Comparison:
        seen.append(k)
        return one[0.8e-6]

    assert only_mean_failed(one[1.2e-6])
    assert _over_many(one[1.2e-6], judged).passed
    assert seen == list(range(1, 16))
    assert not _over_many(one[1.2e-6], lambda k: one[1.2e-6]).passed


def test_the_table_goes_between_its_marks() -> None:
    page = f"a\n{MARKS[0]}\nold\n{MARKS[1]}\nb\n"
    assert into(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="lacks"):
        into("a page", "new")


def test_each_mode_has_its_verdict() -> None:
    result = Result("a")
    for verdict, mode in (("equal", "train"), ("refused", "eval"), ("equal", "eval")):
        result.note(verdict, verdict, mode)
    assert result.modes == {"train": "equal", "eval": "refused"}
    assert (result.verdict, result.reason) == ("refused", "refused")
