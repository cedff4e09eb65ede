"""Each planted fault is caught, on a program that is right without it."""

from __future__ import annotations

import functools

import pytest
from conftest import HERE
from faults import FAULTS, Fault
from harness import Outcome, examine
from planted import caught_by
from twins import Scenario

from graphopt.testing.programs import Program


@functools.cache
def without_fault(program: Program, scenario: Scenario) -> Outcome:
    return examine(program, scenario)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "_"))
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    outcome = caught_by(fault)
    assert outcome.faults, f"survives: {outcome.skipped or 'every check passed'}"
    clean = without_fault(fault.program, fault.scenario)
    assert not clean.faults, str(clean)
    assert not clean.skipped


def test_every_fault_stands_in_the_table_of_the_docs() -> None:
    page = (HERE.parents[1] / "docs" / "proof.md").read_text()
    missing = [f.name for f in FAULTS if f"| {f.name} |" not in page]
    assert not missing, "python tests/fuzz/planted.py prints the table"


def test_there_are_at_least_twenty_of_different_names() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 20
