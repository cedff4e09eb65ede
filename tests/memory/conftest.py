"""The helpers of this folder import each other by name; fixtures that two files share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from graphopt.kernels import activation, glu

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def written(monkeypatch) -> list[torch.Size]:
    """The shapes of the gradients that were written into memory that was there.

    Not the gradients themselves: kept alive they would raise the peaks that tests measure.
    """
    found: list[torch.Size] = []
    invoke = glu.invoke

    def seen(overload, *args, **kwargs):
        if overload is glu._BACKWARD_OUT:
            found.append(args[4].shape)
        if overload is activation._BIAS_ACT_OVER:
            found.append(args[1].shape)
        return invoke(overload, *args, **kwargs)

    for family in (glu, activation):
        monkeypatch.setattr(family, "invoke", seen)
    return found
