"""dropout and dropout_add: the mask bit for bit, statistics, float64, layouts, autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry
from graphopt.kernels._philox import keep_mask

G = torch.ops.graphopt
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAMPLES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name in ("dropout", "dropout_add")
    for i, _ in enumerate(registry()[name].samples(torch.device("cpu")))
]


def seed_of(value, backend):
    return torch.tensor(value, dtype=torch.int64, device=backend.device)


def three(backend, rows, cols, dtype=torch.float32):
    x, residual = (torch.randn(rows, cols, device=backend.device).to(dtype) for _ in range(2))
    return x, residual, torch.randn(cols, device=backend.device).to(dtype)


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_every_mode(backend, check, name, index):
    sample = next(itertools.islice(registry()[name].samples(backend.device), index, None))
    check.against_float64(registry()[name], sample, factor=2.0)


@pytest.mark.parametrize("site", [0, 1, 77])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("cols", [1, 8, 13, 2056])
def test_mask_is_the_references_bit_for_bit(backend, cols, seed, site):
    x = torch.ones(3, cols, device=backend.device, requires_grad=True)
    y = G.dropout(x, 0.3, seed_of(seed, backend), site)
    expected = keep_mask(seed, site, 3, cols, 0.3)
    assert torch.equal((y != 0).cpu(), expected)
    y.sum().backward()
    assert torch.equal((x.grad != 0).cpu(), expected)


@pytest.mark.parametrize("cols", [13, 2056])
def test_mask_of_dropout_add_is_the_same(backend, cols):
    x, _, bias = three(backend, 9, cols)
    x = torch.ones_like(x).requires_grad_()
    zero = torch.zeros_like(x)
    seed = seed_of(5, backend)
    y = G.dropout_add(x, zero, 0.4, seed, 2, bias=torch.zeros_like(bias))
    assert torch.equal(y, G.dropout(x.detach(), 0.4, seed, 2))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("layout", ["transposed", "half of a chunk", "expanded"])
def test_mask_follows_places_not_memory(backend, layout):
    x = {
        "transposed": torch.ones(24, 6).t(),
        "half of a chunk": torch.ones(6, 48)[:, 24:],
        "expanded": torch.ones(1, 24).expand(6, 24),
    }[layout].to(backend.device)
    seed = seed_of(11, backend)
    assert torch.equal(G.dropout(x, 0.5, seed, 4), G.dropout(x.contiguous(), 0.5, seed, 4))


def test_statistics(backend):
    y = G.dropout(torch.ones(256, 400, device=backend.device), 0.2, seed_of(42, backend), 0)
    kept = (y != 0).double()
    draws = kept.numel()
    assert abs(kept.mean().item() - 0.8) < 5 * math.sqrt(0.16 / draws)
    assert abs(y.double().mean().item() - 1) < 5 * math.sqrt(0.25 / draws)
    # No neighbour, along rows or down columns, says anything about the next value.
    for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        assert abs((a * b).mean().item() - 0.64) < 5 * math.sqrt(0.2304 / a.numel())


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (2**32, 0)])
def test_seeds_and_sites_are_independent(backend, other):
    x = torch.ones(100, 200, device=backend.device)
    a = G.dropout(x, 0.5, seed_of(0, backend), 0) != 0
    b = G.dropout(x, 0.5, seed_of(other[0], backend), other[1]) != 0
    assert abs((a & b).double().mean().item() - 0.25) < 5 * math.sqrt(0.1875 / a.numel())


def test_kept_values_are_scaled_so_that_the_mean_is_exact(backend):
    y = G.dropout(torch.ones(8, 64, device=backend.device), 0.1, seed_of(3, backend), 0)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(65536 / (65536 - 6554)).item()}


@pytest.mark.parametrize("p", [0.0, 1e-7])
def test_nothing_drops_at_zero(backend, p):
    x, residual, bias = three(backend, 5, 24)
    seed = seed_of(0, backend)
    y = G.dropout(x, p, seed, 0)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    torch.testing.assert_close(
        G.dropout_add(x, residual, p, seed, 0, bias=bias), residual + (x + bias)
    )


def test_everything_drops_at_one(backend):
    x, residual, bias = (t.requires_grad_() for t in three(backend, 5, 24))
    seed = seed_of(0, backend)
    assert not G.dropout(x, 1.0, seed, 0).any()
    y = G.dropout_add(x, residual, 1.0, seed, 0, bias=bias)
    assert torch.equal(y, residual)
    y.sum().backward()
    assert not x.grad.any()
    assert not bias.grad.any()
    assert residual.grad.eq(1).all()


def test_a_dropped_infinity_is_nan_as_in_eager(backend):
    x = torch.full((16,), math.inf, device=backend.device)
    keep = keep_mask(0, 0, 1, 16, 0.5)[0]
    y = G.dropout(x, 0.5, seed_of(0, backend), 0).cpu()
    assert torch.equal(y.isnan(), ~keep)
    assert y[keep].isinf().all()


@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("cols", [1, 7, 17, 1024, 2500])
def test_sizes(triton_backend, check, rows, cols):
    x, residual, bias = three(triton_backend, rows, cols)
    sample = Sample((x, residual, 0.25, seed_of(1, triton_backend), 3), {"bias": bias})
    check.against_float64(registry()["dropout_add"], sample, factor=2.0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4, 16)])
@pytest.mark.parametrize("name", ["dropout", "dropout_add"])
def test_ranks(backend, check, name, shape):
    x, residual = (torch.randn(shape, device=backend.device) for _ in range(2))
    inputs = (x,) if name == "dropout" else (x, residual)
    check.against_float64(registry()[name], Sample((*inputs, 0.3, seed_of(2, backend), 0)))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0,), (2, 0, 8)])
def test_empty(backend, shape):
    x, residual = (torch.ones(shape, device=backend.device, requires_grad=True) for _ in range(2))
    bias = torch.ones(shape[-1], device=backend.device, requires_grad=True)
    seed = seed_of(0, backend)
    y = G.dropout(G.dropout_add(x, residual, 0.5, seed, 0, bias=bias), 0.5, seed, 1)
    y.sum().backward()
    assert x.grad.shape == residual.grad.shape == y.shape == shape
    assert bias.grad.tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize(("dtype", "other"), list(itertools.product(DTYPES, DTYPES)))
def test_dtype_mix(backend, check, dtype, other):
    x = torch.randn(5, 24, device=backend.device).to(dtype)
    residual, bias = (torch.randn(s, device=backend.device).to(other) for s in ((5, 24), (24,)))
    args = (x, residual, 0.3, seed_of(2, backend), 0)
    assert G.dropout_add(*args, bias=bias).dtype == torch.promote_types(dtype, other)
    check.against_float64(registry()["dropout_add"], Sample(args, {"bias": bias}), factor=2.0)


LAYOUTS = {
    "rows of a wider matrix": lambda r, c: torch.randn(r, 3 * c)[:, c : 2 * c],
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "one row expanded": lambda r, c: torch.randn(1, c).expand(r, c),
    "all one value": lambda r, c: torch.randn(()).expand(r, c),
    "misaligned": lambda r, c: torch.randn(r * c + 1)[1:].view(r, c),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_layouts_of_inputs_and_gradients(triton_backend, check, layout, with_bias):
    x, residual, dy = (LAYOUTS[layout](6, 24).to(triton_backend.device) for _ in range(3))
    bias = torch.randn(48, device=triton_backend.device)[::2] if with_bias else None
    sample = Sample((x, residual, 0.3, seed_of(1, triton_backend), 3), {"bias": bias})
    check.against_float64(registry()["dropout_add"], sample, (dy,), factor=2.0)


def test_equal_runs_give_equal_bits(triton_backend):
    x, residual, bias = (t.requires_grad_() for t in three(triton_backend, 300, 24))
    dy = torch.randn_like(x)
    first, second = (
        torch.autograd.grad(
            G.dropout_add(x, residual, 0.1, seed_of(1, triton_backend), 0, bias=bias),
            (x, residual, bias),
            dy,
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", ["x", "residual", "bias"])
def test_only_the_wanted_gradient(backend, wanted):
    tensors = dict(zip(("x", "residual", "bias"), three(backend, 9, 8), strict=True))

    def loss(tensors):
        x, residual, bias = tensors.values()
        return G.dropout_add(x, residual, 0.3, seed_of(1, backend), 0, bias=bias).sin().sum()

    both = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    loss(both).backward()
    alone = {n: t.clone().requires_grad_(n == wanted) for n, t in tensors.items()}
    loss(alone).backward()
    assert torch.equal(alone[wanted].grad, both[wanted].grad)
    assert all(t.grad is None for n, t in alone.items() if n != wanted)


def test_only_the_seed_is_saved(backend):
    x, residual, bias = (t.requires_grad_() for t in three(backend, 4, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.dropout_add(x, residual, 0.3, seed_of(1, backend), 0, bias=bias)
        G.dropout(x, 0.3, seed_of(1, backend), 1)
    assert [t.numel() for t in saved] == [1, 1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_the_mask(backend, reentrant):
    x, residual, _ = (t.requires_grad_() for t in three(backend, 5, 16))

    def block(x, residual):
        return G.dropout_add(x, residual, 0.5, seed_of(3, backend), 0).square().sum()

    plain = torch.autograd.grad(block(x, residual), (x, residual))
    checkpoint(block, x, residual, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(residual.grad, plain[1])


def test_gradients_do_not_share_memory(backend):
    x, residual, _ = (t.requires_grad_() for t in three(backend, 3, 8))
    G.dropout_add(x, residual, 0.0, seed_of(0, backend), 0).sum().backward()
    x.grad.zero_()
    assert residual.grad.eq(1).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_gradients(backend, mode):
    x, residual, _ = (t.requires_grad_() for t in three(backend, 3, 8))
    seed = seed_of(0, backend)
    with mode():
        y, z = G.dropout(x, 0.5, seed, 0), G.dropout_add(x, residual, 0.5, seed, 0)
    assert y.grad_fn is None
    assert z.grad_fn is None
    assert torch.equal(y, G.dropout(x, 0.5, seed, 0))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, s: G.dropout(x, 0.5, s, 0),
        lambda x, s: G.dropout_add(x, x.detach(), 0.5, s, 0),
    ],
)
def test_second_derivative_is_refused(backend, call):
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    y = call(x, seed_of(0, backend))
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::dropout"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, s: G.dropout(x, 1.5, s, 0), OptionError, "probability 1.5"),
        (lambda x, s: G.dropout(x.int(), 0.5, s, 0), UnsupportedError, "torch.int32"),
        (lambda x, s: G.dropout_add(x, x[:1], 0.5, s, 0), OptionError, "differ"),
        (lambda x, s: G.dropout_add(x, x, 0.5, s, 0, bias=x[0, 1:]), OptionError, "bias"),
    ],
)
def test_errors_say_what_is_wrong(backend, call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 8, device=backend.device), seed_of(0, backend))


@pytest.mark.parametrize("name", ["dropout", "dropout_add"])
def test_opcheck(check, name):
    op = registry()[name]
    sample = check.leaves(list(op.samples(torch.device("cpu")))[1])
    torch.library.opcheck(op.overload, sample.args, sample.kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [4096, 5000])
def test_real_size(check, cols):
    x, residual = (torch.randn(4096, cols, device="cuda").bfloat16() for _ in range(2))
    bias = torch.randn(cols, device="cuda")
    sample = Sample(
        (x, residual, 0.1, torch.tensor(9, device="cuda"), 5),
        {"bias": bias, "out_dtype": torch.bfloat16},
    )
    check.against_float64(registry()["dropout_add"], sample, factor=2.0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows = 2**31 // 4096 + 8
    seed = torch.tensor(9, device="cuda")
    y = G.dropout(torch.ones(rows, 4096, device="cuda", dtype=torch.bfloat16), 0.5, seed, 1)
    expected = keep_mask(9, 1, 8 * 2, 4096, 0.5)
    assert torch.equal((y[:16] != 0).cpu(), expected)
    assert abs((y[-64:] != 0).float().mean().item() - 0.5) < 0.01
    # The last rows are not the first ones again: the counter's high word is in use.
    assert not torch.equal(y[-8:] != 0, y[:8] != 0)
