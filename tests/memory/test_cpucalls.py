"""What operations take inside on the CPU: predictions against the profiler, the file of calls."""

import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphopt
from graphopt.bench.trace import peak_allocated, record
from graphopt.errors import GraphoptWarning
from graphopt.memory import cpucalls, device, trial
from graphopt.memory.oracle import predict

CONVOLUTION = torch.ops.aten.convolution.default


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No file but the test's own, and nothing known."""
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpucalls, "_book", trial.Book())
    monkeypatch.setattr(trial, "SLOW_MS", 0)  # all calls are kept
    return tmp_path


def _depthwise(channels=16):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
        nn.GELU(),
        nn.Conv2d(channels, 2 * channels, 1),
    )


def _thin():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 1, 1))


def _mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 8))


def _transposed():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ConvTranspose2d(8, 3, 3, stride=2))


class Recurrent(nn.Module):
    """A recurrent layer, of which only the sequence of results is read."""

    def __init__(self, make=nn.LSTM, **options):
        super().__init__()
        self.layer = make(12, 16, **options)

    def forward(self, x):
        return self.layer(x)[0]


DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.2}
RECURRENT = [
    ("one layer", lambda: Recurrent(), None),
    ("one layer", lambda: Recurrent(), "bf16"),
    ("deep", lambda: Recurrent(**DEEP), None),
    ("deep", lambda: Recurrent(**DEEP), "bf16"),
    ("eval", lambda: Recurrent(num_layers=2).eval(), None),
    ("no bias", lambda: Recurrent(bias=False), None),
    ("float64", lambda: Recurrent().double(), None),
    ("bfloat16", lambda: Recurrent().bfloat16(), None),
    ("GRU", lambda: Recurrent(nn.GRU), None),
]


def _loss(result):
    return result.float().square().mean()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [_depthwise, _thin, _mlp, _transposed])
def test_prediction_is_the_real_peak(make, precision):
    model, x = make(), torch.randn(4, 3, 16, 16)
    opt = graphopt.optimize(model, (x,), precision=precision)
    found = predict(opt.body, loss_fn=_loss)

    def step():
        model.zero_grad(set_to_none=True)
        _loss(opt(x)).backward()

    step()
    model.zero_grad(set_to_none=True)
    added = peak_allocated(record(step, cuda=False, memory=True))
    assert found.peak_bytes == pytest.approx(found.start_bytes + added, rel=0.01)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("make", "precision"), [pytest.param(m, p, id=f"{n} {p}") for n, m, p in RECURRENT]
)
@pytest.mark.parametrize("train", [True, False])
def test_what_a_recurrent_layer_keeps_for_backward_is_counted(make, precision, train):
    model = make()
    x = torch.randn(20, 8, 12, dtype=next(model.parameters()).dtype)
    with torch.set_grad_enabled(train):
        opt = graphopt.optimize(model, (x,), precision=precision)
        found = predict(opt.body, loss_fn=_loss if train else None)

        def step():
            if train:
                _loss(opt(x)).backward()
            else:
                opt(x)

        step()
        model.zero_grad(set_to_none=True)
        added = peak_allocated(record(step, cuda=False, memory=True))
    assert found.peak_bytes == pytest.approx(found.start_bytes + added, rel=1e-4)
    assert not any("not known" in note for note in found.notes)


def _bilinear():
    x = torch.randn(64, 64, requires_grad=True)
    return nn.Bilinear(64, 64, 16), (x, torch.randn(64, 64))


def _bag():
    return nn.EmbeddingBag(100, 64), (torch.randint(100, (8, 32)),)


