"""scale_: torch's own product in place, and nothing at all by one."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels import _prepared
from graphopt.kernels.scale import SCALE

LOW = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1367), (2, 4096)])
@pytest.mark.parametrize("factor", [1.0, 0.25, 65536.0, float("inf"), float("nan")])
def test_the_product_rounded_once(backend, shape, dtype, factor):
    x = torch.linspace(-3, 3, max(1, torch.Size(shape).numel()), device=backend.device)
    x = x[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    expected = (x.double() * factor).to(dtype)
    SCALE(x, torch.tensor(factor, device=backend.device))
    assert torch.equal(x.nan_to_num(nan=7), expected.nan_to_num(nan=7))


@pytest.mark.parametrize("dtype", LOW)
def test_a_factor_of_low_precision(backend, dtype):
    x = torch.full((5,), 3.0, device=backend.device)
    SCALE(x, torch.tensor([0.5], dtype=dtype, device=backend.device))
    assert x.tolist() == [1.5] * 5


def test_by_one_no_bit_changes(backend):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45], device=backend.device)
    x = odd.clone()
    SCALE(x, torch.ones((), device=backend.device))
    assert torch.equal(x.view(torch.int32), odd.view(torch.int32))


def test_programs_that_take_several_blocks(triton_backend, monkeypatch):
    triton = pytest.importorskip("graphopt.kernels._scale_triton")
    monkeypatch.setattr(triton, "BLOCK", 64)
    monkeypatch.setattr(triton, "PROGRAMS", 3)
    _prepared.forget()
    x = torch.arange(1000.0, device=triton_backend.device)
    SCALE(x, torch.full((), 2.0, device=triton_backend.device))
    _prepared.forget()
    assert torch.equal(x.cpu(), 2 * torch.arange(1000.0))
