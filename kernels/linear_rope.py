"""linear_rope: queries, keys and values by one matrix product, the first two turned by rope.

The weights of the three projections lie one below the other, so one GEMM gives [B, S, W], all
heads of q, then of k, then v. q and k are turned where they lie: the product belongs to the
operator alone, and neither is needed unturned again. So the three results are parts of one buffer
that attention keeps whole, and no byte more is kept than with a buffer for each. Backward turns
both gradients back into one [B, S, W] gradient, copies v's beside them, and has one GEMM for x
and one for the weights. Saved: x, weight, cos and sin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels._batched import for_each_sample, is_batched
from graphopt.kernels._launch import is_aligned
from graphopt.kernels._library import (
    applied,
    define,
    differentiable,
    differentiated,
    invoke,
)
from graphopt.kernels._once import once
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._pointwise import arithmetic, kernel_serves
from graphopt.kernels.linear import bias_gradients, parameter_gradients, product
from graphopt.kernels.rope import _backward_reference as turned_back
from graphopt.kernels.rope import rope_reference

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def linear_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Parts:
    """Project x to queries, keys and values and turn the first two, in plain torch.

    Args:
        x: [B, S, K].
        weight: [W, K] of x's dtype: the rows of q, k and v.
        bias: [W] or None.
        cos: [S, D], [1, 1, S, D] or [B, 1, S, D]; D even, a divisor of q's and k's widths.
        sin: the same.
        widths: rows of the three parts, W in all.
        interleaved: see `rope`.
        masters: see `linear_wide`; with some, they get the gradient in place of weight.
        bias_masters: likewise, in place of bias.

    Returns:
        q [B, Hq, S, D], k [B, Hk, S, D] and v [B, S, widths[2]] in x's dtype, parts of one
        [B, S, W] buffer. The tables get no gradient.

    Raises:
        OptionError: shapes that do not fit.
        UnsupportedError: x and weight of two dtypes; tables that want a gradient.

    Example:
        >>> x, w, table = torch.ones(1, 3, 8), torch.ones(16, 8), torch.ones(3, 4)
        >>> [p.shape[1:] for p in linear_rope_reference(x, w, None, table, table, [8, 4, 4])]
        [torch.Size([2, 3, 4]), torch.Size([1, 3, 4]), torch.Size([3, 4])]
    """
    _check(x, weight, bias, cos, sin, widths)
    packed = product(x, weight.t(), bias)
    heads = _heads(packed, widths, cos.shape[-1])
    turned = rope_reference(heads, cos, sin, interleaved, out_dtype=packed.dtype)
    rest = packed[..., packed.shape[-1] - widths[2] :]
    whole = torch.cat((turned.transpose(1, 2).flatten(2), rest), dim=-1)
    return _parts(whole, widths, cos.shape[-1])


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
) -> None:
    width = cos.shape[-1] if cos.dim() else 0
    if x.dim() != 3 or weight.dim() != 2 or len(widths) != 3 or sum(widths) != weight.shape[0]:
        raise OptionError(
            f"graphopt::linear_rope: x {tuple(x.shape)}, weight {tuple(weight.shape)},"
            f" widths {list(widths)}",
            why="x is [B, S, K], weight [W, K], and the three widths are W in all",
        )
    if width == 0 or width % 2 or any(n % width for n in widths[:2]):
        raise OptionError(
            f"graphopt::linear_rope: tables of {width} columns for widths {list(widths)}",
            why="the widths of q and k are heads of as many columns, in pairs",
        )
    if any(t.dim() > 2 and t.shape[-3] != 1 for t in (cos, sin)):
        raise OptionError("graphopt::linear_rope: a table for each head", try_="rope")
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise UnsupportedError(f"graphopt::linear_rope of {x.dtype} and {weight.dtype}")


def _heads(packed: torch.Tensor, widths: Sequence[int], width: int) -> torch.Tensor:
    """The heads of q and of k in [B, S, W]: [B, Hq + Hk, S, D]."""
    turned = packed[..., : widths[0] + widths[1]]
    return turned.unflatten(-1, (-1, width)).transpose(1, 2)


def _parts(packed: torch.Tensor, widths: Sequence[int], width: int) -> Parts:
    """Split [B, S, W]: q and k as [B, H, S, D] and v as [B, S, N], no copies."""
    q, k, v = packed.split(list(widths), dim=-1)
    first, second = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in (q, k))
    return first, second, v


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Parts:
    _check(x, weight, bias, cos, sin, widths)
    packed = product(x, weight.t(), bias)
    heads = _heads(packed, widths, cos.shape[-1])
    if not _turn(heads, cos, sin, heads, interleaved, back=False):
        heads.copy_(rope_reference(heads, cos, sin, interleaved, out_dtype=packed.dtype))
    return _parts(packed, widths, cos.shape[-1])


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, y: torch.Tensor,
    interleaved: bool, *, back: bool,
) -> bool:  # fmt: skip
    """Turn x into y by the Triton kernel; False, nothing done, where that cannot be."""
    if not kernel_serves(x, cos, sin):
        return False
    from graphopt.kernels import _rope_triton as triton_path

    return triton_path.turn(x, cos, sin, y, interleaved, back=back)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Parts:
    _check(x, weight, bias, cos, sin, widths)
    packed = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return _parts(packed, widths, cos.shape[-1])


# Backward: the gradient of the product, [B, S, W]; its two GEMMs are plain torch.


def _gathered(
    cos: torch.Tensor,
    sin: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    widths: Sequence[int],
    interleaved: bool,
    x: torch.Tensor,
    *,
    launch: bool,
) -> torch.Tensor:
    packed = _backward_fake(cos, sin, grads, widths, interleaved, x)
    parts = _parts(packed, widths, cos.shape[-1])
    for i, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        if grad is None:
            part.zero_()
        elif i == 2:
            (_copy if launch else torch.Tensor.copy_)(part, grad)
        else:
            dy = grad if grad.stride(-1) == 1 else grad.contiguous()
            if launch and _turn(dy, cos, sin, part, interleaved, back=True):
                continue
            dtype = arithmetic(grad, cos, sin)
            part.copy_(turned_back(grad, cos, sin, interleaved, dtype, _dense(grad.shape)))
    return packed


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows, 16 bytes at a time where both lie so: single elements take thrice as long."""
    unit = 16 // to.element_size()
    if to.dtype == source.dtype and to.numel() and all(_in_units(t, unit) for t in (to, source)):
        to, source = to.view(torch.complex128), source.view(torch.complex128)
    to.copy_(source)


