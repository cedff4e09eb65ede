"""A property test of one's own block: whatever comes in, the optimized block does the same.

pytest -p graphopt.testing.plugin examples/03_property_test.py
python examples/03_property_test.py     does the same
"""

import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.testing import inputs_like, upstream_gradients

WIDTH = 16


class Block(nn.Module):
    """A gated MLP behind an RMSNorm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, WIDTH] -> the same shape."""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def make_block() -> Block:
    """The block with its weights; a failure's script calls this, too."""
    torch.manual_seed(0)
    return Block()


warnings.simplefilter("ignore", graphopt.GraphoptWarning)  # no GPU, no matter
model = make_block()
opt = graphopt.optimize(model)
example = torch.randn(3, 5, WIDTH)


# Batch and length vary together in all tensors; values tie, vanish, spread over six decades; the
# memory is transposed, expanded, strided; the gradient that comes back is zero, one-hot, anything.
@settings(max_examples=20, deadline=None)
@given(inputs_like(example, sizes={3: (1, 6), 5: (1, 9)}), st.data())
def test_block(graphopt_equivalent, drawn, data):
    (x,), kwargs = drawn
    upstream = data.draw(upstream_gradients(x))
    graphopt_equivalent(model, opt, (x,), kwargs, upstream=upstream, factory=make_block)


def test_eval(graphopt_equivalent):
    with torch.no_grad():
        graphopt_equivalent(model.eval(), opt, example)
    model.train()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "graphopt.testing.plugin"]))
