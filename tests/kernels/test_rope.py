"""rope against float64: layouts, tables, widths, dtypes, extremes, autograd, launch plans."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry

G = torch.ops.graphopt
OP = registry()["rope"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def tables(device, shape, dtype=torch.float32):
    """cos and sin of unrelated angles, so that swapped values cannot go unseen."""
    angle = torch.randn(2, *shape, device=device)
    return angle[0].cos().to(dtype), angle[1].sin().to(dtype)


LAYOUTS = {
    "heads apart": lambda make, b, h, s, d: make(b, s, h, d).transpose(1, 2),
    "contiguous": lambda make, b, h, s, d: make(b, h, s, d),
    "rows first": lambda make, b, h, s, d: make(s, b, h, d).permute(1, 2, 0, 3),
    "part of packed qkv": lambda make, b, h, s, d: make(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "sliced width": lambda make, b, h, s, d: make(b, s, h, d + 6)[..., :d].transpose(1, 2),
    "one head expanded": lambda make, b, h, s, d: make(b, 1, s, d).expand(b, h, s, d),
    "misaligned": lambda make, b, h, s, d: make(b * s * h * d + 1)[1:].view(b, h, s, d),
    "width apart": lambda make, b, h, s, d: make(b, h, d, s).mT,
}


def laid_out(layout, shape, device, dtype=torch.float32):
    """Random [B, H, S, D] that lies in memory as the layout says."""
    return LAYOUTS[layout](lambda *sizes: torch.randn(sizes, device=device).to(dtype), *shape)


def heads_apart(shape, device, dtype=torch.float32):
    """As the attention of most models sees a projection's [B, S, H * D]."""
    return laid_out("heads apart", shape, device, dtype)


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(backend, check, index):
    check.against_float64(OP, next(itertools.islice(OP.samples(backend.device), index, None)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_halves_are_the_eager_spelling(backend, check, dtype):
    x = heads_apart((2, 3, 5, 8), backend.device, dtype).requires_grad_()
    cos, sin = tables(backend.device, (2, 1, 5, 8), dtype)
    y, expected = G.rope(x, cos, sin), x * cos + rotate_half(x) * sin
    assert (y.dtype, y.stride()) == (expected.dtype, expected.stride())
    grad = torch.randn_like(y)
    (ours,), (theirs,) = (torch.autograd.grad(t, x, grad) for t in (y, expected))
    assert ours.dtype == theirs.dtype
    for a, b in ((y, expected), (ours, theirs)):
        check.near("eager", a, b, torch.finfo(dtype).eps)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation(backend, interleaved):
    x = torch.randn(4, 8, device=backend.device)
    angle = torch.randn(4, 4, device=backend.device)
    full = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    y = G.rope(x, full.cos(), full.sin(), interleaved)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(G.rope(y, full.cos(), -full.sin(), interleaved), x)
    first, second = (x[..., 0], x[..., 1]) if interleaved else (x[..., 0], x[..., 4])
    angle = angle[..., 0]
    torch.testing.assert_close(y[..., 0], first * angle.cos() - second * angle.sin())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (2, 4, 37, 12), (1, 20, 1, 64)])
