"""glu: activation(gate) * up, the gated linear unit's product (SwiGLU, GeGLU, ReGLU, GLU).

Forward reads gate and up, each with any stride between rows (the halves of a packed projection
are read in place), and writes the product: one pass. Saved: gate and up only. Backward reads dy,
gate and up and writes dgate and dup: one pass. Arithmetic in float32 (float64 if an input is), one
rounding at the store.
Shazeer, "GLU Variants Improve Transformer", 2020.

glu_packed takes both as the halves of one [..., 2N] tensor, as a merged projection gives them, and
returns the gradient of the whole: backward writes both halves where they lie, so that nothing has
to be put together.

Where an operand was computed again for the backward alone, its gradient is written over it (see
_overwrite.py).
"""

from __future__ import annotations

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
    check_floating,
    check_same_shape,
    kernel_serves,
    promoted,
    slope_times,
)
from graphopt.kernels._prepared import Prepared, Run

NAMES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


def glu_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """activation(gate) * up in plain torch.

    Args:
        gate: any shape, floating.
        up: gate's shape, floating.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid".
        out_dtype: the result's dtype; None for the promotion of gate's and up's.

    Returns:
        A contiguous tensor of gate's shape.

    Raises:
        OptionError: an unknown activation, or shapes that differ.
        UnsupportedError: not a floating dtype.

    Example:
        >>> glu_reference(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 3.0]), "relu")
        tensor([0., 6.])
    """
    _check(gate, up, activation)
    math = arithmetic(gate, up)
    y = _activations.apply(gate.to(math), activation) * up.to(math)
    return y.to(promoted(gate, up, out_dtype=out_dtype)).contiguous()


