"""rope: x * cos + rotate(x) * sin, the rotary position embedding.

Forward reads x in place, usually a [B, H, S, D] view of [B, S, H, D], and writes the result in the
same memory layout: one pass. cos and sin are read once for several heads. Backward turns the
gradient back with the transpose of the same map: one pass. Saved: cos and sin; x only if a table
wants a gradient. Arithmetic in float32 (float64 if an input is), one rounding at the store.
Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels._library import Gradient, define, invoke
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._pointwise import arithmetic, kernel_serves, promoted

Kept = tuple[bool, torch.dtype, tuple[int, ...], tuple[int, ...]]


def rope_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Turn pairs of values, x * cos + rotate(x) * sin, in plain torch.

    rotate(x) is cat(-x2, x1) of the halves of the last dimension; if interleaved, each pair
    (x0, x1) becomes (-x1, x0).

    Args:
        x: [..., D], D even.
        cos: broadcastable with x; the last dimension D.
        sin: the same.
        interleaved: pairs lie side by side (GPT-J, RoFormer), not in halves (GPT-NeoX, Llama).
        out_dtype: the result's dtype; None for the promotion of the three.

    Returns:
        x's shape, broadcast with cos and sin. In x's memory layout if the shape is x's, as
        ``torch.empty_like(x)`` has it; else contiguous.

    Raises:
        OptionError: D is odd, or the shapes do not broadcast.
        UnsupportedError: the promotion of the three is no floating dtype.

    Example:
        >>> rope_reference(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.ones(2))
        tensor([-2.,  1.])
    """
    shape = _check(x, cos, sin)
    math = arithmetic(x, cos, sin)
    wide = x.to(math)
    y = wide * cos.to(math) + _rotate(wide, interleaved) * sin.to(math)
    result = _new(x, shape, promoted(x, cos, sin, out_dtype=out_dtype))
    y = y.to(result.dtype)
    return y if y.stride() == result.stride() else result.copy_(y)


