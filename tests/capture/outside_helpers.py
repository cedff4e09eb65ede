"""Variables outside of test models, and a model made of a forward."""

from __future__ import annotations

import types

import torch
from torch import nn

SCALE = 2.0
COUNT = 0
TABLE = {"gain": 2.0}
CACHE: dict[int, torch.Tensor] = {}
SPACE = types.SimpleNamespace(gain=2.0)


class Config:
    """An object with a number, read in a method."""

    def __init__(self) -> None:
        self.gain = 2.0

    def value(self) -> float:
        return self.gain


CONFIG = Config()


class Static:
    """A number of a class, read in a static method."""

    gain = 2.0

    @staticmethod
    def apply(x: torch.Tensor) -> torch.Tensor:
        return x * Static.gain


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def counted(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def cached(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] not in CACHE:
        CACHE[x.shape[0]] = torch.arange(3.0)
    return x + CACHE[x.shape[0]]


X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])


def of(forward, **attributes):
    model = type("Of", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Schedule:
    def __init__(self):
        self.step = 0

    def value(self):
        self.step += 1
        return 1.0 / self.step
