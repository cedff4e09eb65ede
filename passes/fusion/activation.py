"""The activation after a linear layer, in one pass; the bias's gradient comes with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from graphopt.graph import ops
from graphopt.graph.pattern import either
from graphopt.passes.base import surely
from graphopt.passes.canonical.activation import widened
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


def activation(x: Any) -> Any:
    """Pattern of any activation that the kernels know."""
    return either(
        aten.relu.default(x),
        aten.gelu.default(x, approximate="none"),
        aten.gelu.default(x, approximate="tanh"),
        aten.silu.default(x),
        aten.tanh.default(x),
        aten.sigmoid.default(x),
    )


_NAMES: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
}


def activation_name(node: fx.Node) -> str | None:
    """The kernels' name of an activation node, None for another op."""
    if node.target is aten.gelu.default:
        return "gelu_tanh" if ops.argument(node, "approximate") == "tanh" else "gelu"
    return _NAMES.get(node.target)


def bias_of_row(bias: torch.Tensor | None, out: torch.Tensor) -> str | None:
    """Why a bias is not one value for each position of the last dim, or None; "" without one."""
    if bias is None:
        return ""
    if bias.dim() != 1 or not surely(bias.shape[0] == out.shape[-1]):
        return f"the bias has shape {list(bias.shape)}, the last dim has {out.shape[-1]}"
    if bias.dtype != out.dtype:
        return f"the bias is {bias.dtype}, the result {out.dtype}"
    return None


@rule("fusion")
def bias_act(x, w, b):
    """activation(linear(x, w, b)): one pass each way, which also sums the bias's gradient."""
    return activation(widened(aten.linear.default(x, w, b)))


@bias_act.also
def _bias_act_addmm(b, x, w, shape):
    return activation(widened(aten.view.default(aten.addmm.default(b, x, w), shape)))


@bias_act.also
def _bias_act_addmm_flat(b, x, w):
    return activation(widened(aten.addmm.default(b, x, w)))


@bias_act.check
def _(m: Match) -> str | None:
    if not m.body.grad:
        return "without a gradient the linear layer's own epilogue adds the bias for free"
    biased = next(n for n in m.nodes if n.target in (aten.linear.default, aten.addmm.default))
    return bias_of_row(m.tensor("b"), biased.meta["val"])


@bias_act.replace
def _(m: Match) -> fx.Node:
    h = product_of_held_bias(m)
    out = None if m.val.dtype == h.meta["val"].dtype else m.val.dtype
    name = activation_name(m.root)
    return m.call(graphopt.bias_act.default, h, m.b, name, bias_added=True, out_dtype=out)


def product_of_held_bias(m: Match) -> fx.Node:
    """Emit the matched linear or addmm again with its bias detached, in the shape that it is read.

    The product adds the bias before it rounds, as in eager: added to a product that was rounded to
    low precision, a bias that cancels it leaves the rounding error. The gradient comes from the
    kernel that reads the result.
    """
    bias = m.call(aten.detach.default, m.b)
    if any(n.target is aten.linear.default for n in m.nodes):
        return m.call(aten.linear.default, m.x, m.w, bias)
    product = m.call(aten.addmm.default, bias, m.x, m.w)
    return m.call(aten.view.default, product, m.shape) if "shape" in m.captures else product


@bias_act.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 5, 8)
    for act in (nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid()):
        yield nn.Sequential(nn.Linear(8, 6), act), (x,)

    def conv1d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.addmm(b, x.view(-1, 8), w).view(3, 5, 6), approximate="tanh")

    low = (torch.randn(4, 8), torch.randn(6, 8), torch.randn(6))

    def widened_first(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b).float())

    yield widened_first, tuple(t.bfloat16() for t in low)
    yield conv1d, (x, torch.randn(8, 6).requires_grad_(), torch.randn(6).requires_grad_())


@bias_act.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 5, 8)
    linear = nn.Linear(8, 6)

    def also_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.linear(x, linear.weight.detach(), linear.bias.detach())
        return F.relu(h), h

    yield also_returned, (x,)
    yield nn.Sequential(nn.Linear(8, 6, bias=False), nn.ReLU()), (x,)