def _rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_back(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The transpose of `_rotate`, which is its negative."""
    return -_rotate(x, interleaved)


def _new(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized result; see `rope_reference` for its layout."""
    if tuple(shape) == tuple(x.shape):
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Sequence[int]:
    """The result's shape."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise OptionError(
            f"graphopt::rope: last dimension of {tuple(x.shape)}", why="values turn in pairs"
        )
    if not promoted(x, cos, sin).is_floating_point:
        raise UnsupportedError(
            f"graphopt::rope of {x.dtype}, {cos.dtype}, {sin.dtype}",
            why="the operator is for float16, bfloat16, float32 and float64",
        )
    try:
        return torch.broadcast_shapes(x.shape, cos.shape, sin.shape)
    except RuntimeError as error:
        raise OptionError(
            f"graphopt::rope: shapes {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}",
            why="cos and sin must broadcast with x",
        ) from error


def _launch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if kernel_serves(x, cos, sin):
        from graphopt.kernels import _rope_triton as triton_path

        y = torch.empty_like(x, dtype=promoted(x, cos, sin, out_dtype=out_dtype))
        if triton_path.turn(x, cos, sin, y, interleaved, back=False):
            return y
    return rope_reference(x, cos, sin, interleaved, out_dtype=out_dtype)


def _fake(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _new(x, _check(x, cos, sin), promoted(x, cos, sin, out_dtype=out_dtype))


# Backward: dx = dy * cos + rotate^T(dy * sin). cos and sin of a pair's two values may differ, so
# that this is not rope with -sin.


def _backward_reference(
    grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dtype: torch.dtype,
    stride: Sequence[int],
) -> torch.Tensor:
    math = arithmetic(grad, cos, sin)
    dy = grad.to(math)
    dx = dy * cos.to(math) + _rotate_back(dy * sin.to(math), interleaved)
    return _backward_new(grad, cos, sin, interleaved, dtype, stride).copy_(dx)


def _backward_launch(
    grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dtype: torch.dtype,
    stride: Sequence[int],
) -> torch.Tensor:
    if kernel_serves(grad, cos, sin):
        from graphopt.kernels import _rope_triton as triton_path

        dy = grad if grad.stride(-1) == 1 else grad.contiguous()
        dx = _backward_new(grad, cos, sin, interleaved, dtype, stride)
        if triton_path.turn(dy, cos, sin, dx, interleaved, back=True):
            return dx
    return _backward_reference(grad, cos, sin, interleaved, dtype, stride)


def _backward_new(
    grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dtype: torch.dtype,
    stride: Sequence[int],
) -> torch.Tensor:
    return grad.new_empty_strided(grad.shape, stride, dtype=dtype)


_BACKWARD = define(
    "rope_backward(Tensor grad, Tensor cos, Tensor sin, bool interleaved, ScalarType dtype,"
    " SymInt[] stride) -> Tensor",
    launch=_backward_launch,
    reference=_backward_reference,
    fake=_backward_new,
)


def _forward_grad(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...], Kept]:
    y = invoke(_ROPE, x, cos, sin, interleaved, out_dtype=out_dtype)
    learned = cos.requires_grad or sin.requires_grad
    kept = (interleaved, x.dtype, tuple(x.shape), y.stride())
    return y, (cos, sin, x if learned else None), kept


def _backward_grad(
    saved: tuple[Any, ...], kept: Kept, needs: tuple[bool, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    (grad,), (cos, sin, x) = grads, saved
    interleaved, dtype, shape, stride = kept
    dx = None
    if needs[0]:
        same = tuple(grad.shape) == shape
        stored = dtype if same else arithmetic(grad, cos, sin)
        dx = invoke(_BACKWARD, grad, cos, sin, interleaved, stored, stride)
        dx = dx if same else dx.sum_to_size(shape).to(dtype)
    if not (needs[1] or needs[2]):
        return dx, None, None, None, None
    # A model seldom learns its tables: plain torch, a few passes.
    math = arithmetic(grad, x)
    dy, wide = grad.to(math), x.to(math)
    dcos = (dy * wide).sum_to_size(cos.shape).to(cos.dtype) if needs[1] else None
    turned = _rotate(wide, interleaved)
    dsin = (dy * turned).sum_to_size(sin.shape).to(sin.dtype) if needs[2] else None
    return dx, dcos, dsin, None, None


_ROPE = define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, *,"
    " ScalarType? out_dtype=None) -> Tensor",
    launch=_launch,
    reference=rope_reference,
    fake=_fake,
    gradient=Gradient(_forward_grad, _backward_grad),
)


def _cost(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    values = prod(_check(x, cos, sin))
    written = values * promoted(x, cos, sin, out_dtype=out_dtype).itemsize
    return Cost(tensor_bytes(x, cos, sin), written, 3 * values)


def _backward_cost(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    # Of x's gradient alone: tables are not learned.
    values = prod(_check(x, cos, sin))
    read = values * promoted(x, cos, sin, out_dtype=out_dtype).itemsize
    return Cost(read + tensor_bytes(cos, sin), tensor_bytes(x), 3 * values)


def _samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-2, 2, 2 * 5 * 3 * 8, device=device).reshape(2, 5, 3, 8)
    angle = torch.linspace(0, 6, 5 * 4, device=device).reshape(5, 4)
    for interleaved in (False, True):
        full = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
        yield Sample((x.transpose(1, 2), full.cos(), full.sin(), interleaved))
        yield Sample((x, full[None, :, None].cos(), full[None, :, None].sin(), interleaved))
    low = {"out_dtype": torch.bfloat16}
    yield Sample((x.bfloat16().transpose(1, 2), full.cos(), full.sin(), True), low)
    # A pair's two values with angles of their own; rows broadcast by the tables.
    yield Sample((x.transpose(1, 2), angle.repeat(1, 2).cos(), full.sin()))
    yield Sample((x[:, :1].transpose(1, 2), full.cos(), full.sin()))


def _example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    """Queries as attention takes them under autocast: [B, H, S, D] of [B, S, H, D]."""
    width = max(d for d in range(2, 129, 2) if cols % d == 0)
    batch = 8 if rows % 8 == 0 else 1
    x = torch.randn(batch, rows // batch, cols // width, width, device=device, dtype=dtype)
    speed = 10000.0 ** -torch.linspace(0, 1, width // 2, device=device)
    angle = torch.arange(rows // batch, device=device)[:, None] * speed
    full = torch.cat((angle, angle), -1)[None, None]
    return Sample((x.transpose(1, 2), full.cos(), full.sin()), {"out_dtype": dtype})


register(
    Op(
        name="rope",
        overload=_ROPE,
        reference=rope_reference,
        launch=_launch,
        samples=_samples,
        example=_example,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="cos and sin; also x if one of them wants a gradient",
    )
)
