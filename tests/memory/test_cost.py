"""Times by the roofline, costs of dispatched operations, calibrations and their file."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.cost import calibrate as calibration
from graphopt.cost import roofline
from graphopt.cost.calibrate import calibrate, kept
from graphopt.cost.dispatched import dispatched_cost, touched_bytes
from graphopt.cost.kept import folder, store
from graphopt.cost.ops import Cost
from graphopt.cost.roofline import CPU, H200, Rates, rates_of
from graphopt.errors import GraphoptWarning, OptionError

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(roofline, "_measured", {})
    return tmp_path / "cache"


class Costs(TorchDispatchMode):
    """Sums up what runs in its block, by operation."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        cost = dispatched_cost(func, args, kwargs or {}, out)
        self.found[str(func)] = self.found.get(str(func), Cost(0, 0)) + cost
        return out


def costs(run):
    with Costs() as seen:
        run()
    return seen.found


def test_a_product_and_its_backward():
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16, requires_grad=True)
    found = costs(lambda: (a @ b).sum().backward())
    assert found["aten.mm.default"].flops == 3 * 2 * 4 * 8 * 16


def test_attention_counts_its_products_on_the_cpu_too():
    q = torch.ones(1, 2, 16, 8)
    found = costs(lambda: F.scaled_dot_product_attention(q, q, q))
    (cost,) = (c for n, c in found.items() if "scaled_dot_product" in n)
    assert cost.flops == 2 * 2 * 2 * 16 * 16 * 8


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.t(),
        lambda x: x.reshape(-1),
        lambda x: x.detach(),
        lambda x: torch.empty(1000),
        lambda x: x.contiguous(),
    ],
)
def test_views_and_bare_memory_are_free(run):
    x = torch.ones(8, 8)
    assert sum(costs(lambda: run(x)).values(), Cost(0, 0)) == Cost(0, 0)


def test_writing_in_place_moves_both_ways():
    x, y = torch.ones(100), torch.ones(100)
    assert costs(lambda: x.add_(y))["aten.add_.Tensor"].bytes == 3 * 400


def test_expanded_elements_are_read_once():
    assert touched_bytes(torch.ones(4, 1).expand(4, 100)) == 16
    assert touched_bytes(torch.ones(0, 3).expand(0, 3)) == 0


def test_the_larger_of_moving_computing_and_launching_counts():
    rates = Rates("x", copy_gbs=1.0, tflops={"float32": 1.0}, floor_us=5.0)
    assert rates.ms(Cost(0, 0), None) == 0.0
    assert rates.ms(Cost(1, 1), None) == 0.005
    assert rates.ms(Cost(10**9, 0), None) == pytest.approx(1000.0)
    assert rates.ms(Cost(0, 10**12), torch.float32) == pytest.approx(1000.0)


def test_tf32_counts_where_it_is_allowed():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        exact = H200.tflops_of(torch.float32)
        torch.set_float32_matmul_precision("high")
        assert H200.tflops_of(torch.float32) > exact
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_host_link_that_is_not_there_takes_forever():
    assert CPU.offload_ms(1) == float("inf")
    assert H200.offload_ms(27 * 10**9) == pytest.approx(500.0)


def test_calibration_is_kept_and_read_again(own_cache):
    assert rates_of("cpu") == CPU
    found = calibrate("cpu")
    assert all(v > 0 for v in (found.copy_gbs, found.floor_us, *found.tflops.values()))
    assert rates_of("cpu") == found
    roofline._measured.clear()  # as in a new process
    assert kept("cpu") == found
    assert rates_of("cpu") == found
    assert calibrate("cpu", refresh=False) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 99, "devices": {"cpu": {}}}',
        '{"version": 1, "devices": {"cpu": {"copy_gbs": "fast"}}}',
        '{"version": 1, "devices": []}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_counts_as_none(own_cache, text):
    own_cache.mkdir()
    (own_cache / calibration.FILE).write_text(text)
    assert kept("cpu") is None
    assert rates_of("cpu") == CPU
    found = calibrate("cpu", refresh=False)
    assert kept("cpu") == found  # and the file is whole again


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_rates_that_cannot_be_count_as_none(own_cache, value):
    entry = {
        "copy_gbs": value,
        "floor_us": 1,
        "host_gbs": 0,
        "source": "",
        "tflops": {"float32": 1},
    }
    store(calibration.FILE, "cpu", entry)
    assert kept("cpu") is None


def test_a_folder_that_cannot_be_written_is_told_once(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(blocked / "below"))
    monkeypatch.setattr("graphopt.cost.kept._told", set())
    with pytest.warns(GraphoptWarning, match="could not be kept"):
        found = calibrate("cpu")
    assert rates_of("cpu") == found  # in this process it holds
    assert calibrate("cpu").name == "cpu"  # and says no more


def test_devices_share_a_file(own_cache):
    store("x.json", "one", {"a": 1})
    store("x.json", "two", {"b": 2})
    data = json.loads((own_cache / "x.json").read_text())
    assert data["devices"] == {"one": {"a": 1}, "two": {"b": 2}}


def test_where_the_files_lie(monkeypatch, tmp_path):
    monkeypatch.delenv("GRAPHOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "graphopt"


@pytest.mark.parametrize("device", ["mps", "abacus", 3.5])
def test_other_devices_are_refused(device):
    with pytest.raises(OptionError):
        calibrate(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_means_an_h200():
    assert rates_of("cuda") == H200
    with pytest.raises(OptionError, match="no GPU to calibrate"):
        calibrate("cuda")


@pytest.mark.gpu
def test_a_gpu_is_calibrated_in_a_moment():
    found = calibrate("cuda")
    assert found.tflops["bfloat16"] > found.tflops["float32"] > 0
    assert found.copy_gbs > 100
    assert found.host_gbs > 1
