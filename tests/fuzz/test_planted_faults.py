"""Each planted fault is caught, on a program that is right without it."""

from __future__ import annotations

import pytest
from faults import FAULTS, Fault
from harness import examine
from planted import caught_by


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "_"))
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    outcome = caught_by(fault)
    assert outcome.faults, f"survives: {outcome.skipped or 'every check passed'}"
    clean = examine(fault.program, fault.scenario)
    assert not clean.faults, str(clean)
    assert not clean.skipped


def test_there_are_at_least_twenty_of_different_names() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 20
