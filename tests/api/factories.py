"""Targets for the command line's tests: small models with their inputs."""

import torch
from torch import nn

from graphopt.graph.record import site_of
from graphopt.passes import rule

aten = torch.ops.aten


def chain():
    """LayerNorm, dropout, ReLU, and a tensor for them."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU()), torch.ones(4, 8)


def keyword():
    return nn.Linear(8, 8), {"input": torch.ones(2, 8)}


def positional():
    return nn.Linear(8, 8), (torch.ones(2, 8),)


def wrong_inputs():
    return nn.Linear(8, 8), [torch.ones(2, 8)]


def not_a_pair():
    return nn.Linear(8, 8)


class Branch(nn.Module):
    """Branches on a tensor's value, which no single graph can hold."""

    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


def branch():
    return Branch(), torch.ones(3)


def raises():
    raise FileNotFoundError("no weights here")


class Layer(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Twelve(nn.Module):
    """Twelve of them."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def twelve():
    torch.manual_seed(0)
    model = Twelve()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model, torch.randn(4, 8, 16)


@rule("fusion", register=False)
def planted_norm(x, shape, weight, bias, eps, _cudnn):
    """LayerNorm, with a wrong eps in one layer of twelve."""
    return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)


@planted_norm.replace
def _(m):
    eps = m.eps * 50 if site_of(m.root).module == "layers.7.norm" else m.eps
    return m.call(torch.ops.graphopt.layer_norm.default, m.x, m.weight, m.bias, eps)


def no_fused_norm(module):
    """A predicate that dislikes one rule."""
    module(torch.ones(4, 8))
    return all(record.rule != "layer_norm" for record in module.rewrites)


@rule("fusion", register=False)
def wrong_norm(x, shape, weight, bias, eps, _cudnn):
    """LayerNorm, 1% too large."""
    return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)


@wrong_norm.replace
def _(m):
    norm = m.call(torch.ops.graphopt.layer_norm.default, m.x, m.weight, m.bias, m.eps)
    return m.call(aten.mul.Tensor, norm, 1.01)


def says_nothing(module):
    module(torch.ones(4, 8))


def breaks(module):
    raise ZeroDivisionError


def exits():
    raise SystemExit(3)


def interrupted():
    raise KeyboardInterrupt
