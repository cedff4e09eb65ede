"""The two internal operators that the whole norm family runs on, and how it is differentiated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphopt.errors import OptionError
from graphopt.kernels import _activations, _norm_reference
from graphopt.kernels._launch import nothing
from graphopt.kernels._library import Args, Gradient, define, invoke

MaybeTensor = torch.Tensor | None
MaybeDtype = torch.dtype | None


class Call(NamedTuple):
    """The arguments of the internal forward, which serves all four operators."""

    x: torch.Tensor
    residual: MaybeTensor
    weight: MaybeTensor
    bias: MaybeTensor
    seed: MaybeTensor
    eps: float
    rms: bool
    weight_offset: float
    round_dtype: MaybeDtype
    dropout_p: float
    site: int
    activation: str
    sum_dtype: torch.dtype
    out_dtype: torch.dtype


def forward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _outputs(Call(*arguments), torch.empty)


def _outputs(c: Call, unwanted: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Check the arguments and allocate the results; those not asked for have no element.

    Args:
        c: the call.
        unwanted: gives these, from a shape of (0,), a dtype and a device.
    """
    if c.residual is not None and c.residual.shape != c.x.shape:
        raise OptionError(
            f"x {list(c.x.shape)} and residual {list(c.residual.shape)} differ in shape",
            try_="residual.expand_as(x)",
        )
    for name, vector in (("weight", c.weight), ("bias", c.bias)):
        if vector is not None and vector.shape != c.x.shape[-1:]:
            raise OptionError(
                f"{name} {list(vector.shape)} does not fit x {list(c.x.shape)}",
                why="the norm is over the last dimension only",
            )
    _activations.check(c.activation)
    stats = _norm_reference.compute_dtype(c.x, c.residual, c.weight, c.bias)
    shape, device = c.x.shape, c.x.device
    rows = math.prod(shape[:-1])
    y = torch.empty(shape, dtype=c.out_dtype, device=device)
    make = unwanted if c.residual is None else torch.empty
    total = make((0,) if c.residual is None else shape, dtype=c.sum_dtype, device=device)
    make = unwanted if c.rms else torch.empty
    mean = make((0 if c.rms else rows,), dtype=stats, device=device)
    return y, total, mean, torch.empty((rows,), dtype=stats, device=device)


