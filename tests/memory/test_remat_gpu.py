"""Dropped values on a CUDA device: freed, computed again on the backward thread, capturable."""

from __future__ import annotations

import copy

import pytest
import torch
from remat_models import GPT, ConvNet, dropping, everything, llama, same
from torch import nn

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
        before = torch.cuda.memory_allocated()
        y = module(x)
        saved.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del y
    assert saved[1] < 0.2 * saved[0], saved
    assert peaks[1] <= peaks[0], peaks


def test_forward_without_backward_leaves_nothing() -> None:
    _, opt, x = _pair(_gpt, "bf16")
    _step(opt, x)
    opt(x)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        opt(x)
    assert torch.cuda.memory_allocated() == before


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
