"""linear_wide: a linear layer in low precision that gives its float32 weights their gradients.

Forward is one GEMM with the low-precision copy of the weight (or of several, one below the other,
see `cast_weights`). Backward's GEMM for the weight writes float32 itself, and the rows of its
result are the parameters' gradients: no gradient in low precision is made, rounded, read again
and widened. The copy gets no gradient; the parameters that it was made of stand beside it as
operands that are only differentiated. Saved: x and the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from graphopt.errors import OptionError
from graphopt.kernels._batched import for_each_sample, is_batched
from graphopt.kernels._library import (
    Short,
    applied,
    define,
    differentiable,
    differentiated,
    invoke,
)
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes

# wide_mm ----------------------------------------------------------------------------------------


def wide_mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix product whose result is stored in a wider dtype than its operands.

    On CUDA the GEMM writes it; elsewhere the product is widened.

    Args:
        a: [M, K].
        b: [K, N] of a's dtype.
        dtype: of the result.

    Returns:
        [M, N].

    Example:
        >>> wide_mm(torch.ones(1, 2).half(), torch.ones(2, 1).half(), torch.float32)
        tensor([[2.]])
    """
    wide = a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32
    if wide and a.numel() and b.numel():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _mm_cost(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Cost:
    out = a.shape[0] * b.shape[1]
    return Cost(tensor_bytes(a, b), out * dtype.itemsize, 2 * out * a.shape[1])


def _mm_samples(device: torch.device) -> Iterator[Sample]:
    a = torch.linspace(-2, 2, 15, device=device).reshape(3, 5).bfloat16()
    yield Sample((a, a.t(), torch.float32))
    yield Sample((a.float(), a.float().t(), torch.float32))


WIDE_MM = define(
    "wide_mm(Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    launch=None,
    reference=wide_mm,
    fake=lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
)

register(
    Op(
        name="wide_mm",
        overload=WIDE_MM,
        reference=wide_mm,
        launch=None,
        samples=_mm_samples,
        cost=_mm_cost,
        saved="nothing: it is not differentiated",
    )
)


def _add_wide_mm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a product to a sum of a wider dtype, in place."""
    wide = a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and total.dtype == torch.float32
    if wide and a.numel() and b.numel():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(wide_mm(a, b, total.dtype))


# An operator for the sake of its fake form: torch 2.11 has none for addmm with an out_dtype.
ADD_WIDE_MM = define(
    "add_wide_mm_(Tensor(a!) total, Tensor a, Tensor b) -> ()",
    launch=None,
    reference=_add_wide_mm,
    fake=lambda total, a, b: None,
)


def parameter_gradients(
    rows: torch.Tensor, x: torch.Tensor, masters: Sequence[torch.Tensor], transposed: bool = False
) -> list[torch.Tensor]:
    """The gradients of the weights of a product, in their own dtype, as parts of one tensor.

    Args:
        rows: gradient of the result, [M, N].
        x: the input, [M, K].
        masters: the weights, [Ni, K] with N in all; [K, N] of a single one if transposed.
        transposed: see `masters`.
    """
    a, b = (x, rows) if transposed else (rows, x)
    wide: torch.Tensor = invoke(WIDE_MM, a.t(), b, masters[0].dtype)
    return [wide] if len(masters) == 1 else list(wide.split([m.shape[0] for m in masters]))


def bias_gradients(rows: torch.Tensor, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the biases of a product, in their own dtype, as parts of one tensor."""
    wide = rows.sum(0, dtype=masters[0].dtype)
    return [wide] if len(masters) == 1 else list(wide.split([m.shape[0] for m in masters]))


# linear_wide ------------------------------------------------------------------------------------


def linear_wide_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: Sequence[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """The linear layer's result, in plain torch; the masters have no say in it.

    Args:
        x: [..., K] of two dimensions or more.
        weight: [N, K] of x's dtype, the copy of the masters one below the other; [K, N] if
            transposed. It gets no gradient.
        bias: [N] or None, the copy of the bias masters where there are some; else it is an operand
            like any other, which gets its gradient itself.
        masters: the weights that get the gradient, in their own dtype; one if transposed.
        bias_masters: likewise.
        transposed: `mm` and `addmm`, for weights that are stored [in, out].

    Returns:
        [..., N].

    Raises:
        OptionError: masters that are not the rows of weight.

    Example:
        >>> w = torch.ones(2, 3, requires_grad=True)
        >>> y = torch.ops.graphopt.linear_wide(torch.ones(1, 3).half(), w.half(), None, [w])
        >>> y.sum().backward()
        >>> w.grad.dtype
        torch.float32
    """
    _check(weight, bias, masters, bias_masters or (), transposed)
    return product(x, weight if transposed else weight.t(), bias)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One GEMM over the rows of x, of [..., K] with [K, N], and a bias or None.

    As `F.linear`, which is opaque below autograd to what counts operations.
    """
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[1])


def _check(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: Sequence[torch.Tensor],
    bias_masters: Sequence[torch.Tensor],
    transposed: bool,
) -> None:
    rows = sum(m.shape[0] for m in masters)
    biases = sum(m.shape[0] for m in bias_masters)
    fits = rows == weight.shape[0] and not (transposed and len(masters) != 1)
    if not fits or (bias_masters and (bias is None or biases != bias.shape[0])):
        raise OptionError(
            f"graphopt::linear_wide: masters of {rows} rows, and {biases} for the bias,"
            f" of a weight {tuple(weight.shape)}",
            why="weight and bias are the copies of their masters one below the other",
        )


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: Sequence[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    _check(weight, bias, masters, bias_masters or (), transposed)
    return x.new_empty((*x.shape[:-1], weight.shape[1 if transposed else 0]))


_LINEAR = define(
    "linear_wide(Tensor x, Tensor weight, Tensor? bias, Tensor[] masters,"
    " Tensor[]? bias_masters=None, bool transposed=False) -> Tensor",
    launch=None,
    reference=linear_wide_reference,
    fake=_fake,
    own_autograd=True,
)


class _LinearWide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        count: int,
        transposed: bool,
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        first, second = list(masters[:count]), list(masters[count:])
        with torch._C._AutoDispatchBelowAutograd():
            y: torch.Tensor = invoke(_LINEAR, x, weight, bias, first, second, transposed)
        _keep(ctx, x, weight, count, transposed, masters)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if is_batched(grad):
            return for_each_sample(_LinearWide.backward, ctx, (grad,))
        x, weight = ctx.saved_tensors
        transposed, needs, shape = ctx.transposed, ctx.needs_input_grad, x.shape
        rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        del x
        masters, biases = ctx.masters, ctx.bias_masters
        if torch.is_grad_enabled():  # create_graph=True: all of it can be differentiated again
            weight = _as_copy_of(weight, masters)
            a, b = (flat, rows) if transposed else (rows, flat)
            wide = torch.mm(a.t(), b).to(masters[0].dtype)
            grads = [wide] if len(masters) == 1 else wide.split([m.shape[0] for m in masters])
        elif any(needs[5 : 5 + len(masters)]):
            grads = parameter_gradients(rows, flat, masters, transposed)
        else:
            grads = [None] * len(masters)
        del flat  # an x that was computed again makes room for its gradient
        dx = None
        if needs[0]:
            dx = torch.mm(rows, weight.t() if transposed else weight).view(shape)
        db = rows.sum(0) if needs[2] and not biases else None
        return dx, None, db, None, None, *grads, *(bias_gradients(rows, biases) if biases else ())


def _keep(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    count: int,
    transposed: bool,
    masters: tuple[torch.Tensor, ...],
) -> None:
    ctx.save_for_backward(x, weight)
    # Not saved: they may be written before backward, which does not read them.
    ctx.masters, ctx.bias_masters = masters[:count], masters[count:]
    ctx.transposed = transposed


class _Unwatched(_LinearWide):
    """The same for where nobody is watching, and a rewrite has seen to it that masters fit."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        count: int,
        transposed: bool,
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        y = product(x, weight if transposed else weight.t(), bias)
        _keep(ctx, x, weight, count, transposed, masters)
        return y


_APPLY = applied(_LinearWide)
_APPLY_UNWATCHED = applied(_Unwatched)


def _as_copy_of(copy: torch.Tensor, masters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of a copy, with the way from the masters to it."""
    again = torch.cat([m.to(copy.dtype) for m in masters])
    return again + (copy - again).detach()


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: list[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    bias_masters = bias_masters or ()
    if differentiated(x, bias, *masters, *bias_masters):
        held = bias.detach() if bias is not None and bias_masters else bias
        given = (x, weight.detach(), held, len(masters), transposed)
        y: torch.Tensor = _APPLY(*given, *masters, *bias_masters)
        return y
    with torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = _LINEAR(x, weight, bias, masters, list(bias_masters), transposed)
    return result


def _recorded(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: list[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None,
    transposed: bool,
) -> torch.Tensor:
    held = bias.detach() if bias is not None and bias_masters else bias
    y: torch.Tensor = _APPLY_UNWATCHED(
        x, weight.detach(), held, len(masters), transposed, *masters, *(bias_masters or ())
    )
    return y


differentiable(_LINEAR, _autograd, Short(_recorded, linear_wide_reference))


def _cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: Sequence[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None = None,
    transposed: bool = False,
) -> Cost:
    out = prod(x.shape[:-1]) * weight.shape[1 if transposed else 0]
    read = tensor_bytes(x, weight, bias)
    return Cost(read, out * x.element_size(), 2 * out * x.shape[-1])


def _backward_cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masters: Sequence[torch.Tensor],
    bias_masters: Sequence[torch.Tensor] | None = None,
    transposed: bool = False,
) -> Cost:
    out = prod(x.shape[:-1]) * weight.shape[1 if transposed else 0]
    read = 2 * out * x.element_size() + tensor_bytes(x, weight)
    return Cost(read, tensor_bytes(x, *masters, *(bias_masters or ())), 4 * out * x.shape[-1])


def _samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-2, 2, 2 * 5 * 6, device=device).sin().reshape(2, 5, 6).bfloat16()
    first = torch.linspace(-1, 3, 24, device=device).cos().reshape(4, 6)
    second = torch.linspace(-2, 1, 12, device=device).reshape(2, 6)
    weight = torch.cat((first, second)).bfloat16()
    bias = torch.linspace(-1, 1, 6, device=device)
    yield Sample((x, weight, None, [first, second]))
    yield Sample((x, weight, bias.bfloat16(), [first, second], [bias[:4], bias[4:]]))
    yield Sample((x, first.bfloat16(), bias[:4].bfloat16(), [first]))
    flat = x.flatten(0, 1)[:, :4].contiguous()
    yield Sample((flat, first.bfloat16(), bias.bfloat16(), [first], [bias], True))
    yield Sample((flat, first.bfloat16(), None, [first], [], True))


register(
    Op(
        name="linear_wide",
        overload=_LINEAR,
        reference=linear_wide_reference,
        launch=None,
        samples=_samples,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="x and the weight's copy",
    )
)
