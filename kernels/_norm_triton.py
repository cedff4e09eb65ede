"""Triton kernels of the norm family. Launches and their tables stand in ``_norm_launch.py``.

One tile is [R, BLOCK]: R rows, BLOCK >= N columns. Everything is float32 between load and store.
Pointers that may be None switch their part of the kernel off at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels import _tl, _tl_activations

SCALARS = ["site", "threshold", "M"]  # their divisibility says nothing about alignment


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    """A tile as float32; masked lanes are 0."""
    value = tl.load(pointer, mask=mask, other=0.0) if MASKED else tl.load(pointer)
    return value.to(tl.float32)


@triton.jit
def _store(pointer, value, mask, MASKED: tl.constexpr):
    """Round once to the pointer's dtype and write."""
    if MASKED:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty))


@triton.jit
def _load_weight(W, cols, mask, weight_offset, MASKED: tl.constexpr):
    return _load(W + cols, mask, MASKED)[None, :] + weight_offset


@triton.jit
def _round(xhat, ROUND: tl.constexpr):
    """The normalized value as the model rounds it before the weight; None: it does not."""
    if ROUND is not None:
        xhat = xhat.to(ROUND).to(tl.float32)
    return xhat


@triton.jit
def _affine(xhat, w, b, W, B):
    """Xhat * w + b, for those of w and b whose pointers are there."""
    if W is not None:
        xhat = xhat * w
    if B is not None:
        xhat = xhat + b
    return xhat


