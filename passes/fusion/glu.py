"""Gated linear units (Shazeer, 2020): activation(gate) * up in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from graphopt.passes.base import same_shape
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
