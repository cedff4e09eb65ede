"""The committed reports of gpt2, t5 and resnet50 are today's, and answer what they should."""

from __future__ import annotations

import re

import pytest
from golden_reports import CURE, FOLDER, MODELS, differences, files, other_versions


@pytest.mark.parametrize("name", MODELS)
def test_the_committed_report_is_todays(name: str) -> None:
    if other_versions():
        pytest.skip(other_versions())
    lines = differences(name)
    assert not lines, "\n".join([*lines, CURE])


@pytest.mark.parametrize("name", MODELS)
def test_the_three_questions_are_answered(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    faster, rest = text.split("2. Why not the rest")
    rest, right = rest.split("3. Is it still right")
    assert "moved in a forward" in faster
    assert "still moves" in rest
    assert "\nYes: " in right


def test_nothing_of_a_machine_is_committed() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert re.findall(r"(?:^|[\s(\"'])/\w+", text) == [], path.name
        assert re.findall(r"\d(?:\.\d+)? (?:s|ms)\b", text) == [], path.name


def test_the_folder_holds_no_report_of_a_model_that_is_gone() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f for m in MODELS for f in files(m)}
