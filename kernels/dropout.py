"""dropout, and dropout_add: residual + dropout(x + bias).

The mask is a function of (seed, site, row, column): made in forward, made again in backward, never
stored (``_philox.py``). Forward reads x (and bias, residual) and writes the result; backward reads
dy and writes dx, summing its columns for the bias gradient on the way; the residual's gradient is
dy itself. Saved: the seed. Arithmetic in float32 (float64 if an input is), one rounding at the
store. A dropped value is multiplied by 0, as in eager: a dropped infinity is NaN. With
``bias_added``, x holds the bias already, and the bias only gets its gradient (see activation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphopt.kernels._library import Gradient, define, invoke
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._philox import dropout_factor, threshold
from graphopt.kernels._pointwise import (
    arithmetic,
    check_bias,
    check_floating,
    check_same_shape,
    kernel_serves,
    own,
    plus_bias,
    promoted,
    sum_to_bias,
)
from graphopt.kernels._prepared import Prepared, Run

# Integer operations of Philox4x32-7 that one value of eight has to bear.
_PHILOX_FLOPS = 10


# dropout ----------------------------------------------------------------------------------------


def dropout_reference(x: torch.Tensor, p: float, seed: torch.Tensor, site: int) -> torch.Tensor:
    """Dropout of x in plain torch: each value is 0 with probability p, else scaled by 1 / (1 - p).

    Args:
        x: any shape, floating.
        p: the probability of dropping a value, 0 to 1.
        seed: 0-d int64, as ``draw_seed`` gives it.
        site: which dropout of the forward; two sites of one seed draw independent masks.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        OptionError: p is not in [0, 1].
        UnsupportedError: not a floating dtype.

    Example:
        >>> dropout_reference(torch.ones(4), 1.0, torch.tensor(0), 0)
        tensor([0., 0., 0., 0.])
    """
    check_floating("dropout", x)
    math = arithmetic(x)
    factor = dropout_factor(x, p, seed, site, math)
    y = x.to(math) if factor is None else x.to(math) * factor
    return own(y.to(x.dtype), x)


def _dropout_launch(x: torch.Tensor, p: float, seed: torch.Tensor, site: int) -> torch.Tensor:
    y: torch.Tensor = _LAUNCH((x, None, None, seed), (p, site))
    return y


def _prepare(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    x, (p, site) = tensors[0], options
    if not kernel_serves(x):
        return lambda x, residual, bias, seed: dropout_reference(x, p, seed, site)
    from graphopt.kernels import _dropout_triton as triton_path

    return triton_path.prepare_forward(x, None, None, p, site, x.dtype)


_LAUNCH = Prepared(_prepare)


def _dropout_fake(x: torch.Tensor, p: float, seed: torch.Tensor, site: int) -> torch.Tensor:
    check_floating("dropout", x)
    threshold(p)
    return x.new_empty(x.shape)


def _dropout_forward_grad(
    x: torch.Tensor, p: float, seed: torch.Tensor, site: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[float, int]]:
    return invoke(_DROPOUT, x, p, seed, site), (seed,), (p, site)


def _dropout_backward_grad(
    saved: tuple[Any, ...],
    kept: tuple[float, int],
    needs: tuple[bool, ...],
    grads: tuple[Any, ...],
) -> tuple[Any, ...]:
    p, site = kept
    return invoke(_DROPOUT, grads[0], p, saved[0], site), None, None, None


_DROPOUT = define(
    "dropout(Tensor x, float p, Tensor seed, int site) -> Tensor",
    launch=_dropout_launch,
    reference=dropout_reference,
    fake=_dropout_fake,
    gradient=Gradient(_dropout_forward_grad, _dropout_backward_grad),
)


def _dropout_cost(x: torch.Tensor, p: float, seed: torch.Tensor, site: int) -> Cost:
    return Cost(tensor_bytes(x), tensor_bytes(x), x.numel() * (1 + _PHILOX_FLOPS))


def _seed(device: torch.device) -> torch.Tensor:
    return torch.tensor(0x0123_4567_89AB_CDEF, dtype=torch.int64, device=device)


def _dropout_samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-4, 4, 6 * 24, device=device).reshape(2, 3, 24)
    seed = _seed(device)
    for p in (0.0, 0.1, 0.5, 1.0):
        yield Sample((x, p, seed, 3))
    yield Sample((x[..., :17].bfloat16(), 0.3, seed, 0))


def _dropout_example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    return Sample((torch.randn(rows, cols, device=device, dtype=dtype), 0.1, _seed(device), 1))


register(
    Op(
        name="dropout",
        overload=_DROPOUT,
        reference=dropout_reference,
        launch=_dropout_launch,
        samples=_dropout_samples,
        example=_dropout_example,
        cost=_dropout_cost,
        backward_cost=_dropout_cost,
        saved="the seed: 8 bytes",
        random=True,
    )
)


# dropout_add ------------------------------------------------------------------------------------


def dropout_add_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    *,
    bias: torch.Tensor | None = None,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Residual + dropout(x + bias) in plain torch.

    Args:
        x: [..., N], floating.
        residual: x's shape, floating.
        p: the probability of dropping a value, 0 to 1.
        seed: 0-d int64, as ``draw_seed`` gives it.
        site: which dropout of the forward.
        bias: [N] or None, added before the dropout.
        bias_added: x holds the bias already, and only the gradient of the bias is asked for.
        out_dtype: the result's dtype; None for the promotion of x's, residual's and bias's.

    Returns:
        A contiguous tensor of x's shape.

    Raises:
        OptionError: p is not in [0, 1], or shapes do not fit.
        UnsupportedError: not a floating dtype.

    Example:
        >>> dropout_add_reference(torch.ones(2), torch.ones(2), 0.0, torch.tensor(0), 0)
        tensor([2., 2.])
    """
    _check_add(x, residual, bias)
    math = arithmetic(x, residual, bias)
    z = plus_bias(x.to(math), bias, bias_added)
    factor = dropout_factor(x, p, seed, site, math)
    z = z if factor is None else z * factor
    return (residual.to(math) + z).to(promoted(x, residual, bias, out_dtype=out_dtype)).contiguous()


