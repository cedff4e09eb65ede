"""Random programs beside eager: a fixed few hundred lines here, the long run in run.py."""

from __future__ import annotations

import pytest
from conftest import HERE
from harness import cut_down, examine, examine_seed, read_entry
from hypothesis import given, note, settings
from hypothesis import strategies as st
from twins import Scenario

from graphopt.testing.programs import Program, programs

CORPUS = sorted((HERE / "corpus").glob("*.json"))
SEEDS = range(20_000, 20_048)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_matches_eager(seed: int) -> None:
    program, scenario, outcome = examine_seed(seed)
    if outcome.faults:
        small = cut_down(program, scenario, outcome)
        pytest.fail(f"{outcome}\n{scenario}\n{small.script()}")


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_what_once_failed_matches_eager(path) -> None:
    program, scenario = read_entry(path.read_text())
    outcome = examine(program, scenario)
    assert not outcome.skipped, outcome.skipped
    assert not outcome.faults, f"{outcome}\n{program.script()}"


@settings(max_examples=10)
@given(programs(max_idioms=3), st.integers(0, 99))
def test_a_drawn_program_matches_eager(program: Program, seed: int) -> None:
    note(program.script())
    assert not examine(program, Scenario.of(seed, program)).faults