def _shared_nothing(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor of no element for all calls, in place of an allocation."""
    return nothing(dtype, device)


def forward_launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = Call(*arguments)
    outputs = _outputs(c, _shared_nothing)
    if c.x.numel() == 0:
        return tuple(t.zero_() for t in outputs)
    if outputs[3].dtype == torch.float64:
        return _norm_reference.forward(*c)
    from graphopt.kernels import _norm_launch

    _norm_launch.forward(c.x, c.residual, outputs, *c[2:12])
    return outputs


def forward_reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = Call(*arguments)
    outputs = forward_fake(*c)  # also checks the arguments
    if c.x.numel() == 0:
        return tuple(t.zero_() for t in outputs)
    return _norm_reference.forward(*c)


_FORWARD = define(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, "
    "float eps, bool rms, float weight_offset, ScalarType? round_dtype, float dropout_p, int site, "
    "str activation, ScalarType sum_dtype, ScalarType out_dtype) "
    "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    launch=forward_launch,
    reference=forward_reference,
    fake=forward_fake,
)


class BackwardCall(NamedTuple):
    """The arguments of the internal backward.

    x is the normed tensor (the input, or with ``add`` the sum). A dtype that is None says that this
    gradient is not wanted; it is returned empty.
    """

    x: torch.Tensor
    dy: torch.Tensor
    dsum: MaybeTensor
    weight: MaybeTensor
    bias: MaybeTensor
    mean: torch.Tensor
    rstd: torch.Tensor
    seed: MaybeTensor
    rms: bool
    weight_offset: float
    round_dtype: MaybeDtype
    dropout_p: float
    site: int
    activation: str
    add: bool
    dx: MaybeDtype
    dresidual: MaybeDtype
    dweight: MaybeDtype
    dbias: MaybeDtype


def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _gradients(BackwardCall(*arguments), torch.empty)


def _gradients(c: BackwardCall, unwanted: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Allocate the gradients; those not wanted have no element and come from ``unwanted``."""
    shape, device = c.x.shape, c.x.device
    vector = shape[-1:]
    found = []
    for size, dtype in zip((shape, shape, vector, vector), c[15:], strict=True):
        if dtype is None:
            found.append(unwanted((0,), dtype=torch.float32, device=device))
        else:
            found.append(torch.empty(size, dtype=dtype, device=device))
    return tuple(found)


def _backward_launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = BackwardCall(*arguments)
    if c.rstd.dtype == torch.float64:
        return _backward_reference(*c)
    outputs = _gradients(c, _shared_nothing)
    if c.x.numel() == 0:
        return tuple(t.zero_() for t in outputs)
    from graphopt.kernels import _norm_launch

    wanted = tuple(None if dtype is None else t for t, dtype in zip(outputs, c[15:], strict=True))
    _norm_launch.backward(c.x, c.dy, c.dsum, wanted, *c[3:15])
    return outputs


def _backward_reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = BackwardCall(*arguments)
    outputs = _backward_fake(*c)
    if c.x.numel() == 0:
        return tuple(t.zero_() for t in outputs)
    results = _norm_reference.backward(*c[:15])
    for out, result, dtype in zip(outputs, results, c[15:], strict=True):
        if dtype is not None:
            out.copy_(result)
    return outputs


_BACKWARD = define(
    "norm_backward(Tensor x, Tensor dy, Tensor? dsum, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, Tensor? seed, bool rms, float weight_offset, ScalarType? round_dtype, "
    "float dropout_p, int site, str activation, bool add, ScalarType? dx, ScalarType? dresidual, "
    "ScalarType? dweight, ScalarType? dbias) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    launch=_backward_launch,
    reference=_backward_reference,
    fake=_backward_fake,
)


def gradient(to_call: Callable[..., Call], names: tuple[str, ...]) -> Gradient:
    """The gradient of an operator whose tensor arguments, in schema order, are ``names``."""
    place = {name: i for i, name in enumerate(names)}
    add = "residual" in place

    def forward(*args: Any) -> tuple[Any, Args, Any]:
        c = to_call(*args)
        y, total, mean, rstd = invoke(_FORWARD, *c)
        saved = (total if add else c.x, c.weight, c.bias, mean, rstd, c.seed)
        dtypes = {n: t.dtype for n in names if (t := getattr(c, n)) is not None}
        return ((y, total) if add else y), saved, (c[6:12], dtypes)

    def backward(saved: Args, kept: Any, needs: tuple[bool, ...], grads: Args) -> Args:
        x, weight, bias, mean, rstd, seed = saved
        form, dtypes = kept
        dy, dsum = grads if add else (grads[0], None)
        if dy is None:
            dy = torch.zeros_like(x, memory_format=torch.contiguous_format)
        wanted = {n: dtypes.get(n) if needs[place[n]] else None for n in names}
        # Without dropout both summands have one gradient: compute it once.
        shared = (
            add and form[3] == 0.0 and wanted["x"] is not None and wanted["x"] == wanted["residual"]
        )
        dtype_list = [wanted.get(n) for n in ("x", "residual", "weight", "bias")]
        if shared:
            dtype_list[0] = None
        results = invoke(
            _BACKWARD, x, dy, dsum, weight, bias, mean, rstd, seed, *form, add, *dtype_list
        )
        by_name = dict(zip(("x", "residual", "weight", "bias"), results, strict=True))
        if shared:
            by_name["x"] = by_name["residual"]
        ours = tuple(by_name[n] if wanted[n] is not None else None for n in names)
        return ours + (None,) * (len(needs) - len(ours))

    return Gradient(forward, backward, (place["x"], place["residual"]) if add else ())