def _dropout_add_launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    *,
    bias: torch.Tensor | None = None,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    options = (p, site, bias_added, out_dtype)
    y: torch.Tensor = _LAUNCH_ADD((x, residual, bias, seed), options)
    return y


def _prepare_add(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    (x, residual, bias, _), (p, site, bias_added, out_dtype) = tensors, options
    if not kernel_serves(x, residual, bias):
        return lambda x, residual, bias, seed: dropout_add_reference(
            x, residual, p, seed, site, bias=bias, bias_added=bias_added, out_dtype=out_dtype
        )
    _check_add(x, residual, bias)
    from graphopt.kernels import _dropout_triton as triton_path

    result = promoted(x, residual, bias, out_dtype=out_dtype)
    added = None if bias_added else bias
    write = triton_path.prepare_forward(x, residual, added, p, site, result)
    if bias_added:
        return lambda x, residual, bias, seed: write(x, residual, None, seed)
    return write


_LAUNCH_ADD = Prepared(_prepare_add)


def _dropout_add_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    *,
    bias: torch.Tensor | None = None,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check_add(x, residual, bias)
    threshold(p)
    return x.new_empty(x.shape, dtype=promoted(x, residual, bias, out_dtype=out_dtype))


def _check_add(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_floating("dropout_add", x, residual, bias)
    check_same_shape("dropout_add", x, residual)
    check_bias("dropout_add", x, bias)


def _dropout_add_backward_reference(
    grad: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    double = torch.float64 in (x_dtype, bias_dtype, grad.dtype)
    math = torch.float64 if double else torch.float32
    factor = dropout_factor(grad, p, seed, site, math)
    dx = grad.to(math) if factor is None else grad.to(math) * factor
    dbias = grad.new_empty(0, dtype=x_dtype)
    if bias_dtype is not None:
        dbias = own(sum_to_bias(dx, bias_dtype), grad)
    return own(dx.to(x_dtype), grad), dbias


def _dropout_add_backward_launch(
    grad: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _LAUNCH_ADD_BACKWARD(
        (grad, seed), (p, site, x_dtype, bias_dtype)
    )
    return found


def _prepare_add_backward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    grad, (p, site, x_dtype, bias_dtype) = tensors[0], options
    if not kernel_serves(grad) or torch.float64 in (x_dtype, bias_dtype):
        return lambda grad, seed: _dropout_add_backward_reference(
            grad, p, seed, site, x_dtype, bias_dtype
        )
    from graphopt.kernels import _dropout_triton as triton_path

    return triton_path.prepare_backward(grad, *options)


_LAUNCH_ADD_BACKWARD = Prepared(_prepare_add_backward)


def _dropout_add_backward_fake(
    grad: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dbias = grad.new_empty(0, dtype=x_dtype)
    if bias_dtype is not None:
        dbias = grad.new_empty(grad.shape[-1], dtype=bias_dtype)
    return grad.new_empty(grad.shape, dtype=x_dtype), dbias


_DROPOUT_ADD_BACKWARD = define(
    "dropout_add_backward(Tensor grad, float p, Tensor seed, int site, ScalarType x_dtype,"
    " ScalarType? bias_dtype=None) -> (Tensor, Tensor)",
    launch=_dropout_add_backward_launch,
    reference=_dropout_add_backward_reference,
    fake=_dropout_add_backward_fake,
)


def _dropout_add_forward_grad(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    bias: torch.Tensor | None,
    bias_added: bool,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    y = invoke(
        _DROPOUT_ADD, x, residual, p, seed, site,
        bias=bias, bias_added=bias_added, out_dtype=out_dtype,
    )  # fmt: skip
    dtypes = (x.dtype, residual.dtype, None if bias is None else bias.dtype)
    return y, (seed,), (p, site, *dtypes)


def _dropout_add_backward_grad(
    saved: tuple[Any, ...],
    kept: tuple[Any, ...],
    needs: tuple[bool, ...],
    grads: tuple[Any, ...],
) -> tuple[Any, ...]:
    p, site, x_dtype, residual_dtype, bias_dtype = kept
    dx = dresidual = dbias = None
    if needs[0] or needs[5]:
        asked = bias_dtype if needs[5] else None
        dx, dbias = invoke(_DROPOUT_ADD_BACKWARD, grads[0], p, saved[0], site, x_dtype, asked)
    if needs[1]:
        dresidual = grads[0].to(residual_dtype)
    return (
        dx if needs[0] else None,
        dresidual,
        None,
        None,
        None,
        dbias if needs[5] else None,
        None,
        None,
    )


_DROPOUT_ADD = define(
    "dropout_add(Tensor x, Tensor residual, float p, Tensor seed, int site, *,"
    " Tensor? bias=None, bool bias_added=False, ScalarType? out_dtype=None) -> Tensor",
    launch=_dropout_add_launch,
    reference=dropout_add_reference,
    fake=_dropout_add_fake,
    gradient=Gradient(_dropout_add_forward_grad, _dropout_add_backward_grad),
)


def _dropout_add_cost(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    *,
    bias: torch.Tensor | None = None,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    written = x.numel() * promoted(x, residual, bias, out_dtype=out_dtype).itemsize
    added = None if bias_added else bias
    flops = x.numel() * (2 + (added is not None) + _PHILOX_FLOPS)
    return Cost(tensor_bytes(x, residual, added), written, flops)


def _dropout_add_backward_cost(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    *,
    bias: torch.Tensor | None = None,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    # The residual's gradient is dy itself, unless it is of another dtype.
    result = promoted(x, residual, bias, out_dtype=out_dtype)
    copy = residual.dtype != result
    read = (1 + copy) * x.numel() * result.itemsize
    written = tensor_bytes(x, bias) + copy * tensor_bytes(residual)
    return Cost(read, written, x.numel() * (1 + (bias is not None) + _PHILOX_FLOPS))


def _dropout_add_samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-4, 4, 6 * 24, device=device).reshape(2, 3, 24)
    residual = torch.linspace(3, -3, 6 * 24, device=device).reshape(2, 3, 24)
    bias = torch.linspace(-1, 1, 24, device=device)
    seed = _seed(device)
    for p in (0.0, 0.1, 1.0):
        yield Sample((x, residual, p, seed, 3))
        yield Sample((x, residual, p, seed, 3), {"bias": bias})
    yield Sample((x, residual, 0.1, seed, 3), {"bias": bias, "bias_added": True})
    half = {"bias": bias[:17], "out_dtype": torch.bfloat16}
    yield Sample((x[..., :17].bfloat16(), residual[..., :17], 0.3, seed, 0), half)


def _dropout_add_example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    x, residual = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
    kwargs = {"bias": torch.randn(cols, device=device), "out_dtype": dtype}
    return Sample((x, residual, 0.1, _seed(device), 1), kwargs)


register(
    Op(
        name="dropout_add",
        overload=_DROPOUT_ADD,
        reference=dropout_add_reference,
        launch=_dropout_add_launch,
        samples=_dropout_add_samples,
        example=_dropout_add_example,
        cost=_dropout_add_cost,
        backward_cost=_dropout_add_backward_cost,
        saved="the seed: 8 bytes",
        random=True,
        workspace="backward with a bias gradient: float32 [parts, N], at most 4 programs an SM",
    )
)
