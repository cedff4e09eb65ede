"""The casts of a block's weights become one op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes.weights import block_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Model(nn.Module):
    """Two blocks and a head that is a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def targets(opt: nn.Module) -> list[str]:
    return [str(n.target) for n in opt.graph.nodes]


def test_one_cast_a_block_and_the_same_step() -> None:
    model = Model()
    opt = graphopt.optimize(model, X, precision="bf16")
    assert targets(opt).count("graphopt.cast_weights.default") == 3
    assert "cast_weights([self.layers[0].a.bias, self.layers[0].a.weight" in opt.code
    assert graphopt.verify(opt, X).passed


def test_a_step_is_eagers_to_the_bit() -> None:
    model = Model()
    opt = graphopt.optimize(model, X, rules="default,-bias_act", precision="bf16")
    steps = []
    for each in (model, opt):
        with torch.autocast("cpu", torch.bfloat16, enabled=each is model):
            y = each(X)
        steps.append([y, *torch.autograd.grad(y.float().square().sum(), model.parameters())])
    assert all(map(torch.equal, *steps))


def test_weights_of_a_step_are_fresh() -> None:
    model = Model()
    opt = graphopt.optimize(model, X, precision="bf16")
    before = opt(X)
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(2)
    assert not torch.equal(opt(X), before)


def test_a_tied_weight_is_cast_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    opt = graphopt.optimize(Tied(), X, precision="bf16")
    opt(X).float().sum().backward()
    assert graphopt.verify(opt, X).passed


def test_other_casts_are_left() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(8, 8))
            self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x @ self.table) + self.conv(x.view(1, 2, 4, 4)).sum()
            return y, self.linear.weight.to(torch.bfloat16)

    opt = graphopt.optimize(Other(), X, precision="bf16")
    merged = [n for n in opt.graph.nodes if "cast_weights" in str(n.target)]
    paths = {str(s.target) for n in merged for s in n.all_input_nodes}
    assert not paths & {"table", "conv.weight", "linear.weight"}


def test_switched_off_with_fusion() -> None:
    opt = graphopt.optimize(Model(), X, precision="bf16", fuse=False)
    assert not any("cast_weights" in t for t in targets(opt))


def test_the_plan_counts_them() -> None:
    plan = graphopt.optimize(Model(), X, precision="bf16").precision_plan
    assert sum(c.weight for c in plan.casts) == 9


@pytest.mark.parametrize(
    ("path", "block"),
    [("h.11.attn.weight", "h.11"), ("norm.weight", "norm"), ("weight", ""), ("0.weight", "0")],
)
def test_blocks(path: str, block: str) -> None:
    assert block_of(path) == block


def test_copies_lie_as_the_weights_do() -> None:
    """Those of a recurrent layer on a GPU are parts of one buffer, in cuDNN's own order."""
    block = Block()
    flat = torch.cat([p.detach().flatten() for p in reversed(list(block.parameters()))])
    end = flat.numel()
    for p in block.parameters():
        p.data = flat[end - p.numel() : end].view(p.shape)
        end -= p.numel()
    opt = graphopt.optimize(nn.Sequential(block), X, precision="bf16")
    cast = torch.ops.graphopt.cast_weights.default
    (merged,) = (n for n in opt.body.graph.nodes if n.target is cast)
    assert [n.target for n in merged.args[0]] == [
        "0.b.bias",
        "0.b.weight",
        "0.a.bias",
        "0.a.weight",
    ]
    torch.testing.assert_close(opt(X), block(X), atol=1e-2, rtol=1e-2, check_dtype=False)
