"""A first call within what a caller may have around it: hooks on saved tensors, anomaly mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(32, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32)
    return nn.Sequential(*layers).double()


def _to_array(tensor: torch.Tensor) -> object:
    return tensor.detach().numpy()  # nothing without values has that


AROUND = {
    "arrays": lambda: torch.autograd.graph.saved_tensors_hooks(_to_array, torch.from_numpy),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "anomaly": torch.autograd.detect_anomaly,
    "forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
}


def _gradients(module: nn.Module, call: object) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 64 * 32, dtype=torch.float64).view(64, 32).requires_grad_()
    call(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("options", [{}, {"memory_budget": "10MiB"}, {"segments": 2}])
@pytest.mark.parametrize("around", AROUND)
def test_a_first_call_within(around, options):
    plain, opt = _net(), graphopt.optimize(_net(), **options)

    def within(module):
        def call(x):
            with AROUND[around]() if module is opt else contextlib.nullcontext():
                return module(x)

        return call

    torch.testing.assert_close(_gradients(opt, within(opt)), _gradients(plain, within(plain)))


@pytest.mark.parametrize("options", [{}, {"memory_budget": "10MiB"}, {"segments": 2}])
def test_a_first_call_within_a_checkpoint(options):
    plain, opt = _net(), graphopt.optimize(_net(), **options)
    found = _gradients(opt, lambda x: checkpoint(opt, x, use_reentrant=False))
    torch.testing.assert_close(found, _gradients(plain, plain))


def test_what_was_around_is_there_again():
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor

    opt = graphopt.optimize(_net(), memory_budget="10MiB")
    x = torch.ones(4, 32, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        opt(x)
        first = len(seen)
        opt(x)
    assert first > 0
    assert len(seen) == 2 * first  # nothing but the step, the first time
