"""Triton for cross_entropy: a program a row forward, one or more programs a row backward.

A tile is [K, W] consecutive columns of one row, seen so that a thread holds the same W / threads
columns of every line: the maximum and the sum run down the lines in registers, and threads meet
only once a row. Each of the W columns keeps a maximum and a sum of its own (online softmax). Whole
tiles need no mask; what is left of a row is walked line by line.

Rows are read in whole groups of 16 bytes where the tensor begins at a multiple of 16, beyond the
first and the last class too: each group holds a class, so it lies in the same allocation, and what
is no class is replaced after the load. Rows that begin inside a group ("skewed", an odd vocabulary)
are read so by the forward alone: the backward would have to shift them before the store. Strides
and widths come in units, so that Triton sees their divisibility.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphopt.kernels._launch import cdiv, is_aligned, next_power_of_2, on_device

NONE, MEAN = 0, 1


class Shape(NamedTuple):
    """How a kernel walks a row.

    Args:
        lines: of a tile: loads of 16 bytes that a thread has on their way.
        columns: the widest line; 8 values for each thread.
        stages: pipeline stages of the loop over tiles.
        programs: a row; 0 for one a tile.
    """

    lines: int
    columns: int
    stages: int
    programs: int


FORWARD = Shape(lines=8, columns=512, stages=2, programs=1)
BACKWARD = Shape(lines=2, columns=1024, stages=1, programs=0)
ALIKE = ["V", "inner", "ignore_index"]  # their divisibility says nothing about alignment
ROWS_A_STEP = 8192  # of the program that adds the rows' losses


@triton.jit
def _row_start(row, inner, stride_outer, stride_inner, UNIT: tl.constexpr):
    return ((row // inner) * stride_outer + (row % inner) * stride_inner) * UNIT


@triton.jit
def _load_line(start, cols, skew, V, width, GROUP: tl.constexpr, EXACT: tl.constexpr):
    """Columns as float32; those that are no class are -inf."""
    inside = cols < width * GROUP
    x = tl.load(start + cols, mask=inside, other=float("-inf")).to(tl.float32)
    return x if EXACT else tl.where((cols >= skew) & (cols < V + skew), x, float("-inf"))


@triton.jit
def _target_of(TARGET, row, V, ignore_index):
    """(class, 0 where there is none; is it ignored; is it a class)."""
    target = tl.load(TARGET + row).to(tl.int64)
    known = (target >= 0) & (target < V)
    ignored = target == ignore_index
    return tl.where(known & (ignored == 0), target, 0), ignored, known


@triton.jit
def _absorb(top, total, x):
    """Each column's maximum, and its sum of exp(x - maximum), with the lines of x taken in."""
    highest = tl.maximum(top, tl.max(x, 0))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift[None, :]), 0)


@triton.jit
def _gap(x, origin, cols, skew, V, WEIGHT):
    """Each column's sum of w * (origin - x), for label smoothing."""
    inside = (cols >= skew) & (cols < V + skew)
    gap = tl.where(inside, origin - x, 0.0)
    if WEIGHT is not None:
        gap *= tl.load(WEIGHT + (cols - skew), mask=inside, other=0.0).to(tl.float32)
    return tl.sum(gap, 0)


