"""configure_memory_pool: what is set, what is too late, what is refused."""

import os
import sys

import pytest
import torch

import graphopt
from graphopt.errors import OptionError
from graphopt.memory import pool
from graphopt.memory.pool import configure_memory_pool

NAMES = (
    pool.CONF,
    pool.OLD_CONF,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "LOCAL_RANK",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No such variable before, and none left behind."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("jax", "tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(pool, "_unread", set())


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there: what is asked of it is written down."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda f, i: asked.append((f, i))
    )
    return asked


def test_without_a_gpu_nothing_is_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = graphopt.configure_memory_pool()
    assert not any(name in os.environ for name in NAMES)
    assert found.variables == {}
    assert "there is no GPU that torch could use: nothing was set" in repr(found)
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in found.shell


def test_with_a_gpu_all_is_set(gpu):
    found = configure_memory_pool(0.75)
    assert gpu == [(0.75, 0)]
    assert os.environ[pool.CONF] == os.environ[pool.OLD_CONF] == "expandable_segments:True"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert found.too_late == ()
    assert "at most 75% of the GPU 0" in repr(found)


def test_libraries_can_be_left_alone(gpu):
    configure_memory_pool(jax=False, tensorflow=False)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in os.environ


def test_jax_takes_a_share_of_its_own(gpu):
    configure_memory_pool(0.5, jax=0.3)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.30"


def test_where_nothing_is_left_jax_takes_memory_as_it_needs_it(gpu):
    configure_memory_pool(1.0)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_settings_of_the_user_stay(gpu, monkeypatch):
    monkeypatch.setenv(pool.CONF, "max_split_size_mb:128,expandable_segments:True")
    found = configure_memory_pool(expandable_segments=False)
    assert os.environ[pool.CONF] == "max_split_size_mb:128,expandable_segments:False"
    assert any("max_split_size_mb:128,expandable_segments:True" in n for n in found.notes)


def test_what_is_too_late_is_said(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setitem(sys.modules, "jax", object())
    found = configure_memory_pool()
    assert gpu == [(0.8, 1)]
    assert len(found.too_late) == 2
    assert "torch has touched the GPU" in found.too_late[0]
    assert "jax is imported" in found.too_late[1]
    assert configure_memory_pool().too_late == found.too_late  # it is as late the second time


def test_torchruns_rank_says_which_gpu(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    configure_memory_pool()
    assert gpu == [(0.8, 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"fraction": 0},
        {"fraction": 1.5},
        {"fraction": True},
        {"fraction": "0.8"},
        {"fraction": float("nan")},
        {"fraction": 0.8, "jax": 0.3},
        {"jax": "yes"},
        {"jax": 2},
        {"expandable_segments": 1.5},
        {"tensorflow": None},
        {"device": -1},
        {"device": "cuda"},
        {"device": 7},
        {"fracton": 0.8},
    ],
    ids=str,
)
def test_bad_values_are_refused_before_anything_is_set(gpu, options):
    with pytest.raises(OptionError):
        configure_memory_pool(**options)
    assert gpu == []
    assert not any(name in os.environ for name in NAMES)


@pytest.mark.gpu
def test_the_fraction_holds():
    before = torch.cuda.get_per_process_memory_fraction()
    try:
        configure_memory_pool(0.5, jax=False, tensorflow=False)
        total = torch.cuda.get_device_properties(0).total_memory
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(total * 0.6), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
