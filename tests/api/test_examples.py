"""The examples run and show what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name):
    run = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_training_gives_the_losses_of_eager():
    table = output_of("01_train.py").split("graphopt\n")[-1]
    rows = [list(map(float, line.split())) for line in table.splitlines()]
    assert len(rows) == 10
    for _, eager, optimized in rows:
        assert optimized == pytest.approx(eager, rel=1e-3)
    assert rows[-1][1] < rows[0][1]


def test_own_rule_fires_and_is_proved():
    printed = output_of("02_own_rule.py")
    assert "exp_of_log" in printed
    assert "inside the contract" in printed
    assert "without it: []" in printed


def test_property_test_of_ones_own_block_passes():
    assert "2 passed" in output_of("03_property_test.py")


def test_every_example_is_tested():
    text = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    assert [p.name for p in EXAMPLES.glob("*.py") if p.name not in text] == []