def _launch(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    y: torch.Tensor = _LAUNCH((gate, up), (activation, out_dtype))
    return y


def _prepare(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    (gate, up), (activation, out_dtype) = tensors, options
    if not kernel_serves(gate, up):
        return lambda gate, up: glu_reference(gate, up, activation, out_dtype=out_dtype)
    _check(gate, up, activation)
    from graphopt.kernels import _glu_triton as triton_path

    result = promoted(gate, up, out_dtype=out_dtype)
    return triton_path.prepare_forward(gate, up, activation, result)


_LAUNCH = Prepared(_prepare)


def _fake(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check(gate, up, activation)
    return gate.new_empty(gate.shape, dtype=promoted(gate, up, out_dtype=out_dtype))


def _check(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    if activation not in NAMES:
        raise OptionError(f"unknown activation {activation!r}", try_="one of " + ", ".join(NAMES))
    check_floating("glu", gate, up)
    check_same_shape("glu", gate, up)


def _backward_reference(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    math = arithmetic(gate, up, grad)
    dy, z = grad.to(math), gate.to(math)
    dgate = slope_times(dy * up.to(math), z, activation)
    dup = dy * _activations.apply(z, activation)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _backward_launch(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _LAUNCH_BACKWARD((grad, gate, up), (activation,))
    return found


def _prepare_backward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    if not kernel_serves(*tensors):
        return lambda *given: _backward_reference(*given, *options)
    from graphopt.kernels import _glu_triton as triton_path

    return triton_path.prepare_backward(*tensors, *options)


_LAUNCH_BACKWARD = Prepared(_prepare_backward)


_BACKWARD = define(
    "glu_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    launch=_backward_launch,
    reference=_backward_reference,
    fake=lambda grad, gate, up, activation: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)


def _backward_out_reference(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    """Write both gradients, which may lie where gate and up do."""
    first, second = _backward_reference(grad, gate, up, activation)
    dgate.copy_(first)
    dup.copy_(second)


def _backward_out_launch(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    _LAUNCH_BACKWARD_OUT((grad, gate, up, dgate, dup), (activation,))


def _prepare_backward_out(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    if not kernel_serves(*tensors):
        return lambda *given: _backward_out_reference(*given[:3], *options, *given[3:])
    from graphopt.kernels import _glu_triton as triton_path

    return triton_path.prepare_backward_out(*tensors, *options)


_LAUNCH_BACKWARD_OUT = Prepared(_prepare_backward_out)


# dgate may be gate and dup may be up; the rows of both results lie at one stride.
_BACKWARD_OUT = define(
    "glu_backward_out(Tensor grad, Tensor gate, Tensor up, str activation,"
    " Tensor(a!) dgate, Tensor(b!) dup) -> ()",
    launch=_backward_out_launch,
    reference=_backward_out_reference,
    fake=lambda grad, gate, up, activation, dgate, dup: None,
)


def _forward_grad(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], str]:
    return invoke(_GLU, gate, up, activation, out_dtype=out_dtype), (gate, up), activation


def _backward_grad(
    saved: tuple[Any, ...], activation: str, needs: tuple[bool, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    over = [needs[i] and may_overwrite(saved, i, grads[0]) for i in (0, 1)]
    if any(over):
        dgate, dup = (
            t.detach() if o else t.new_empty(t.shape) for t, o in zip(saved, over, strict=True)
        )
        invoke(_BACKWARD_OUT, grads[0], *saved, activation, dgate, dup)
    else:
        dgate, dup = invoke(_BACKWARD, grads[0], *saved, activation)
    return dgate if needs[0] else None, dup if needs[1] else None, None, None


_GLU = define(
    "glu(Tensor gate, Tensor up, str activation, *, ScalarType? out_dtype=None) -> Tensor",
    launch=_launch,
    reference=glu_reference,
    fake=_fake,
    gradient=Gradient(_forward_grad, _backward_grad),
)

overwrites(
    _GLU,
    Overwriting(
        backward=_BACKWARD,
        operands=(0, 1),
        saved=(1, 2),
        over=lambda grad, gate, up, activation: _BACKWARD_OUT(grad, gate, up, activation, gate, up),
    ),
)

_FLOPS = {"silu": 5, "gelu": 6, "gelu_tanh": 9, "relu": 2, "sigmoid": 4}


def _cost(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    written = gate.numel() * promoted(gate, up, out_dtype=out_dtype).itemsize
    return Cost(tensor_bytes(gate, up), written, gate.numel() * _FLOPS[activation])


def _backward_cost(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    read = gate.numel() * promoted(gate, up, out_dtype=out_dtype).itemsize
    flops = gate.numel() * (2 * _FLOPS[activation] + 2)
    return Cost(read + tensor_bytes(gate, up), tensor_bytes(gate, up), flops)


def _samples(device: torch.device) -> Iterator[Sample]:
    packed = torch.linspace(-4, 4, 2 * 3 * 48, device=device).reshape(2, 3, 48)
    gate, up = packed.chunk(2, dim=-1)
    for activation in NAMES:
        yield Sample((gate, up, activation))
    yield Sample((gate.bfloat16(), up, "silu"), {"out_dtype": torch.bfloat16})
    yield Sample((gate[..., :17].contiguous(), up[..., :17], "gelu"))


def _example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    packed = torch.randn(rows, 2 * cols, device=device, dtype=dtype)
    return Sample((*packed.chunk(2, dim=-1), "silu"))


register(
    Op(
        name="glu",
        overload=_GLU,
        reference=glu_reference,
        launch=_launch,
        samples=_samples,
        example=_example,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="gate and up: 1 x the inputs' bytes",
    )
)


# glu_packed -------------------------------------------------------------------------------------


def glu_packed_reference(
    packed: torch.Tensor,
    activation: str,
    gate_first: bool = True,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """activation(gate) * up of the two halves of the last dimension, in plain torch.

    Args:
        packed: [..., 2N], floating.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid".
        gate_first: whether the gate is the first half, else the second.
        out_dtype: the result's dtype; None for packed's.

    Returns:
        [..., N], contiguous.

    Raises:
        OptionError: an unknown activation, or an odd last dimension.
        UnsupportedError: not a floating dtype.

    Example:
        >>> glu_packed_reference(torch.tensor([-1.0, 2.0, 3.0, 3.0]), "relu")
        tensor([0., 6.])
    """
    return glu_reference(*_halves(packed, gate_first), activation, out_dtype=out_dtype)


def _halves(packed: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up."""
    if packed.dim() == 0 or packed.shape[-1] % 2:
        raise OptionError(
            f"graphopt::glu_packed: last dimension of {tuple(packed.shape)}",
            why="its halves are the gate and the other factor",
        )
    first, second = packed.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _packed_launch(
    packed: torch.Tensor,
    activation: str,
    gate_first: bool = True,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _launch(*_halves(packed, gate_first), activation, out_dtype=out_dtype)


def _packed_fake(
    packed: torch.Tensor,
    activation: str,
    gate_first: bool = True,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _fake(*_halves(packed, gate_first), activation, out_dtype=out_dtype)


def _packed_backward_reference(
    grad: torch.Tensor, packed: torch.Tensor, activation: str, gate_first: bool
) -> torch.Tensor:
    dgate, dup = _backward_reference(grad, *_halves(packed, gate_first), activation)
    return torch.cat((dgate, dup) if gate_first else (dup, dgate), dim=-1)


def _packed_backward_launch(
    grad: torch.Tensor, packed: torch.Tensor, activation: str, gate_first: bool
) -> torch.Tensor:
    found: torch.Tensor = _LAUNCH_PACKED_BACKWARD((grad, packed), (activation, gate_first))
    return found


def _prepare_packed_backward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    if not kernel_serves(*tensors):
        return lambda *given: _packed_backward_reference(*given, *options)
    from graphopt.kernels import _glu_triton as triton_path

    return triton_path.prepare_backward_packed(*tensors, *options)


_LAUNCH_PACKED_BACKWARD = Prepared(_prepare_packed_backward)


_PACKED_BACKWARD = define(
    "glu_packed_backward(Tensor grad, Tensor packed, str activation, bool gate_first) -> Tensor",
    launch=_packed_backward_launch,
    reference=_packed_backward_reference,
    fake=lambda grad, packed, activation, gate_first: packed.new_empty(packed.shape),
)


def _packed_forward_grad(
    packed: torch.Tensor, activation: str, gate_first: bool, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[str, bool]]:
    y = invoke(_PACKED, packed, activation, gate_first, out_dtype=out_dtype)
    return y, (packed,), (activation, gate_first)


def _packed_backward_grad(
    saved: tuple[Any, ...], kept: tuple[str, bool], needs: tuple[bool, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    if not may_overwrite(saved, 0, grads[0]):
        return invoke(_PACKED_BACKWARD, grads[0], *saved, *kept), None, None, None
    packed = saved[0].detach()
    _packed_over(grads[0], packed, *kept)
    return packed, None, None, None


def _packed_over(
    grad: torch.Tensor, packed: torch.Tensor, activation: str, gate_first: bool
) -> None:
    """Write the gradient of the whole over it."""
    halves = _halves(packed, gate_first)
    invoke(_BACKWARD_OUT, grad, *halves, activation, *halves)


_PACKED = define(
    "glu_packed(Tensor packed, str activation, bool gate_first=True, *,"
    " ScalarType? out_dtype=None) -> Tensor",
    launch=_packed_launch,
    reference=glu_packed_reference,
    fake=_packed_fake,
    gradient=Gradient(_packed_forward_grad, _packed_backward_grad),
)


overwrites(
    _PACKED,
    Overwriting(backward=_PACKED_BACKWARD, operands=(0,), saved=(1,), over=_packed_over),
)


def _packed_cost(
    packed: torch.Tensor,
    activation: str,
    gate_first: bool = True,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    return _cost(*_halves(packed, gate_first), activation, out_dtype=out_dtype)


def _packed_backward_cost(
    packed: torch.Tensor,
    activation: str,
    gate_first: bool = True,
    *,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    return _backward_cost(*_halves(packed, gate_first), activation, out_dtype=out_dtype)


def _packed_samples(device: torch.device) -> Iterator[Sample]:
    packed = torch.linspace(-4, 4, 2 * 3 * 48, device=device).reshape(2, 3, 48)
    for activation in NAMES:
        yield Sample((packed, activation))
    yield Sample((packed.bfloat16(), "silu", False))
    yield Sample((packed.bfloat16(), "silu"), {"out_dtype": torch.float32})
    yield Sample((packed[..., :34], "gelu"))


def _packed_example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    return Sample((torch.randn(rows, 2 * cols, device=device, dtype=dtype), "silu"))


register(
    Op(
        name="glu_packed",
        overload=_PACKED,
        reference=glu_packed_reference,
        launch=_packed_launch,
        samples=_packed_samples,
        example=_packed_example,
        cost=_packed_cost,
        backward_cost=_packed_backward_cost,
        saved="packed: 1 x the input's bytes",
    )
)
