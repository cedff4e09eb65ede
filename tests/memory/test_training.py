"""Fifty steps with and without a budget: the same weights and buffers, to the last bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt

STEPS = 50


class Normed(nn.Module):
    """Convolutions with batch norm: running statistics are written once a step."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def batch():
        return torch.randn(8, 3, 12, 12)


class Dropped(nn.Module):
    """Dropout in every block: a recompute must drop what forward dropped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2, self.training)
        return x

    @staticmethod
    def batch():
        return torch.randn(64, 16)


class Counting(nn.Module):
    """A running mean and a step count in buffers, read by the same forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.count += 1
        return x - self.mean

    batch = staticmethod(Dropped.batch)


class Noisy(nn.Module):
    """Noise from torch's own generator between the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x + 0.1 * torch.randn_like(x)))
        return x

    batch = staticmethod(Dropped.batch)


def budgeted(model, x):
    """The model optimized within four fifths of its plain peak."""
    return graphopt.optimize(model, x, memory_budget=0.8)


def train(module):
    """Fifty steps of SGD with momentum; the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        loss = module(module.batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")
@pytest.mark.parametrize("kind", [Normed, Dropped, Counting, Noisy])
def test_training_is_the_same_to_the_last_bit(kind):
    torch.manual_seed(0)
    plain = kind().train()
    twin = copy.deepcopy(plain)
    tight = budgeted(twin, kind.batch())
    assert tight.memory_plan.recompute
    losses = train(graphopt.optimize(plain, kind.batch()))
    assert train(tight) == losses
    assert losses[-1] != losses[0]
    state, twins = plain.state_dict(), twin.state_dict()
    assert [k for k in state if not torch.equal(state[k], twins[k])] == []


def test_a_buffer_is_written_once_a_step():
    model = Counting()
    train(budgeted(model, Counting.batch()))
    assert model.count == STEPS
