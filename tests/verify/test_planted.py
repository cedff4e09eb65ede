"""A wrong rule, planted among the real ones, is named with its place, whatever it gets wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import Match, Rule, rule

aten = torch.ops.aten


class Block(nn.Module):
    """Norm, MLP and residual with dropout, twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + self.drop(down(nn.functional.gelu(up(norm(x)))))
        return x


def planted(replace: Callable[[Match], Any]) -> Rule:
    """A rule on every LayerNorm with a replacement of the test's own."""

    @rule("fusion", register=False)
    def planted_norm(x, shape, weight, bias, eps, _cudnn):  # type: ignore[no-untyped-def]
        """A LayerNorm, done wrong."""
        return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)

    planted_norm.replace(replace)
    return planted_norm


def optimized(model: nn.Module, x: torch.Tensor, wrong: Rule) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphopt.GraphoptWarning)
        return graphopt.optimize(model, x, rules=["default,-layer_norm,-add_layer_norm", wrong])


def norm(m: Match, **changed: Any) -> Any:
    """The right replacement, unless something is changed."""
    given = {"x": m.x, "weight": m.weight, "bias": m.bias, "eps": m.eps, **changed}
    return m.call(torch.ops.graphopt.layer_norm.default, *given.values())


FAULTS: dict[str, Callable[[Match], Any]] = {
    "eps": lambda m: norm(m, eps=m.eps * 10),
    "no_bias": lambda m: norm(m, bias=None),
    "scale": lambda m: m.call(aten.mul.Tensor, norm(m), 1 + 1e-6),
    "no_gradient": lambda m: norm(m, x=m.call(aten.detach.default, m.x)),
    "no_weight_gradient": lambda m: norm(m, weight=m.call(aten.detach.default, m.weight)),
    "half": lambda m: m.call(
        aten.to.dtype, norm(m, x=m.call(aten.to.dtype, m.x, torch.float16), weight=None, bias=None),
        torch.float32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named(fault: str) -> None:
    x = torch.randn(4, 8, 32)
    opt = optimized(Block().train(), x, planted(FAULTS[fault]))
    result = graphopt.verify(opt, x)
    assert {c.rule for c in result.wrong if c.kind == "local"} == {"planted_norm"}, repr(result)
    with pytest.raises(graphopt.VerifyError, match=r"planted_norm at norms\.0") as caught:
        result.check()
    assert "test_planted.py" in str(caught.value)  # not the line in torch's LayerNorm


def test_a_right_rule_of_ones_own_passes() -> None:
    x = torch.randn(4, 8, 32)
    opt = optimized(Block().train(), x, planted(norm))
    assert sum(r.rule == "planted_norm" for r in opt.rewrites) == 2
    graphopt.verify(opt, x).check()


def test_rounding_where_the_formula_is_right_is_named_too() -> None:
    def rounded(m: Match) -> Any:
        low = m.call(aten.to.dtype, m.x, torch.bfloat16)
        return norm(m, x=m.call(aten.to.dtype, low, torch.float32))

    x = torch.randn(4, 8, 32)
    result = graphopt.verify(optimized(Block().train(), x, planted(rounded)), x)
    first = result.wrong[0]
    assert first.rule == "planted_norm"
    assert first.agreement is not None
    assert first.agreement < 1e-12  # right in float64, too coarse in float32
    assert "times eager's" in first.reason
