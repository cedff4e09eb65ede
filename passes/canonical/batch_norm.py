"""BatchNorm in eval folded into the convolution or linear before it.

The folded weight is a value of the graph, computed from the parameters and statistics at each
call: it follows an optimizer step or a loaded checkpoint, and nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from graphopt.graph.facts import nbytes
from graphopt.graph.pattern import either
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@rule("canonical")
def fold_batch_norm(
    x, w, b, stride, padding, dilation, groups, gamma, beta, mean, var, _momentum, eps, _cudnn
):
    """A convolution and its BatchNorm in eval are one convolution with a derived weight."""
    conv = either(
        aten.conv2d.default(x, w, b, stride, padding, dilation, groups),
        aten.conv1d.default(x, w, b, stride, padding, dilation, groups),
        aten.conv3d.default(x, w, b, stride, padding, dilation, groups),
        aten.conv2d.padding(x, w, b, stride, padding, dilation, groups),
        aten.conv1d.padding(x, w, b, stride, padding, dilation, groups),
    )
    return aten.batch_norm.default(conv, gamma, beta, mean, var, False, _momentum, eps, _cudnn)


@fold_batch_norm.also
def _fold_batch_norm_linear(x, w, b, gamma, beta, mean, var, _momentum, eps, _cudnn):
    linear = aten.linear.default(x, w, b)
    return aten.batch_norm.default(linear, gamma, beta, mean, var, False, _momentum, eps, _cudnn)


@fold_batch_norm.check
def _(m: Match) -> str | None:
    w = m.tensor("w")
    if w is None or m.tensor("mean") is None or m.tensor("var") is None:
        return "the weight or the statistics are not tensors"
    if "stride" not in m.captures and m.val.dim() != 2:
        return "the linear's features are not the BatchNorm's channels"
    dtypes = {
        t.dtype
        for n in ("w", "b", "gamma", "beta", "mean", "var")
        if (t := m.tensor(n)) is not None
    }
    if len(dtypes) != 1:
        return "weight and statistics differ in dtype"
    if m.body.grad and any(map(m.requires_grad, ("w", "b", "gamma", "beta"))):
        return (
            "a gradient of its weights is taken, which the folded form would sum in another order"
        )
    # Folding reads and writes the weight once a call; BatchNorm reads and writes the activation.
    if nbytes(w) > nbytes(m.val):
        return "its weight is larger than its output: deriving it at each call would cost more"
    return None


@fold_batch_norm.replace
def _(m: Match) -> fx.Node:
    from operator import getitem

    folded = m.call(
        graphopt.fold_batch_norm.default, m.w, m.b, m.gamma, m.beta, m.mean, m.var, float(m.eps)
    )
    weight, bias = m.call(getitem, folded, 0), m.call(getitem, folded, 1)
    if "stride" not in m.captures:
        return m.call(aten.linear.default, m.x, weight, bias)
    conv = next(n.target for n in m.nodes if n.target is not aten.batch_norm.default)
    return m.call(conv, m.x, weight, bias, m.stride, m.padding, m.dilation, m.groups)


def _stack(*layers: nn.Module) -> nn.Module:
    stack = nn.Sequential(*layers).eval().requires_grad_(False)
    with torch.no_grad():
        for buffer in stack.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    return stack


@fold_batch_norm.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(2, 3, 9, 9)
    yield _stack(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), (x,)
    yield _stack(nn.Conv2d(3, 6, 3, 2, 1, groups=3), nn.BatchNorm2d(6, affine=False)), (x,)
    yield _stack(nn.Conv1d(3, 4, 3, padding="same"), nn.BatchNorm1d(4)), (torch.randn(2, 3, 9),)
    yield _stack(nn.Linear(5, 4), nn.BatchNorm1d(4)), (torch.randn(64, 5),)


@fold_batch_norm.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(2, 3, 9, 9)
    yield _stack(nn.Conv2d(3, 64, 9), nn.BatchNorm2d(64)), (x,)
    yield _stack(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).requires_grad_(True), (x,)
    yield _stack(nn.Linear(5, 4), nn.BatchNorm1d(6)), (torch.randn(2, 6, 5),)