def test_layouts(triton_backend, check, layout, interleaved, shape):
    x = laid_out(layout, shape, triton_backend.device)
    cos, sin = tables(triton_backend.device, shape[2:])
    assert G.rope(x, cos, sin, interleaved).stride() == torch.empty_like(x).stride()
    check.against_float64(OP, Sample((x, cos, sin, interleaved)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_any_layout(triton_backend, check, layout):
    x = heads_apart((2, 3, 5, 8), triton_backend.device)
    grad = laid_out(layout, (2, 3, 5, 8), triton_backend.device)
    sample = Sample((x, *tables(triton_backend.device, (5, 8))))
    check.against_float64(OP, sample, (grad,))


def test_gradient_has_the_layout_of_x(backend):
    x = heads_apart((2, 3, 5, 8), backend.device).requires_grad_()
    y = G.rope(x, *tables(backend.device, (5, 8)))
    (dx,) = torch.autograd.grad(y, x, torch.randn(2, 3, 5, 8, device=backend.device))
    assert dx.stride() == x.stride()


TABLES = {
    "rows": (5, 8),
    "rows of rank 4": (1, 1, 5, 8),
    "a batch's own": (2, 1, 5, 8),
    "a head's own": (3, 1, 8),
    "every row's own": (2, 3, 5, 8),
    "a batch's and a head's own": (2, 3, 1, 8),
    "one row": (8,),
    "one value a row": (5, 1),
    "one value": (),
}


@pytest.mark.parametrize("layout", ["heads apart", "contiguous"])
@pytest.mark.parametrize("table", TABLES)
def test_tables(triton_backend, check, table, layout):
    x = laid_out(layout, (2, 3, 5, 8), triton_backend.device)
    check.against_float64(OP, Sample((x, *tables(triton_backend.device, TABLES[table]))))


def test_cos_and_sin_of_different_shapes(triton_backend, check):
    device = triton_backend.device
    x = heads_apart((2, 3, 5, 8), device)
    cos, sin = torch.randn(5, 8, device=device), torch.randn(2, 3, 1, 8, device=device)
    check.against_float64(OP, Sample((x, cos, sin)))


def test_tables_of_any_strides(triton_backend, check):
    device = triton_backend.device
    x = heads_apart((2, 3, 5, 8), device)
    cos = torch.randn(5, 32, device=device)[:, 8:16]
    sin = torch.randn(8, 5, device=device).t()
    check.against_float64(OP, Sample((x, cos, sin)))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [2, 6, 16, 80, 96, 256, 512, 514])
def test_widths(triton_backend, check, width, interleaved):
    x = heads_apart((1, 3, 7, width), triton_backend.device)
    check.against_float64(
        OP, Sample((x, *tables(triton_backend.device, (7, width)), interleaved)), factor=2.0
    )


@pytest.mark.parametrize("shape", [(8,), (7, 8), (3, 7, 8), (2, 3, 2, 7, 8), (2, 2, 2, 2, 7, 8)])
def test_ranks(backend, check, shape):
    x = torch.randn(shape, device=backend.device)
    check.against_float64(OP, Sample((x, *tables(backend.device, shape[-2:]))))


def test_more_dimensions_than_the_kernel_has(triton_backend, check):
    x = torch.randn(2, 3, 2, 3, 8, device=triton_backend.device).permute(3, 1, 2, 0, 4)
    check.against_float64(OP, Sample((x, *tables(triton_backend.device, (3, 1, 2, 8)))))


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_empty(backend, shape):
    x = torch.ones(shape, device=backend.device, requires_grad=True)
    G.rope(x, *tables(backend.device, shape[2:])).sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize(("x_dtype", "table_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtype_mix(backend, check, x_dtype, table_dtype):
    x = heads_apart((2, 3, 5, 8), backend.device, x_dtype)
    cos, sin = tables(backend.device, (5, 8), table_dtype)
    assert G.rope(x, cos, sin).dtype == torch.promote_types(x_dtype, table_dtype)
    check.against_float64(OP, Sample((x, cos, sin)))


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype_is_one_rounding(backend, out_dtype):
    x = heads_apart((2, 3, 5, 8), backend.device, torch.bfloat16)
    cos, sin = tables(backend.device, (5, 8))
    y = G.rope(x, cos, sin, out_dtype=out_dtype)
    assert y.stride() == x.stride()
    if backend.interpreted and out_dtype == torch.bfloat16:
        pytest.skip("the interpreter's cast to bfloat16 truncates")
    assert torch.equal(y, G.rope(x, cos, sin).to(out_dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extremes_as_eager(backend, dtype, interleaved):
    values = [0.0, -0.0, 1.0, -3e38, math.inf, -math.inf, math.nan]
    pairs = torch.tensor(list(itertools.product(values, values)), dtype=dtype)
    x = (pairs if interleaved else pairs.t().reshape(1, -1)).to(backend.device)
    cos, sin = (torch.full_like(x, v) for v in (0.0, 1.0))
    y = G.rope(x, cos, sin, interleaved)
    turned = rotate_pairs(x) if interleaved else rotate_half(x)
    torch.testing.assert_close(y, x * cos + turned * sin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:])
def test_only_the_wanted_gradients(backend, wanted):
    def slopes(wanted):
        torch.manual_seed(1)
        x = heads_apart((2, 3, 5, 8), backend.device).detach()
        both = [x, *tables(backend.device, (5, 8))]
        for tensor, want in zip(both, wanted, strict=True):
            tensor.requires_grad_(want)
        G.rope(*both).sin().sum().backward()
        return [t.grad for t in both]

    for want, some, every in zip(wanted, slopes(wanted), slopes((True,) * 3), strict=True):
        assert torch.equal(some, every) if want else some is None


def test_saved_are_the_tables_alone(backend):
    x = heads_apart((2, 3, 5, 8), backend.device).requires_grad_()
    cos, sin = tables(backend.device, (5, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.rope(x, cos, sin)
    assert [t.data_ptr() for t in saved] == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_gradients(backend, mode):
    x = heads_apart((2, 3, 5, 8), backend.device).requires_grad_()
    cos, sin = tables(backend.device, (5, 8))
    with mode():
        y = G.rope(x, cos, sin)
    assert y.grad_fn is None
    assert torch.equal(y, G.rope(x, cos, sin))


def test_second_derivative_is_refused(backend):
    x = torch.randn(2, 8, device=backend.device, requires_grad=True)
    y = G.rope(x, *tables(backend.device, (8,)))
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::rope"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: G.rope(x[:, :3], x[:, :3], x[:, :3]), OptionError, r"\(2, 3\)"),
        (lambda x: G.rope(x[0, 0], x, x), OptionError, r"last dimension of \(\)"),
        (lambda x: G.rope(x, x[:, :4], x), OptionError, r"\(2, 8\), \(2, 4\) and \(2, 8\)"),
        (lambda x: G.rope(x.long(), x.long(), x.long()), UnsupportedError, "torch.int64"),
    ],
)
def test_errors_say_what_is_wrong(backend, call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 8, device=backend.device))


def test_opcheck():
    sample = next(iter(OP.samples(torch.device("cpu"))))
    x, cos, sin = sample.args[:3]
    torch.library.opcheck(OP.overload, (x.requires_grad_(), cos, sin), {"out_dtype": x.dtype})


def test_opcheck_of_learned_tables(check):
    sample = check.leaves(next(iter(OP.samples(torch.device("cpu")))))
    torch.library.opcheck(OP.overload, sample.args, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_have_the_real_strides(layout):
    x = laid_out(layout, (2, 3, 5, 8), "cpu")
    cos, sin = tables(x.device, (5, 8))
    y = G.rope(x, cos, sin)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, cos, sin)]
        fake = G.rope(fakes[0].requires_grad_(), *fakes[1:])
        fake.sum().backward()
    assert (fake.shape, fake.stride()) == (y.shape, y.stride())
    assert fakes[0].grad.shape == x.shape


@pytest.mark.parametrize("layout", ["heads apart", "contiguous", "part of packed qkv"])
def test_symbolic_shapes_with_a_transposed_view(layout):
    def step(x, cos, sin):
        y = G.rope(x, cos, sin)
        return y, *torch.autograd.grad(y.sin().sum(), x)

    x = laid_out(layout, (2, 3, 5, 8), "cpu").requires_grad_()
    symbolic = make_fx(step, tracing_mode="symbolic")(x, *tables(x.device, (5, 8)))
    x, (cos, sin) = laid_out(layout, (3, 4, 7, 10), "cpu"), tables(x.device, (7, 10))
    x.requires_grad_()
    for ours, theirs in zip(symbolic(x, cos, sin), step(x, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


# Launch plans -----------------------------------------------------------------------------------


def plan_of(x, cos, sin):
    launch = pytest.importorskip("graphopt.kernels._rope_triton")
    y = torch.empty_like(x)
    return launch.plan(*((tuple(t.shape), t.stride()) for t in (x, cos, sin, y)))


@pytest.mark.parametrize("batch_has_its_own", [True, False])
def test_heads_of_a_tile_share_the_tables(batch_has_its_own):
    x = torch.empty(8, 2048, 16, 128, device="meta").transpose(1, 2)
    table = torch.empty(8 if batch_has_its_own else 1, 1, 2048, 128, device="meta")
    cut = plan_of(x, table, table)
    assert cut.sizes == ((1, 8 * 2048, 16) if batch_has_its_own else (8, 2048, 16))
    assert (cut.shared(1), cut.shared(2)) == (False, True)
    assert (cut.tile_b, cut.tile_c) == (2, 16)


def test_batch_and_heads_of_contiguous_memory_are_one_dimension():
    x, table = torch.empty(8, 16, 2048, 128, device="meta"), torch.empty(2048, 128, device="meta")
    cut = plan_of(x, table, table)
    assert cut.sizes == (1, 128, 2048)
    assert (cut.tile_b, cut.tile_c) == (8, 4)


@pytest.mark.parametrize(("heads", "tile"), [(1, 1), (6, 8), (12, 4), (14, 16), (32, 16)])
def test_heads_are_cut_with_little_waste(heads, tile):
    x = torch.empty(2, 64, heads, 128, device="meta").transpose(1, 2)
    table = torch.empty(64, 128, device="meta")
    cut = plan_of(x, table, table)
    assert cut.tile_c == tile if heads > 1 else cut.tile_b * cut.tile_c == 32


@pytest.mark.parametrize("layout", ["heads apart", "contiguous", "part of packed qkv"])
def test_served_layouts_never_reach_the_reference(triton_backend, monkeypatch, layout):
    from graphopt.kernels import rope

    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(rope, "rope_reference", refuse)
    monkeypatch.setattr(rope, "_backward_reference", refuse)
    x = laid_out(layout, (2, 3, 5, 8), triton_backend.device).requires_grad_()
    G.rope(x, *tables(triton_backend.device, (5, 8))).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads apart", "contiguous", "part of packed qkv"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(2, 16, 2048, 128), (2, 12, 1023, 80), (3, 7, 513, 256)])
def test_real_sizes(check, layout, interleaved, shape):
    device = torch.device("cuda")
    x = laid_out(layout, shape, device, torch.bfloat16)
    cos, sin = tables(device, shape[2:])
    sample = Sample((x, cos, sin, interleaved), {"out_dtype": torch.bfloat16})
    exact = Sample((x, cos, sin, interleaved))
    y = OP.overload(*sample.args, **sample.kwargs)
    check.near("y", y, OP.reference(*(t.double() for t in exact.args[:3]), interleaved), 2**-8)
    grad = torch.randn_like(y)
    leaf = x.detach().requires_grad_()
    wide = x.detach().double().requires_grad_()
    (ours,) = torch.autograd.grad(OP.overload(leaf, *sample.args[1:], **sample.kwargs), leaf, grad)
    expected = OP.reference(wide, cos.double(), sin.double(), interleaved)
    (theirs,) = torch.autograd.grad(expected, wide, grad.double())
    assert ours.stride() == torch.empty_like(x).stride()
    check.near("dx", ours, theirs, 2**-8)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    device = torch.device("cuda")
    heads, rows, width = 16, 2**31 // (16 * 128) + 3, 128
    x = torch.zeros(1, rows, heads, width, device=device, dtype=torch.bfloat16).transpose(1, 2)
    x[:, :, -3:].normal_()
    cos, sin = tables(device, (3, width), torch.bfloat16)
    table = [torch.zeros(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2)]
    table[0][-3:], table[1][-3:] = cos, sin
    y = G.rope(x, *table)
    assert torch.equal(y[:, :, -3:], G.rope(x[:, :, -3:].clone(), cos, sin))
    assert not y[:, :, :-3].any()