def _in_units(t: torch.Tensor, unit: int) -> bool:
    """Whether each row of a tensor lies in whole units, at multiples of one."""
    steps = (*t.stride()[:-1], t.shape[-1], t.storage_offset())
    return t.stride(-1) == 1 and all(n % unit == 0 for n in steps) and is_aligned(t)


def _dense(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def _backward_fake(
    cos: torch.Tensor,
    sin: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    widths: Sequence[int],
    interleaved: bool,
    x: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(widths)))


_BACKWARD = define(
    "linear_rope_backward(Tensor cos, Tensor sin, Tensor?[] grads, int[] widths,"
    " bool interleaved, Tensor x) -> Tensor",
    launch=partial(_gathered, launch=True),
    reference=partial(_gathered, launch=False),
    fake=_backward_fake,
)


_LINEAR_ROPE = define(
    "linear_rope(Tensor x, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, int[] widths,"
    " bool interleaved=False, Tensor[]? masters=None, Tensor[]? bias_masters=None)"
    " -> (Tensor, Tensor, Tensor)",
    launch=_launch,
    reference=linear_rope_reference,
    fake=_fake,
    own_autograd=True,
)


class _LinearRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: tuple[Sequence[int], bool, int],
        *masters: torch.Tensor,
    ) -> Parts:
        if cos.requires_grad or sin.requires_grad:
            raise UnsupportedError(
                "graphopt::linear_rope: a gradient for cos or sin",
                why="q and k are turned in place, so what they were before is gone",
                try_="a linear and graphopt::rope",
            )
        widths, interleaved, count = plan
        ctx.masters, ctx.bias_masters = list(masters[:count]), list(masters[count:])
        ctx.plan = plan
        with torch._C._AutoDispatchBelowAutograd():
            parts: Parts = invoke(_LINEAR_ROPE, x, weight, bias, cos, sin, widths, interleaved)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        if any(g is not None and is_batched(g) for g in grads):
            return for_each_sample(_LinearRope.backward, ctx, grads)
        saved = ctx.saved_tensors
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            found = _gradients(ctx, saved, grads)
        return once("linear_rope", found, (*saved, *grads)) if torch.is_grad_enabled() else found


