"""LayerNorm and RMSNorm with the dropout and residual before and the activation after them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from graphopt.graph.pattern import either
from graphopt.passes.base import same_shape, surely
from graphopt.passes.canonical.norm import row_weight
from graphopt.passes.fusion.activation import activation, activation_name
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


def dropped(x: Any, p: Any, seed: Any, site: Any) -> Any:
    """Pattern of a value with or without seeded dropout."""
    return either(graphopt.dropout.default(x, p, seed, site), x)


def dropout_options(m: Match) -> dict[str, Any]:
    """Keyword arguments of a norm op for the dropout that was matched, none without one."""
    if not any(n.target is graphopt.dropout.default for n in m.nodes):
        return {}
    return {"dropout_p": m.p, "seed": m.seed, "site": m.site}


def activation_option(m: Match) -> dict[str, Any]:
    """Keyword argument of a norm op for the activation that was matched, none without one."""
    name = activation_name(m.root)
    return {} if name is None else {"activation": name}


def out_dtype(m: Match, plain: torch.dtype) -> torch.dtype | None:
    """The result's dtype where it is not the one that the op gives by itself."""
    return None if m.val.dtype == plain else m.val.dtype


# ------------------------------------------------------------------------------------ LayerNorm


@rule("fusion")
def layer_norm(x, shape, w, b, eps, p, seed, site, _cudnn):
    """activation(dropout(layer_norm(x))), each part optional: one read, one write."""
    h = dropped(aten.layer_norm.default(x, shape, w, b, eps, _cudnn), p, seed, site)
    return activation(h)


@layer_norm.also
def _layer_norm_plain(x, shape, w, b, eps, p, seed, site, _cudnn):
    h = aten.layer_norm.default(x, shape, w, b, eps, _cudnn)
    return graphopt.dropout.default(h, p, seed, site)


@layer_norm.also
def _layer_norm_bare(x, shape, w, b, eps, _cudnn):
    return aten.layer_norm.default(x, shape, w, b, eps, _cudnn)


@layer_norm.check
def layer_norm_fits(m: Match) -> str | None:
    """Why the kernels cannot take this LayerNorm, or None."""
    x = m.tensor("x")
    if x is None or not x.dtype.is_floating_point:
        return "x is not a floating-point tensor"
    if len(m.shape) != 1:
        return f"it norms the last {len(m.shape)} dims, the kernel takes one"
    for name in ("w", "b"):
        if m.captures[name] is not None and (reason := row_weight(m, name)):
            return reason
        row = m.tensor(name)
        narrow = x.dtype in (torch.bfloat16, torch.float16)
        if row is not None and row.dtype != x.dtype and not (narrow and row.dtype == torch.float32):
            return f"torch refuses a LayerNorm of {x.dtype} with a {row.dtype} weight or bias"
    return None


@layer_norm.replace
def _(m: Match) -> fx.Node:
    return m.call(
        graphopt.layer_norm.default,
        m.x,
        m.w,
        m.b,
        m.eps,
        **dropout_options(m),
        **activation_option(m),
        out_dtype=out_dtype(m, m.x.meta["val"].dtype),
    )


@layer_norm.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.ReLU()), (x,)
    yield nn.Sequential(nn.LayerNorm(8), nn.GELU()), (x,)
    yield nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1)), (x,)
    yield nn.LayerNorm(8), (x,)
    yield nn.LayerNorm(8, elementwise_affine=False), (x,)


@layer_norm.refuses
def _() -> Iterator[Spelling]:
    yield nn.LayerNorm((4, 8)), (torch.randn(3, 4, 8),)


@rule("fusion", before=("dropout_add",))
def add_layer_norm(x, residual, shape, w, b, eps, p, seed, site, _cudnn):
    """layer_norm(residual + dropout(x)); the sum is returned too."""
    total = aten.add.Tensor(graphopt.dropout.default(x, p, seed, site), residual)
    return aten.layer_norm.default(total, shape, w, b, eps, _cudnn), total


# A pattern of its own, which is tried after the larger one: `either` would take the first summand
# that fits as x, and leave the dropout of `residual + dropout(x)` an operator of its own.
@add_layer_norm.also
def _add_layer_norm_plain(x, residual, shape, w, b, eps, _cudnn):
    total = aten.add.Tensor(x, residual)
    return aten.layer_norm.default(total, shape, w, b, eps, _cudnn), total


@add_layer_norm.check
def _(m: Match) -> str | None:
    return layer_norm_of_sum(m) or layer_norm_fits(m)


def layer_norm_of_sum(m: Match) -> str | None:
    """Why the sum cannot be taken into the norm's kernel, or None."""
    x, residual, total = m.tensor("x"), m.tensor("residual"), m.outputs[1].meta["val"]
    if x is None or residual is None:
        return "one of the summands is a number"
    if not same_shape(x, total) or not same_shape(residual, total):
        return "one of the summands is broadcast"
    if total.dtype != torch.promote_types(x.dtype, residual.dtype):
        return "the sum is not in the promoted dtype"
    if not total.dtype.is_floating_point:
        return "the sum is not floating point"
    if not _by_rows(total) and _reaches_batch_norm(m.outputs[1]):
        # the kernel writes rows: the batch norm would be given channels-last memory, where torch's
        # own for the CPU has three times the error (maxvit)
        return "a batch norm reads the sum, which does not lie in memory by rows"
    return None


