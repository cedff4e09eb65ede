"""A LayerDrop that is off is no branch; one that is on is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.capture.certain import Certain, decided


class LayerDrop(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layerdrop = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        return x


@given(st.sampled_from(["lt", "le", "gt", "ge"]), st.floats(-2, 2))
def test_what_is_decided_is_right_for_the_ends_of_the_interval(name: str, bound: float) -> None:
    answer = decided(name, bound)
    ends = [torch.zeros(()), torch.tensor(1 - 2**-24)]
    found = {bool(getattr(torch, name)(t.double(), bound)) for t in ends}
    if answer is not None:
        assert found == {answer}


def test_a_draw_that_was_written_to_is_not_decided() -> None:
    with Certain():
        draw = torch.rand(8)
        view = draw[:]
        view -= 2.0
        assert bool((draw < 0).all())
        assert not bool((torch.rand(8) < 0).any())


def test_layerdrop_of_nothing_is_captured_and_changed_captures_again() -> None:
    model, x = LayerDrop(0.0), torch.randn(2, 4)
    opt = graphopt.optimize(model, x)
    assert torch.equal(opt(x), model(x))
    assert "rand" not in opt.code
    model.layerdrop = 0.5
    with pytest.raises(graphopt.CaptureError, match="LayerDrop"):
        opt(x)


def test_layerdrop_of_one_drops_every_layer() -> None:
    model, x = LayerDrop(1.0), torch.randn(2, 4)
    assert torch.equal(graphopt.optimize(model, x)(x), x)