@triton.jit(do_not_specialize=SCALARS)
def norm_fwd(
    X, RES, W, B, SEED, Y, SUM, MEAN, RSTD,
    M, stride_x, stride_res, site, threshold, scale, eps, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, R a step; a program walks the steps with the grid's stride."""
    MASKED: tl.constexpr = N != BLOCK or R > 1
    cols = tl.arange(0, BLOCK)
    w = 1.0
    b = 0.0
    if W is not None:
        w = _load_weight(W, cols, cols < N, weight_offset, N != BLOCK)
    if B is not None:
        b = _load(B + cols, cols < N, N != BLOCK)[None, :]
    if DROPOUT:
        seed = tl.load(SEED)
    for step in tl.range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0), num_stages=STAGES):
        rows = step * R + tl.arange(0, R).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = _load(X + rows[:, None] * stride_x + cols[None, :], mask, MASKED)
        out = rows[:, None] * N + cols[None, :]
        if DROPOUT:
            group = rows * ((N + 7) // 8)
            factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        if RES is not None:
            if DROPOUT:
                x = x * factor
            x += _load(RES + rows[:, None] * stride_res + cols[None, :], mask, MASKED)
            x = x.to(SUM.dtype.element_ty)
            _store(SUM + out, x, mask, MASKED)
            x = x.to(tl.float32)
        if RMS:
            d = x
        else:
            mean = tl.sum(x, 1) / N
            d = x - mean[:, None]
            if MASKED:
                d = tl.where(mask, d, 0.0)
            tl.store(MEAN + rows, mean, mask=rows < M)
        rstd = tl.rsqrt(tl.sum(d * d, 1) / N + eps)
        tl.store(RSTD + rows, rstd, mask=rows < M)
        y = _affine(_round(d * rstd[:, None], ROUND), w, b, W, B)
        if DROPOUT and RES is None:
            y = y * factor
        _store(Y + out, _tl_activations.activate(y, ACT, FAST), mask, MASKED)


@triton.jit(do_not_specialize=SCALARS)
def norm_fwd_wide(
    X, RES, W, B, SEED, Y, SUM, MEAN, RSTD,
    M, stride_x, stride_res, site, threshold, scale, eps, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One row a program, in blocks of columns: one pass for the statistics, one for the output."""
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    if DROPOUT:
        seed = tl.load(SEED)
    count = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    moment = tl.zeros((1,), tl.float32)
    for first in tl.range(0, N, BLOCK):
        cols = first + lane
        mask = (cols < N)[None, :]
        x = _load(X + row * stride_x + cols[None, :], mask, True)
        if RES is not None:
            if DROPOUT:
                group = rows * ((N + 7) // 8) + first // 8
                x = x * _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            x += _load(RES + row * stride_res + cols[None, :], mask, True)
            x = x.to(SUM.dtype.element_ty)
            _store(SUM + row * N + cols[None, :], x, mask, True)
            x = x.to(tl.float32)
        if RMS:
            moment += tl.sum(x * x, 1)
        else:
            # Blocks are merged by their means (Chan et al.), so that a large mean cancels nothing.
            here = tl.sum(mask.to(tl.float32), 1)
            centre = tl.sum(x, 1) / here
            d = tl.where(mask, x - centre[:, None], 0.0)
            delta = centre - mean
            total = count + here
            moment += tl.sum(d * d, 1) + delta * delta * (count * here / total)
            mean += delta * (here / total)
            count = total
    rstd = tl.rsqrt(moment / N + eps)
    tl.store(RSTD + rows, rstd)
    if not RMS:
        tl.store(MEAN + rows, mean)
    tl.debug_barrier()  # the sum was written by the threads of this program
    for first in tl.range(0, N, BLOCK):
        cols = first + lane
        mask = (cols < N)[None, :]
        w = 1.0
        b = 0.0
        if W is not None:
            w = _load_weight(W, cols, cols < N, weight_offset, True)
        if B is not None:
            b = _load(B + cols, cols < N, True)[None, :]
        if RES is not None:
            x = _load(SUM + row * N + cols[None, :], mask, True)
        else:
            x = _load(X + row * stride_x + cols[None, :], mask, True)
        y = _affine(_round((x - mean[:, None]) * rstd[:, None], ROUND), w, b, W, B)
        if DROPOUT and RES is None:
            group = rows * ((N + 7) // 8) + first // 8
            y = y * _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        y = _tl_activations.activate(y, ACT, FAST)
        _store(Y + row * N + cols[None, :], y, mask, True)


@triton.jit
def _before_outer(
    dy, xhat, w, b, W, B, factor, DROPOUT: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr
):
    """The gradient before activation and dropout; recomputes the pre-activation from xhat."""
    if ACT != "none":
        z = _affine(xhat, w, b, W, B)
        if DROPOUT:
            z = z * factor
        dy = _tl_activations.activate_grad(dy, z, ACT, FAST)
    if DROPOUT:
        dy = dy * factor
    return dy


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd(
    DY, DSUM, X, W, B, MEAN, RSTD, SEED, DX, DRES, DW, DB,
    M, stride_dy, stride_dsum, stride_x, site, threshold, scale, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Persistent: dx in one read of dy and x; dW and dB partials [programs, N] on the way.

    ADD: x is the sum residual + dropout(input), so the mask applies to the input's gradient only.
    """
    MASKED: tl.constexpr = N != BLOCK or R > 1
    cols = tl.arange(0, BLOCK)
    w = 1.0
    b = 0.0
    if W is not None:
        w = _load_weight(W, cols, cols < N, weight_offset, N != BLOCK)
    if B is not None and ACT != "none":
        b = _load(B + cols, cols < N, N != BLOCK)[None, :]
    if DROPOUT:
        seed = tl.load(SEED)
    if DW is not None:
        dw = tl.zeros((R, BLOCK), tl.float32)
    if DB is not None:
        db = tl.zeros((R, BLOCK), tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0), num_stages=STAGES):
        rows = step * R + tl.arange(0, R).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = _load(DY + rows[:, None] * stride_dy + cols[None, :], mask, MASKED)
        x = _load(X + rows[:, None] * stride_x + cols[None, :], mask, MASKED)
        rstd = _load(RSTD + rows, rows < M, R > 1)[:, None]
        if not RMS:
            x -= _load(MEAN + rows, rows < M, R > 1)[:, None]
        xhat = x * rstd
        rounded = _round(xhat, ROUND)
        factor = 1.0
        if DROPOUT:
            group = rows * ((N + 7) // 8)
            factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        if not ADD:
            dy = _before_outer(dy, rounded, w, b, W, B, factor, DROPOUT, ACT, FAST)
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
                dx += _load(DSUM + rows[:, None] * stride_dsum + cols[None, :], mask, MASKED)
            if DRES is not None:
                _store(DRES + out, dx, mask, MASKED)
            if DX is not None:
                if ADD and DROPOUT:
                    dx = dx * factor
                _store(DX + out, dx, mask, MASKED)
    partial = tl.program_id(0).to(tl.int64) * N + cols
    if DW is not None:
        _store(DW + partial, tl.sum(dw, 0), cols < N, N != BLOCK)
    if DB is not None:
        _store(DB + partial, tl.sum(db, 0), cols < N, N != BLOCK)


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd_wide(
    DY, DSUM, X, W, B, MEAN, RSTD, SEED, DX, DRES,
    stride_dy, stride_dsum, stride_x, site, threshold, scale, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The dx of one row a program, in blocks of columns: one pass for the two means, one for dx."""
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    rstd = tl.load(RSTD + rows)[:, None]
    mean = 0.0
    if not RMS:
        mean = tl.load(MEAN + rows)[:, None]
    if DROPOUT:
        seed = tl.load(SEED)
    c1 = tl.zeros((1,), tl.float32)
    c2 = tl.zeros((1,), tl.float32)
    for sweep in tl.static_range(2):
        for first in tl.range(0, N, BLOCK):
            cols = first + lane
            mask = (cols < N)[None, :]
            dy = _load(DY + row * stride_dy + cols[None, :], mask, True)
            x = _load(X + row * stride_x + cols[None, :], mask, True)
            xhat = (x - mean) * rstd
            w = 1.0
            b = 0.0
            factor = 1.0
            if W is not None:
                w = _load_weight(W, cols, cols < N, weight_offset, True)
            if B is not None and ACT != "none":
                b = _load(B + cols, cols < N, True)[None, :]
            if DROPOUT and (sweep == 1 or not ADD):
                group = rows * ((N + 7) // 8) + first // 8
                factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            if not ADD:
                rounded = _round(xhat, ROUND)
                dy = _before_outer(dy, rounded, w, b, W, B, factor, DROPOUT, ACT, FAST)
            if W is not None:
                dy = dy * w
            if sweep == 0:
                c1 += tl.sum(dy * xhat, 1)
                c2 += tl.sum(dy, 1)
            else:
                dx = dy - xhat * (c1 / N)[:, None]
                if not RMS:
                    dx -= (c2 / N)[:, None]
                dx *= rstd
                out = row * N + cols[None, :]
                if DSUM is not None:
                    dx += _load(DSUM + row * stride_dsum + cols[None, :], mask, True)
                if DRES is not None:
                    _store(DRES + out, dx, mask, True)
                if DX is not None:
                    if ADD and DROPOUT:
                        dx = dx * factor
                    _store(DX + out, dx, mask, True)


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd_wide_weights(
    DY, X, W, B, MEAN, RSTD, SEED, DW, DB,
    M, stride_dy, stride_x, site, threshold, scale, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """DW and dB partials [programs of axis 1, N] of BLOCK columns a program."""
    first = tl.program_id(0) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    w = 1.0
    b = 0.0
    if W is not None:
        w = _load_weight(W, cols, cols < N, weight_offset, True)
    if B is not None and ACT != "none":
        b = _load(B + cols, cols < N, True)[None, :]
    if DROPOUT:
        seed = tl.load(SEED)
    dw = tl.zeros((R, BLOCK), tl.float32)
    db = tl.zeros((R, BLOCK), tl.float32)
    for step in tl.range(tl.program_id(1), tl.cdiv(M, R), tl.num_programs(1)):
        rows = step * R + tl.arange(0, R).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = _load(DY + rows[:, None] * stride_dy + cols[None, :], mask, True)
        xhat = _load(X + rows[:, None] * stride_x + cols[None, :], mask, True)
        if not RMS:
            xhat -= _load(MEAN + rows, rows < M, True)[:, None]
        xhat = _round(xhat * _load(RSTD + rows, rows < M, True)[:, None], ROUND)
        if not ADD:
            factor = 1.0
            if DROPOUT:
                group = rows * ((N + 7) // 8) + first // 8
                factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            dy = _before_outer(dy, xhat, w, b, W, B, factor, DROPOUT, ACT, FAST)
        dw += dy * xhat
        db += dy
    partial = tl.program_id(1).to(tl.int64) * N + cols
    if DW is not None:
        tl.store(DW + partial, tl.sum(dw, 0), mask=cols < N)
    if DB is not None:
        tl.store(DB + partial, tl.sum(db, 0), mask=cols < N)


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