_APPLY = applied(_LinearRope)


def _gradients(ctx: Any, saved: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    x, weight, cos, sin = saved
    widths, interleaved, _ = ctx.plan
    needs, masters, biases = ctx.needs_input_grad, ctx.masters, ctx.bias_masters
    packed = invoke(_BACKWARD, cos, sin, list(grads), list(widths), interleaved, x)
    rows, flat = packed.flatten(0, 1), x.flatten(0, 1)
    dx = torch.mm(rows, weight).view(x.shape) if needs[0] else None
    dw = torch.mm(rows.t(), flat) if needs[1] else None
    db = rows.sum(0) if needs[2] else None
    wide: list[torch.Tensor | None] = [None] * len(masters)
    if any(needs[6 : 6 + len(masters)]):
        wide = [*parameter_gradients(rows, flat, masters)]
    return dx, dw, db, None, None, None, *wide, *(bias_gradients(rows, biases) if biases else ())


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Parts:
    masters, bias_masters = masters or (), bias_masters or ()
    if differentiated(x, weight, bias, cos, sin, *masters, *bias_masters):
        weight = weight.detach() if masters else weight
        bias = bias.detach() if bias is not None and bias_masters else bias
        plan = (tuple(widths), interleaved, len(masters))
        found: Parts = _APPLY(x, weight, bias, cos, sin, plan, *masters, *bias_masters)
        return found
    with torch._C._AutoDispatchBelowAutograd():
        parts: Parts = _LINEAR_ROPE(x, weight, bias, cos, sin, widths, interleaved)
    return parts


differentiable(_LINEAR_ROPE, _autograd)


def _cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Cost:
    rows, size = prod(x.shape[:-1]), x.element_size()
    turned = rows * (widths[0] + widths[1])
    read = tensor_bytes(x, weight, bias, cos, sin) + turned * size
    written = (rows * weight.shape[0] + turned) * size
    return Cost(read, written, 2 * rows * weight.numel() + 3 * turned)


def _backward_cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    widths: Sequence[int],
    interleaved: bool = False,
    masters: Sequence[torch.Tensor] | None = None,
    bias_masters: Sequence[torch.Tensor] | None = None,
) -> Cost:
    rows, size = prod(x.shape[:-1]), x.element_size()
    packed = rows * weight.shape[0] * size
    # Gathered once, then read by each GEMM.
    read = 3 * packed + tensor_bytes(x, weight, cos, sin)
    written = packed + tensor_bytes(x, *(masters or (weight,)), *(bias_masters or (bias,)))
    return Cost(read, written, 4 * rows * weight.numel())


def _samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-2, 2, 2 * 5 * 6, device=device).sin().reshape(2, 5, 6)
    weight = torch.linspace(-1, 3, 20 * 6, device=device).cos().reshape(20, 6)
    bias = torch.linspace(-1, 1, 20, device=device)
    angle = torch.linspace(0, 6, 5 * 4, device=device).reshape(5, 4)
    cos, sin = angle.cos(), angle.sin()
    yield Sample((x, weight, bias, cos, sin, [8, 4, 8]))
    yield Sample((x, weight, None, cos[None, None], sin[None, None], [8, 8, 4], True))
    batch = torch.stack((cos, sin))[:, None]
    yield Sample((x, weight, None, batch, batch.flip(0), [4, 4, 12]))
    yield Sample((x.bfloat16(), weight.bfloat16(), None, cos, sin, [12, 4, 4]))


def _example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    """Attention's projections of a model of `cols` columns, with as many heads of k and v as q."""
    width = max(d for d in range(2, 129, 2) if cols % d == 0)
    batch = 8 if rows % 8 == 0 else 1
    x = torch.randn(batch, rows // batch, cols, device=device, dtype=dtype)
    weight = torch.randn(3 * cols, cols, device=device, dtype=dtype) / cols**0.5
    speed = 10000.0 ** -torch.linspace(0, 1, width // 2, device=device)
    angle = torch.arange(rows // batch, device=device)[:, None] * speed
    full = torch.cat((angle, angle), -1)[None, None]
    return Sample((x, weight, None, full.cos(), full.sin(), [cols] * 3))


register(
    Op(
        name="linear_rope",
        overload=_LINEAR_ROPE,
        reference=linear_rope_reference,
        launch=_launch,
        samples=_samples,
        example=_example,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="x, weight, cos and sin",
    )
)
