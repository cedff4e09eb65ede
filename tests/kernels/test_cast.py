"""cast_weights: the copies and the gradients are those of one `to` a weight."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(3, 5), (7,), (), (64, 64), (0, 4), (1, 1, 3)]
cast = torch.ops.graphopt.cast_weights


def weights(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    made.append(torch.randn(4, 6, generator=generator).to(device, dtype).t())
    return [w.requires_grad_() for w in made]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(device: str, low: torch.dtype, dtype: torch.dtype) -> None:
    given = weights(device, dtype)
    copies = cast(given, low)
    wanted = [w.to(low) for w in given]
    assert all(map(torch.equal, copies, wanted))
    assert all(c.dtype == low and c.is_contiguous() for c in copies)
    grads = [torch.randn_like(c) for c in copies]
    found = torch.autograd.grad(copies, given, grads)
    exact = torch.autograd.grad(wanted, given, grads)
    assert all(map(torch.equal, found, exact))
    assert all(g.dtype == dtype for g in found)


def test_copies_are_aligned_and_apart() -> None:
    copies = cast([w.detach() for w in weights()], torch.bfloat16)
    base = copies[0].untyped_storage().data_ptr()
    assert all((c.data_ptr() - base) % 128 == 0 for c in copies if c.numel())
    before = copies[3].clone()
    copies[0].fill_(7)
    assert torch.equal(copies[3], before)


def test_extreme_values() -> None:
    value = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-45, -0.0])
    (copy,) = cast([value], torch.float16)
    torch.testing.assert_close(copy, value.to(torch.float16), equal_nan=True, rtol=0, atol=0)


def test_a_copy_that_nobody_uses_has_no_gradient() -> None:
    first, second = weights()[:2]
    copies = cast([first, second], torch.bfloat16)
    found = torch.autograd.grad(copies[0].sum(), [first, second], allow_unused=True)
    assert found[0] is not None
    assert found[1] is None


def test_a_frozen_weight_costs_no_gradient() -> None:
    first, second = weights()[:2]
    copies = cast([first, second.detach()], torch.bfloat16)
    (copies[0].sum() + copies[1].sum()).backward()
    assert torch.equal(first.grad, torch.ones_like(first))


def test_two_forwards_keep_their_own_copies() -> None:
    weight = torch.full((4,), 2.0, requires_grad=True)
    (first,) = cast([weight], torch.bfloat16)
    loss = (first * first).sum()
    with torch.no_grad():
        weight.mul_(10)
    (second,) = cast([weight], torch.bfloat16)
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.tolist() == [4.0] * 4
    assert second.tolist() == [20.0] * 4


def test_gradients_of_gradients() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    (copy,) = cast([weight], torch.bfloat16)
    (grad,) = torch.autograd.grad((copy**3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), weight)
    assert second.tolist() == [6.0, 12.0]


def test_no_weights_and_no_gradient_mode() -> None:
    assert cast([], torch.bfloat16) == []
    with torch.no_grad():
        assert not cast(weights(), torch.bfloat16)[0].requires_grad
    with torch.inference_mode():
        assert cast(weights(), torch.bfloat16)[0].is_inference()
