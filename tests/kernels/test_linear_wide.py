"""linear_wide against casts and a linear layer: values, the masters' gradients, what is kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from graphopt.errors import OptionError
from graphopt.kernels import registry

G = torch.ops.graphopt
OP = registry()["linear_wide"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))


def arguments(index: int, device: str, dtype: torch.dtype | None = None) -> list:
    """A sample's arguments: x, the masters and a bias of its own as leaves; copies cast anew."""
    sample = next(itertools.islice(OP.samples(torch.device(device)), index, None))
    defaults = ([], False)[len(sample.args) - 4 :]
    x, weight, bias, masters, bias_masters, transposed = (*sample.args, *defaults)

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(dtype or t.dtype, copy=True).requires_grad_()

    masters, bias_masters = [leaf(m) for m in masters], [leaf(m) for m in bias_masters]
    weight = weight.to(dtype or weight.dtype)
    if bias is not None:
        bias = bias.to(dtype or bias.dtype) if bias_masters else leaf(bias)
    return [leaf(x), weight, bias, masters, bias_masters, transposed]


def leaves(args: list) -> list[torch.Tensor]:
    x, _, bias, masters, bias_masters, _ = args
    return [x, *masters, *bias_masters, *([bias] if bias is not None and not bias_masters else [])]


def separate(x, weight, bias, masters, bias_masters, transposed):
    """Casts that are differentiated, then the layer."""
    weight = torch.cat([m.to(x.dtype) for m in masters])
    bias = torch.cat([m.to(x.dtype) for m in bias_masters]) if bias_masters else bias
    return F.linear(x, weight.t() if transposed else weight, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(device: str, index: int) -> None:
    args, exact = arguments(index, device), arguments(index, device, torch.float64)
    y, wanted = OP.overload(*args), separate(*exact)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves(args), grad)
    slopes = torch.autograd.grad(wanted, leaves(exact), grad.double())
    for a, b, leaf in zip((y, *found), (wanted, *slopes), (y, *leaves(args)), strict=True):
        assert a.dtype == leaf.dtype
        assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.gpu
def test_the_gradient_is_not_rounded_to_low_precision() -> None:
    args = arguments(0, "cuda")
    (found,) = torch.autograd.grad(OP.overload(*args).sum(), args[3][0])
    x = args[0].detach().float().flatten(0, 1)
    wanted = torch.ones(4, len(x), device="cuda") @ x
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_contiguous_and_may_be_added_to(device: str) -> None:
    args = arguments(1, device)
    for _ in range(2):
        OP.overload(*args).sum().backward()
    first, second = args[3]
    assert first.grad.is_contiguous()
    assert second.grad.is_contiguous()
    kept = second.grad.clone()
    first.grad.zero_()
    assert torch.equal(second.grad, kept)


def test_saved_are_x_and_the_copy() -> None:
    args = arguments(1, "cpu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        OP.overload(*args)
    assert [t.data_ptr() for t in saved] == [args[0].data_ptr(), args[1].data_ptr()]


def test_masters_may_be_written_before_backward() -> None:
    args, again = arguments(0, "cpu"), arguments(0, "cpu")
    y = OP.overload(*args)
    with torch.no_grad():
        args[3][0].mul_(3)
    y.sum().backward()
    OP.overload(*again).sum().backward()
    assert torch.equal(args[0].grad, again[0].grad)


@pytest.mark.parametrize("frozen", range(3))
def test_only_the_wanted_gradients(frozen: int) -> None:
    args = arguments(1, "cpu")
    for i, group in enumerate(([args[0]], args[3], args[4])):
        for t in group:
            t.requires_grad_(i != frozen)
    OP.overload(*args).sum().backward()
    for i, group in enumerate(([args[0]], args[3], args[4])):
        assert all((t.grad is None) == (i == frozen) for t in group)


def test_gradients_of_gradients() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[3.0, -1.0]], dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return G.linear_wide(x, w.detach(), None, [w]) ** 3

    slopes = torch.autograd.grad(function(x, w), (x, w), create_graph=True)
    again = torch.autograd.grad(sum(s.sum() for s in slopes), (x, w))
    exact = torch.autograd.grad((x @ w.t()) ** 3, (x, w), create_graph=True)
    wanted = torch.autograd.grad(sum(s.sum() for s in exact), (x, w))
    for a, b in zip((*slopes, *again), (*exact, *wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_mode_and_no_rows() -> None:
    args = arguments(0, "cpu")
    with torch.no_grad():
        assert not OP.overload(*args).requires_grad
    empty = args[0].detach()[:0].requires_grad_()
    OP.overload(empty, *args[1:]).sum().backward()
    assert not args[3][0].grad.any()


def test_errors_say_what_is_wrong() -> None:
    x, weight, _, masters, *_ = arguments(0, "cpu")
    with pytest.raises(OptionError, match="masters of 4 rows"):
        OP.overload(x, weight, None, masters[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_that_are_stored_wide(device: str, dtype: torch.dtype) -> None:
    a = torch.randn(64, 128, device=device).to(dtype)
    b = torch.randn(96, 128, device=device).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found = G.wide_mm(a, b.t(), wide)
    assert found.dtype == wide
    exact = a.double() @ b.double().t()
    eps = torch.finfo(dtype if device == "cpu" else wide).eps
    assert (found.double() - exact).norm() < max(2 * eps, 2e-3 * (device == "cuda")) * exact.norm()
