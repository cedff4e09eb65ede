"""Random programs beside eager: a few fixed ones here, thousands by run.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import run
from conftest import HERE
from harness import cut_down, examine, examine_seed, read_entry
from hypothesis import given, note, settings
from hypothesis import strategies as st
from twins import Scenario

from graphopt.testing.programs import Program, programs

CORPUS = sorted((HERE / "corpus").glob("*.json"))
SEEDS = range(20_000, 20_036)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_matches_eager(seed: int) -> None:
    program, scenario, outcome = examine_seed(seed)
    if outcome.faults:
        small = cut_down(program, scenario, outcome)
        pytest.fail(f"{outcome}\n{scenario}\n{small.script()}")


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_what_once_failed_matches_eager(path: Path) -> None:
    program, scenario = read_entry(path.read_text())
    outcome = examine(program, scenario)
    assert not outcome.skipped, outcome.skipped
    assert not outcome.faults, f"{outcome}\n{program.script()}"


def test_the_long_run_counts_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--programs", "2", "--seed", "20000"]) == 0
    printed = capsys.readouterr()
    assert "2 programs, 2 compared with eager and float64: 0 mismatches" in printed.out
    assert "rules that never fired" in printed.out
    assert not printed.err


@settings(max_examples=6)
@given(programs(max_idioms=3), st.integers(0, 99))
def test_a_drawn_program_matches_eager(program: Program, seed: int) -> None:
    note(program.script())
    assert not examine(program, Scenario.of(seed, program)).faults
