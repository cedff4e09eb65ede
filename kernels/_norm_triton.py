"""Triton kernels of the norm family. Launches and their tables stand in ``_norm_launch.py``.

One tile is [R, BLOCK]: R rows, BLOCK >= N columns. Everything is float32 between load and store.
Pointers that may be None switch their part of the kernel off at compile time. Row strides come in
units of ALIGN elements: Triton would see divisibility by 16 alone, and load rows of 1000 bfloat16
values one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels import _tl, _tl_activations

SCALARS = ["site", "threshold", "M"]  # their divisibility says nothing about alignment


@triton.jit
def load(pointer, mask, MASKED: tl.constexpr):
    """A tile as float32; masked lanes are 0."""
    value = tl.load(pointer, mask=mask, other=0.0) if MASKED else tl.load(pointer)
    return value.to(tl.float32)


@triton.jit
def store(pointer, value, mask, MASKED: tl.constexpr):
    """Round once to the pointer's dtype and write."""
    if MASKED:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty))


@triton.jit
def load_weight(W, cols, N: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr):
    """The weight as a row of a tile, [1, BLOCK]: in the tile's layout, with no shuffle."""
    w = load(W + cols[None, :], (cols < N)[None, :], MASKED)
    return w + OFFSET if OFFSET != 0 else w


@triton.jit
def round_to(xhat, ROUND: tl.constexpr):
    """The normalized value as the model rounds it before the weight; None: it does not."""
    if ROUND is not None:
        xhat = xhat.to(ROUND).to(tl.float32)
    return xhat


@triton.jit
def affine(xhat, w, b, W, B):
    """Xhat * w + b, for those of w and b whose pointers are there."""
    if W is not None:
        xhat = xhat * w
    if B is not None:
        xhat = xhat + b
    return xhat


