"""The script that trains a language model in five precisions runs, and its checks can fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "train_text.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_text"] = module
    spec.loader.exec_module(module)
    return module


SMALL = [
    "--width=16", "--layers=1", "--heads=2", "--length=16", "--batch=2", "--device=cpu",
]  # fmt: skip


def test_a_short_run(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    modes = "--modes=float32,graphopt-bf16,graphopt-fp16"
    script.main([*SMALL, modes, "--steps=5", "--seeds=1", f"--json={out}"])
    runs = json.loads(out.read_text())["runs"]
    assert [r["mode"] for r in runs] == ["float32", "graphopt-bf16", "graphopt-fp16"]
    assert all(5 < r["final"] < 6 for r in runs)  # ln 256 = 5.55 for a model that knows nothing
    assert runs[0]["scale"] == []
    assert runs[2]["scale"][0] == [0, 2.0**16]
    assert "no check of final" in capsys.readouterr().out


def runs_of(figures: dict[str, list[float]], skipped: int = 0) -> list[dict[str, object]]:
    return [
        {"mode": m, "seed": i, "final": v, "held_out": v, "skipped": skipped * ("graphopt" in m)}
        for m, values in figures.items()
        for i, v in enumerate(values)
    ]


def test_modes_that_end_apart_fail(script: ModuleType) -> None:
    near = {"float32": [1.0, 1.1, 0.9], "graphopt-bf16": [1.1, 1.2, 1.0]}
    assert script.checks(runs_of(near))
    assert not script.checks(runs_of({**near, "graphopt-bf16": [1.3, 1.4, 1.2]}))
    assert not script.checks(runs_of({**near, "graphopt-bf16": [1.0, 1.1, float("nan")]}))


def test_more_skipped_steps_than_autocast_fail(script: ModuleType) -> None:
    equal = {"autocast-fp16": [1.0, 1.1], "graphopt-fp16": [1.0, 1.1]}
    assert script.checks(runs_of(equal, skipped=1))
    assert not script.checks(runs_of(equal, skipped=2))


def test_a_fall_of_the_scale_is_a_skipped_step(script: ModuleType) -> None:
    start = script.START
    found = script.scale_changes([start, start / 2, start / 2, start])
    assert found == [(0, start), (1, start / 2), (3, start)]
