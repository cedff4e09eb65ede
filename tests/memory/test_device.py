"""What operations take inside: launch functions on fake tensors, measured calls, workspaces."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import graphopt
from graphopt.kernels import registry
from graphopt.memory import cpucalls, device, gpucalls, trial
from graphopt.memory.device import adds_bias, gemm_workspace, launching_nothing, lt_workspace
from graphopt.memory.fakestep import fake_mode
from graphopt.memory.inner import expanded
from graphopt.memory.oracle import predict
from graphopt.memory.tracker import StorageTracker, storages_of
from graphopt.memory.trial import FILE

CUDA = torch.device("cuda")


def test_the_cpu_has_no_gemm_workspace():
    assert gemm_workspace(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("config", "size"),
    [(":4096:2:16:8", 8320 * 1024), (":16:8", 128 * 1024), (":0:0", 0)],
)
def test_the_workspaces_configuration_is_honoured(monkeypatch, config, size):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert gemm_workspace(CUDA) == size


LT = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 2**20),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "512"}, 512 * 1024),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 * 1024),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, 0),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "DISABLE_ADDMM_CUDA_LT": "1"}, 0),
    ],
)
def test_cublaslt_has_a_workspace_of_its_own_unless_told_otherwise(monkeypatch, given, size):
    for name in (*LT, "DISABLE_ADDMM_CUDA_LT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert lt_workspace(CUDA) == size
    assert lt_workspace(torch.device("cpu")) == 0


def test_only_products_with_a_bias_of_a_row_take_it():
    a, row, full = torch.ones(3, 3), torch.ones(3), torch.ones(3, 3)
    assert adds_bias("addmm", (row, a, a))
    assert not adds_bias("addmm", (full, a, a))
    assert not adds_bias("addmm", (row, a, torch.ones(3, 1)))
    assert not adds_bias("mm", (a, a))
    assert adds_bias("linear", (a, a, row))
    assert not adds_bias("linear", (a, a))
    assert not adds_bias("linear", (a, a, None))


@pytest.mark.gpu
def test_cublaslt_takes_what_is_said_of_it():
    torch._C._cuda_clearCublasWorkspaces()
    a, row = torch.ones(64, 64, device="cuda"), torch.ones(64, device="cuda")
    torch.mm(a, a)
    before = torch.cuda.memory_allocated()
    torch.addmm(row, a, a)
    assert torch.cuda.memory_allocated() - before == lt_workspace(CUDA)


def test_products_of_forward_and_backward_take_a_workspace_each(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    model = nn.Linear(8, 8)
    body = graphopt.optimize(model, (torch.randn(4, 8),)).body
    found = predict(body, device="cuda")
    assert found.breakdown["workspaces"] == 2 * 2**20
    assert found.start_bytes > 2 * 2**20  # kept from the step before


def test_a_cpu_build_makes_no_fake_cuda_tensors(tmp_path):
    # A fake CUDA tensor that requires a gradient ends the process where torch has no CUDA.
    code = (
        "import torch, graphopt; from graphopt.memory.oracle import predict; "
        "opt = graphopt.optimize(torch.nn.Linear(4, 4), (torch.ones(2, 4),)); "
        "predict(opt.body, device='cuda')"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr


def test_what_cannot_be_measured_is_known_by_name(monkeypatch):
    monkeypatch.setattr(device, "gpu_call", lambda func, *call: known.get(func))
    known = {torch.ops.aten.relu.default: trial.Taken(100)}
    seen, inside = StorageTracker(), device.Inside(CUDA, real=True)
    inside.begin(seen)
    for func in (torch.ops.aten.convolution.default, torch.ops.aten.relu.default):
        assert inside.whole(func, (), {}, "out") == "out"
        inside.add(seen, None, False, (func, (), {}, "out"))
    assert inside.unknown == {"convolution"}
    assert [a.bytes for a in seen.allocations if a.op] == [512]


def _needs(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _step(op, args, kwargs):
    """Forward and backward of one operator, its results alive until the end."""
    out = op.overload(*args, **kwargs)
    roots = [t for t in storages_of(out) if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(registry()))
def test_fake_launches_allocate_what_real_ones_do(name):
    op = registry()[name]
    for sample in op.samples(CUDA):
        real, faked = _curves(op, (sample.args, sample.kwargs), _needs)
        if real is None:  # a gradient that the operator does not give
            real, faked = _curves(op, (sample.args, sample.kwargs), lambda value: False)
        assert faked == real


def _curves(op, given, needs):
    """Live bytes of a step on real tensors and on fake ones; None where there is no gradient."""
    mode = fake_mode()
    real = tree_map(lambda v: v.detach().requires_grad_() if needs(v) else v, given)
    twins = tree_map(
        lambda v: mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v,
        real,
    )
    try:
        with StorageTracker(within=expanded) as seen:
            kept = _step(op, *real)
    except graphopt.UnsupportedError:
        return None, None
    with launching_nothing(), mode, StorageTracker(within=expanded) as faked:
        twin = _step(op, *twins)
    curves = seen.curve(), faked.curve()
    del kept, twin
    return curves


@pytest.mark.gpu
def test_workspaces_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpucalls, "_book", trial.Book())
    monkeypatch.setattr(trial, "SLOW_MS", 0)
    x = torch.randn(8, 16, 64, 64, device="cuda", requires_grad=True)
    w = torch.randn(32, 16, 3, 3, device="cuda", requires_grad=True)
    mode = fake_mode()
    a, b = (mode.from_tensor(t, static_shapes=True) for t in (x, w))
    args = (a, b, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = torch.ops.aten.convolution.default, args, {}, x.new_empty(8, 32, 64, 64)
    first = gpucalls.gpu_call(*call)
    assert first is not None
    monkeypatch.setattr(gpucalls, "_measure", None)  # not called again
    assert gpucalls.gpu_call(*call) == first
    assert (tmp_path / FILE).exists()


class Net(nn.Module):
    """Convolutions, attention and a loss."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 64, 7, 4, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1)
        )
        self.qkv, self.head = nn.Linear(256, 768), nn.Linear(256, 1000)

    def forward(self, x, labels):
        x = self.conv(x).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(y.mean(1)), labels)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_prediction_is_the_allocators_peak_within_3_percent(precision):
    model = Net().cuda()
    x, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.arange(64, device="cuda")
    opt = graphopt.optimize(model, (x, labels), precision=precision)
    found = predict(opt.body)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        opt(x, labels).backward()
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before  # other tests' memory lies there, too
    assert found.peak_bytes - found.start_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_what_cudnn_s_layers_keep_for_backward_is_counted(make, precision, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpucalls, "_book", trial.Book())
    layer = make(256, 512, 2, batch_first=True, bidirectional=True).cuda()

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0].float().square().mean()

    model, x = First(), torch.randn(32, 256, 256, device="cuda")
    opt = graphopt.optimize(model, (x,), precision=precision)
    found = predict(opt.body)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        opt(x).backward()
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    assert found.peak_bytes - found.start_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("length", [33, 64, 256])
def test_attention_on_the_cpu_takes_what_its_source_says(length):
    from graphopt.bench.trace import peak_allocated, record

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (torch.randn(2, 4, length, 8) for _ in range(3))
    found = []
    peak = peak_allocated(record(lambda: found.append(forward(q, k, v)), cuda=False, memory=True))
    results = sum(t.untyped_storage().nbytes() for t in found[0])
    assert peak - results == cpucalls._attention((q, k, v), found[0])


