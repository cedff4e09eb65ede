"""`precision=`: as under `torch.autocast`, written into the graph, with the user's exceptions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import graphopt

BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """Linear layers, a norm, an activation, a softmax; with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(nn.functional.gelu(self.norm(self.up(x)))), -1)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor = X) -> tuple[torch.Tensor, list[torch.Tensor]]:
    y = model(x)
    return y, list(torch.autograd.grad(y.float().square().sum(), list(model.parameters())))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("fp16", FP16)])
def test_a_precision_is_the_autocast_of_that_dtype(name: str, dtype: torch.dtype) -> None:
    model = Net()
    y, grads = step(graphopt.optimize(model, X, precision=name))
    with torch.autocast("cpu", dtype):
        wanted, wanted_grads = step(graphopt.optimize(model, X))
    assert y.dtype == wanted.dtype == dtype
    assert torch.equal(y, wanted)
    assert all(map(torch.equal, grads, wanted_grads))
    assert all(g.dtype == torch.float32 for g in grads)


def test_it_holds_for_every_call_and_ends_with_it() -> None:
    opt = graphopt.optimize(Net(), precision="bf16")
    assert opt(X).dtype == BF16
    assert not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert opt(torch.randn(5, 8)).dtype == BF16


def test_an_ambient_autocast_wins() -> None:
    opt = graphopt.optimize(Net(), X, precision="bf16")
    with torch.autocast("cpu", FP16):
        assert opt(X).dtype == FP16
        assert torch.is_autocast_enabled("cpu")
    assert opt(X).dtype == BF16


def test_auto_is_bf16_on_the_cpu_and_leaves_a_low_precision_model_alone() -> None:
    assert graphopt.optimize(Net(), X, precision="auto").precision_plan.ambient == "bfloat16"
    low = Net().to(BF16)
    assert graphopt.optimize(low, X.to(BF16), precision="auto").precision_plan.ambient is None


def test_float64_parts_stay() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.wide = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.low(x).double())

    opt = graphopt.optimize(Mixed(), X, precision="bf16")
    assert opt(X).dtype == torch.float64
    assert ("aten.linear", "bfloat16") in opt.precision_plan.ops


def test_the_source_and_copies() -> None:
    model = Net()
    opt = graphopt.optimize(model, X, precision="bf16", precision_overrides={"down": "fp32"})
    assert model(X).dtype == torch.float32
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert torch.equal(twin(X), opt(X))
        assert ("aten.linear", "float32") in twin.precision_plan.ops


def test_attach_takes_it() -> None:
    model = Net()
    graphopt.attach(model, precision="bf16")
    assert model(X).dtype == BF16


def test_an_override_keeps_a_module_in_float32() -> None:
    class ByHand(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.gelu(self.norm(self.up(x)))
            with torch.autocast("cpu", enabled=False):
                y = self.down(y.float())
            return torch.softmax(y, -1)

    opt = graphopt.optimize(Net(), X, precision="bf16", precision_overrides={"down": "fp32"})
    with torch.autocast("cpu", BF16):
        wanted, wanted_grads = step(ByHand())
    y, grads = step(opt)
    torch.testing.assert_close(y, wanted, atol=4e-3, rtol=4e-3)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=2e-2)
    assert [p[1:] for p in opt.precision_plan.pinned] == [("down", "aten.linear", "float32")]
    assert graphopt.verify(opt, X).passed


@pytest.mark.parametrize(
    ("overrides", "dtypes"),
    [
        ({"linear": "fp32"}, {"float32"}),
        ({"aten.linear": torch.float32}, {"float32"}),
        ({"aten.linear.default": "fp32"}, {"float32"}),
        ({"*::linear": "fp32"}, {"float32"}),
        ({"up::linear": "fp32"}, {"float32", "bfloat16"}),
        ({"up::softmax": "fp32"}, {"bfloat16"}),
        ({"linear": "fp32", "down": "bf16"}, {"float32", "bfloat16"}),
        ({"*": "fp32"}, {"float32"}),
        ({"*": "fp32", "linear": "fp16"}, {"float16"}),
    ],
)
def test_patterns(overrides: dict[str, object], dtypes: set[str]) -> None:
    opt = graphopt.optimize(Net(), X, precision="bf16", precision_overrides=overrides)
    assert {d for op, d in opt.precision_plan.ops if op == "aten.linear"} == dtypes
    assert graphopt.verify(opt, X).passed


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"precision": "fp8"}, "'bf16'"),
        ({"precision": torch.bfloat16}, "precision is"),
        ({"precision_overrides": {"dwn": "fp32"}}, "'down'"),
        ({"precision_overrides": {"down": "fp64"}}, "'fp32'"),
        ({"precision_overrides": ["down"]}, "a dict"),
        ({"precision_overrides": {3: "fp32"}}, "the key 3"),
        ({"precision_overrides": {"down::lin": "fp32"}}, "neither"),
        ({"precision_overrides": {"down.7.*": "fp32"}}, "neither"),
        ({"precision_overrides": {"down.*": "fp32"}}, "no module inside"),
        ({"precision_overrides": {"aten.linear.other": "fp32"}}, "neither"),
    ],
)
def test_wrong_options(options: dict[str, object], word: str) -> None:
    with pytest.raises(graphopt.OptionError, match=word):
        graphopt.optimize(Net(), X, **options)


def test_a_grad_scaler_trains_and_skips_as_under_autocast() -> None:
    losses = []
    for optimized in (False, True):
        model = Net()
        call = graphopt.optimize(model, precision="fp16") if optimized else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        seen = []
        for _ in range(40):
            with torch.autocast("cpu", FP16, enabled=not optimized):
                loss = call(X).float().square().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((float(loss.detach()), scaler.get_scale()))
        losses.append(seen)
    (eager, scales), (ours, our_scales) = (zip(*seen, strict=True) for seen in losses)
    assert scales[0] < 2.0**40
    assert scales == our_scales
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), atol=2e-3, rtol=2e-3)
    assert eager[-1] < eager[0]


def test_the_plan_and_the_code_name_the_dtype_that_a_pinned_product_has() -> None:
    class Fused(nn.Module):
        """A product whose bias goes into the activation's kernel: a rule emits it anew."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).sum()

    opt = graphopt.optimize(Fused(), X, precision="bf16", precision_overrides={"*": "fp32"})
    assert "bias_act" in opt.code
    assert "bf16[" not in opt.code
    assert {dtype for _, dtype in opt.precision_plan.ops} == {"float32"}
