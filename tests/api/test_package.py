"""The package as installed: lazy names, what importing costs, its folders, file sizes."""

import subprocess
import sys
from pathlib import Path

import pytest

import graphopt

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
SOURCES = {"graphopt": "graphopt", "kernels": "graphopt.kernels", "passes": "graphopt.passes"}


def python(code, cwd):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


def test_import_is_fast_beyond_torch(tmp_path):
    code = (
        "import torch, time; start = time.perf_counter(); import graphopt; "
        "print(time.perf_counter() - start)"
    )
    assert float(python(code, tmp_path)) < 0.3


@pytest.mark.parametrize("module", ["triton", "transformers", "timm", "rich", "torch"])
def test_import_does_not_load(module, tmp_path):
    assert python(f"import sys, graphopt; print({module!r} in sys.modules)", tmp_path) == "False\n"


def test_optimize_does_not_load_triton_or_transformers(tmp_path):
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport graphopt\ngraphopt.optimize\n"
        "print(sorted({'triton', 'transformers', 'timm'} & (set(sys.modules) - before)))"
    )
    assert python(code, tmp_path) == "[]\n"


@pytest.mark.parametrize("name", sorted(set(graphopt.__all__) - {"__version__"}))
def test_public_name_is_there_and_documented(name):
    assert getattr(graphopt, name).__doc__.strip()


def test_a_function_is_not_hidden_by_the_submodule_of_its_name():
    import graphopt.verify

    assert callable(graphopt.verify)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = graphopt.optimise


def test_pyproject_lists_every_package_folder():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join([SOURCES[top], *path.parent.relative_to(ROOT / top).parts])
        for top in SOURCES
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(settings["packages"])


@pytest.mark.parametrize("top", SOURCES)
def test_no_source_file_is_longer_than_500_lines(top):
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / top).rglob("*.py")}
    assert [str(p) for p, length in lengths.items() if length > 500] == []
