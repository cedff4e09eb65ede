"""The two internal operators that the whole norm family runs on, and how it is differentiated."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphopt.errors import OptionError
from graphopt.kernels import _activations, _norm_reference
from graphopt.kernels._library import Args, Gradient, define, invoke
from graphopt.kernels._prepared import Prepared, Run, maker

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


Form = tuple[Any, ...] | None
"""Shape of a result; None for one that the call does not make."""


def _results(c: Call) -> tuple[tuple[Form, torch.dtype], ...]:
    """Check the arguments; shape and dtype of y, sum, mean and rstd.

    Raises:
        OptionError: shapes that do not fit, an unknown activation.
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
    shape, rows = c.x.shape, (math.prod(c.x.shape[:-1]),)
    total, mean = None if c.residual is None else shape, None if c.rms else rows
    return (shape, c.out_dtype), (total, c.sum_dtype), (mean, stats), (rows, stats)


def forward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = Call(*arguments)
    return _empty(_results(c), c.x)


def _empty(
    results: tuple[tuple[Form, torch.dtype | None], ...], x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Allocate results; those not asked for have no element."""
    return tuple(
        torch.empty((0,) if form is None else form, dtype=dtype or torch.float32, device=x.device)
        for form, dtype in results
    )


def forward_launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = _FORWARD_LAUNCH(arguments[:5], arguments[5:])
    return found


def _prepare_forward(tensors: tuple[MaybeTensor, ...], options: tuple[Any, ...]) -> Run:
    c = Call(*tensors, *options)  # type: ignore[arg-type]
    results = _results(c)
    if c.x.numel() == 0:
        return lambda x, *rest: tuple(t.zero_() for t in _empty(results, x))
    if results[3][1] == torch.float64:
        return lambda *given: _norm_reference.forward(*given, *options)
    from graphopt.kernels import _norm_launch

    write = _norm_launch.prepare_forward(c)
    makers = [maker(c.x, form, dtype) for form, dtype in results]
    make_y, make_sum, make_mean, make_rstd = makers

    def run(x, residual, weight, bias, seed):  # type: ignore[no-untyped-def]
        outputs = make_y(x), make_sum(x), make_mean(x), make_rstd(x)
        write(x, residual, weight, bias, seed, *outputs)
        return outputs

    return run


_FORWARD_LAUNCH = Prepared(_prepare_forward)


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

    @property
    def results(self) -> tuple[tuple[Form, MaybeDtype], ...]:
        """Shape and dtype of each gradient, both None for one that is not wanted."""
        shape = tuple(self.x.shape)
        forms = (shape, shape, shape[-1:], shape[-1:])
        return tuple((None if d is None else f, d) for f, d in zip(forms, self[15:], strict=True))


def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = BackwardCall(*arguments)
    return _empty(c.results, c.x)


def _backward_launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = _BACKWARD_LAUNCH(arguments[:8], arguments[8:])
    return found


def _prepare_backward(tensors: tuple[MaybeTensor, ...], options: tuple[Any, ...]) -> Run:
    c = BackwardCall(*tensors, *options)  # type: ignore[arg-type]
    if c.rstd.dtype == torch.float64:
        return lambda *given: _backward_reference(*given, *options)
    results = c.results
    if c.x.numel() == 0:
        return lambda x, *rest: tuple(t.zero_() for t in _empty(results, x))
    from graphopt.kernels import _norm_launch

    write = _norm_launch.prepare_backward(c)
    makers = [maker(c.x, form, dtype or torch.float32) for form, dtype in results]
    make_dx, make_dresidual, make_dweight, make_dbias = makers

    def run(*given):  # type: ignore[no-untyped-def]
        x = given[0]
        outputs = make_dx(x), make_dresidual(x), make_dweight(x), make_dbias(x)
        write(*given, *outputs)
        return outputs

    return run


_BACKWARD_LAUNCH = Prepared(_prepare_backward)


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


@functools.lru_cache(maxsize=1024)
def _asked(
    needs: tuple[bool, ...], dtypes: tuple[MaybeDtype, ...], places: tuple[int, ...], alike: bool
) -> tuple[tuple[MaybeDtype, ...], tuple[int | None, ...]]:
    """What a backward has to compute, and which of it is each argument's gradient.

    Args:
        needs: for each argument of the operator whether its gradient is wanted.
        dtypes: of x, residual, weight and bias; None for one that is not there.
        places: which argument each of these is; -1 for none.
        alike: both summands have one gradient, where their dtypes are one.
    """
    wanted = [d if at >= 0 and needs[at] else None for d, at in zip(dtypes, places, strict=True)]
    of = list(range(4))
    if alike and wanted[0] is not None and wanted[0] == wanted[1]:
        of[0], wanted_x = 1, None  # computed once
    else:
        wanted_x = wanted[0]
    found: list[int | None] = [None] * len(needs)
    for i, at in enumerate(places):
        if wanted[i] is not None:
            found[at] = of[i]
    return (wanted_x, *wanted[1:]), tuple(found)


def gradient(to_call: Callable[..., Call], names: tuple[str, ...]) -> Gradient:
    """The gradient of an operator whose tensor arguments, in schema order, are ``names``."""
    every = ("x", "residual", "weight", "bias")
    places = tuple(names.index(n) if n in names else -1 for n in every)
    add = "residual" in names

    def forward(*args: Any) -> tuple[Any, Args, Any]:
        c = to_call(*args)
        x, residual, weight, bias, seed = c[:5]
        y, total, mean, rstd = invoke(_FORWARD, *c)
        saved = (total if add else x, weight, bias, mean, rstd, seed)
        dtypes = (
            x.dtype,
            None if residual is None else residual.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
        )
        return ((y, total) if add else y), saved, (c[6:12], dtypes)

    def backward(saved: Args, kept: Any, needs: tuple[bool, ...], grads: Args) -> Args:
        x, weight, bias, mean, rstd, seed = saved
        form, dtypes = kept
        dy, dsum = grads if add else (grads[0], None)
        if dy is None:
            dy = torch.zeros_like(x, memory_format=torch.contiguous_format)
        # Without dropout both summands have one gradient.
        wanted, order = _asked(needs, dtypes, places, add and form[3] == 0.0)
        found = invoke(_BACKWARD, x, dy, dsum, weight, bias, mean, rstd, seed, *form, add, *wanted)
        return tuple(None if i is None else found[i] for i in order)

    return Gradient(forward, backward, places[:2] if add else ())
