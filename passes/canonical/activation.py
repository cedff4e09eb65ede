"""GELU (erf and tanh), SiLU and the logit soft cap, from the ways in which people spell them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


def near(value: Any, wanted: float, dtype: torch.dtype) -> bool:
    """Whether a literal is a constant, up to what a tensor of some dtype can tell apart."""
    tolerance = 1e-15 if dtype == torch.float64 else 6e-8
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isclose(value, wanted, rel_tol=tolerance)
    )


def half_times(x: Any, factor: Any) -> Any:
    """Pattern of 0.5 * x * factor in any association."""
    return either(
        aten.mul.Tensor(aten.mul.Tensor(x, 0.5), factor),
        aten.mul.Tensor(x, aten.mul.Tensor(factor, 0.5)),
        aten.mul.Tensor(aten.mul.Tensor(x, factor), 0.5),
        aten.div.Tensor(aten.mul.Tensor(x, factor), 2),
        aten.mul.Tensor(aten.div.Tensor(x, 2), factor),
    )


def widened(x: Any) -> Any:
    """Pattern of a value that may have been cast to float32 before it is read."""
    return either(aten.to.dtype(x, torch.float32), x)


def in_root_dtype(m: Match, name: str = "x") -> fx.Node:
    """The capture in the dtype of the match's result, by a cast where they differ."""
    x: fx.Node = getattr(m, name)
    if x.meta["val"].dtype == m.val.dtype:
        return x
    return m.call(aten.to.dtype, x, m.val.dtype)


@rule("canonical")
def gelu(x, root2):
    """0.5 * x * (1 + erf(x / sqrt(2))), however associated, is aten.gelu."""
    return half_times(x, aten.add.Tensor(aten.erf.default(aten.div.Tensor(widened(x), root2)), 1))


@gelu.also
def _gelu_multiplied(x, root_half):
    erf = aten.erf.default(aten.mul.Tensor(widened(x), root_half))
    return half_times(x, aten.add.Tensor(erf, 1))


@gelu.check
def _(m: Match) -> str | None:
    if "root2" in m.captures and not near(m.root2, math.sqrt(2), m.val.dtype):
        return f"x is divided by {m.root2}, not by sqrt(2)"
    if "root_half" in m.captures and not near(m.root_half, math.sqrt(0.5), m.val.dtype):
        return f"x is multiplied by {m.root_half}, not by sqrt(0.5)"
    return floating(m)


def floating(m: Match) -> str | None:
    """Why the rule may not fire: the value is no real floating-point tensor."""
    value = m.tensor("x")
    if value is None or not value.dtype.is_floating_point:
        return "x is not a floating-point tensor"
    return None


@gelu.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.gelu.default, in_root_dtype(m))


@gelu.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), (x,)
    yield lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951)), (x,)
    yield lambda x: x * (0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))), (x,)
    yield lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))) / 2, (x,)


@gelu.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: x * 0.5 * (1 + torch.erf(x / 1.5)), (x,)
    yield lambda x: x * 0.5 * (1 + torch.erf((x + 1) / math.sqrt(2))), (x,)


def cubed(x: Any) -> Any:
    """Pattern of x ** 3."""
    return either(
        aten.pow.Tensor_Scalar(widened(x), 3),
        aten.mul.Tensor(aten.mul.Tensor(x, x), x),
    )


