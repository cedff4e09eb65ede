"""The user's own `torch.utils.checkpoint`: captured as regions, and recomputed as in eager."""

from __future__ import annotations

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from remat_models import GPT, ConvNet, llama, same, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import graphopt
from graphopt.errors import CaptureError
from graphopt.graph.edit import REGION
from graphopt.passes.remat import region_values, saved_bytes
from graphopt.remat import is_marker


class Checkpointed(GPT):
    """Each block is a region."""

    reentrant = False
    on = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return self.head(self.ln(x))


def made(reentrant: bool = False, **settings) -> Checkpointed:
    torch.manual_seed(0)
    model = Checkpointed(layers=2, **settings)
    model.reentrant = reentrant
    return model


def gradients(model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    y = model(*args)
    y = y if isinstance(y, torch.Tensor) else y[0]
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), list(model.parameters()))]


@pytest.mark.parametrize(("reentrant", "precision"), [(False, None), (True, None), (False, "bf16")])
def test_the_gradients_are_those_without(reentrant, precision) -> None:
    model, ids = made(reentrant), tokens()
    opt = graphopt.optimize(model, ids, precision=precision)
    assert any(map(is_marker, opt.graph.nodes))
    assert [r.rule for r in opt.rewrites][-1] == "rematerialize"
    found = gradients(opt, ids)
    model.on = False
    plain = graphopt.optimize(model, ids, precision=precision)
    assert not any(map(is_marker, plain.graph.nodes))
    # other chains fuse, so bf16 rounds elsewhere
    near = {} if precision is None else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(found, gradients(plain, ids), **near)


def test_they_are_proved() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2))

        def forward(self, x):
            for part in (self.one, self.two):
                x = checkpoint(part, x, use_reentrant=False)
            return x

    x = torch.linspace(-1, 1, 24).view(4, 6)
    opt = graphopt.optimize(Net(), x)
    assert "rematerialize" in [r.rule for r in opt.rewrites]
    assert graphopt.verify(opt, x).passed


def test_without_dropout_they_are_eagers() -> None:
    model, ids = made(p=0.0), tokens()
    opt = graphopt.optimize(copy.deepcopy(model), ids)
    torch.testing.assert_close(gradients(opt, ids), gradients(model, ids))


def test_only_what_enters_a_region_is_saved() -> None:
    ids = tokens()
    opt = graphopt.optimize(made(), ids)
    chosen = region_values(opt.body)
    kept = {n: size for n, size in saved_bytes(opt.body).items() if n not in chosen}
    residual = 2 * 8 * 16 * 4
    # the input of each block, what the last one gives, its norm, and the seed
    assert sorted(kept.values()) == [8] + 4 * [residual]


def test_a_rule_does_not_fuse_across_a_border() -> None:
    opt = graphopt.optimize(made(), tokens())
    regions = {
        n.meta[REGION]
        for n in opt.graph.nodes
        if n.target is torch.ops.graphopt.add_layer_norm.default
    }
    assert regions == {1, 2}  # one inside each block, none between two
    assert any("different regions (checkpoint)" in str(r) for r in opt.refusals)


def test_the_switch_is_seen() -> None:
    model, ids = made(), tokens()
    opt = graphopt.optimize(model, ids)
    model.on = False
    opt(ids)
    assert not any(map(is_marker, opt.graph.nodes))
    model.on = True
    opt(ids)
    assert any(map(is_marker, opt.graph.nodes))


def test_dropout_in_a_region_repeats_its_mask() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: F.dropout(x.exp(), 0.5).square(), x, use_reentrant=False)

    opt = graphopt.optimize(Masked())
    x = torch.zeros(1000, requires_grad=True)
    y = opt(x)
    torch.rand(7)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y)  # of exp(x)**2 * mask
    assert 0.4 < (y == 0).float().mean() < 0.6


def test_batch_norm_in_a_region_counts_once() -> None:
    class Net(ConvNet):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    opt = graphopt.optimize(copy.deepcopy(model), x)
    plain = copy.deepcopy(model)
    ConvNet.forward(plain, x).sum().backward()
    opt(x).sum().backward()
    torch.testing.assert_close(list(opt.buffers()), list(plain.buffers()))
    assert opt.bn1.num_batches_tracked == 1
    for ours, theirs in zip(opt.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_nested_regions_are_one() -> None:
    class Nested(nn.Module):
        def forward(self, x):
            def inner(x):
                return checkpoint(torch.sin, x.exp(), use_reentrant=False).cos()

            return checkpoint(inner, x, use_reentrant=False) * x

    x = torch.linspace(-1, 1, 8).requires_grad_()
    opt = graphopt.optimize(Nested(), x)
    assert {n.meta.get(REGION) for n in opt.graph.nodes} == {None, 1}
    found, expected = (torch.autograd.grad(m(x).sum(), x) for m in (opt, Nested()))
    assert same(found, expected)


def test_checkpoint_sequential() -> None:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return checkpoint_sequential(self.layers, 3, x, use_reentrant=False)

    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    opt = graphopt.optimize(Stack(), x)
    assert {n.meta.get(REGION) for n in opt.graph.nodes} == {None, 1, 2}
    assert same(gradients(opt, x), gradients(opt.source, x))


def test_a_value_that_two_regions_share_is_kept() -> None:
    class Shared(nn.Module):
        def forward(self, x):
            def body(y, k):
                return torch.sin(y) * torch.exp(x) * k  # exp(x) is one value after cleaning

            return sum(checkpoint(body, x * k, k, use_reentrant=False) for k in (2.0, 3.0))

    x = torch.linspace(-1, 1, 8).requires_grad_()
    opt = graphopt.optimize(Shared(), x)
    exp = [n for n in opt.graph.nodes if n.target is torch.ops.aten.exp.default]
    assert len(exp) == 1
    assert REGION not in exp[0].meta
    found, expected = (torch.autograd.grad(m(x).sum(), x) for m in (opt, Shared()))
    torch.testing.assert_close(found, expected)


def test_evaluation_has_no_markers() -> None:
    model, ids = made(), tokens()
    opt = graphopt.optimize(model)
    with torch.no_grad():
        opt(ids)
    assert not any(map(is_marker, opt.graph.nodes))


def test_a_budget_of_ones_own_replaces_the_regions() -> None:
    opt = graphopt.optimize(made(), tokens(), segments=1)
    assert not any(map(is_marker, opt.graph.nodes))


def test_hugging_faces_switch() -> None:
    torch.manual_seed(0)
    model, ids = llama(), tokens()
    plain = graphopt.optimize(copy.deepcopy(model), ids)
    model.train()
    model.gradient_checkpointing_enable()
    opt = graphopt.optimize(model, ids)
    assert len([n for n in opt.graph.nodes if is_marker(n)]) > 10
    torch.testing.assert_close(gradients(opt, ids), gradients(plain, ids))


def test_a_selective_policy_is_refused() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as policy

    context = functools.partial(policy, [torch.ops.aten.mm.default])

    class Selective(nn.Module):
        def forward(self, x):
            return checkpoint(torch.sin, x, use_reentrant=False, context_fn=context)

    with pytest.raises(CaptureError, match="context_fn") as caught:
        graphopt.optimize(Selective(), torch.ones(2, requires_grad=True))
    assert "test_remat_checkpoint.py" in caught.value.at


def test_markers_keep_to_their_regions() -> None:
    opt = graphopt.optimize(made(), tokens())
    for marker in filter(is_marker, opt.graph.nodes):
        source = marker.args[0]
        part = source.args[0] if source.target is operator.getitem else source
        assert part.meta[REGION] in (1, 2)
