"""A launch that fails inside Triton says what to do; one that fails elsewhere stays as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphopt.errors import GraphOptError, UnsupportedError
from graphopt.kernels import _launch, _library

X = torch.ones(2)


def inside(module, error):
    """A function that raises, as if its code stood in a module of that name."""
    names = {"__name__": module, "error": error}
    exec("def launch(*args, **kwargs):\n    raise error", names)
    return names["launch"]


def run(launch, monkeypatch):
    monkeypatch.setattr(_launch, "use_triton", lambda tensor: True)
    return _library._choose("layer_norm", launch, lambda *args: "reference")(X)


def damaged():
    try:
        json.loads("")
    except ValueError as error:
        return error
    raise AssertionError


def test_a_damaged_cache_is_named_with_its_folder(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/data/kernels")
    with pytest.raises(GraphOptError) as caught:
        run(inside("triton.runtime.cache", damaged()), monkeypatch)
    assert "graphopt::layer_norm" in caught.value.what
    assert "JSONDecodeError" in caught.value.why
    assert "/data/kernels" in caught.value.try_


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    launch = inside("triton.runtime.cache", PermissionError(13, "Permission denied: '/cache'"))
    with pytest.raises(GraphOptError, match="Permission denied: '/cache'"):
        run(launch, monkeypatch)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("graphopt.kernels.norm", ValueError("a fault of ours")),
        ("triton.runtime.jit", torch.OutOfMemoryError("no room")),
        ("triton.runtime.jit", UnsupportedError("complex numbers")),
    ],
)
def test_other_errors_stay_as_they_are(module, error, monkeypatch):
    with pytest.raises(type(error)) as caught:
        run(inside(module, error), monkeypatch)
    assert caught.value is error


SCRIPT = """
import torch, graphopt
model = torch.nn.LayerNorm(64).cuda()
x = torch.linspace(-1, 1, 512, device="cuda").reshape(8, 64)
opt = graphopt.optimize(model, x, fuse="always")
assert any(r.rule == "layer_norm" for r in opt.rewrites)
try:
    opt(x).sum().backward()
    print("good", float((opt(x) - model(x)).abs().max()) < 1e-5)
except graphopt.GraphOptError as error:
    print("told", "cache" in error.try_)
"""


def fresh_process(folder):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    return done.stdout.strip().splitlines()[-1:], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("ending", [".json", ".cubin", ".so"])
def test_a_damaged_file_in_the_cache(tmp_path, ending):
    folder = tmp_path / "cache"
    assert fresh_process(folder)[0] == ["good True"]
    files = [p for p in folder.rglob(f"*{ending}") if p.is_file()]
    for path in files:
        path.write_bytes(b"damaged")
    out, stderr = fresh_process(folder)
    assert out in (["good True"], ["told True"]), stderr


@pytest.mark.gpu
def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").write_text("a file")
    out, stderr = fresh_process(Path(tmp_path / "taken" / "cache"))
    assert out == ["told True"], stderr