@rule("canonical")
def gelu_tanh(x, cubic, factor):
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) is aten.gelu(approximate='tanh')."""
    inner = aten.add.Tensor(x, aten.mul.Tensor(cubed(x), cubic))
    return half_times(x, aten.add.Tensor(aten.tanh.default(aten.mul.Tensor(inner, factor)), 1))


@gelu_tanh.also
def _gelu_tanh_factored(x, cubic, factor):
    square = either(
        aten.mul.Tensor(aten.mul.Tensor(x, cubic), x),
        aten.mul.Tensor(aten.mul.Tensor(x, x), cubic),
        aten.mul.Tensor(aten.pow.Tensor_Scalar(widened(x), 2), cubic),
    )
    poly = aten.add.Tensor(square, 1)
    inner = either(
        aten.mul.Tensor(aten.mul.Tensor(x, factor), poly),
        aten.mul.Tensor(aten.mul.Tensor(x, poly), factor),
    )
    return half_times(x, aten.add.Tensor(aten.tanh.default(inner), 1))


@gelu_tanh.check
def _(m: Match) -> str | None:
    if not near(m.cubic, 0.044715, m.val.dtype):
        return f"the cubic term's factor is {m.cubic}, not 0.044715"
    # Written out to ten digits in several model files, which float32 cannot tell apart.
    if not near(m.factor, math.sqrt(2 / math.pi), m.val.dtype):
        return f"the factor before the tanh's argument is {m.factor}, not sqrt(2/pi)"
    return floating(m)


@gelu_tanh.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.gelu.default, in_root_dtype(m), approximate="tanh")


@gelu_tanh.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    c = math.sqrt(2 / math.pi)
    yield lambda x: 0.5 * x * (1 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0)))), (x,)
    yield lambda x: 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * x * x * x))), (x,)
    yield lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))), (x,)


@gelu_tanh.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.05 * x**3))), (x,)
    yield lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))), (x,)
    rounded = 0.7978845608  # float64 can tell this from sqrt(2/pi)
    yield lambda x: 0.5 * x * (1 + torch.tanh(rounded * (x + 0.044715 * x**3))), (x.double(),)


@gelu_tanh.also
def _gelu_tanh_cube_left(x, cubic, factor):
    cube = aten.mul.Tensor(aten.mul.Tensor(aten.mul.Tensor(x, cubic), x), x)
    inner = aten.mul.Tensor(aten.add.Tensor(x, cube), factor)
    return half_times(x, aten.add.Tensor(aten.tanh.default(inner), 1))


@rule("canonical")
def silu(x):
    """X * sigmoid(x) is aten.silu."""
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


@silu.also
def _silu_divided(x):
    return aten.div.Tensor(x, aten.add.Tensor(aten.exp.default(aten.neg.default(x)), 1))


@silu.check
def _(m: Match) -> str | None:
    if m.tensor("x") is not None and m.tensor("x").dtype != m.val.dtype:  # type: ignore[union-attr]
        return "the product is wider than x"
    return floating(m)


@silu.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.silu.default, m.x)


@silu.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: x * torch.sigmoid(x), (x,)
    yield lambda x: torch.sigmoid(x) * x, (x,)


@silu.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: x * torch.sigmoid(1.702 * x), (x,)
    yield lambda x, y: x * torch.sigmoid(y), (x, torch.randn(3, 8))


@rule("canonical")
def softcap(x, cap):
    """Cap * tanh(x / cap), the logit soft cap of Gemma 2, is graphopt.softcap."""
    return aten.mul.Tensor(aten.tanh.default(aten.div.Tensor(x, cap)), cap)


@softcap.also
def _softcap_multiplied(x, inverse, cap):
    return aten.mul.Tensor(aten.tanh.default(aten.mul.Tensor(x, inverse)), cap)


@softcap.check
def _(m: Match) -> str | None:
    if isinstance(m.cap, bool) or not isinstance(m.cap, (int, float)) or m.cap <= 0:
        return f"the cap {m.cap} is not a positive number"
    inverse = m.captures.get("inverse")
    if inverse is not None and not (
        isinstance(inverse, (int, float)) and near(inverse * m.cap, 1, m.val.dtype)
    ):
        return f"x is multiplied by {inverse}, which is not 1/{m.cap}"
    return floating(m)


@softcap.replace
def _(m: Match) -> fx.Node:
    return m.call(graphopt.softcap.default, m.x, float(m.cap), out_dtype=_other_than_x(m))


def _other_than_x(m: Match) -> torch.dtype | None:
    return None if m.val.dtype == m.x.meta["val"].dtype else m.val.dtype


@softcap.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: torch.tanh(x / 30.0) * 30.0, (x,)
    yield lambda x: 50.0 * torch.tanh(x * (1 / 50.0)), (x,)


@softcap.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: torch.tanh(x / 30.0) * 20.0, (x,)
