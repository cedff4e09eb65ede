"""Targets for the command line's tests: small models with their inputs."""

import torch
from torch import nn


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
