"""`torch.autograd.grad(..., is_grads_batched=True)` through every operator: sample by sample."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.kernels import registry

OPS = sorted(name for name in registry() if name not in ("draw_seed", "wide_mm"))
TABLES = {"linear_rope": (3, 4), "linear_cross_entropy": (4,), "cross_entropy": (2,)}
"""Floating arguments by position that get no gradient."""


def leaves(name: str, sample: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """(args, kwargs, the tensors among them that want a gradient)."""

    def leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if floating else value

    args = [
        a if i in TABLES.get(name, ()) else tree_map(leaf, a) for i, a in enumerate(sample.args)
    ]
    kwargs = tree_map(leaf, sample.kwargs)
    wanted = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    return args, kwargs, [t for t in wanted if t.requires_grad]


def results(run: Any) -> list[torch.Tensor]:
    out = run if isinstance(run, (tuple, list)) else (run,)
    return [y for y in out if isinstance(y, torch.Tensor) and y.requires_grad]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # The ways to a gradient differ in a rounding where the second run computes what the first had.
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = 8 * torch.finfo(expected.dtype).eps * scale
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", OPS)
def test_every_operator_gives_each_samples_gradient(name, backend):
    for sample in itertools.islice(registry()[name].samples(backend.device), 3):
        args, kwargs, wanted = leaves(name, sample)
        outputs = results(registry()[name].overload(*args, **kwargs))
        grads = [torch.randn(2, *y.shape, device=y.device).to(y.dtype) for y in outputs]
        more = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(outputs, wanted, grads, is_grads_batched=True, **more)
        for i in range(2):
            each = torch.autograd.grad(outputs, wanted, [g[i] for g in grads], **more)
            for a, b in zip(found, each, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    close(a[i], b)


class Net(torch.nn.Module):
    """Fused ops one after another."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 16),
            torch.nn.Linear(16, 3),
        )

    def forward(self, x):
        h = torch.nn.functional.gelu(self.up(self.norm(x)))
        return torch.softmax(self.down(h), -1).sum(0)


@pytest.mark.parametrize("budget", [None, 0.9])
def test_a_jacobian_of_an_optimized_module(budget):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 8)
    opt = graphopt.optimize(model, x, segments=None if budget is None else 2)
    assert any(r.kind == "local" for r in opt.rewrites)
    found = []
    for module in (model, opt):
        y = module(x)
        parameters = list(model.parameters())
        found.append(torch.autograd.grad(y, parameters, torch.eye(3), is_grads_batched=True))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_inside_a_checkpoint():
    op = torch.ops.graphopt.layer_norm
    x, w = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    plain = op(x, w, None, 1e-5)
    kept = checkpoint(lambda x: op(x, w, None, 1e-5), x, use_reentrant=False)
    grads = torch.randn(3, 4, 8)
    expected = torch.autograd.grad(plain, (x, w), grads, is_grads_batched=True)
    found = torch.autograd.grad(kept, (x, w), grads, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


def test_batches_inside_batches():
    x = torch.randn(4, 8, requires_grad=True)
    y = torch.ops.graphopt.layer_norm(x, None, None, 1e-5)
    grads = torch.randn(2, 3, 4, 8)

    def pull(grad):
        return torch.autograd.grad(y, x, grad, is_grads_batched=True, retain_graph=True)[0]

    found = torch._vmap_internals._vmap(pull, 0, 0)(grads)
    each = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in grads.view(6, 4, 8)]
    torch.testing.assert_close(found, torch.stack(each).view(2, 3, 4, 8))
