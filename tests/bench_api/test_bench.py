"""`graphopt.bench` on the CPU: what it returns, what it leaves alone, what it survives."""

import json
import types

import pytest
import torch
from torch import nn

import graphopt
from graphopt.bench.measure import quartiles
from graphopt.bench.result import BenchResult, DeviceTime, Row

X = torch.linspace(-1, 1, 32).reshape(4, 8)
FAST = {"seconds": 0.004, "rounds": 2, "warmup": 1, "profile": False}


class Block(nn.Module):
    """A norm with running statistics, a dropout, and a flag on a submodule."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        return self.drop(torch.relu(self.up(self.norm(x)))) * scale


def test_the_rows_are_the_variants_and_graphopt_last():
    result = graphopt.bench(Block(), X, ["eager", {"mine": Block()}], **FAST)
    assert [row.name for row in result.rows] == ["eager", "mine", "graphopt"]
    assert [row.error for row in result.rows] == [None] * 3
    assert result.baseline == "eager"
    assert result.ratio("graphopt") == result["graphopt"].ms / result["eager"].ms


@pytest.mark.parametrize("copy", [True, False])
def test_the_model_and_the_generators_are_as_before(copy):
    model = Block()
    model.drop.eval()
    model.up.weight.grad = torch.ones(8, 8)
    other = Block()
    state = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, other)]
    random, gradient = torch.get_rng_state(), model.up.weight.grad
    graphopt.bench(model, X, ["eager", {"mine": other}], copy=copy, train=True, **FAST)
    for module, before in zip((model, other), state, strict=True):
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert model.up.weight.grad is gradient
    assert model.up.bias.grad is None
    assert other.up.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert model._forward_hooks == {}
    assert "forward" not in model.__dict__


def test_a_variant_that_fails_is_a_row_with_its_error(monkeypatch):
    def no_compiler(model):
        raise RuntimeError("no C++ compiler\nat length")

    monkeypatch.setattr(torch, "compile", no_compiler)
    result = graphopt.bench(Block(), X, ("compile", "eager"), **FAST)
    assert result["compile"].error == "RuntimeError: no C++ compiler"
    assert result["compile"].ms is None
    assert result.baseline == "eager"
    assert "compile failed: RuntimeError: no C++ compiler" in result.closing


def test_a_variant_that_fails_later_does_not_stop_the_others():
    calls = []

    def tired(x):
        calls.append(x)
        if len(calls) > 4:
            raise ValueError("tired")
        return x * 2

    result = graphopt.bench(nn.Linear(8, 8), X, ["eager", {"tired": tired}], train=False, **FAST)
    assert result["tired"].error == "ValueError: tired"
    assert result["graphopt"].steps >= 2


def test_a_model_that_cannot_be_captured_is_a_row_with_its_error():
    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    result = graphopt.bench(Branch(8, 8), X, ["eager"], **FAST)
    assert "data-dependent" in result["graphopt"].error
    assert result["eager"].ms > 0


def test_what_the_model_raises_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graphopt.bench(nn.Linear(9, 2), X, ["eager"], **FAST)


def test_a_mode_is_measured_as_asked():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    def modes(**options):
        seen.clear()
        result = graphopt.bench(Seen(8, 8), X, ["eager"], **options, **FAST)
        return result.step, set(seen)

    assert modes() == ("forward, backward", {(True, True)})
    assert modes(train=False) == ("forward", {(False, False)})
    with torch.no_grad():
        assert modes() == ("forward", {(True, False)})
        assert modes(train=True) == ("forward, backward", {(True, True)})


def test_training_can_be_measured_inside_inference_mode():
    with torch.inference_mode():
        result = graphopt.bench(nn.Linear(8, 8), X, ["eager"], train=True, **FAST)
    assert [row.error for row in result.rows] == [None, None]
    assert result.step == "forward, backward"


def test_a_precision_that_only_graphopt_has_is_told():
    model = nn.Linear(8, 8)
    result = graphopt.bench(model, X, ["eager"], precision="bf16", **FAST)
    assert "graphopt alone runs with precision='bf16'" in result.closing


def test_the_loss_is_the_models_own_or_that_of_loss_fn():
    class WithLoss(nn.Linear):
        def forward(self, x):
            return types.SimpleNamespace(loss=super().forward(x).sum())

    model = WithLoss(8, 8)
    assert graphopt.bench(model, X, {"mine": model}, **FAST)["mine"].value == pytest.approx(
        model(X).loss.item()
    )
    linear = nn.Linear(8, 8)
    result = graphopt.bench(linear, X, ["eager"], loss_fn=lambda y: y.sum() * 3, **FAST)
    assert result["eager"].value == pytest.approx(linear(X).sum().item() * 3)


def test_variants_compute_the_same():
    torch.manual_seed(0)
    result = graphopt.bench(nn.Sequential(nn.LayerNorm(8), nn.GELU()), X, ["eager"], **FAST)
    assert result["graphopt"].value == pytest.approx(result["eager"].value, rel=1e-5)


def test_an_optimizer_takes_part_and_the_model_keeps_its_weights():
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    result = graphopt.bench(
        model, X, ["eager"], optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **FAST
    )
    assert result.step == "forward, backward, optimizer"
    assert torch.equal(model.weight, before)


def test_the_inputs_are_not_written_to():
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    x = X.clone()
    graphopt.bench(InPlace(8, 8), x, ["eager"], train=False, **FAST)
    assert torch.equal(x, X)


def test_turns_are_interleaved():
    order = []
    variants = {n: lambda x, n=n: order.append(n) or x for n in "ab"}
    options = {**FAST, "seconds": 1e-9, "rounds": 4}
    graphopt.bench(nn.Linear(8, 8), X, variants, train=False, **options)
    started, measured = "aaabbb", "abbaabab"  # the order turns; graphopt is the third
    assert "".join(order) == started + measured + "ab"  # and once each for the memory


def test_memory_counts_parameters_inputs_and_what_a_step_adds():
    model = nn.Linear(256, 512, bias=False)
    result = graphopt.bench(model, torch.ones(64, 256), ["eager"], train=False, **FAST)
    exact = 4 * (256 * 512 + 64 * 256 + 64 * 512)
    assert exact <= result["eager"].peak_bytes <= exact * 1.01


def test_the_profile_says_where_the_time_goes():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    result = graphopt.bench(model, X, ["eager"], **{**FAST, "profile": True})
    kinds = result["graphopt"].device.kinds
    assert kinds["gemm"] > 0
    assert kinds["fused"] > 0
    assert result["eager"].device.kinds["fused"] == 0
    assert any(k.kind == "fused" for k in result["graphopt"].device.kernels)


def test_the_cpu_is_told_to_prove_nothing_about_speed():
    result = graphopt.bench(nn.Linear(8, 8), X, ["eager"], **FAST)
    assert "no speed-up is to be expected" in result.closing


def test_options_reach_optimize():
    model = nn.Sequential(nn.LayerNorm(8), nn.ReLU())
    result = graphopt.bench(model, X, ["eager"], fuse=False, **{**FAST, "profile": True})
    assert not any(
        "layer_norm" in k.name and k.kind == "fused" for k in result.rows[1].device.kernels
    )


def test_a_graph_without_rewrites_is_told():
    result = graphopt.bench(nn.Tanh(), X.clone().requires_grad_(), ["eager"], **FAST)
    assert "note: graphopt: nothing was rewritten in this graph" in result.closing
    result = graphopt.bench(nn.LayerNorm(8), X, ["eager"], **FAST)
    assert "nothing was rewritten" not in result.closing


# ---- the result


def made(**changes):
    times = DeviceTime(dict.fromkeys(("gemm", "fused", "other", "copies"), 1.0), 4.0, 6.0, ())
    rows = (
        Row("eager", None, 10.0, 9.0, 11.0, 10.0, 5, 4 * 2**30, 1.0, 2.5, times),
        Row("compile", "RuntimeError: no <compiler>"),
        Row("graphopt", None, 5.0, 4.9, 5.1, 5.0, 5, 2**30, 3.0, 2.5, times),
    )
    values = {
        "model": "Block",
        "step": "forward",
        "mode": "eval",
        "inputs": ("x: f32[4, 8]",),
        "precision": "bfloat16",
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "baseline": "eager",
        "rows": rows,
        "rounds": 5,
        "notes": (),
    }
    return BenchResult(**{**values, **changes})


def test_the_table_reads():
    assert repr(made()).splitlines() == [
        "Block  eval  x: f32[4, 8]",
        "a step: forward under bfloat16 autocast   NVIDIA H200   torch 2.11",
        "",
        "variant     ms   quartiles  to eager  wall ms     peak  to eager  start s  value",
        "eager     10.0  9.00..11.0     1.00x     10.0  4.0 GiB     1.00x     1.00    2.5",
        "compile      -           -         -        -        -         -        -      -",
        "graphopt  5.00  4.90..5.10     0.50x     5.00  1.0 GiB     0.25x     3.00    2.5",
        "",
        "ms a step  GEMM  fused  other  copies  idle  busy",
        "eager      1.00   1.00   1.00    1.00  6.00   40%",
        "graphopt   1.00   1.00   1.00    1.00  6.00   80%",
        "",
        "compile failed: RuntimeError: no <compiler>",
        "graphopt is 2.00 times as fast as eager",
        "eager is bound by the host: the device is busy for 40% of a step, "
        "so a faster kernel changes little",
    ]


def test_no_verdict_inside_the_spread():
    eager, _, mine = made().rows
    near = Row("graphopt", None, 9.5, 8.0, 10.0, 9.5)
    result = made(rows=(eager, near))
    assert "graphopt against eager: no difference beyond the spread" in result.closing
    assert mine.busy == 0.8


def test_to_dict_is_plain_and_stable():
    data = made().to_dict()
    assert json.loads(json.dumps(data))["rows"][2]["ratio"] == 0.5
    assert data["schema"] == "graphopt.bench/1"
    assert " ".join(data) == (
        "schema model step mode inputs precision device versions baseline rows rounds notes"
    )
    assert " ".join(data["rows"][0]) == (
        "name error ms low_ms high_ms wall_ms steps peak_bytes start_s value device notes"
        " ratio peak_ratio"
    )


def test_html_is_escaped():
    text = made()._repr_html_()
    assert "no &lt;compiler&gt;" in text
    assert "<compiler>" not in text


def test_an_unknown_row_says_which_there_are():
    with pytest.raises(graphopt.OptionError, match="'eager' or 'compile' or 'graphopt'"):
        made()["liger"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [([3.0], (3.0, 3.0, 3.0)), ([1.0, 2.0, 3.0, 4.0, 5.0], (2.0, 3.0, 4.0))],
)
def test_quartiles(times, expected):
    assert quartiles(times) == expected


# ---- on a GPU


@pytest.mark.gpu
def test_on_a_gpu():
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()).cuda()
    x = torch.randn(2**16, 512, device="cuda")  # enough that fusing pays
    before = torch.cuda.get_rng_state()
    result = graphopt.bench(
        model, x, ["eager"], autocast="bf16", optimizer=True, seconds=0.05, rounds=3
    )
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for row in result.rows:
        assert row.error is None
        assert 0 < row.low_ms <= row.ms <= row.high_ms
        assert row.device.kinds["gemm"] > 0
        assert row.device.kinds["optimizer"] > 0
        assert 0 < row.device.busy_ms <= row.wall_ms * 1.5
        # two float32 moments, parameters, and gradients at the least
        assert row.peak_bytes > 4 * 4 * 512 * 512
    assert result["graphopt"].device.kinds["fused"] > 0
    assert result["eager"].device.kinds["fused"] == 0


@pytest.mark.gpu
def test_a_variant_without_room_on_the_gpu_is_a_row_with_its_error():
    def greedy(x):
        return torch.empty(2**50, device="cuda")

    model = nn.Linear(64, 64).cuda()
    x = torch.randn(64, 64, device="cuda")
    result = graphopt.bench(
        model, x, ["eager", {"greedy": greedy}], train=False, seconds=0.01, rounds=2
    )
    assert "OutOfMemoryError" in result["greedy"].error
    assert result["graphopt"].error is None
