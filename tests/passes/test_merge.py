"""Linears that read one input become one product: where, where not, and what it leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


class Mlp(nn.Module):
    """A gated unit; what a test changes in it is done by `change`."""

    def __init__(self, bias: bool = False, gate_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(16, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, 16, bias=bias)
        self.gate_first = gate_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_first:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        up = self.up(x)
        return self.down(up * F.silu(self.gate(x)))


class Attention(nn.Module):
    """Grouped queries, rope, causal attention; without rope a plain one."""

    def __init__(self, kv: int = 1, bias: bool = False, rope: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(16, 16, bias=bias)
        self.k, self.v = (nn.Linear(16, 4 * kv, bias=bias) for _ in range(2))
        self.o = nn.Linear(16, 16, bias=bias)
        angle = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
        self.register_buffer("angle", torch.cat((angle, angle), -1))
        self.rope = rope

    def turned(self, t: torch.Tensor) -> torch.Tensor:
        if not self.rope:
            return t
        half = torch.cat((-t[..., 2:], t[..., :2]), -1)
        return (t * self.angle.cos() + half * self.angle.sin()).to(t.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


def targets(opt: nn.Module) -> list[str]:
    return [str(n.target) for n in opt.graph.nodes]


def refusals(opt: nn.Module) -> list[str]:
    return [r.reason for r in opt.refusals if r.rule == "merge_linear"]


def linears(opt: nn.Module) -> int:
    names = ("aten.linear.default", "graphopt.linear_rope.default")
    return sum(t in names for t in targets(opt))


def optimized(model: nn.Module, x: Any = X, **options: Any) -> Any:
    return graphopt.optimize(model, x, precision="bf16", **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "gate and up": (Mlp, 2, "graphopt.glu_packed.default"),
    "with biases": (lambda: Mlp(bias=True), 2, "graphopt.glu_packed.default"),
    "up first": (lambda: Mlp(gate_first=False), 2, "graphopt.glu_packed.default"),
    "one head of k and v": (Attention, 2, "graphopt.linear_rope.default"),
    "as many heads": (lambda: Attention(kv=4, bias=True), 2, "graphopt.linear_rope.default"),
    "no rope": (lambda: Attention(kv=4, rope=False), 2, "aten.split_with_sizes.default"),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], int, str]:
    return MODELS[request.param]


def test_one_product_and_the_whole_step_is_proved(case: Any) -> None:
    make, count, op = case
    opt = optimized(make())
    assert linears(opt) == count
    assert op in targets(opt)
    assert "merge_linear" in [r.rule for r in opt.rewrites]
    found = graphopt.verify(opt, X)
    assert found.passed, found


def test_gradients_are_each_parameters_own(case: Any) -> None:
    """Contiguous, of the parameter's shape, adding up over two calls as eager's do."""
    model = case[0]()
    opt = optimized(model)
    for scale in (1.0, 0.5):
        opt(scale * X).float().square().sum().backward()
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    for scale in (1.0, 0.5):
        exact(scale * X.double()).square().sum().backward()
    for (name, p), e in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.is_contiguous(), name
        assert p.grad.dtype == torch.float32
        scale = 0.03 * e.grad.abs().max() + 1e-3
        assert (p.grad - e.grad).abs().max() <= scale, name


def test_gradients_do_not_share_elements() -> None:
    model = Mlp()
    optimized(model)(X).float().sum().backward()
    kept = model.up.weight.grad.clone()
    model.gate.weight.grad.zero_()
    assert torch.equal(model.up.weight.grad, kept)


def test_backward_twice_over_one_graph(case: Any) -> None:
    model = case[0]()
    loss = optimized(model)(X).float().square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_an_input_gets_its_gradient(case: Any) -> None:
    model = case[0]()
    x, wide = X.clone().requires_grad_(), X.double().requires_grad_()
    optimized(model, x)(x).float().square().sum().backward()
    copy.deepcopy(model).double()(wide).square().sum().backward()
    assert (x.grad - wide.grad).norm() < 0.02 * wide.grad.norm()


def test_without_gradients(case: Any) -> None:
    model = case[0]().eval()
    opt = optimized(model)
    with torch.no_grad():
        assert (opt(X).float() - model(X)).norm() < 0.02 * model(X).norm()


def test_sizes_that_change() -> None:
    opt = optimized(Mlp(), dynamic=True)
    assert linears(opt) == 2
    for rows in (1, 3):
        wanted = opt.source(X[:1, :rows])
        assert (opt(X[:1, :rows]).float() - wanted).norm() < 0.02 * wanted.norm()


def test_parameters_and_state_dict_are_untouched() -> None:
    model = Attention()
    names = [n for n, _ in model.named_parameters()]
    before = {k: (v.data_ptr(), v.stride()) for k, v in model.state_dict().items()}
    opt = optimized(model)
    opt(X).float().sum().backward()
    assert [n for n, _ in model.named_parameters()] == names
    assert {k: (v.data_ptr(), v.stride()) for k, v in model.state_dict().items()} == before


def test_it_can_be_left_out() -> None:
    opt = optimized(Mlp(), rules="default,-merge_linear")
    assert linears(opt) == 3
    assert "graphopt.glu.default" in targets(opt)
    assert linears(optimized(Mlp(), rules="glu,merge_linear")) == 2
    assert linears(optimized(Mlp(), rules="glu")) == 3
    assert linears(optimized(Mlp(), fuse=False)) == 3
    with pytest.raises(graphopt.OptionError, match="merge_linear"):
        optimized(Mlp(), rules="default,-merge_linaer")


def test_rewrites_stop_where_they_are_told() -> None:
    rules = [r.rule for r in optimized(Mlp()).rewrites]
    at = rules.index("merge_linear")
    for limit in (at, at + 1):
        found = [r.rule for r in optimized(Mlp(), max_rewrites=limit).rewrites]
        assert found.count("merge_linear") == limit - at


# What is not merged -------------------------------------------------------------------------------


def hooked(m: Mlp) -> None:
    m.up.weight.register_hook(lambda g: g)


class Shared(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x * 2, self.up.weight), self.down.weight)


def parametrized(m: Mlp) -> None:
    nn.utils.parametrizations.weight_norm(m.up)


def frozen(m: Mlp) -> None:
    m.gate.requires_grad_(False)


def low(m: Mlp) -> None:
    m.up.weight = nn.Parameter(m.up.weight.detach().bfloat16())


def laid_out(m: Mlp) -> None:
    m.up.weight = nn.Parameter(m.up.weight.detach().t().contiguous().t())


def biased(m: Mlp) -> None:
    m.up.bias = nn.Parameter(torch.ones(24))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "has a hook"),
        (parametrized, "computed at every call"),
        (frozen, "what is frozen"),
        (low, "not cast"),
        (laid_out, "not contiguous"),
        (biased, "having a bias"),
    ],
)
def test_weights_that_are_not_merged(change: Callable[[Mlp], None], reason: str) -> None:
    model = Mlp()
    change(model)
    opt = optimized(model)
    assert "graphopt.glu_packed.default" not in targets(opt)
    assert any(reason in r for r in refusals(opt)), refusals(opt)
    opt(X).float().sum().backward()
    assert model.down.weight.grad is not None


def test_a_weight_that_is_used_twice_is_not_merged() -> None:
    opt = optimized(Shared())
    assert "graphopt.glu_packed.default" not in targets(opt)
    assert any("tied or shared" in r for r in refusals(opt))


def test_float32_is_left() -> None:
    opt = graphopt.optimize(Mlp(), X)
    assert linears(opt) == 3
    assert refusals(opt) == [
        "its weight is not cast to low precision: stacking it would cost a copy at every call"
    ]


class Pair(nn.Module):
    """Two linears and what is done with their results."""

    def __init__(self, use: Callable[..., Any], other_input: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.use, self.other_input = use, other_input

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.a(x), self.b(x * 2 if self.other_input else x))


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda a, b: (a, b), "leaves the graph"),
        (lambda a, b: (a.view(2, -1) * 2, b * 2), "would need a copy"),
        (lambda a, b: F.softmax(a, -1) + F.softmax(b, -1), "may copy"),
        (lambda a, b: a * 2 + b * 3, "put its gradients together"),
    ],
)
def test_readers_for_which_it_does_not_do(use: Callable[..., Any], reason: str) -> None:
    opt = optimized(Pair(use))
    assert linears(opt) == 2
    assert any(reason in r for r in refusals(opt)), refusals(opt)


def test_other_inputs_are_no_siblings() -> None:
    opt = optimized(Pair(lambda a, b: F.silu(a) * b, other_input=True))
    assert linears(opt) == 2
    assert refusals(opt) == []


def test_blocks_are_merged_apart() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(self.layers[0](x)) * self.layers[1](x)

    opt = optimized(Blocks())
    assert linears(opt) == 2
    assert refusals(opt) == []


def test_a_side_branch_is_fine() -> None:
    """A low-rank update beside frozen projections, as adapters add it."""

    class Adapted(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.first, self.second = nn.Linear(16, 2, bias=False), nn.Linear(2, 24, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up(x) + self.second(self.first(x))
            return self.down(F.silu(self.gate(x)) * up)

    model = Adapted()
    opt = optimized(model)
    opt(X).float().sum().backward()
    assert model.first.weight.grad is not None
    assert graphopt.verify(opt, X).passed


def test_a_hook_that_comes_later_sees_the_gradient() -> None:
    model = Mlp()
    opt = optimized(model)
    seen = []
    model.up.weight.register_hook(lambda g: seen.append(g.shape) or 2 * g)
    model.gate.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    opt(X).float().sum().backward()
    doubled = model.up.weight.grad.clone()
    assert seen.count(torch.Size([24, 16])) == 2
    alone = Mlp()
    optimized(alone)(X).float().sum().backward()
    assert torch.equal(doubled, 2 * alone.up.weight.grad)


def test_a_cache_of_keys_keeps_rope_apart() -> None:
    class Cached(Attention):
        def forward(self, x: torch.Tensor) -> Any:
            b, s, _ = x.shape
            q, k, v = (f(x).view(b, s, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k = self.turned(q), self.turned(k)
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.o(y.transpose(1, 2).reshape(b, s, -1)), k

    opt = optimized(Cached())
    assert "graphopt.linear_rope.default" not in targets(opt)
    assert any("attention alone" in r or "one attention" in r for r in refusals(opt))


def test_learned_tables_keep_rope_apart() -> None:
    model = Attention()
    model.angle = nn.Parameter(model._buffers.pop("angle"))
    opt = optimized(model)
    assert "graphopt.linear_rope.default" not in targets(opt)
    assert any("want a gradient" in r for r in refusals(opt))
    opt(X).float().sum().backward()
    assert model.angle.grad is not None
