"""What the capture tests share: one comparison of an optimized module with an eager twin."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphopt.capture.signature import flatten
from graphopt.module import GraphoptModule

sys.path.insert(0, str(Path(__file__).resolve().parent))  # outside_helpers


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a result, in order."""
    leaves: list[Any] = []
    flatten(value, leaves, results=True)
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def loss(value: Any) -> torch.Tensor:
    """A scalar in which every element of a result has a weight of its own."""
    terms = [
        (t.double() * torch.arange(1, t.numel() + 1).double().cos().view(t.shape)).sum()
        for t in tensors(value)
        if t.requires_grad
    ]
    return sum(terms, torch.zeros((), dtype=torch.float64, requires_grad=True))


def equal(a: Any, b: Any, where: str = "result") -> None:
    """Assert that two results hold the same tensors, bit for bit, in the same structure."""
    assert type(a) is type(b), where
    x, y = tensors(a), tensors(b)
    assert len(x) == len(y), where
    for i, (p, q) in enumerate(zip(x, y, strict=True)):
        assert (p.shape, p.dtype, p.stride()) == (q.shape, q.dtype, q.stride()), f"{where} {i}"
        assert p.requires_grad == q.requires_grad, f"{where} {i}: requires_grad"
        torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True, msg=lambda m: m)


@pytest.fixture
def twin() -> Callable[..., GraphoptModule]:
    """`twin(model, *args, **kwargs)` compares eager and optimized in train and in eval mode.

    Outputs, gradients of parameters and inputs, buffers and inputs after the call must be equal;
    returns the optimized module.
    """

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> GraphoptModule:
        reference = copy.deepcopy(model)
        opt = GraphoptModule(model)
        for training, grad in ((True, True), (True, True), (False, True), (False, False)):
            opt.train(training)
            reference.train(training)
            given = [copy.deepcopy((args, kwargs)) for _ in range(2)]
            for p in (*model.parameters(), *reference.parameters()):
                p.grad = None
            with torch.set_grad_enabled(grad):
                want = reference(*given[0][0], **given[0][1])
                got = opt(*given[1][0], **given[1][1])
            equal(got, want)
            if grad:
                loss(want).backward()
                loss(got).backward()
            equal(given[1], given[0], "arguments after the call")
            inputs = zip(tensors(given[1]), tensors(given[0]), strict=True)
            mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
            for a, b in (*inputs, *((mine[n], theirs[n]) for n in mine)):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
            for (name, a), (_, b) in zip(
                model.named_buffers(), reference.named_buffers(), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"buffer {name}")
        return opt

    return run
