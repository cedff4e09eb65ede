"""Train a small model, eager and optimized from the same weights, and compare the losses.

python examples/01_train.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import graphopt


class Block(nn.Module):
    """A residual block: norm, widen, activation, narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, width]."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
    """Loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both and print their losses side by side."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Block(64) for _ in range(4))).to(device)
    x, y = torch.randn(2, 32, 64, device=device)

    opt = graphopt.optimize(copy.deepcopy(model), x)
    print(graphopt.explain(model, x))
    print("\nstep    eager  graphopt")
    for step, pair in enumerate(zip(train(model, x, y, 10), train(opt, x, y, 10), strict=True)):
        print(f"{step:4d} {pair[0]:8.5f}  {pair[1]:8.5f}")


if __name__ == "__main__":
    main()
