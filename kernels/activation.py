"""bias_act: activation(x + bias) over the last dimension; softcap: cap * tanh(x / cap).

Forward reads x (and bias) and writes y: one pass. Saved: x and bias; backward recomputes the
derivative, reads dy and x, writes dx, and sums dx's columns for the bias gradient in the same pass.
Where x was computed again for the backward alone, dx is written over it (see _overwrite.py).
With ``bias_added``, x holds the bias already: forward adds nothing, backward sums as ever. That is
for a bias that a matrix product adds before it rounds; the product takes it detached.
Arithmetic in float32 (float64 if an input is), one rounding at the store; sums in a fixed order.
Activations: none, relu, gelu (exact, by erf), gelu_tanh, silu, tanh, sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from graphopt.errors import OptionError
from graphopt.kernels import _activations
from graphopt.kernels._library import Gradient, define, invoke
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._overwrite import Overwriting, may_overwrite, overwrites
from graphopt.kernels._pointwise import (
    arithmetic,
    check_bias,
    check_floating,
    kernel_serves,
    own,
    plus_bias,
    promoted,
    slope_times,
    sum_to_bias,
)
from graphopt.kernels._prepared import Prepared, Run

# bias_act ---------------------------------------------------------------------------------------


def bias_act_reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """activation(x + bias) in plain torch.

    Args:
        x: [..., N], floating.
        bias: [N] or None.
        activation: one of ``_activations.NAMES``.
        bias_added: x holds the bias already, and only the gradient of the bias is asked for.
        out_dtype: the result's dtype; None for the promotion of x's and bias's.

    Returns:
        A contiguous tensor of x's shape.

    Raises:
        OptionError: an unknown activation, or a bias of another shape.
        UnsupportedError: not a floating dtype.

    Example:
        >>> bias_act_reference(torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.5]), "relu")
        tensor([0.0000, 2.5000])
    """
    _check_bias_act(x, bias, activation)
    z = plus_bias(x.to(arithmetic(x, bias)), bias, bias_added)
    y = _activations.apply(z, activation).to(promoted(x, bias, out_dtype=out_dtype))
    return own(y, x)


def _bias_act_launch(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    y: torch.Tensor = _LAUNCH((x, bias), (activation, bias_added, out_dtype))
    return y


def _prepare(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    (x, bias), (activation, added, out_dtype) = tensors, options
    if not kernel_serves(x, bias):
        return lambda x, bias: bias_act_reference(
            x, bias, activation, bias_added=added, out_dtype=out_dtype
        )
    _check_bias_act(x, bias, activation)
    from graphopt.kernels import _activation_triton as triton_path

    result = promoted(x, bias, out_dtype=out_dtype)
    write = triton_path.prepare_forward(x, None if added else bias, activation, result)
    return (lambda x, bias: write(x, None)) if added else write


_LAUNCH = Prepared(_prepare)


def _bias_act_fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check_bias_act(x, bias, activation)
    return x.new_empty(x.shape, dtype=promoted(x, bias, out_dtype=out_dtype))


def _check_bias_act(x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
    _activations.check(activation)
    check_floating("bias_act", x, bias)
    check_bias("bias_act", x, bias)


def _bias_act_backward_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, the bias gradient in sum_dtype, of no element if that is None)."""
    z = x.to(arithmetic(x, bias, grad))
    z = z if bias is None else z + bias
    dz = slope_times(grad.to(z.dtype), z, activation)
    dbias = x.new_empty(0)
    if sum_dtype is not None:
        dbias = own(sum_to_bias(dz, sum_dtype), grad)
    return own(dz.to(x.dtype), grad), dbias


