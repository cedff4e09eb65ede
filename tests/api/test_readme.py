"""README and CONTRIBUTING stay true: code blocks run, their outputs are what is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt import cli, errors
from graphopt.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def shape_of(text):
    """A text with its numbers and the width of its gaps taken out: errors differ by machine."""
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_python_blocks_run_and_print_what_readme_shows(tmp_path):
    pieces = [code for language, code in BLOCKS if language == "python"]
    script = tmp_path / "example.py"
    script.write_text("\nprint('=' * 9)\n".join(pieces))
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    printed = [part for part in run.stdout.split("=" * 9 + "\n") if part.strip()]
    shown = [text for language, text in BLOCKS if language == "text"]
    assert list(map(shape_of, printed)) == list(map(shape_of, shown))


@pytest.mark.parametrize("ending", ["graphopt demo", "pytest -n 2"])
def test_the_first_two_commands_are_one_line_each(ending):
    (line,) = re.findall(rf"^python3 -m venv .*{ending}$", README, flags=re.MULTILINE)
    assert line.count("pip install") == 1


def test_every_command_is_in_the_readme():
    named = set(re.findall(r"^graphopt (\w+)", README, flags=re.MULTILINE))
    (choices,) = (a.choices for a in make_parser()._actions if isinstance(a.choices, dict))
    assert named == set(choices)
    for name in named:
        with pytest.raises(SystemExit) as exit_:
            cli.main([name, "--help"])
        assert exit_.value.code == 0


def test_every_error_and_option_is_in_the_readme():
    import inspect

    from graphopt import optimize

    kinds = [n for n, v in vars(errors).items() if isinstance(v, type) and n != "GraphOptError"]
    options = [n for n in inspect.signature(optimize).parameters if n != "model"]
    assert [name for name in (*kinds, *options) if f"| `{name}` |" not in README] == []


def test_every_variable_in_the_readme_is_read_somewhere():
    sources = "".join(
        path.read_text()
        for top in ("graphopt", "passes", "kernels")
        for path in (ROOT / top).rglob("*.py")
    )
    variables = set(re.findall(r"GRAPHOPT_[A-Z_]+", README))
    assert [name for name in variables if name not in sources] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_and_paths_exist(document):
    text = (ROOT / document).read_text()
    paths = re.findall(r"\]\(([\w./-]+)\)|`((?:graphopt|passes|kernels|tests)/[\w./]*)`", text)
    missing = [p for pair in paths for p in pair if p and not (ROOT / p).exists()]
    assert missing == []
