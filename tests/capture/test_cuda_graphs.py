"""torch.cuda.make_graphed_callables around an optimized module: one launch for all of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(p)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def net(p=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64, p) for _ in range(4))).cuda(), torch.randn(8192, 64).cuda()


def step(opt, model, x):
    model.zero_grad()
    y = opt(x)
    y.square().sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "fuse": "always"},
        {"fuse": "always", "memory_budget": 0.8},
    ],
)
def test_a_replayed_step_has_the_numbers_of_the_module(options):
    model, x = net()
    opt = graphopt.optimize(model, x, **options)
    torch.cuda.make_graphed_callables(opt, (x.clone(),))
    expected = graphopt.optimize(model, x, **options)
    for _ in range(2):
        assert all(map(torch.equal, step(opt, model, x), step(expected, model, x)))
        with torch.no_grad():  # weights are read anew, low-precision copies made anew
            for p in model.parameters():
                p.mul_(1.5)
        x = x.flip(0)


def test_each_replay_draws_a_mask_of_its_own():
    model, x = net(0.5)
    opt = graphopt.optimize(model, x, fuse="always")
    torch.cuda.make_graphed_callables(opt, (x.clone(),))
    first, second = step(opt, model, x), step(opt, model, x)
    assert not torch.equal(first[0], second[0])
