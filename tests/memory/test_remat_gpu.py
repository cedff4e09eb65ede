"""Dropped values on a CUDA device: freed, computed again on the backward thread, capturable."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from remat_models import GPT, ConvNet, dropped, dropping, everything, llama, same
from torch import nn

from graphopt.emit import Program
from graphopt.passes.remat import saved_bytes

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def _gpt() -> tuple[nn.Module, torch.Tensor]:
    return GPT(layers=4, width=256), torch.randint(0, 31, (8, 256))


def _conv() -> tuple[nn.Module, torch.Tensor]:
    return ConvNet(), torch.randn(2, 3, 8, 8)


def _llama() -> tuple[nn.Module, torch.Tensor]:
    return llama(), torch.randint(0, 31, (2, 8))


def _pair(make, precision):
    torch.manual_seed(0)
    model, x = make()
    model.to(DEVICE)
    plain = dropping(copy.deepcopy(model), lambda names: [], precision)
    return plain, dropping(model, everything, precision), x.to(DEVICE)


def _step(opt: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    y = opt(x)
    y = (y if isinstance(y, torch.Tensor) else y[0]).float()
    opt.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape))
    return [y.detach(), *(p.grad.clone() for p in opt.parameters())]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [_gpt, _conv, _llama])
def test_equal_to_the_bit(make, precision) -> None:
    plain, opt, x = _pair(make, precision)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, again, found = _step(plain, x), _step(plain, x), _step(opt, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert opt.entry.program.recipes
    if same(expected, again):  # where the device repeats itself
        assert same(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_less_memory_is_taken(precision) -> None:
    plain, opt, x = _pair(_gpt, precision)
    saved, peaks = [], []
    for module in (plain, opt):
        _step(module, x)
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = _requested("current")
        y = module(x)
        saved.append(_requested("current") - before)
        y.sum().backward()
        peaks.append(_requested("peak") - before)
        del y
    assert saved[1] < 0.2 * saved[0], saved
    assert peaks[1] <= peaks[0], peaks


def _requested(when: str) -> int:
    """Bytes asked for, without the slack of the allocator's blocks: tests before decide on that."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def test_forward_without_backward_leaves_nothing() -> None:
    _, opt, x = _pair(_gpt, "bf16")
    _step(opt, x)
    opt(x)
    before = _allocated()
    for _ in range(20):
        opt(x)
    # below it where what tests before left behind goes meanwhile
    assert torch.cuda.memory_allocated() <= before


def _allocated() -> int:
    """What is held when what capture left in reference cycles is gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_inside_a_cuda_graph() -> None:
    _, opt, x = _pair(lambda: (GPT(layers=2, width=64, p=0.0), torch.randint(0, 31, (2, 16))), None)
    expected = _step(opt, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            opt(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    opt.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = opt(x)
        y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape))
    for p in opt.parameters():
        p.grad.zero_()
    graph.replay()
    torch.testing.assert_close([p.grad for p in opt.parameters()], expected[1:])


def _offloading(opt: nn.Module, x: torch.Tensor, names=None) -> Program:
    body = opt.capture((x,)).compiled.body
    sizes = saved_bytes(body)
    names = names or [n for n, size in sizes.items() if size > 1 << 20 and "cast_weights" not in n]
    assert len(names) > 8
    return Program(dropped(body.copy(), [], offload=names), "offload")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_values_in_host_memory(precision) -> None:
    plain, _, x = _pair(_gpt, precision)
    away = _offloading(plain, x)
    found, saved = [], []
    for program in (Program(plain.entry.compiled.body, "plain"), away):
        for _ in range(3):  # again, with pinned memory and gradients at hand
            plain.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = program(x)[0]
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            y.float().backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape))
        found.append([y.detach(), *(p.grad.clone() for p in plain.parameters())])
        saved.append(held)
    # attention's backward adds in an order of its own each time
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
    assert saved[1] < 0.3 * saved[0], saved


def test_a_copy_runs_beside_the_computation() -> None:
    """Forward waits for no copy but those that still wait at its end."""
    plain, _, x = _pair(_gpt, "bf16")
    away = _offloading(plain, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        away(x)[0].float().sum().backward()
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy" in e.name and "Pinned" in e.name]
    kernels = [e for e in profile.events() if "Memcpy" not in e.name and "Memset" not in e.name]
    beside = [
        c
        for c in copies
        if any(
            k.time_range.start < c.time_range.end and c.time_range.start < k.time_range.end
            for k in kernels
        )
    ]
    assert len(copies) > 16
    assert len(beside) > len(copies) // 2


def test_what_was_fetched_ahead_in_vain_is_let_go() -> None:
    plain, _, x = _pair(_gpt, "bf16")
    y = _offloading(plain, x)(x)[0].float().sum()
    last = list(plain.head.parameters())
    torch.autograd.grad(y, last, retain_graph=True)
    before = _allocated()
    torch.autograd.grad(y, last, retain_graph=True)
    assert _allocated() == before
    y.backward()
