"""What the pointwise families share: dtypes, checks, tiles. No Triton here."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import _launch
from graphopt.kernels._launch import Rows, next_power_of_2, row_view

HALF = (torch.float16, torch.bfloat16)
_SERVED = (*HALF, torch.float32)
_FLOATS = (*_SERVED, torch.float64)


def promoted(*tensors: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a result: the one asked for, else the promotion of the inputs that are there.

    Example:
        >>> promoted(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
        torch.float32
    """
    if out_dtype is not None:
        return out_dtype
    dtypes = [t.dtype for t in tensors if t is not None]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def arithmetic(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype that the arithmetic is done in: float64 if an input is, else float32."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


def kernel_serves(*tensors: torch.Tensor | None) -> bool:
    """Whether the Triton kernels take these dtypes; float64 goes to the reference."""
    return all(t is None or t.dtype in _SERVED for t in tensors)


def check_floating(op: str, *tensors: torch.Tensor | None) -> None:
    """Refuse dtypes other than float16, bfloat16, float32 and float64.

    Raises:
        UnsupportedError: a tensor is of another dtype.
    """
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in _FLOATS:
            raise UnsupportedError(
                f"graphopt::{op} of {tensor.dtype}",
                why="the operator is for float16, bfloat16, float32 and float64",
            )


def check_bias(op: str, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse a bias that is not one value for each element of x's last dimension.

    Raises:
        OptionError: it is not.
    """
    if bias is None:
        return
    if bias.dim() != 1 or x.dim() == 0 or bias.shape[0] != x.shape[-1]:
        raise OptionError(
            f"graphopt::{op}: bias {tuple(bias.shape)} for x {tuple(x.shape)}",
            why="the bias is added over the last dimension",
            try_="a bias of shape [x.shape[-1]]",
        )


def check_same_shape(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse two tensors of different shapes.

    Raises:
        OptionError: the shapes differ.
    """
    if a.shape != b.shape:
        raise OptionError(
            f"graphopt::{op}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ",
            why="the operator does not broadcast",
            try_="torch.broadcast_tensors",
        )


def plus_bias(x: torch.Tensor, bias: torch.Tensor | None, added: bool) -> torch.Tensor:
    """X + bias; x alone if it holds the bias already, which then still gets its gradient."""
    if bias is None:
        return x
    if not added:
        return x + bias
    if bias.requires_grad and torch.is_grad_enabled():  # a reference that is differentiated
        return x + (bias - bias.detach())
    return x


def sum_to_bias(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a bias, from that of the sum: all leading dimensions summed."""
    leading = list(range(gradient.dim() - 1))
    return (gradient.sum(leading) if leading else gradient).to(dtype)


def slope_times(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """The derivative at z times dy, both of one dtype, by eager's own backward operators."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dy, z)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(dy, z, approximate="tanh")
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(dy, torch.tanh(z))
    if activation == "sigmoid":
        return torch.ops.aten.sigmoid_backward(dy, torch.sigmoid(z))
    return dy


def own(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A contiguous result that shares no memory with source, as an operator must return it."""
    if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


class Tiling(NamedTuple):
    """How a pointwise kernel cuts [count, cols] into tiles.

    Args:
        rows: how many rows there are.
        cols: columns.
        rows_a_tile: rows of a tile, a power of two.
        cols_a_tile: columns of a tile, a power of two of at least 8.
    """

    rows: int
    cols: int
    rows_a_tile: int
    cols_a_tile: int

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return -(-self.cols // self.cols_a_tile)

    @property
    def down(self) -> int:
        """Tiles one below the other."""
        return -(-self.rows // self.rows_a_tile)


# Values a tile. 1024 columns of a 16-bit dtype are one 128-bit access for each thread of 4 warps;
# 4 rows of them forward and 2 backward keep enough accesses in flight. The loop that sums columns
# takes 4, for it pays barriers and addresses a step; it needs 128 registers a thread, so that 4
# programs fit a multiprocessor.
WIDEST = 1024
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
SUMMING_TILE = 4096
# The backward that also sums columns: programs a multiprocessor, and stages of its loop over rows.
SUMMING_PROGRAMS = 4
SUMMING_STAGES = 3


@functools.lru_cache(maxsize=4096)
def tile(count: int, cols: int, values: int) -> Tiling:
    """Tiles of about ``values`` values, as wide as the rows up to ``WIDEST`` columns.

    Example:
        >>> tile(16384, 4096, 4096)
        Tiling(rows=16384, cols=4096, rows_a_tile=4, cols_a_tile=1024)
        >>> tile(16384, 17, 4096).rows_a_tile
        128
    """
    width = max(8, min(next_power_of_2(cols), WIDEST))
    if count == 1:
        width = min(next_power_of_2(cols), values) if cols > WIDEST else width
        return Tiling(count, cols, 1, width)
    return Tiling(count, cols, min(values // width, next_power_of_2(count)), width)


def lay_out(*tensors: torch.Tensor, flat: bool, copy: bool = True) -> tuple[list[Rows], int, int]:
    """The tensors as rows, and the (count, cols) that a kernel walks.

    With ``flat``, contiguous tensors become one long row, so that odd widths cost nothing.

    Args:
        tensors: tensors of one shape.
        flat: the kernel does not need to know the columns.
        copy: False to see how copies would lie, without making them.
    """
    views = [row_view(t, copy) for t in tensors]
    count, cols = views[0].rows, views[0].cols
    if flat and count > 1 and all(v.stride == cols for v in views):
        total = count * cols
        return [Rows(v.tensor, 1, total, total) for v in views], 1, total
    return views, count, cols


def summing_parts(tiling: Tiling, tensor: torch.Tensor) -> int:
    """Into how many parts the rows are cut when each part sums its columns."""
    programs = SUMMING_PROGRAMS * _launch.sm_count(tensor)
    return max(1, min(tiling.down, programs // tiling.across))
