"""Casts around a fused op, folded into its loads and stores.

A fused op holds its result in float32 before it stores. Storing it in low precision rounds that
same value once, as the cast would have; reading a narrower operand and widening it is exact. So
no rounding step is added or lost, whoever wrote the cast.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import LOW
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


def _norms(x: Any, w: Any, b: Any, eps: Any, a: Any, c: Any, drop: tuple[Any, ...]) -> Any:
    p, seed, site, act, out = drop
    options = {"dropout_p": p, "seed": seed, "site": site, "activation": act, "out_dtype": out}
    return either(
        graphopt.layer_norm.default(x, w, b, eps, **options),
        graphopt.rms_norm.default(x, w, eps, weight_offset=a, round_dtype=c, **options),
    )


@rule("fusion")
def cast_store(x, y, w, b, eps, _a, _c, _p, seed, _site, _act, _out, to):
    """A fused op's float32 result that is only read in low precision is stored so."""
    fused = either(
        _norms(x, w, b, eps, _a, _c, (_p, seed, _site, _act, _out)),
        graphopt.glu.default(x, y, _act, out_dtype=_out),
        graphopt.glu_packed.default(x, _act, _a, out_dtype=_out),
        graphopt.bias_act.default(x, y, _act, bias_added=_c, out_dtype=_out),
        graphopt.softcap.default(x, _a, out_dtype=_out),
        graphopt.dropout_add.default(x, y, _p, seed, _site, bias=b, bias_added=_c, out_dtype=_out),
        graphopt.rope.default(x, y, b, _a, out_dtype=_out),
    )
    return aten.to.dtype(fused, to)


@cast_store.also
def _cast_store_pair(x, y, w, b, eps, _a, _c, _p, seed, _site, _sum, _out, to):
    options = {"dropout_p": _p, "seed": seed, "site": _site, "sum_dtype": _sum, "out_dtype": _out}
    pair = either(
        graphopt.add_layer_norm.default(x, y, w, b, eps, **options),
        graphopt.add_rms_norm.default(x, y, w, eps, weight_offset=_a, round_dtype=_c, **options),
    )
    return aten.to.dtype(operator.getitem(pair, 0), to), operator.getitem(pair, 1)


def fused_node(m: Match) -> fx.Node:
    """The graphopt op among the matched nodes."""
    return next(n for n in m.nodes if str(n.target).startswith("graphopt."))


def stored_dtype(m: Match) -> torch.dtype:
    """The dtype in which the fused op stores its first result now."""
    value = fused_node(m).meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    dtype: torch.dtype = first.dtype
    return dtype


@cast_store.check
def _(m: Match) -> str | None:
    if m.to not in LOW or stored_dtype(m) != torch.float32:
        return f"a cast from {stored_dtype(m)} to {m.to} is a rounding step of its own"
    return None


@cast_store.replace
def _(m: Match) -> fx.Node | tuple[fx.Node, ...]:
    old = fused_node(m)
    new = m.call(old.target, *old.args, **{**old.kwargs, "out_dtype": m.to})
    if not isinstance(new.meta["val"], (tuple, list)):
        return new
    return tuple(m.call(operator.getitem, new, i) for i in range(len(m.outputs)))


@cast_store.spellings
def _() -> Iterator[Spelling]:
    x, w = torch.randn(3, 8), torch.rand(8)
    low = torch.bfloat16
    yield lambda x: F.layer_norm(x, (8,)).to(low), (x,)
    yield lambda x, w: F.rms_norm(x, (8,), w, 1e-6).to(low), (x, w)
    yield lambda g, u: (F.silu(g) * u).to(low), (x, torch.randn(3, 8))
    yield lambda x, r: F.layer_norm(x + r, (8,)).to(low), (x, torch.randn(3, 8))

    def rotary(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-q[..., 4:], q[..., :4]), -1)
        return (q * cos + turned * sin).to(low)

    yield rotary, (torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(5, 8), torch.randn(5, 8))

    def sum_too(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x + r
        return F.layer_norm(s, (8,)).to(low), s

    yield sum_too, (x, torch.randn(3, 8))


@cast_store.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x: F.layer_norm(x, (8,)).to(torch.float64), (x,)
    yield lambda x: F.layer_norm(x, (8,)).float(), (x.bfloat16(),)

    def both_precisions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.layer_norm(x, (8,))
        return y.to(torch.bfloat16), y

    yield both_precisions, (x,)


@rule("fusion")
def cast_load(x, wide, w, b, eps, _a, _c, _p, seed, _site, _act, _out):
    """A norm whose operand was only widened for it reads the narrow one."""
    return _norms(aten.to.dtype(x, wide), w, b, eps, _a, _c, (_p, seed, _site, _act, _out))


@cast_load.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or x.dtype not in LOW or m.wide != torch.float32:
        return "the cast is not one from low precision to float32"
    return None


@cast_load.replace
def _(m: Match) -> fx.Node:
    old = fused_node(m)
    kwargs = {**old.kwargs, "out_dtype": stored_dtype(m)}
    return m.call(old.target, m.x, *old.args[1:], **kwargs)


@cast_load.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8).bfloat16()
    yield lambda x: F.layer_norm(x.float(), (8,)), (x,)


@cast_load.refuses
def _() -> Iterator[Spelling]:
    def wide_is_kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.float()
        return F.layer_norm(h, (8,)), h

    yield wide_is_kept, (torch.randn(3, 8).bfloat16(),)
    yield lambda x: F.layer_norm(x.float(), (8,)), (torch.randn(3, 8, dtype=torch.float64),)
