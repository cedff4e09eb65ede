"""Triton for rope: every pair of values turned by its angle, or turned back, in one pass.

The leading dimensions are seen as three, (A, B, C), in the order of the result's memory; each
tensor has its own stride in each. A program turns a tile of B x C rows, cut so that several rows,
usually heads, take the same piece of cos and sin. Input and result are read and written where they
lie, so [B, H, S, D] views of [B, S, H, D] and slices of a packed projection need no copy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from graphopt.kernels._launch import next_power_of_2
from graphopt.kernels._prepared import Launch, MaybeTensor, Prepared, Run

WIDEST = 512
# Values a tile: 4 warps then have 4 accesses of 128 bits a thread in flight.
TILE = 4096
WARPS = 4
# Most rows of a tile that share a piece of the tables, which then costs L2 little: heads that lie
# side by side in memory; fewer if they lie far apart, so that the piece of each head stays long.
SHARED_INNER = 16
SHARED_OUTER = 8


@triton.jit
def _load_pairs(
    POINTER, rows, inside, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both values of each pair, float32 [B, C, BLOCK]; rows: offsets, inside: masks, [B, C]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)
        mask = inside[:, :, None] & (cols < 2 * HALF)[None, None, :]
        pairs = tl.load(POINTER + rows[:, :, None] + cols[None, None, :], mask=mask)
        pairs = tl.reshape(pairs, (rows.shape[0], rows.shape[1], BLOCK, 2))
        first, second = tl.split(pairs)
    else:
        cols = tl.arange(0, BLOCK)
        mask = inside[:, :, None] & (cols < HALF)[None, None, :]
        at = rows[:, :, None] + cols[None, None, :]
        first = tl.load(POINTER + at, mask=mask)
        second = tl.load(POINTER + HALF + at, mask=mask)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(
    POINTER, rows, inside, first, second,
    HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    first, second = first.to(POINTER.dtype.element_ty), second.to(POINTER.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)
        mask = inside[:, :, None] & (cols < 2 * HALF)[None, None, :]
        pairs = tl.reshape(tl.join(first, second), (rows.shape[0], rows.shape[1], 2 * BLOCK))
        tl.store(POINTER + rows[:, :, None] + cols[None, None, :], pairs, mask=mask)
    else:
        cols = tl.arange(0, BLOCK)
        mask = inside[:, :, None] & (cols < HALF)[None, None, :]
        at = rows[:, :, None] + cols[None, None, :]
        tl.store(POINTER + at, first, mask=mask)
        tl.store(POINTER + HALF + at, second, mask=mask)


@triton.jit
def _turn(
    X, COS, SIN, Y, size_b, size_c,
    x_a, x_b, x_c, cos_a, cos_b, cos_c, sin_a, sin_b, sin_c, y_a, y_b, y_c,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_c = tl.cdiv(size_c, TC)
    tiles_b = tl.cdiv(size_b, TB)
    c = (program % tiles_c).to(tl.int64) * TC + tl.arange(0, TC)
    b = (program // tiles_c % tiles_b).to(tl.int64) * TB + tl.arange(0, TB)
    a = (program // tiles_c // tiles_b).to(tl.int64)
    inside = (b < size_b)[:, None] & (c < size_c)[None, :]
    at_x = a * x_a + (b * x_b)[:, None] + (c * x_c)[None, :]
    at_y = a * y_a + (b * y_b)[:, None] + (c * y_c)[None, :]
    # Rows of a tile that share the tables load them again, from the L1 cache: a tile of tables one
    # row thick would save that, but costs barriers, for its values then change threads.
    at_cos = a * cos_a + (b * cos_b)[:, None] + (c * cos_c)[None, :]
    at_sin = a * sin_a + (b * sin_b)[:, None] + (c * sin_c)[None, :]
    x1, x2 = _load_pairs(X, at_x, inside, HALF, BLOCK, INTERLEAVED)
    cos1, cos2 = _load_pairs(COS, at_cos, inside, HALF, BLOCK, INTERLEAVED)
    sin1, sin2 = _load_pairs(SIN, at_sin, inside, HALF, BLOCK, INTERLEAVED)
    if BACK:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    if IN_PLACE:
        # In a tile of fewer values than threads, several threads hold the same value: none may
        # write before all have read.
        tl.debug_barrier()
    _store_pairs(Y, at_y, inside, y1, y2, HALF, BLOCK, INTERLEAVED)


@dataclass(frozen=True)
class Plan:
    """How one call is cut; the strides are those of (A, B, C), in elements.

    Args:
        sizes: of (A, B, C); the result's stride falls from A to C.
        x: strides of the input.
        cos: strides of cos, 0 where it is broadcast.
        sin: the same of sin.
        y: strides of the result.
        half: pairs of a row.
        tile_b: rows of a tile along B, a power of two.
        tile_c: the same along C.
    """

    sizes: tuple[int, ...]
    x: tuple[int, ...]
    cos: tuple[int, ...]
    sin: tuple[int, ...]
    y: tuple[int, ...]
    half: int
    tile_b: int
    tile_c: int

    @property
    def programs(self) -> int:
        """Tiles in all."""
        return self.sizes[0] * -(-self.sizes[1] // self.tile_b) * -(-self.sizes[2] // self.tile_c)

    def shared(self, dim: int) -> bool:
        """Whether neither table changes along a dimension."""
        return self.cos[dim] == 0 and self.sin[dim] == 0


Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


@functools.lru_cache(maxsize=1024)
def plan(x: Strided, cos: Strided, sin: Strided, y: Strided) -> Plan | None:
    """How to turn x into y, each given as (shape, strides); None if the kernel cannot.

    It can if x and y are of one shape, D is even and at most `WIDEST`, every last dimension is
    contiguous, cos and sin have D columns and broadcast to x, and the leading dimensions merge
    into at most three.

    Example:
        >>> table = ((5, 8), (8, 1))
        >>> heads = ((2, 3, 5, 8), (120, 8, 24, 1))  # [B, H, S, D] of [B, S, H, D]
        >>> plan(heads, table, table, heads).sizes
        (2, 5, 3)
    """
    shape, width = x[0], x[0][-1]
    leading = [_leading(t, shape) for t in (x, cos, sin, y)]
    if shape != y[0] or width % 2 or width > WIDEST or any(t is None for t in leading):
        return None
    columns = zip(shape[:-1], *(t for t in leading if t is not None), strict=True)
    dims = _merge(sorted((d for d in columns if d[0] != 1), key=lambda d: -d[4]))
    if len(dims) > 3:
        return None
    dims = [(1, 0, 0, 0, 0)] * (3 - len(dims)) + dims
    sizes, of_x, of_cos, of_sin, of_y = (tuple(d[i] for d in dims) for i in range(5))
    half = width // 2
    uncut = Plan(sizes, of_x, of_cos, of_sin, of_y, half, 1, 1)
    tile_b, tile_c = _tile(uncut, max(1, TILE // (2 * next_power_of_2(half))))
    return replace(uncut, tile_b=tile_b, tile_c=tile_c)


Dim = tuple[int, ...]  # size, then the strides of x, cos, sin and y


def _leading(tensor: Strided, shape: tuple[int, ...]) -> list[int] | None:
    """Strides of all dimensions but the last, broadcast to a shape; None if that cannot be."""
    sizes, strides = tensor
    missing = len(shape) - len(sizes)
    if not sizes or missing < 0 or sizes[-1] != shape[-1] or strides[-1] != 1:
        return None
    if any(n not in (1, wanted) for n, wanted in zip(sizes, shape[missing:], strict=True)):
        return None
    steps = zip(sizes[:-1], strides[:-1], strict=True)
    return [0] * missing + [0 if size == 1 else step for size, step in steps]


def _merge(dims: list[Dim]) -> list[Dim]:
    """Neighbours that lie at one stride in every tensor become one dimension."""
    merged: list[Dim] = []
    for dim in dims:
        size, steps = dim[0], dim[1:]
        if merged and all(
            outer == inner * size for outer, inner in zip(merged[-1][1:], steps, strict=True)
        ):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append(dim)
    return merged


def _tile(uncut: Plan, rows: int) -> tuple[int, int]:
    """(rows along B, rows along C) of a tile of about that many rows."""
    _, size_b, size_c = uncut.sizes
    if uncut.shared(2) and not uncut.shared(1):
        tile_c = _fit(size_c, min(rows, SHARED_INNER))
        return min(next_power_of_2(size_b), rows // tile_c), tile_c
    if uncut.shared(1) and not uncut.shared(2):
        tile_b = _fit(size_b, min(rows, SHARED_OUTER))
        return tile_b, min(next_power_of_2(size_c), rows // tile_b)
    tile_c = min(next_power_of_2(size_c), rows)
    return min(next_power_of_2(size_b), rows // tile_c), tile_c


def _fit(size: int, most: int) -> int:
    """A power of two up to `most` that cuts a size with little waste: 12 heads are 3 tiles of 4."""
    divisor = min(size & -size, most)
    return divisor if divisor >= 4 else min(next_power_of_2(size), most)


def _strided(tensor: torch.Tensor) -> Strided:
    return tuple(tensor.shape), tensor.stride()


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, y: torch.Tensor,
    interleaved: bool, back: bool,
) -> bool:  # fmt: skip
    """Write x turned by the angles into y, or turned back; False, nothing done, if `plan` cannot.

    Args:
        x: [..., D], float16, bfloat16 or float32.
        cos: broadcastable to x.
        sin: the same.
        y: x's shape, any memory layout with D contiguous; x itself, to turn it in place.
        interleaved: pairs lie side by side.
        back: apply the transpose of the map.
    """
    done: bool = _TURN((x, cos, sin, y), (interleaved, back, x is y))
    return done


def _prepare(tensors: tuple[MaybeTensor, ...], options: tuple[Any, ...]) -> Run:
    (x, cos, sin, y), (interleaved, back, in_place) = tensors, options
    assert x is not None and cos is not None and sin is not None and y is not None
    cut = plan(_strided(x), _strided(cos), _strided(sin), _strided(y)) if x.dim() else None
    if cut is None or y.numel() == 0:
        done = cut is not None
        return lambda *tensors: done
    launch = Launch(
        _turn, (cut.programs,), *cut.sizes[1:], *cut.x, *cut.cos, *cut.sin, *cut.y,
        BACK=back, INTERLEAVED=interleaved, IN_PLACE=in_place,
        HALF=cut.half, BLOCK=next_power_of_2(cut.half),
        TB=cut.tile_b, TC=cut.tile_c, num_warps=WARPS,
    )  # fmt: skip

    def run(*tensors: torch.Tensor) -> bool:
        launch(*tensors)
        return True

    return run


_TURN = Prepared(_prepare)
