"""Modules that are called in unusual ways: graph modules, compiled parts, a forward in itself."""

import pytest
import torch
from torch import nn

import graphopt

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())


def compiled_inside():
    model = nn.Sequential(block(), nn.ReLU())
    model[0].compile(backend="eager")
    return model


class CallsItself(nn.Linear):
    def forward(self, x, depth=2):
        if depth == 0:
            return super().forward(x)
        return self(x, depth=depth - 1) + self.forward(x.flip(0), depth - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.fx.symbolic_trace(block()),
        lambda: torch.export.export(block(), (X,)).module(),
        compiled_inside,
        lambda: CallsItself(8, 8),
    ],
    ids=["symbolic_trace", "exported", "compiled inside", "calls itself"],
)
def test_it_computes_what_the_model_computes(make):
    model = make()
    opt = graphopt.optimize(model)
    expected, found = model(X), opt(X)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.sum(), model.parameters()) for y in (expected, found)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_graph_module_is_fused_like_the_module_it_was_traced_from():
    graphs = [block(), torch.fx.symbolic_trace(block())]
    rules = [[r.rule for r in graphopt.optimize(g, X).rewrites] for g in graphs]
    assert rules[0] == rules[1] != []
