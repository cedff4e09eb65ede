"""`precision_check` names the op that low precision hurts, and pins it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Loud(nn.Module):
    """A layer whose values overflow float16, and shrink again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quiet, self.loud = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loud(self.quiet(x) * 1e4) / 1e5


class Faint(nn.Module):
    """Values below float16's smallest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x.t() * 1e-9)


def test_overflow_is_counted_where_it_begins_and_pinned() -> None:
    model = Loud()
    with torch.no_grad():
        model.loud.weight.mul_(1e2)
    found = graphopt.precision_check(model, X, precision="fp16", pin=1.0)
    assert found.overrides == {"loud::aten.linear": "fp32"}
    assert found.before is not None
    assert found.before > found.outputs
    assert [n.op for n in found.nodes if n.overflow] == []
    opt = graphopt.optimize(model, X, precision="fp16", precision_overrides=found.overrides)
    assert torch.isfinite(opt(X)).all()
    assert not torch.isfinite(graphopt.optimize(model, X, precision="fp16")(X)).all()


def test_underflow_is_counted() -> None:
    found = graphopt.precision_check(Faint(), X, precision="fp16")
    assert found.nodes[0].op == "aten.mm"
    assert found.nodes[0].underflow == 16
    assert 0 < found.nodes[0].smallest < 1e-7


def test_an_error_that_was_handed_on_is_not_an_ops_own() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x.t()) - torch.mm(x, x.t()).float().detach()

    found = {n.op: n for n in graphopt.precision_check(Chain(), X).nodes}
    assert found["aten.mm"].error == pytest.approx(found["aten.mm"].own)
    assert found["aten.mm"].own > 1e-4


def test_bf16_errors_are_those_of_its_rounding() -> None:
    found = graphopt.precision_check(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), X)
    assert [n.dtype for n in found.nodes] == ["bfloat16"] * 2
    assert all(1e-4 < n.own < 1e-2 and n.overflow == n.underflow == 0 for n in found.nodes)
    assert found.nodes[0].site.module in ("0", "1")
    assert found.to_dict()["nodes"][0]["pattern"] in ("0::aten.linear", "1::aten.tanh")


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    graphopt.precision_check(model, X)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": None},
        {"pin": -1},
        {"pin": "worst"},
        {"pin": float("nan")},
        {"pin": -float("inf")},
        {"pin": True},
    ],
)
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(graphopt.OptionError):
        graphopt.precision_check(nn.Linear(8, 8), X, **options)
