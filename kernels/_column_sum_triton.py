"""The second half of a deterministic column sum: float32 partials [parts, N] to one row."""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels._launch import cdiv
from graphopt.kernels._prepared import Launch

COLS = 32  # 128 bytes a row and program: many programs, whole cache lines
PARTS = 64


@triton.jit
def _column_sum(PARTIAL, OUT, parts, N, BP: tl.constexpr, BN: tl.constexpr):
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = cols < N
    total = tl.zeros((BP, BN), tl.float32)
    for first in range(0, parts, BP):
        rows = first + tl.arange(0, BP)
        mask = (rows < parts)[:, None] & inside[None, :]
        place = rows.to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(PARTIAL + place, mask=mask, other=0.0)
    tl.store(OUT + cols, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=inside)


def prepare_column_sum(parts: int, cols: int) -> Launch:
    """A launch of (partial, out): the columns of contiguous float32 [parts, cols], rounded once."""
    return Launch(_column_sum, (cdiv(cols, COLS),), parts, cols, BP=PARTS, BN=COLS)
