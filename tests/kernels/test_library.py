"""Imports, the registry, launch helpers and the random bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphopt.kernels
from graphopt.errors import OptionError
from graphopt.kernels import _launch, _philox, registry

ROOT = Path(__file__).resolve().parents[2]


def test_import_needs_neither_triton_nor_a_gpu(tmp_path):
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, graphopt.kernels\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(torch.ops.graphopt.rms_norm(torch.ones(2, 4), None, 0.0).sum().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "8.0", done.stderr


def test_plain_import_of_the_folder_says_how_to_import():
    if not (ROOT / "kernels" / "__init__.py").exists():
        pytest.skip("the tests run apart from the source tree")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "import graphopt.kernels" in done.stderr


def test_every_record_is_whole():
    assert registry(), "no operators"
    for name, op in registry().items():
        assert op.overload is getattr(torch.ops.graphopt, name).default
        samples = list(op.samples(torch.device("cpu")))
        assert samples, f"{name} has no samples"
        cost = op.cost(*samples[0].args, **samples[0].kwargs)
        assert cost.bytes > 0


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered already"):
        graphopt.kernels._op.register(registry()["draw_seed"])


def test_layer_norm_cost_is_each_byte_once():
    x, w = torch.ones(4, 8), torch.ones(8)
    cost = registry()["layer_norm"].cost(x, w, w, 1e-5)
    assert (cost.bytes_read, cost.bytes_written) == (4 * 8 * 4 + 2 * 32, 4 * 8 * 4 + 2 * 4 * 4)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_row_view_sees_the_same_values(shape, order, halve):
    size = torch.Size(shape)
    base = torch.arange(size.numel() * 2 ** len(shape)).reshape([2 * n for n in shape])
    for dim, half in enumerate(halve[: len(shape)]):
        base = base[(slice(None),) * dim + (slice(0, None, 2) if half else slice(0, shape[dim]),)]
    tensor = base.permute([i for i in order if i < len(shape)])
    rows = _launch.row_view(tensor)
    seen = rows.tensor.as_strided(
        (rows.rows, rows.cols), (rows.stride, 1), rows.tensor.storage_offset()
    )
    assert torch.equal(seen, tensor.reshape(-1, tensor.shape[-1]))


def test_row_view_of_a_scalar_and_of_broadcast_rows():
    assert _launch.row_view(torch.ones(())).rows == 1
    assert _launch.row_view(torch.ones(5).expand(2, 3, 5)).stride == 0


def test_philox_known_answers():
    # Random123's kat_vectors, philox4x32, 7 rounds: counter and key zero. Site 0, row 0, seed 0.
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    bits = _philox.random_bits(torch.tensor(0), 0, 1, 8, torch.device("cpu"))[0].tolist()
    assert bits == [half for w in words for half in (w & 0xFFFF, w >> 16)]


def test_row_bits_do_not_depend_on_the_number_of_rows():
    few, many = (_philox.keep_mask(5, 2, rows, 13, 0.5) for rows in (3, 9))
    assert torch.equal(few, many[:3])


@pytest.mark.parametrize(
    ("p", "threshold", "scale"), [(0.0, 0, 1.0), (1e-6, 0, 1.0), (0.5, 32768, 2.0), (1.0, 65536, 0)]
)
def test_threshold_and_scale(p, threshold, scale):
    assert _philox.threshold(p) == threshold
    assert _philox.scale(p) == scale


def test_probability_out_of_range():
    with pytest.raises(OptionError, match="probability"):
        _philox.threshold(-0.1)


def test_draw_seed_repeats_with_the_generator():
    torch.manual_seed(1)
    first = [torch.ops.graphopt.draw_seed("cpu").item() for _ in range(2)]
    torch.manual_seed(1)
    second = [torch.ops.graphopt.draw_seed("cpu").item() for _ in range(2)]
    assert first == second
    assert first[0] != first[1]


def test_draw_seed_is_traced_as_random():
    assert torch.Tag.nondeterministic_seeded in torch.ops.graphopt.draw_seed.default.tags
