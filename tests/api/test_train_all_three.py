"""The training example: it learns, it resumes where it stopped, it keeps to what is asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_all_three.py"
SMALL = ("--device", "cpu", "--layers", "2", "--width", "32", "--batch", "4", "--length", "32")


def trained(folder, *options):
    """The runs that the example writes down, by name."""
    path = folder / "seen.json"
    command = [sys.executable, EXAMPLE, *SMALL, "--json", path, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


def test_the_loss_falls_as_eager_s_does(tmp_path):
    runs = trained(tmp_path, "--steps", "12", "--dropout", "0", "--compare")
    eager, ours = runs["eager float32"]["losses"], runs["graphopt"]["losses"]
    assert ours == pytest.approx(eager, rel=1e-4)
    assert ours[-1] < ours[0]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    state = tmp_path / "run.pt"
    whole = trained(tmp_path, "--steps", "6", "--precision", "fp16")["graphopt"]["losses"]
    both = ("--precision", "fp16", "--checkpoint", state)
    first = trained(tmp_path, "--steps", "3", *both)["graphopt"]["losses"]
    second = trained(tmp_path, "--steps", "3", *both, "--resume")["graphopt"]["losses"]
    assert first + second == whole


def test_resuming_without_a_file_is_an_error(tmp_path):
    command = [sys.executable, EXAMPLE, "--resume", "--checkpoint", tmp_path / "none.pt"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "does not exist" in run.stderr
