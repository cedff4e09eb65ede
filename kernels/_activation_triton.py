"""Triton for bias_act and softcap: pointwise forward, backward with the bias gradient on the way.

Both see x as [M, N]. Forward: read x (and the N bias values), write y. Backward: read dy and x,
write dx, and sum dx's columns in registers over a program's rows into float32 partials
[parts, N], which a second kernel adds in a fixed order: no atomics, the same bits every time.
Softcap is the activation "softcap", z -> cap * tanh(z / cap).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._column_sum_triton import prepare_column_sum
from graphopt.kernels._pointwise import (
    BACKWARD_TILE,
    FORWARD_TILE,
    HALF,
    SUMMING_STAGES,
    SUMMING_TILE,
    lay_out,
    summing_parts,
    tile,
)
from graphopt.kernels._prepared import Launch, MaybeTensor, Run, maker, on_rows
from graphopt.kernels._tl_activations import activate, activate_grad


@triton.jit
def _bias_act_fwd(
    X, BIAS, Y, M, N, stride_x, cap,
    CAPPED: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    mask = (rows < M)[:, None] & inside[None, :]
    z = tl.load(X + first + rows[:, None] * stride_x + cols[None, :], mask=mask).to(tl.float32)
    if BIAS is not None:
        z += tl.load(BIAS + first + cols, mask=inside).to(tl.float32)[None, :]
    y = cap * activate(z / cap, "tanh", FAST) if CAPPED else activate(z, ACT, FAST)
    place = first + rows[:, None] * N + cols[None, :]
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _bias_act_bwd(
    DY, X, BIAS, DX, PARTIAL, M, N, stride_dy, stride_x, cap,
    CAPPED: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: one block of columns, every parts-th block of rows.
    across = tl.cdiv(N, BN)
    part = tl.program_id(0) // across
    parts = tl.num_programs(0) // across
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    if BIAS is not None:
        bias = tl.load(BIAS + first + cols, mask=inside).to(tl.float32)[None, :]
    if PARTIAL is not None:
        total = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(part, tl.cdiv(M, BM), parts, num_stages=STAGES):
        rows = (block * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & inside[None, :]
        at_dy = first + rows[:, None] * stride_dy + cols[None, :]
        at_x = first + rows[:, None] * stride_x + cols[None, :]
        dy = tl.load(DY + at_dy, mask=mask).to(tl.float32)
        z = tl.load(X + at_x, mask=mask).to(tl.float32)
        if BIAS is not None:
            z += bias
        at = z / cap if CAPPED else z
        dz = activate_grad(dy, at, "tanh" if CAPPED else ACT, FAST)
        place = first + rows[:, None] * N + cols[None, :]
        tl.store(DX + place, dz.to(DX.dtype.element_ty), mask=mask)
        if PARTIAL is not None:
            total += tl.where(mask, dz, 0.0)
    if PARTIAL is not None:
        place = part.to(tl.int64) * N + first + cols
        tl.store(PARTIAL + place, tl.sum(total, 0), mask=inside)


def prepare_forward(
    x: torch.Tensor,
    bias: MaybeTensor,
    activation: str,
    out_dtype: torch.dtype,
    cap: float | None = None,
) -> Run:
    """A function of (x, bias): activation(x + bias), or softcap if a cap is given.

    Its result is contiguous, of out_dtype.
    """
    make = maker(x, x.shape, out_dtype)
    if x.numel() == 0:
        return lambda x, bias: make(x)
    (rows,), count, cols = lay_out(x, flat=bias is None, copy=False)
    tiles = tile(count, cols, FORWARD_TILE)
    launch = Launch(
        _bias_act_fwd, (tiles.across * tiles.down,),
        count, cols, rows.stride, 1.0 if cap is None else cap,
        CAPPED=cap is not None, ACT=activation, FAST=out_dtype in HALF,
        BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
    )  # fmt: skip

    def run(x: torch.Tensor, bias: MaybeTensor) -> torch.Tensor:
        y = make(x)
        launch(x, bias, y)
        return y

    return on_rows(run, (x,), (bias,))


def prepare_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: MaybeTensor,
    activation: str,
    sum_dtype: torch.dtype | None,
    cap: float | None = None,
    *,
    over: bool = False,
) -> Run:
    """A function of (dy, x, bias): dx in x's dtype and the bias gradient in sum_dtype.

    The latter has no element if sum_dtype is None. With ``over``, x is contiguous and dx is
    written over it: each program reads its part of x before it writes the same part of dx.
    """
    make_dx = (lambda x: x) if over else maker(x, x.shape, x.dtype)
    width = None if sum_dtype is None else (x.shape[-1],)
    make_dbias = maker(x, width, sum_dtype or x.dtype)
    if x.numel() == 0:
        return lambda dy, x, bias: (
            make_dx(x),
            make_dbias(x) if width is None else make_dbias(x).zero_(),
        )
    flat = bias is None and sum_dtype is None
    (rows_dy, rows_x), count, cols = lay_out(dy, x, flat=flat, copy=False)
    tiles = tile(count, cols, BACKWARD_TILE if sum_dtype is None else SUMMING_TILE)
    parts = tiles.down if sum_dtype is None else summing_parts(tiles, x)
    launch = Launch(
        _bias_act_bwd, (tiles.across * parts,),
        count, cols, rows_dy.stride, rows_x.stride, 1.0 if cap is None else cap,
        CAPPED=cap is not None, ACT=activation, FAST=x.dtype in HALF,
        BM=tiles.rows_a_tile, BN=tiles.cols_a_tile,
        STAGES=1 if sum_dtype is None else SUMMING_STAGES, num_warps=4,
    )  # fmt: skip
    make_partial = maker(x, (parts, cols), torch.float32)
    column_sum = prepare_column_sum(parts, cols)

    def run(
        dy: torch.Tensor, x: torch.Tensor, bias: MaybeTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dbias = make_dx(x), make_dbias(x)
        partial = None if width is None else make_partial(x)
        launch(dy, x, bias, dx, partial)
        if partial is not None:
            column_sum(partial, dbias)
        return dx, dbias

    return on_rows(run, (dy, x), (bias,))
