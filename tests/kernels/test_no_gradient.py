"""Operators that have no gradient say so, where torch would give a wrong one."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import graphopt.kernels  # noqa: F401
from graphopt.errors import UnsupportedError
from graphopt.kernels import _library

ops = torch.ops.graphopt


def values(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()


CALLS = {
    "wide_mm": lambda a: ops.wide_mm(a, a.t(), torch.float64),
    "glu_backward": lambda a: ops.glu_backward(a, a, a, "silu")[1],
    "glu_packed_backward": lambda a: ops.glu_packed_backward(a[:, :2], a, "silu", True),
    "bias_act_backward": lambda a: ops.bias_act_backward(a, a, None, "gelu")[0],
    "softcap_backward": lambda a: ops.softcap_backward(a, a, 2.0),
    "linear_rope_backward": lambda a: ops.linear_rope_backward(
        *torch.ones(2, 3, 4), [a[None, None], None, a[None]], [4, 4, 4], False, a[None]
    ),
    "cross_entropy_forward": lambda a: ops.cross_entropy_forward(
        a, torch.arange(3), None, 1, -100, 0.0, None, None
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_through_it_is_an_error(name: str) -> None:
    a = values(3, 4)
    out = CALLS[name](a)
    with torch.no_grad():
        torch.testing.assert_close(out, CALLS[name](a))
    with pytest.raises(UnsupportedError, match=f"backward of graphopt::{name}"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match=f"backward of graphopt::{name}"):
        torch.autograd.grad(CALLS[name](a).sum(), a, allow_unused=True)


WRITES = {
    "add_wide_mm_": lambda a, t: ops.add_wide_mm_(t, a, a.t()),
    "bias_act_backward_": lambda a, t: ops.bias_act_backward_(a[:, :3], t, None, "gelu"),
    "glu_backward_out": lambda a, t: ops.glu_backward_out(
        *(a[:, :3] for _ in range(3)), "silu", t, torch.zeros(3, 3)
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_one_that_writes_its_operands_is_refused_at_once(name: str) -> None:
    a, total = values(3, 4), torch.zeros(3, 3)
    with pytest.raises(UnsupportedError, match=f"backward of graphopt::{name}"):
        WRITES[name](a, total)
    assert not total.any()
    with torch.no_grad():
        WRITES[name](a, total)


def test_tangents_are_not_lost() -> None:
    a = values(3, 4).detach()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError):
        ops.wide_mm(forward_ad.make_dual(a, a), a.t(), torch.float64)


@pytest.mark.parametrize("overload", list(_library._DIRECT), ids=str)
def test_every_operator_is_asked_at_the_level_of_autograd(overload) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(overload._schema.name, "Autograd")
