"""The command line where its output cannot be written, or nobody reads it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt import cli, demo
from graphopt.cli.parser import make_parser

HERE = Path(__file__).parent
SCRIPT = Path(sys.executable).with_name("graphopt")
WORDS = {
    "verify": ["factories:positional"],
    "bench": ["factories:chain", "--against", "eager", "--seconds", "0.01"],
    "advise": ["factories:chain", "--no-measured"],
}
FULL = "graphopt: cannot write the output: No space left on device\n"
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def commands():
    """Every subcommand that the parser knows."""
    actions = make_parser()._actions
    return next(list(a.choices) for a in actions if isinstance(a, argparse._SubParsersAction))


def words(command):
    default = [] if command in ("demo", "rules", "env") else ["factories:chain"]
    return [command, *WORDS.get(command, default)]


@pytest.fixture(autouse=True)
def _in_folder_of_factories(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    # What it shows while it works is all that matters here.
    monkeypatch.setattr(demo, "run", lambda device, say: (say and say("text")) or Demo())


class Demo:
    """In place of what the demo found."""

    passed = True

    def to_dict(self):
        return {}


@needs_full
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("command", commands())
def test_a_full_disk_is_an_error_of_one_line(command, options, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main([*words(command), *options]) == 1
    assert capsys.readouterr().err.endswith(FULL)


@needs_full
@pytest.mark.parametrize("argv", [["--help"], ["explain", "factories:absent", "--json"]])
def test_help_and_usage_errors_on_a_full_disk(argv, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(argv) == 1
    assert capsys.readouterr().err.endswith(FULL)


@needs_full
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_python_does_not_complain_at_its_end(stream):
    # Unbuffered, argparse itself passes over what it cannot write.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with open("/dev/full", "w") as full:
        options[stream] = full
        wrong = subprocess.run([SCRIPT, "nonsense"], **options, text=True, check=False)
        help_ = subprocess.run([SCRIPT, "-h"], **options, text=True, check=False)
    assert wrong.returncode == 2
    expected = (1, FULL) if stream == "stdout" else (0, None)
    assert (help_.returncode, help_.stderr) == expected


def test_standard_output_that_is_closed_is_an_error_of_one_line():
    run = subprocess.run(
        f"'{SCRIPT}' rules >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr == "graphopt: cannot write the output: standard output is closed\n"


def without_reader(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


@pytest.mark.parametrize("command", commands())
def test_a_closed_pipe_ends_nothing(command, monkeypatch, capsys):
    with without_reader(monkeypatch):
        code = cli.main(words(command))
    assert code == 0
    assert "Error" not in capsys.readouterr().err


def test_the_verdict_is_told_to_nobody_and_yet_is_the_exit_code(monkeypatch):
    argv = ["bisect", "factories:chain", "--predicate", "factories:no_fused_norm"]
    with without_reader(monkeypatch):
        assert cli.main(argv) == 1