@pytest.mark.parametrize("dim", [1, 2])
def test_attention_s_backward_on_the_cpu_lays_its_gradient_out(dim):
    from graphopt.bench.trace import peak_allocated, record

    aten = torch.ops.aten
    q, k, v = (torch.randn(2, 4, 64, 8) for _ in range(3))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    grad = torch.randn(2, 4, 64, 8).transpose(1, dim).contiguous().transpose(1, dim)
    args = (grad, q, k, v, out, sums, 0.0, False)
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = []
    peak = peak_allocated(record(lambda: found.append(run(*args)), cuda=False, memory=True))
    results = sum(t.nbytes for t in found[0])
    assert peak - results == cpucalls._attention_backward(args, found[0])


def test_batch_norm_s_backward_on_the_cpu_takes_one_more_gradient():
    from graphopt.bench.trace import peak_allocated, record

    x, w = torch.randn(4, 8, 6, 6), torch.ones(8)
    args = (x, x, w, None, None, w, w, True, 1e-5, [True, True, True])
    run = torch.ops.aten.native_batch_norm_backward
    found = []
    peak = peak_allocated(record(lambda: found.append(run(*args)), cuda=False, memory=True))
    assert peak - sum(t.nbytes for t in found[0]) == cpucalls._batch_norm_backward(args, found[0])


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss"])
def test_a_loss_lies_in_the_storage_of_all_losses(loss):
    from graphopt.bench.trace import peak_allocated, record

    x, y = torch.randn(64, 16), torch.randn(64, 16)
    run = getattr(torch.ops.aten, loss).default
    real = peak_allocated(record(lambda: run(x, y), cuda=False, memory=True))
    with fake_mode() as mode, StorageTracker() as seen:
        result = run(mode.from_tensor(x), mode.from_tensor(y))
    assert seen.allocations[-1].bytes == x.nbytes
    assert real - 2 * x.nbytes < 64  # the result and all losses, and numbers on the way
    assert cpucalls._mse_loss((x, y), result) == x.nbytes


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    index = 0

    @property
    def device(self):
        return torch.device("cuda", self.index)


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two kinds of GPU of which nothing is known, and all is kept."""
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpucalls, "_book", trial.Book())
    monkeypatch.setattr(trial, "SLOW_MS", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: f"GPU of kind {d.index}")


def _taken_of_cumsum(index):
    x = torch.zeros(4).as_subclass(OnGpu)
    x.index = index
    return gpucalls.gpu_call(torch.ops.aten.cumsum.default, (x, 0), {}, x).inside


def test_what_one_model_of_gpu_takes_says_nothing_of_another(monkeypatch, gpus):
    monkeypatch.setattr(gpucalls, "_measure", lambda *call: trial.Taken(1000 * (1 + call[4].index)))
    assert [_taken_of_cumsum(i) for i in (0, 1, 0, 1)] == [1000, 2000, 1000, 2000]
    monkeypatch.setattr(gpucalls, "_book", trial.Book())
    monkeypatch.setattr(gpucalls, "_measure", None)  # from the file, for each kind its own
    assert [_taken_of_cumsum(i) for i in (1, 0)] == [2000, 1000]


def test_another_setting_is_measured_anew(monkeypatch, gpus):
    sizes = iter([10, 20])
    monkeypatch.setattr(gpucalls, "_measure", lambda *call: trial.Taken(next(sizes)))
    assert _taken_of_cumsum(0) == 10
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert _taken_of_cumsum(0) == 20