def _bias_act_backward_launch(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _LAUNCH_BACKWARD(
        (grad, x, bias), (activation, sum_dtype)
    )
    return found


def _prepare_backward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    if not kernel_serves(*tensors) or options[1] == torch.float64:
        return lambda *given: _bias_act_backward_reference(*given, *options)
    from graphopt.kernels import _activation_triton as triton_path

    return triton_path.prepare_backward(*tensors, *options)


_LAUNCH_BACKWARD = Prepared(_prepare_backward)


def _bias_act_backward_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dbias = x.new_empty(0)
    if sum_dtype is not None:
        dbias = x.new_empty(x.shape[-1], dtype=sum_dtype)
    return x.new_empty(x.shape), dbias


_BIAS_ACT_BACKWARD = define(
    "bias_act_backward(Tensor grad, Tensor x, Tensor? bias, str activation,"
    " ScalarType? sum_dtype=None) -> (Tensor, Tensor)",
    launch=_bias_act_backward_launch,
    reference=_bias_act_backward_reference,
    fake=_bias_act_backward_fake,
)


def _bias_act_over_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Write dx over x; the bias gradient."""
    dx, dbias = _bias_act_backward_reference(grad, x, bias, activation, sum_dtype)
    x.copy_(dx)
    return dbias


def _bias_act_over_launch(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    dbias: torch.Tensor = _LAUNCH_OVER((grad, x, bias), (activation, sum_dtype))
    return dbias


def _prepare_over(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    if not kernel_serves(*tensors) or options[1] == torch.float64:
        return lambda *given: _bias_act_over_reference(*given, *options)
    from graphopt.kernels import _activation_triton as triton_path

    run = triton_path.prepare_backward(*tensors, *options, over=True)
    return lambda *given: run(*given)[1]


_LAUNCH_OVER = Prepared(_prepare_over)

_BIAS_ACT_OVER = define(
    "bias_act_backward_(Tensor grad, Tensor(a!) x, Tensor? bias, str activation,"
    " ScalarType? sum_dtype=None) -> Tensor",
    launch=_bias_act_over_launch,
    reference=_bias_act_over_reference,
    fake=lambda *args, **kwargs: _bias_act_backward_fake(*args, **kwargs)[1],
)


def _bias_act_forward_grad(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    bias_added: bool,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...], tuple[Any, ...]]:
    y = invoke(_BIAS_ACT, x, bias, activation, bias_added=bias_added, out_dtype=out_dtype)
    dtype = None if bias is None else bias.dtype
    return y, (x, None if bias_added else bias), (activation, dtype)


def _bias_act_backward_grad(
    saved: tuple[Any, ...], kept: tuple[Any, ...], needs: tuple[bool, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    activation, dtype = kept
    options = activation, dtype if needs[1] else None
    if needs[0] and may_overwrite(saved, 0, grads[0]):
        dx = saved[0].detach()
        dbias = invoke(_BIAS_ACT_OVER, grads[0], dx, saved[1], *options)
    else:
        dx, dbias = invoke(_BIAS_ACT_BACKWARD, grads[0], *saved, *options)
    return dx if needs[0] else None, dbias if needs[1] else None, None, None, None


_BIAS_ACT = define(
    "bias_act(Tensor x, Tensor? bias, str activation, *, bool bias_added=False,"
    " ScalarType? out_dtype=None) -> Tensor",
    launch=_bias_act_launch,
    reference=bias_act_reference,
    fake=_bias_act_fake,
    gradient=Gradient(_bias_act_forward_grad, _bias_act_backward_grad),
)

overwrites(
    _BIAS_ACT,
    Overwriting(backward=_BIAS_ACT_BACKWARD, operands=(0,), saved=(1,), over=_BIAS_ACT_OVER),
)

# Transcendental functions and the arithmetic around them, counted as one each.
_FLOPS = {"none": 0, "relu": 1, "gelu": 5, "gelu_tanh": 8, "silu": 4, "tanh": 1, "sigmoid": 3}


def _bias_act_cost(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    written = x.numel() * promoted(x, bias, out_dtype=out_dtype).itemsize
    added = None if bias_added else bias
    flops = x.numel() * (_FLOPS[activation] + (added is not None))
    return Cost(tensor_bytes(x, added), written, flops)


def _bias_act_backward_cost(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    bias_added: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    read = x.numel() * promoted(x, bias, out_dtype=out_dtype).itemsize + tensor_bytes(x, bias)
    flops = x.numel() * (2 * _FLOPS[activation] + 1 + (bias is not None))
    return Cost(read, tensor_bytes(x, bias), flops)


def _bias_act_samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-4, 4, 6 * 24, device=device).reshape(2, 3, 24)
    bias = torch.linspace(-1, 1, 24, device=device)
    for activation in _activations.NAMES:
        yield Sample((x, bias, activation))
    yield Sample((x.bfloat16(), None, "gelu"))
    yield Sample((x.bfloat16(), bias, "silu"), {"out_dtype": torch.bfloat16})
    yield Sample((x, bias, "gelu"), {"bias_added": True})
    yield Sample((x.bfloat16(), bias.bfloat16(), "relu"), {"bias_added": True})
    yield Sample((x[..., :17], bias[:17], "relu"))


def _bias_act_example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    x = torch.randn(rows, cols, device=device, dtype=dtype)
    return Sample((x, torch.randn(cols, device=device), "gelu"), {"out_dtype": dtype})


register(
    Op(
        name="bias_act",
        overload=_BIAS_ACT,
        reference=bias_act_reference,
        launch=_bias_act_launch,
        samples=_bias_act_samples,
        example=_bias_act_example,
        cost=_bias_act_cost,
        backward_cost=_bias_act_backward_cost,
        saved="x and bias: 1 x the input's bytes",
        workspace="backward with a bias gradient: float32 [parts, N], at most 4 programs an SM",
    )
)


# softcap ----------------------------------------------------------------------------------------


def softcap_reference(
    x: torch.Tensor, cap: float, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Cap * tanh(x / cap) in plain torch: x for small x, never beyond +-cap.

    Args:
        x: any shape, floating.
        cap: the bound, not 0.
        out_dtype: the result's dtype; None for x's.

    Returns:
        A contiguous tensor of x's shape.

    Raises:
        OptionError: the cap is 0 or not finite.
        UnsupportedError: not a floating dtype.

    Example:
        >>> softcap_reference(torch.tensor([0.0, 1e6]), 30.0)
        tensor([ 0., 30.])
    """
    _check_softcap(x, cap)
    y = cap * torch.tanh(x.to(arithmetic(x)) / cap)
    return y.to(promoted(x, out_dtype=out_dtype)).contiguous()


def _softcap_launch(
    x: torch.Tensor, cap: float, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    y: torch.Tensor = _LAUNCH_SOFTCAP((x, None), (cap, out_dtype))
    return y


def _prepare_softcap(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    (x, _), (cap, out_dtype) = tensors, options
    if not kernel_serves(x):
        return lambda x, _: softcap_reference(x, cap, out_dtype=out_dtype)
    _check_softcap(x, cap)
    from graphopt.kernels import _activation_triton as triton_path

    return triton_path.prepare_forward(x, None, "none", promoted(x, out_dtype=out_dtype), cap)


_LAUNCH_SOFTCAP = Prepared(_prepare_softcap)


def _softcap_fake(
    x: torch.Tensor, cap: float, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    _check_softcap(x, cap)
    return x.new_empty(x.shape, dtype=promoted(x, out_dtype=out_dtype))


def _check_softcap(x: torch.Tensor, cap: float) -> None:
    check_floating("softcap", x)
    if cap == 0 or not math.isfinite(cap):
        raise OptionError(f"graphopt::softcap: cap {cap}", try_="a finite number other than 0")


def _softcap_backward_reference(grad: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
    z = x.to(arithmetic(x, grad)) / cap
    return slope_times(grad.to(z.dtype), z, "tanh").to(x.dtype).contiguous()


def _softcap_backward_launch(grad: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
    dx: torch.Tensor = _LAUNCH_SOFTCAP_BACKWARD((grad, x, None), (cap,))[0]
    return dx


def _prepare_softcap_backward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    (grad, x, _), (cap,) = tensors, options
    if not kernel_serves(grad, x):
        return lambda grad, x, _: (_softcap_backward_reference(grad, x, cap),)
    from graphopt.kernels import _activation_triton as triton_path

    return triton_path.prepare_backward(grad, x, None, "none", None, cap)


_LAUNCH_SOFTCAP_BACKWARD = Prepared(_prepare_softcap_backward)


_SOFTCAP_BACKWARD = define(
    "softcap_backward(Tensor grad, Tensor x, float cap) -> Tensor",
    launch=_softcap_backward_launch,
    reference=_softcap_backward_reference,
    fake=lambda grad, x, cap: x.new_empty(x.shape),
)


def _softcap_forward_grad(
    x: torch.Tensor, cap: float, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], float]:
    return invoke(_SOFTCAP, x, cap, out_dtype=out_dtype), (x,), cap


def _softcap_backward_grad(
    saved: tuple[Any, ...], cap: float, needs: tuple[bool, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    return invoke(_SOFTCAP_BACKWARD, grads[0], saved[0], cap), None, None


_SOFTCAP = define(
    "softcap(Tensor x, float cap, *, ScalarType? out_dtype=None) -> Tensor",
    launch=_softcap_launch,
    reference=softcap_reference,
    fake=_softcap_fake,
    gradient=Gradient(_softcap_forward_grad, _softcap_backward_grad),
)


def _softcap_cost(x: torch.Tensor, cap: float, *, out_dtype: torch.dtype | None = None) -> Cost:
    written = x.numel() * promoted(x, out_dtype=out_dtype).itemsize
    return Cost(tensor_bytes(x), written, 3 * x.numel())


def _softcap_backward_cost(
    x: torch.Tensor, cap: float, *, out_dtype: torch.dtype | None = None
) -> Cost:
    read = x.numel() * promoted(x, out_dtype=out_dtype).itemsize + tensor_bytes(x)
    return Cost(read, tensor_bytes(x), 5 * x.numel())


def _softcap_samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-100, 100, 3 * 17, device=device).reshape(3, 17)
    yield Sample((x, 30.0))
    yield Sample((x.bfloat16(), 50.0), {"out_dtype": torch.float32})


def _softcap_example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    return Sample((torch.randn(rows, cols, device=device, dtype=dtype) * 20, 30.0))


register(
    Op(
        name="softcap",
        overload=_SOFTCAP,
        reference=softcap_reference,
        launch=_softcap_launch,
        samples=_softcap_samples,
        example=_softcap_example,
        cost=_softcap_cost,
        backward_cost=_softcap_backward_cost,
        saved="x: 1 x the input's bytes",
    )
)
