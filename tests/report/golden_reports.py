"""The golden reports: what a new user reads about gpt2, t5 and resnet50, committed as text.

    python tests/report/golden_reports.py            compare with tests/report/golden/
    python tests/report/golden_reports.py --write    write what is found there

Times, versions and rounding errors are left out; files are named without their folders. The numbers
of ops and bytes depend on the versions of torch and of the model's library, so the texts are
compared only with those of constraints.txt.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.metadata
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import graphopt
from graphopt.diff import DiffResult
from graphopt.report.summary import Report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = HERE / "golden"
MODELS = ("gpt2", "t5", "resnet50")
DIFFS = ("gpt2",)
CURE = "python tests/report/golden_reports.py --write, when the change is meant"


@functools.cache
def results(name: str) -> tuple[Report, DiffResult]:
    """The report, with its proof, and the diff of a small model of the zoo in training mode."""
    from zoo import ZOO

    entry = ZOO[name]
    model, batch = entry.make(training=True, dropout=True), entry.batch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphopt.GraphoptWarning)
        opt = graphopt.optimize(model, example_kwargs=batch)
    proof = graphopt.verify(opt, example_kwargs=batch)
    return graphopt.report(opt, verify=proof), graphopt.diff(opt)


def files(name: str) -> list[str]:
    """The files of a model: its report, and for some its diff."""
    return [f"{name}.txt", *([f"{name}.diff.txt"] if name in DIFFS else [])]


def texts(name: str) -> dict[str, str]:
    """File name -> text."""
    report, diff = results(name)
    return dict(zip(files(name), (report.text(stable=True), f"{diff!r}\n"), strict=False))


def differences(name: str) -> list[str]:
    """The lines in which the committed texts of a model differ from what is found."""
    lines: list[str] = []
    for file, found in texts(name).items():
        path = FOLDER / file
        committed = path.read_text() if path.exists() else ""
        lines += difflib.unified_diff(
            committed.splitlines(), found.splitlines(), f"golden/{file}", "found", lineterm="", n=1
        )
    return lines


def other_versions() -> str:
    """Which of the versions that matter are not those of constraints.txt, "" for none."""
    wanted = dict(re.findall(r"^(\w+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    found = []
    for package in ("torch", "transformers", "timm"):
        version = importlib.metadata.version(package).partition("+")[0]
        if version != wanted[package]:
            found.append(f"{package} {version} is not {wanted[package]}")
    return ", ".join(found)


def main() -> int:
    """Compare, or write; 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write what is found")
    if parser.parse_args().write:
        FOLDER.mkdir(exist_ok=True)
        for name in MODELS:
            for file, text in texts(name).items():
                (FOLDER / file).write_text(text)
                print(f"wrote {FOLDER / file}")
        return 0
    if other_versions():
        print(f"not compared: {other_versions()}")
        return 0
    lines = [line for name in MODELS for line in differences(name)]
    print("\n".join([*lines, CURE] if lines else ["the committed texts are right"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
