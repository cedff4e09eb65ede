"""A tensor multiplied by a scalar in place; by one: not even read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._launch import cdiv
from graphopt.kernels._prepared import Launch

BLOCK = 4096
PROGRAMS = 1024
"""The most programs: each takes several blocks, for by one all of them only end."""


@triton.jit
def _scale(X, FACTOR, count, programs, BLOCK: tl.constexpr):
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs * BLOCK):
            places = first + tl.arange(0, BLOCK)
            inside = places < count
            x = tl.load(X + places, mask=inside).to(tl.float32)
            tl.store(X + places, (x * factor).to(X.dtype.element_ty), mask=inside)


def prepare_scale(x: torch.Tensor) -> Launch:
    """A launch of (x, factor) for a contiguous x of this many elements, at least one."""
    programs = min(PROGRAMS, cdiv(x.numel(), BLOCK))
    return Launch(_scale, (programs,), x.numel(), programs, BLOCK=BLOCK)
