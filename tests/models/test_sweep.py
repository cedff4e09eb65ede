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
from sweep import Result, _apart, sweep, table
from torch import nn
from zoo import Entry

from graphopt.numerics import compare

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
    assert "| b | refused | 0 | 0.00 | 0.00 | 0 | x/y |" in text