class Applied(nn.Module):
    """A function of a linear layer's result."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(32, 32), function

    def forward(self, x):
        return self.function(self.layer(x))


def _soft_margin():
    labels = torch.ones(256, 32)
    return Applied(lambda x: nn.functional.soft_margin_loss(x, labels)), (torch.randn(256, 32),)


def _kth():
    return Applied(lambda x: x.kthvalue(3).values), (torch.randn(32, 32, 32),)


@pytest.mark.parametrize("make", [_bilinear, _bag, _soft_margin, _kth])
def test_what_torch_s_own_operations_copy_inside_is_counted(make):
    model, inputs = make()

    def step():
        _loss(model(*inputs)).backward()

    found = graphopt.profile_memory(model, inputs, loss_fn=_loss).prediction
    step()
    for leaf in (*model.parameters(), *inputs):
        leaf.grad = None
    added = peak_allocated(record(step, cuda=False, memory=True))
    assert found.peak_bytes == pytest.approx(found.start_bytes + added, rel=0.002)


def _all_but(name):
    """In the place of a measurement: every call takes nothing, one is not to be made."""

    def measure(func, *call):
        assert trial.name_of(func) != name
        return trial.Taken(0)

    return measure


def test_a_layer_whose_workspace_is_not_known_is_named_and_its_backward_is_not_run(monkeypatch):
    monkeypatch.setattr(cpucalls, "MOST_FLOPS", 1)
    monkeypatch.setattr(cpucalls, "_measure", _all_but("mkldnn_rnn_layer"))
    opt = graphopt.optimize(Recurrent(), (torch.randn(20, 8, 12),))
    notes = predict(opt.body, loss_fn=_loss).notes
    assert any("mkldnn_rnn_layer" in note and "not known" in note for note in notes)


def test_a_backward_without_its_workspace_is_not_run(monkeypatch):
    monkeypatch.setattr(cpucalls, "_measure", _all_but("mkldnn_rnn_layer_backward"))
    opt = graphopt.optimize(Recurrent(), (torch.randn(20, 8, 12),))
    assert any("mkldnn_rnn_layer_backward" in n for n in predict(opt.body, loss_fn=_loss).notes)


def _call(batch=2):
    x, w = torch.zeros(batch, 16, 8, 8), torch.zeros(16, 1, 7, 7)
    args = (x, w, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 16)
    return CONVOLUTION, args, {}, torch.zeros_like(x)


def test_a_call_runs_once_a_machine(own_cache, monkeypatch):
    found = cpucalls.cpu_call(*_call())
    assert found is not None
    monkeypatch.setattr(cpucalls, "_book", trial.Book())
    monkeypatch.setattr(cpucalls, "_measure", None)  # not called: read from the file
    assert cpucalls.cpu_call(*_call()) == found


def test_another_number_of_threads_is_measured_anew(monkeypatch):
    cpucalls.cpu_call(*_call())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(cpucalls, "_measure", lambda *call: trial.Taken(123))
    assert cpucalls.cpu_call(*_call()).inside == 123


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "devices": []}'])
def test_a_damaged_file_counts_as_none(own_cache, text):
    (own_cache / trial.FILE).write_text(text)
    assert cpucalls.cpu_call(*_call()) is not None
    assert json.loads((own_cache / trial.FILE).read_text())["devices"]  # and it is whole again


WRONG = ["12", None, -1, 1.5, True, [], [-1, []], [1.5, []], [0, [[0, "float32"]]]]
WRONG += [[0, [[0, "relu", [1], 4]]], [0, [["0", "float32", [1], 4]]], [True, []]]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_entry_that_is_no_count_is_measured_anew(own_cache, monkeypatch, wrong):
    found = cpucalls.cpu_call(*_call())
    path = own_cache / trial.FILE
    data = json.loads(path.read_text())
    for entry in data["devices"].values():
        entry.update(dict.fromkeys(entry, wrong))
    path.write_text(json.dumps(data))
    monkeypatch.setattr(cpucalls, "_book", trial.Book())
    assert cpucalls.cpu_call(*_call()) == found


def test_a_file_that_cannot_be_written_is_told_once(own_cache, monkeypatch):
    (own_cache / "file").write_text("")
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(own_cache / "file" / "below"))
    monkeypatch.setattr("graphopt.cost.kept._told", set())
    with pytest.warns(GraphoptWarning, match="could not be kept"):
        found = cpucalls.cpu_call(*_call())
    assert found is not None
    monkeypatch.setattr(cpucalls, "_measure", None)
    assert cpucalls.cpu_call(*_call()) == found  # it holds for this process


@pytest.mark.parametrize("limit", ["MOST_FLOPS", "MOST_BYTES"])
def test_a_call_that_is_too_large_is_not_run_and_the_prediction_says_so(monkeypatch, limit):
    monkeypatch.setattr(cpucalls, limit, 1)
    opt = graphopt.optimize(_thin(), (torch.randn(2, 3, 8, 8),))
    monkeypatch.setattr(cpucalls, "_measure", _all_but("convolution"))
    notes = predict(opt.body, loss_fn=_loss).notes
    assert "what convolution takes inside is not known" in notes


def test_a_profiler_of_the_user_s_is_left_alone(own_cache):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert cpucalls.cpu_call(*_call()) is None
        torch.ones(3).exp()
    assert any(e.name == "aten::exp" for e in seen.events())
    assert cpucalls.cpu_call(*_call()) is not None  # and the next time it is measured


def test_products_are_called_only_where_the_blas_does_not_multiply_what_lies_there(monkeypatch):
    called = []
    monkeypatch.setattr(cpucalls, "_measure", lambda *call: called.append(call) or trial.Taken(0))

    def calls(a, b):
        called.clear()
        cpucalls.cpu_call(torch.ops.aten.mm.default, (a, b), {}, a @ b)
        return bool(called)

    full = torch.zeros(3, 3)
    assert not calls(full, full.t())
    assert not calls(full[:2, :2], full[1:, 1:])
    assert calls(full.bfloat16(), full.bfloat16())
    assert calls(full[0, 0].expand(5, 3), full)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert calls(full, full)
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast_and_random_state_do_not_reach_a_measured_call():
    a = torch.zeros(32, 64)
    call = torch.ops.aten.mm.default, (a, a.t()), {}, torch.zeros(32, 32)
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpucalls.cpu_call(*call).inside == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_counting_for_a_gpu_runs_nothing_here(monkeypatch):
    opt = graphopt.optimize(_thin(), (torch.randn(2, 3, 8, 8),))
    monkeypatch.setattr(device, "cpu_call", None)
    assert predict(opt.body, loss_fn=_loss, device="cuda").peak_bytes


def test_a_model_on_meta_is_counted_without_a_call(own_cache):
    graphopt.profile_memory(_thin().to("meta"), torch.randn(2, 3, 8, 8, device="meta"))
    assert not (own_cache / trial.FILE).exists()