@triton.jit
def _fwd_rows(
    step, w, b, seed, X, RES, W, B, Y, SUM, MEAN, RSTD,
    M, stride_x, stride_res, site, threshold, scale, eps, OFFSET: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, HOISTED: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """R whole rows in registers. Unless HOISTED, weights are loaded late: fewer live registers."""
    MASKED: tl.constexpr = N != BLOCK or R > 1
    cols = tl.arange(0, BLOCK)
    rows = step * R + tl.arange(0, R).to(tl.int64)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = load(X + rows[:, None] * stride_x + cols[None, :], mask, MASKED)
    out = rows[:, None] * N + cols[None, :]
    group = rows * ((N + 7) // 8)
    if RES is not None:
        if DROPOUT:
            x = x * _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        x += load(RES + rows[:, None] * stride_res + cols[None, :], mask, MASKED)
        x = x.to(SUM.dtype.element_ty)
        store(SUM + out, x, mask, MASKED)
        x = x.to(tl.float32)
    elif DROPOUT:
        words = _tl.random_words(seed, site, group, BLOCK)  # while x is on its way
    if not RMS:
        mean = tl.sum(x, 1) / N
        x -= mean[:, None]
        if MASKED:
            x = tl.where(mask, x, 0.0)
        tl.store(MEAN + rows, mean, mask=rows < M)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(RSTD + rows, rstd, mask=rows < M)
    if not HOISTED:
        if W is not None:
            w = load_weight(W, cols, N, OFFSET, N != BLOCK)
        if B is not None:
            b = load_weight(B, cols, N, 0.0, N != BLOCK)
    y = affine(round_to(x * rstd[:, None], ROUND), w, b, W, B)
    if DROPOUT and RES is None:
        y = y * _tl.factor_of(words, threshold, scale, BLOCK)
    store(Y + out, _tl_activations.activate(y, ACT, FAST), mask, MASKED)


@triton.jit(do_not_specialize=SCALARS)
def norm_fwd(
    X, RES, W, B, SEED, Y, SUM, MEAN, RSTD,
    M, stride_x, stride_res, site, threshold, scale, eps, OFFSET: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One step of R rows a program (STAGES 0), or a walk over the steps with the grid's stride."""
    stride_x *= ALIGN
    stride_res *= ALIGN
    w = 1.0
    b = 0.0
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    if STAGES == 0:
        _fwd_rows(
            tl.program_id(0).to(tl.int64), w, b, seed, X, RES, W, B, Y, SUM, MEAN, RSTD,
            M, stride_x, stride_res, site, threshold, scale, eps, OFFSET,
            N, BLOCK, R, False, RMS, ROUND, DROPOUT, ACT, FAST,
        )  # fmt: skip
    else:
        cols = tl.arange(0, BLOCK)
        if W is not None:
            w = load_weight(W, cols, N, OFFSET, N != BLOCK)
        if B is not None:
            b = load_weight(B, cols, N, 0.0, N != BLOCK)
        for step in tl.range(
            tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0), num_stages=STAGES
        ):
            _fwd_rows(
                step, w, b, seed, X, RES, W, B, Y, SUM, MEAN, RSTD,
                M, stride_x, stride_res, site, threshold, scale, eps, OFFSET,
                N, BLOCK, R, True, RMS, ROUND, DROPOUT, ACT, FAST,
            )  # fmt: skip


@triton.jit
def before_outer(
    dy, xhat, w, b, W, B, factor, DROPOUT: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr
):
    """The gradient before activation and dropout; recomputes the pre-activation from xhat."""
    if ACT != "none":
        z = affine(xhat, w, b, W, B)
        if DROPOUT:
            z = z * factor
        dy = _tl_activations.activate_grad(dy, z, ACT, FAST)
    if DROPOUT:
        dy = dy * factor
    return dy


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd(
    DY, DSUM, X, W, B, MEAN, RSTD, SEED, DX, DRES, DW, DB,
    M, stride_dy, stride_dsum, stride_x, site, threshold, scale,
    OFFSET: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Persistent: dx in one read of dy and x; dW and dB partials [programs, N] on the way.

    ADD: x is the sum residual + dropout(input), so the mask applies to the input's gradient only.
    """
    stride_dy *= ALIGN
    stride_dsum *= ALIGN
    stride_x *= ALIGN
    MASKED: tl.constexpr = N != BLOCK or R > 1
    cols = tl.arange(0, BLOCK)
    w = 1.0
    b = 0.0
    if W is not None:
        w = load_weight(W, cols, N, OFFSET, N != BLOCK)
    if B is not None and ACT != "none":
        b = load_weight(B, cols, N, 0.0, N != BLOCK)
    if DROPOUT:
        seed = tl.load(SEED)
    if DW is not None:
        dw = tl.zeros((R, BLOCK), tl.float32)
    if DB is not None:
        db = tl.zeros((R, BLOCK), tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0), num_stages=STAGES):
        rows = step * R + tl.arange(0, R).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = load(DY + rows[:, None] * stride_dy + cols[None, :], mask, MASKED)
        x = load(X + rows[:, None] * stride_x + cols[None, :], mask, MASKED)
        rstd = load(RSTD + rows, rows < M, R > 1)[:, None]
        if not RMS:
            x -= load(MEAN + rows, rows < M, R > 1)[:, None]
        xhat = x * rstd
        rounded = round_to(xhat, ROUND)
        factor = 1.0
        if DROPOUT:
            group = rows * ((N + 7) // 8)
            factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        if not ADD:
            dy = before_outer(dy, rounded, w, b, W, B, factor, DROPOUT, ACT, FAST)
        if DW is not None:
            dw += dy * rounded
        if DB is not None:
            db += dy
        if DX is not None or DRES is not None:
            if W is not None:
                dy = dy * w
            if RMS:
                dx = rstd * (dy - xhat * (tl.sum(dy * xhat, 1) / N)[:, None])
            else:
                c1 = (tl.sum(dy * xhat, 1) / N)[:, None]
                dx = rstd * (dy - xhat * c1 - (tl.sum(dy, 1) / N)[:, None])
            out = rows[:, None] * N + cols[None, :]
            if DSUM is not None:
                dx += load(DSUM + rows[:, None] * stride_dsum + cols[None, :], mask, MASKED)
            if DRES is not None:
                store(DRES + out, dx, mask, MASKED)
            if DX is not None:
                if ADD and DROPOUT:
                    dx = dx * factor
                store(DX + out, dx, mask, MASKED)
    partial = tl.program_id(0).to(tl.int64) * N + cols
    if DW is not None:
        store(DW + partial, tl.sum(dw, 0), cols < N, N != BLOCK)
    if DB is not None:
        store(DB + partial, tl.sum(db, 0), cols < N, N != BLOCK)


@triton.jit
def _sum_rows(PARTIALS, OUT, cols, P, N, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK_P, BLOCK), tl.float32)
    for first in tl.range(0, P, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(PARTIALS + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(OUT + cols, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=cols < N)


@triton.jit
def norm_bwd_reduce(
    DW_PARTIALS, DB_PARTIALS, DW, DB, P, N, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the partials over programs in a fixed order, and round to the weights' dtypes."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if DW is not None:
        _sum_rows(DW_PARTIALS, DW, cols, P, N, BLOCK_P, BLOCK)
    if DB is not None:
        _sum_rows(DB_PARTIALS, DB, cols, P, N, BLOCK_P, BLOCK)
