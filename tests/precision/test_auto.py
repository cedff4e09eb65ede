"""`precision="auto"`, and parts of a model that no precision touches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import precision as module
from graphopt.precision import Lowering, _resolved, lowering, own_low

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def ambient(model: nn.Module, x: torch.Tensor = X, precision: str = "auto") -> str | None:
    found: str | None = graphopt.optimize(model, x, precision=precision).precision_plan.ambient
    return found


def test_it_is_bf16_on_the_cpu() -> None:
    assert ambient(nn.Linear(8, 8)) == "bfloat16"


def test_a_gpu_without_bf16_gets_fp16_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.warns(graphopt.GraphoptWarning, match="GradScaler"):
        assert _resolved.__wrapped__("cuda") == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert _resolved.__wrapped__("cuda") == "bf16"


def test_the_note_points_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_bf16", lambda kind: False)
    _resolved.cache_clear()
    try:
        with pytest.warns(graphopt.GraphoptWarning) as seen:
            assert ambient(nn.Linear(8, 8)) == "float16"
    finally:
        _resolved.cache_clear()
    notes = [w for w in seen if "GradScaler" in str(w.message)]
    assert {w.filename for w in notes} == {__file__}


@pytest.mark.gpu
def test_it_is_bf16_on_a_gpu_that_has_it() -> None:
    assert ambient(nn.Linear(8, 8).cuda(), X.cuda()) == "bfloat16"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_model_in_low_precision_stays_as_it_is(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    opt = graphopt.optimize(model, X.to(dtype), precision="auto")
    assert opt.precision_plan.ambient is None
    assert torch.equal(opt(X.to(dtype)), model(X.to(dtype)))


class Adapted(nn.Module):
    """Most weights in low precision, with a float32 adapter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, dtype=BF16)
        self.inner, self.outer = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(BF16)) + self.outer(self.inner(x)).to(BF16)


def test_a_float32_adapter_on_a_low_precision_model_stays_float32() -> None:
    model = Adapted()
    opt = graphopt.optimize(model, X, precision="auto")
    assert opt.precision_plan.ambient is None
    torch.testing.assert_close(opt(X), model(X), rtol=1e-2, atol=1e-2)
    dtypes = [n.meta["val"].dtype for n in opt.graph.nodes if "linear" in str(n.target)]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_a_part_in_fp16_gives_the_rest_its_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8).to(FP16))
    assert lowering(nn.Linear(8, 8), "auto") == Lowering("cpu", BF16)
    model[0] = nn.Linear(8, 640)
    assert own_low(model) == ("fp16", False)
    assert lowering(model, "auto") == Lowering("cpu", FP16)
    both = nn.Sequential(nn.Linear(8, 80), nn.Linear(8, 8).to(FP16), nn.Linear(8, 8).to(BF16))
    assert lowering(both, "auto") == Lowering("cpu", None)


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16"])
def test_a_float64_model_stays_float64(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)).double()
    opt = graphopt.optimize(model, X.double(), precision=precision)
    torch.testing.assert_close(opt(X.double()), model(X.double()))
    assert not opt.precision_plan.casts


class Fourier(nn.Module):
    """A layer in the frequency domain, with complex weights, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.up(x).float()) * self.weight
        return self.down(torch.fft.irfft(spectrum, n=8))


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16"])
def test_complex_parts_stay(precision: str) -> None:
    model = Fourier()
    opt = graphopt.optimize(model, X, precision=precision)
    low = {"auto": BF16, "bf16": BF16, "fp16": FP16}[precision]
    with torch.autocast("cpu", low):
        expected = model(X)
    found = opt(X)
    assert found.dtype == low
    assert torch.equal(found, expected)
    wanted, grads = (
        torch.autograd.grad(y.float().square().sum(), list(model.parameters()))
        for y in (expected, found)
    )
    assert [g.dtype for g in grads] == [p.dtype for p in model.parameters()]
    for a, b in zip(wanted, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models whose sizes are summed, from here on."""
    seen: list[nn.Module] = []

    def low(model: nn.Module) -> tuple[str | None, bool]:
        seen.append(model)
        return own_low(model)

    monkeypatch.setattr(module, "own_low", low)
    return seen


def test_sizes_are_summed_at_a_capture_and_not_at_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = counted(monkeypatch)
    opt = graphopt.optimize(nn.Linear(8, 8), precision="auto")
    for _ in range(5):
        opt(X)
    assert len(seen) == 1
    with torch.no_grad():  # another graph of the same state
        for _ in range(5):
            opt(X)
    assert len(seen) == 1
    for _ in range(3):  # another mode
        opt.eval()(X)
    assert len(seen) <= 2


def test_a_model_converted_between_calls_gets_another_precision() -> None:
    model = nn.Linear(8, 8)
    opt = graphopt.optimize(model, precision="auto")
    for dtype, given, expected in (
        (torch.float32, X, BF16),
        (FP16, X.half(), FP16),
        (torch.float32, X, BF16),
        (torch.float64, X.double(), torch.float64),
    ):
        model.to(dtype)
        with torch.autocast("cpu", BF16, enabled=expected == BF16):
            eager = model(given)
        for _ in range(2):
            assert opt(given).dtype == eager.dtype
        assert opt.precision_plan.ambient == (None if expected == FP16 else "bfloat16")


def test_a_graph_of_the_users_own_autocast_is_not_taken_for_autos() -> None:
    model = nn.Linear(8, 8)
    opt = graphopt.optimize(model, precision="auto")
    assert opt(X).dtype == BF16  # float32: auto is bf16
    model.half()
    with torch.autocast("cpu", BF16):
        assert opt(X.half()).dtype == BF16  # the user's own, over a model in fp16
    assert opt(X.half()).dtype == FP16
    model.float()
    assert opt(X).dtype == BF16
    model.half()
    assert opt(X.half()).dtype == FP16


def test_a_model_that_runs_unoptimized_is_looked_at_each_time() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > -1e9 else x

    model = Branch()
    opt = graphopt.optimize(model, precision="auto", on_error="fallback")
    with pytest.warns(graphopt.GraphoptWarning):
        assert opt(X).dtype == BF16
    model.half()
    assert opt(X.half()).dtype == FP16