@triton.jit(do_not_specialize=ALIKE)
def _ce_fwd(
    X, TARGET, WEIGHT, WEIGHT_SUM, LOSS, STATISTICS,
    M, V, width, inner, stride_outer, stride_inner, ignore_index, smoothing,
    UNIT: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, SKEWED: tl.constexpr,
    SMOOTH: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offset = _row_start(row, inner, stride_outer, stride_inner, UNIT)
    at, ignored, known = _target_of(TARGET, row, V, ignore_index)
    hit = tl.load(X + offset + at).to(tl.float32)
    skew = 0
    if SKEWED:
        skew = (offset % GROUP).to(tl.int32)
        offset = offset // GROUP * GROUP
        width = tl.cdiv(V + skew, GROUP)
    start = X + offset
    line = tl.arange(0, W)[None, :]
    lanes = tl.arange(0, K)[:, None] * W + line
    top = tl.full((W,), float("-inf"), tl.float32)
    total = tl.zeros((W,), tl.float32)
    if SMOOTH:
        # Measured from the target's logit, so that a common offset of all does not cancel.
        origin = tl.where(tl.abs(hit) < float("inf"), hit, 0.0)
        below = tl.zeros((W,), tl.float32)
    begin = 0
    if SKEWED:
        head = _load_line(start, line, skew, V, width, GROUP, EXACT)
        top, total = _absorb(top, total, head)
        if SMOOTH:
            below += _gap(head, origin, line, skew, V, WEIGHT)
        begin = W
    end = begin + tl.maximum(V + skew - begin, 0) // (K * W) * (K * W)
    for first in tl.range(begin, end, K * W, num_stages=STAGES):
        x = tl.load(start + (first + lanes)).to(tl.float32)
        top, total = _absorb(top, total, x)
        if SMOOTH:
            below += _gap(x, origin, first + lanes, skew, V, WEIGHT)
    for first in tl.range(end, V + skew, W):
        tail = _load_line(start, first + line, skew, V, width, GROUP, EXACT)
        top, total = _absorb(top, total, tail)
        if SMOOTH:
            below += _gap(tail, origin, first + line, skew, V, WEIGHT)
    peak = tl.max(top, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    log_sum = tl.log(tl.sum(total * tl.exp(top - shift), 0))
    tl.store(STATISTICS + row, peak)
    tl.store(STATISTICS + M + row, log_sum)
    loss = log_sum - (hit - peak)
    if WEIGHT is not None:
        loss *= tl.load(WEIGHT + at).to(tl.float32)
    if SMOOTH:
        every = tl.load(WEIGHT_SUM) if WEIGHT is not None else V.to(tl.float32)
        smooth = every * (log_sum + (peak - origin)) + tl.sum(below, 0)
        loss = (1 - smoothing) * loss + smoothing / V * smooth
    loss = tl.where(known, loss, float("nan"))
    tl.store(LOSS + row, tl.where(ignored, 0.0, loss).to(LOSS.dtype.element_ty))


@triton.jit(do_not_specialize=["M", "V", "ignore_index"])
def _ce_reduce(
    ROWS, TARGET, WEIGHT, LOSS, TOTAL, M, V, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: the losses of all rows added in a fixed order, and for a mean their weights."""
    loss = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK).to(tl.int64)
        mask = rows < M
        loss += tl.load(ROWS + rows, mask=mask, other=0.0)
        if TOTAL is not None:
            target = tl.load(TARGET + rows, mask=mask, other=0).to(tl.int64)
            counts = mask & (target != ignore_index) & (target >= 0) & (target < V)
            if WEIGHT is not None:
                total += tl.load(WEIGHT + target, mask=counts, other=0.0).to(tl.float32)
            else:
                total += tl.where(counts, 1.0, 0.0)
    value = tl.sum(loss, 0)
    if TOTAL is not None:
        weights = tl.sum(total, 0)
        tl.store(TOTAL, weights)
        value = value / weights
    tl.store(LOSS, value.to(LOSS.dtype.element_ty))


@triton.jit
def _slope(
    x, cols, at, peak, hit, factor, each, WEIGHT, V, SMOOTH: tl.constexpr
):  # fmt: skip
    """The gradient of a tile: factor * exp(x - peak) - hit at the target - each * w."""
    slope = tl.exp(x - peak) * factor
    if SMOOTH:
        if WEIGHT is not None:
            slope -= each * tl.load(WEIGHT + cols, mask=cols < V, other=0.0).to(tl.float32)
        else:
            slope -= each
    return tl.where(cols == at, slope - hit, slope)


@triton.jit(do_not_specialize=[*ALIKE, "stride_grad", "stride_dx", "width_dx", "programs"])
def _ce_bwd(
    GRAD, X, TARGET, WEIGHT, WEIGHT_SUM, STATISTICS, TOTAL, DX,
    M, V, width, inner, stride_outer, stride_inner, stride_grad, stride_dx, width_dx, programs,
    ignore_index, smoothing,
    UNIT: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, SMOOTH: tl.constexpr,
    GROUP_DX: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Program i of a row: its tiles i, i + programs, ...; the last one also what no tile holds.
    row = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    line = tl.arange(0, W)[None, :]
    lanes = tl.arange(0, K)[:, None] * W + line
    out = DX + row * (stride_dx * GROUP_DX)
    end = V // (K * W) * (K * W)
    left = end if part == programs - 1 else width_dx * GROUP_DX
    at, ignored, known = _target_of(TARGET, row, V, ignore_index)
    peak = tl.load(STATISTICS + row)
    log_sum = tl.load(STATISTICS + M + row)
    if ignored:
        # Zero without a read, but NaN where the softmax is, as in eager.
        blank = (peak + log_sum) * 0.0
        for first in tl.range(part * (K * W), end, programs * (K * W)):
            tile = tl.zeros((K, W), tl.float32) + blank
            tl.store(out + (first + lanes), tile.to(DX.dtype.element_ty))
        for first in tl.range(left, width_dx * GROUP_DX, W):
            rest = first + line
            tail = tl.where(rest < V, blank, 0.0).to(DX.dtype.element_ty)
            tl.store(out + rest, tail, mask=rest < width_dx * GROUP_DX)
    else:
        start = X + _row_start(row, inner, stride_outer, stride_inner, UNIT)
        scale = tl.load(GRAD + row * stride_grad).to(tl.float32)
        if TOTAL is not None:
            scale = scale / tl.load(TOTAL)
        scale = tl.where(known, scale, float("nan"))
        hit = scale
        if WEIGHT is not None:
            hit *= tl.load(WEIGHT + at).to(tl.float32)
        factor = hit
        each = 0.0
        if SMOOTH:
            hit *= 1 - smoothing
            each = smoothing / V * scale
            every = tl.load(WEIGHT_SUM) if WEIGHT is not None else V.to(tl.float32)
            factor = hit + each * every
        factor *= tl.exp(-log_sum)
        for first in tl.range(part * (K * W), end, programs * (K * W), num_stages=STAGES):
            cols = first + lanes
            x = tl.load(start + cols).to(tl.float32)
            slope = _slope(x, cols, at, peak, hit, factor, each, WEIGHT, V, SMOOTH)
            tl.store(out + cols, slope.to(DX.dtype.element_ty))
        for first in tl.range(left, width_dx * GROUP_DX, W):
            rest = first + line
            z = _load_line(start, rest, 0, V, width, GROUP, EXACT)
            tail = _slope(z, rest, at, peak, hit, factor, each, WEIGHT, V, SMOOTH)
            # The padding of a row is the gradient's own.
            tail = tl.where(rest < V, tail, 0.0).to(DX.dtype.element_ty)
            tl.store(out + rest, tail, mask=rest < width_dx * GROUP_DX)


class _Rows(NamedTuple):
    """Logits as rows at two strides: row r lies at (r // inner) * outer + (r % inner) * step."""

    tensor: torch.Tensor
    inner: int
    outer: int
    step: int


def _rows_of(logits: torch.Tensor) -> _Rows:
    """See logits [..., V] as rows, with a copy only if two strides do not tell where they lie."""
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    found = _two_strides(logits.shape[:-1], logits.stride()[:-1])
    if found is None:
        logits = logits.contiguous()
        return _Rows(logits, max(1, logits.numel() // logits.shape[-1]), 0, logits.shape[-1])
    return _Rows(logits, *found)


def _two_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(inner, outer, step) of leading dimensions that lie at two strides, None if at more."""
    runs: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        else:
            runs.append((size, stride))
    if len(runs) > 2:
        return None
    runs += [(1, 0)] * (2 - len(runs))
    return runs[0][0], runs[1][1], runs[0][1]


def _units(rows: _Rows, classes: int) -> tuple[tuple[int, ...], dict[str, int], bool]:
    """(width, inner, outer, step) in units; the constants that say which; are rows skewed."""
    unit = 16
    while rows.outer % unit or rows.step % unit:
        unit //= 2
    group = 16 // rows.tensor.element_size() if is_aligned(rows.tensor) else 1
    skewed = unit % group != 0
    width = cdiv(classes, group)
    flags = {"UNIT": unit, "GROUP": group, "EXACT": width * group == classes and not skewed}
    return (width, rows.inner, rows.outer // unit, rows.step // unit), flags, skewed


def _tile(shape: Shape, columns: int) -> dict[str, int]:
    """Lines and columns of a tile, with the warps that serve it."""
    w = min(shape.columns, max(32, next_power_of_2(columns)))
    k = shape.lines if columns >= shape.lines * w else 1
    return {"K": k, "W": w, "STAGES": shape.stages, "num_warps": max(1, w // 256)}


def _vectors(
    weight: torch.Tensor | None, smoothing: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(the class weights, their sum where smoothing asks for it)."""
    if weight is None:
        return None, None
    weight = weight.contiguous()
    return weight, weight.sum(dtype=torch.float32) if smoothing else None


def forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None,
    reduction: int, ignore_index: int, smoothing: float, classes: int,
    loss: torch.Tensor, statistics: torch.Tensor, total: torch.Tensor,
) -> None:  # fmt: skip
    """Write loss, statistics [2, rows] and, for a mean, total; there is at least one row."""
    rows = _rows_of(logits)
    count = statistics.shape[1]
    sizes, flags, skewed = _units(rows, classes)
    target = target.contiguous()
    weight, weight_sum = _vectors(weight, smoothing)
    # Without a reduction the rows' losses are the result.
    each = loss if reduction == NONE else torch.empty_like(statistics[0])
    with on_device(logits):
        _ce_fwd[(count,)](
            rows.tensor, target, weight, weight_sum, each, statistics,
            count, classes, *sizes, ignore_index, smoothing,
            SKEWED=skewed, SMOOTH=smoothing > 0, **flags, **_tile(FORWARD, classes),
        )  # fmt: skip
        if reduction != NONE:
            block = min(ROWS_A_STEP, max(32, next_power_of_2(count)))
            _ce_reduce[(1,)](
                each, target, weight, loss, total if reduction == MEAN else None,
                count, classes, ignore_index, BLOCK=block, num_warps=max(1, min(16, block // 256)),
            )  # fmt: skip


def backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None,
    reduction: int, ignore_index: int, smoothing: float, classes: int,
    statistics: torch.Tensor, total: torch.Tensor, dx: torch.Tensor,
) -> None:  # fmt: skip
    """Write dx, shaped as logits, whose rows lie at one stride, a multiple of 16 bytes."""
    rows = _rows_of(logits)
    count = statistics.shape[1]
    sizes, flags, skewed = _units(rows, classes)
    group = 16 // dx.element_size()
    if skewed or flags["GROUP"] == 1:
        # One layout serves load and store: with wide stores, a warp's narrow loads lie far apart.
        flags, sizes, group = {**flags, "GROUP": 1, "EXACT": True}, (classes, *sizes[1:]), 1
    width_dx = cdiv(dx.shape[-1], group)
    stride_dx = dx.stride(-2) // group if dx.dim() > 1 else 0
    tile = _tile(BACKWARD, classes)
    programs = BACKWARD.programs or max(1, classes // (tile["K"] * tile["W"]))
    stride_grad = 0
    if reduction == NONE:
        grad = grad.reshape(-1)
        stride_grad = grad.stride(0)
    weight, weight_sum = _vectors(weight, smoothing)
    with on_device(logits):
        _ce_bwd[(count * programs,)](
            grad, rows.tensor, target.contiguous(), weight, weight_sum,
            statistics, total if reduction == MEAN else None, dx,
            count, classes, *sizes, stride_grad, stride_dx, width_dx, programs,
            ignore_index, smoothing,
            SMOOTH=smoothing > 0, GROUP_DX=group, **flags, **tile,
        )  # fmt: skip
