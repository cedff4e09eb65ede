"""Under autocast a step takes no more memory than eager and the low copies of the weights."""

from __future__ import annotations

import pytest
import torch
from contract import optimized
from peaks import peak_of
from zoo import ZOO

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "convnext"])
def test_peak_under_autocast(name: str) -> None:
    entry = ZOO[name]
    model, batch = entry.make(training=True), entry.batch(0)
    with torch.autocast("cpu", BF16):
        opt = optimized(model, batch)
    eager, ours = (peak_of(call, model, batch, BF16) for call in (model, opt))
    assert ours <= eager + 2 * sum(p.numel() for p in model.parameters())


def test_the_peak_is_counted() -> None:
    model = torch.nn.Linear(8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        return model(torch.cat([x, x]).exp()).sum()

    batch = {"x": torch.ones(4, 8)}
    exp, result, there = 8 * 8 * 4, 8 * 8 * 4, (8 * 8 + 8 + 4 * 8) * 4
    assert peak_of(call, model, batch, None) >= exp + result + there