_KEEP_LAYOUT = (
    *(aten.add.Tensor, aten.mul.Tensor, aten.dropout.default, graphopt.dropout.default),
    *(graphopt.dropout_add.default, graphopt.add_layer_norm.default, operator.getitem),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.view.default),
)
"""Operations whose result lies in memory as their first tensors do."""


def _by_rows(tensor: torch.Tensor) -> bool:
    """Whether a tensor is surely contiguous."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not surely(size == 1) and not surely(stride == expected):
            return False
        expected = expected * size
    return True


def _reaches_batch_norm(node: fx.Node) -> bool:
    """Whether the layout of a value is that of a batch norm's input."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.target in (aten.batch_norm.default, graphopt.batch_norm.default):
                return True
            if user.target in _KEEP_LAYOUT and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


@add_layer_norm.replace
def _(m: Match) -> tuple[fx.Node, ...]:
    pair = m.call(
        graphopt.add_layer_norm.default,
        m.x,
        m.residual,
        m.w,
        m.b,
        m.eps,
        **dropout_options(m),
        out_dtype=out_dtype(m, m.outputs[1].meta["val"].dtype),
    )
    return m.call(operator.getitem, pair, 0), m.call(operator.getitem, pair, 1)


@add_layer_norm.spellings
def _() -> Iterator[Spelling]:
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    yield lambda x, r: F.layer_norm(x + r, (8,)), (x, r)

    def both(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = r + F.dropout(x, 0.1, True)
        return F.layer_norm(s, (8,), eps=1e-6), s

    yield both, (x, r)


@add_layer_norm.refuses
def _() -> Iterator[Spelling]:
    yield lambda x, r: F.layer_norm(x + r, (8,)), (torch.randn(3, 8), torch.randn(8))
    yield lambda x: F.layer_norm(x + 1.0, (8,)), (torch.randn(3, 8),)

    def normed(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x.t() + r
        return F.layer_norm(s, (8,)), F.batch_norm(s.t(), None, None, training=True)

    yield normed, (torch.randn(8, 3), torch.randn(3, 8))


# -------------------------------------------------------------------------------------- RMSNorm


@rule("fusion")
def rms_norm_act(x, w, eps, offset, rounded, out, p, seed, site):
    """activation(dropout(rms_norm(x))): one read, one write."""
    h = graphopt.rms_norm.default(
        x, w, eps, weight_offset=offset, round_dtype=rounded, out_dtype=out
    )
    return activation(dropped(h, p, seed, site))


@rms_norm_act.also
def _rms_norm_dropout(x, w, eps, offset, rounded, out, p, seed, site):
    h = graphopt.rms_norm.default(
        x, w, eps, weight_offset=offset, round_dtype=rounded, out_dtype=out
    )
    return graphopt.dropout.default(h, p, seed, site)


@rms_norm_act.replace
def _(m: Match) -> fx.Node:
    return m.call(
        graphopt.rms_norm.default,
        m.x,
        m.w,
        m.eps,
        weight_offset=m.offset or None,
        round_dtype=m.rounded,
        out_dtype=m.out,
        **dropout_options(m),
        **activation_option(m),
    )


@rms_norm_act.spellings
def _() -> Iterator[Spelling]:
    x, w = torch.randn(3, 8), torch.rand(8)
    yield lambda x, w: F.relu(F.dropout(F.rms_norm(x, (8,), w, 1e-6), 0.1, True)), (x, w)
    yield lambda x, w: F.dropout(F.rms_norm(x, (8,), w, 1e-6), 0.1, True), (x, w)


@rule("fusion", before=("dropout_add",))
def add_rms_norm(x, residual, w, eps, offset, rounded, out, p, seed, site):
    """rms_norm(residual + dropout(x)); the sum is returned too."""
    total = aten.add.Tensor(graphopt.dropout.default(x, p, seed, site), residual)
    y = graphopt.rms_norm.default(
        total, w, eps, weight_offset=offset, round_dtype=rounded, out_dtype=out
    )
    return y, total


@add_rms_norm.also  # a pattern of its own as above
def _add_rms_norm_plain(x, residual, w, eps, offset, rounded, out):
    total = aten.add.Tensor(x, residual)
    y = graphopt.rms_norm.default(
        total, w, eps, weight_offset=offset, round_dtype=rounded, out_dtype=out
    )
    return y, total


@add_rms_norm.check
def _(m: Match) -> str | None:
    return layer_norm_of_sum(m)


@add_rms_norm.replace
def _(m: Match) -> tuple[fx.Node, ...]:
    pair = m.call(
        graphopt.add_rms_norm.default,
        m.x,
        m.residual,
        m.w,
        m.eps,
        weight_offset=m.offset or None,
        round_dtype=m.rounded,
        **dropout_options(m),
        out_dtype=out_dtype(m, m.outputs[1].meta["val"].dtype),
    )
    return m.call(operator.getitem, pair, 0), m.call(operator.getitem, pair, 1)


@add_rms_norm.spellings
def _() -> Iterator[Spelling]:
    x, r, w = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    yield lambda x, r, w: F.rms_norm(x + r, (8,), w, 1e-6), (x, r, w)
    yield lambda x, r, w: F.rms_norm(r + F.dropout(x, 0.2, True), (8,), w, 1e-6), (x, r, w)


@add_rms_norm.refuses
def _() -> Iterator[Spelling]:
    x, w = torch.randn(3, 8), torch.rand(8)
    yield lambda x, r, w: F.rms_norm(x + r, (8,), w, 1e-6), (x, torch.randn(8), w)
