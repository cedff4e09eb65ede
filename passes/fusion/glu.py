"""Gated linear units (Shazeer, 2020): activation(gate) * up in one pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import same_shape, surely
from graphopt.passes.fusion.activation import activation, activation_name
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@rule("fusion", before=("bias_act",))
def glu(gate, up):
    """activation(gate) * up (SwiGLU, GeGLU, ReGLU) reads each once and writes once."""
    return aten.mul.Tensor(activation(gate), up)


@glu.check
def _(m: Match) -> str | None:
    gate, up = m.tensor("gate"), m.tensor("up")
    if gate is None or up is None or not same_shape(gate, up):
        return "gate and up differ in shape"
    if gate.dtype != up.dtype or not gate.dtype.is_floating_point:
        return f"gate is {gate.dtype}, up is {up.dtype}"
    if _activation(m) == "tanh":
        return "no kernel has a tanh gate"
    if m.gate is m.up:
        return "gate and up are one value"
    return None


def _activation(m: Match) -> str | None:
    return next(filter(None, map(activation_name, m.nodes)), None)


@glu.replace
def _(m: Match) -> fx.Node:
    return m.call(graphopt.glu.default, m.gate, m.up, _activation(m))


@glu.spellings
def _() -> Iterator[Spelling]:
    g, u = torch.randn(3, 8), torch.randn(3, 8)
    yield lambda g, u: F.silu(g) * u, (g, u)
    yield lambda g, u: u * F.gelu(g), (g, u)
    yield lambda g, u: F.gelu(g, approximate="tanh") * u, (g, u)
    yield lambda g, u: F.relu(g) * u, (g, u)
    yield lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], (torch.randn(3, 16),)


@glu.refuses
def _() -> Iterator[Spelling]:
    g, u = torch.randn(3, 8), torch.randn(3, 1)
    yield lambda g, u: F.silu(g) * u, (g, u)
    yield lambda g: F.silu(g) * 2.0, (g,)

    def gate_is_kept(g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = F.silu(g)
        return s * u, s

    yield gate_is_kept, (g, torch.randn(3, 8))


@rule("fusion")
def packed_glu(x, parts, dim, first, second, act, out):
    """A gated unit of two halves of one value reads them in place and gives one gradient."""
    halves = either(
        aten.chunk.default(x, parts, dim),
        aten.split.Tensor(x, parts, dim),
        aten.split_with_sizes.default(x, parts, dim),
    )
    return _gated(operator.getitem(halves, first), operator.getitem(halves, second), act, out)


@packed_glu.also
def _packed_glu_sliced(x, dim, first, middle, second, end, act, out):
    halves = (aten.slice.Tensor(x, dim, first, middle), aten.slice.Tensor(x, dim, second, end))
    return _gated(*halves, act, out)


def _gated(gate: Any, up: Any, act: Any, out: Any) -> Any:
    return graphopt.glu.default(gate, up, act, out_dtype=out)


@packed_glu.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or x.dim() == 0 or m.dim % x.dim() != x.dim() - 1:
        return "the halves are not those of the last dim"
    size = x.shape[-1]
    if "middle" in m.captures:
        return None if _gate_first(m) is not None else "the slices are not two halves"
    if any(n.target is aten.chunk.default for n in m.nodes):
        whole = m.parts == 2 and surely(size % 2 == 0)
    elif isinstance(m.parts, int):
        whole = surely(m.parts * 2 == size)
    else:
        whole = len(m.parts) == 2 and surely(m.parts[0] == m.parts[1])
    return None if whole and {m.first, m.second} == {0, 1} else "it is not cut into two halves"


def _gate_first(m: Match) -> bool | None:
    """Whether the gate is the first half; None where slices are no halves."""
    if "middle" not in m.captures:
        return bool(m.first == 0)
    size = m.x.meta["val"].shape[-1]
    gate, up = (m.first, m.middle), (m.second, m.end)
    low, high = (gate, up) if m.first == 0 else (up, gate)
    if not all(isinstance(n, int) for n in (*low, *high)):
        return None
    halves = low[0] == 0 and low[1] == high[0] and surely(low[1] * 2 == size)
    return bool(m.first == 0) if halves and surely(high[1] >= size) else None


@packed_glu.replace
def _(m: Match) -> fx.Node:
    order = () if _gate_first(m) else (False,)
    return m.call(graphopt.glu_packed.default, m.x, m.act, *order, out_dtype=m.out)


@packed_glu.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 16)
    yield lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (x,)
    yield lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]), (x,)
    yield lambda x: F.silu(x[..., :8]) * x[..., 8:], (x,)
    yield lambda x: x[..., :8] * torch.sigmoid(x[..., 8:]), (x,)

    def split(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.split(8, dim=1)
        return (F.silu(gate) * up).to(torch.bfloat16)

    yield split, (x,)


@packed_glu.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(4, 16)
    yield lambda x: F.silu(x.chunk(2, 0)[0]) * x.chunk(2, 0)[1], (x,)
    yield lambda x: F.silu(x.chunk(4, -1)[0]) * x.chunk(4, -1)[1], (x,)
    yield lambda x: F.silu(x[..., :8]) * x[..., 4:12], (x,)

    def kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up, up

    yield kept, (x,)
