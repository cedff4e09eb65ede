"""cross_entropy against float64 and eager: modes, sizes, layouts, dtypes, extremes, autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry

G = torch.ops.graphopt
OP = registry()["cross_entropy"]
NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {NONE: "none", MEAN: "mean", SUM: "sum"}
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF = math.inf


def eager(logits, target, weight=None, reduction=MEAN, ignore_index=-100, label_smoothing=0.0):
    """torch's own, over the same rows."""
    return F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), weight, ignore_index=ignore_index,
        reduction=REDUCTIONS[reduction], label_smoothing=label_smoothing,
    )  # fmt: skip


def both(logits, target, *options, grad=None):
    """(ours, gradient, eager's, gradient) on float32 logits."""
    found = []
    for function in (G.cross_entropy, eager):
        x = logits.detach().clone().requires_grad_()
        loss = function(x, target, *options)
        upstream = torch.ones_like(loss) if grad is None else grad.reshape(loss.shape)
        found += [loss.detach().reshape(-1), *torch.autograd.grad(loss, x, upstream)]
    return found


def assert_as_eager(logits, target, *options, grad=None):
    ours, slope, theirs, expected = both(logits, target, *options, grad=grad)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(slope, expected, rtol=2e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(backend, check, index):
    sample = next(itertools.islice(OP.samples(backend.device), index, None))
    sample = Sample(
        (check.leaves(Sample(sample.args[:1])).args[0], *sample.args[1:]), sample.kwargs
    )
    outputs, found, grads = check.run(OP.overload, sample)
    exact = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in sample.args]
    exact[0] = exact[0].detach().requires_grad_()
    kwargs = {k: v for k, v in sample.kwargs.items() if k != "out_dtype"}
    wide = tuple(g.double() for g in grads)
    expected, slopes, _ = check.run(OP.reference, Sample(tuple(exact), kwargs), wide)
    low = max(torch.finfo(t.dtype).eps for t in (*outputs, torch.empty(0)))
    check.near("loss", outputs[0], expected[0], low * 2)
    check.near("gradient", found[0], slopes[0], torch.finfo(found[0].dtype).eps * 4)
    assert found[0].dtype == sample.args[0].dtype
    assert found[0].shape == sample.args[0].shape


@pytest.mark.parametrize("reduction", list(REDUCTIONS))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_as_eager(backend, reduction, weighted, smoothing):
    logits = torch.randn(7, 19, device=backend.device)
    target = torch.tensor([3, 18, -100, 0, 7, -100, 3], device=backend.device)
    weight = torch.rand(19, device=backend.device) if weighted else None
    grad = torch.randn(7 if reduction == NONE else (), device=backend.device)
    assert_as_eager(logits, target, weight, reduction, -100, smoothing, grad=grad)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("cols", [1, 2, 31, 33, 1000, 2049, 8193, 20001])
def test_sizes(triton_backend, rows, cols):
    logits = torch.randn(rows, cols, device=triton_backend.device) * 4
    target = torch.arange(rows, device=triton_backend.device) * 7 % cols
    assert_as_eager(logits, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(backend, check, dtype):
    logits = (torch.randn(6, 50, device=backend.device) * 3).to(dtype).requires_grad_()
    target = torch.arange(6, device=backend.device)
    loss = G.cross_entropy(logits, target)
    assert loss.dtype == dtype
    (slope,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    (truth,) = torch.autograd.grad(expected, exact)
    assert slope.dtype == dtype
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    check.near("loss", loss, expected, eps)
    check.near("gradient", slope, truth, eps)


def test_the_gradient_of_low_precision_is_that_of_float32_rounded_once(backend):
    # In float16: the interpreter truncates to bfloat16.
    logits = (torch.randn(9, 40, device=backend.device) * 3).half()
    target = torch.arange(9, device=backend.device)
    _, wide, _, _ = both(logits.float(), target)
    low = logits.clone().requires_grad_()
    G.cross_entropy(low, target, out_dtype=torch.float32).backward()
    assert torch.equal(low.grad, wide.half())


LAYOUTS = {
    "odd rows": lambda x: x,
    "columns of a wider matrix": lambda x: torch.cat((x, x), -1)[..., :37],
    "misaligned": lambda x: torch.cat((x, x), -1)[..., 1:38],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of each sequence": lambda x: torch.cat((x, x), 1)[:, 1:6],
    "expanded": lambda x: x[:1].expand(4, 5, 37),
    "three strides": lambda x: torch.cat((x, x), 1)[:, ::2].unflatten(0, (2, 2)).transpose(0, 1),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(backend, layout):
    dtype = torch.bfloat16 if layout != "three strides" else torch.float32
    x = LAYOUTS[layout](torch.randn(4, 5, 37, device=backend.device).to(dtype))
    target = torch.arange(x[..., 0].numel(), device=backend.device) % 37
    strided, packed = x.detach().requires_grad_(), x.contiguous().detach().requires_grad_()
    losses = [G.cross_entropy(t, target, None, NONE) for t in (strided, packed)]
    torch.testing.assert_close(*losses, rtol=2e-6, atol=2e-6)
    slopes = [
        torch.autograd.grad(loss, t, torch.ones_like(loss))[0]
        for loss, t in zip(losses, (strided, packed), strict=True)
    ]
    eps = torch.finfo(dtype).eps  # rows are summed in an order that depends on where they begin
    torch.testing.assert_close(*slopes, rtol=4 * eps, atol=1e-6)
    wide = packed.detach().double().flatten(0, -2)
    expected = F.cross_entropy(wide, target, reduction="none")
    torch.testing.assert_close(losses[0].double(), expected, rtol=4 * eps, atol=4 * eps)


def test_a_slice_of_each_sequence_is_read_in_place(triton_backend):
    from graphopt.kernels import _cross_entropy_triton

    x = torch.randn(4, 8, 32, device=triton_backend.device)[:, :-1]
    rows = _cross_entropy_triton._rows_of(x)
    assert rows.tensor is x
    assert (rows.inner, rows.outer, rows.step) == (7, 256, 32)


def test_columns_beyond_the_classes_do_not_count(backend):
    wide = torch.randn(6, 48, device=backend.device)
    wide[:, 41:] = math.nan
    target = torch.arange(6, device=backend.device)
    padded, cut = wide.clone().requires_grad_(), wide[:, :41].clone().requires_grad_()
    a = G.cross_entropy(padded, target, classes=41)
    b = G.cross_entropy(cut, target)
    a.backward()
    b.backward()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    torch.testing.assert_close(padded.grad[:, :41], cut.grad, rtol=1e-5, atol=1e-8)
    assert not padded.grad[:, 41:].any()


EXTREMES = {
    "a masked class": [[-INF, 1.0, 2.0, 3.0]],
    "a masked target": [[1.0, -INF, 2.0, 3.0]],
    "all masked": [[-INF] * 4],
    "infinite": [[INF, 1.0, 2.0, 3.0]],
    "infinite target": [[1.0, INF, 2.0, 3.0]],
    "nan": [[math.nan, 1.0, 2.0, 3.0]],
    "finfo.min masks": [[torch.finfo(torch.float32).min, 1.0, 2.0, 3.0]],
    "finfo.min alone": [[torch.finfo(torch.float32).min] * 4],
    "a common offset": [[30000.5, 30001.0, 30002.0, 30003.0]],
    "far apart": [[-3e4, 3e4, 0.0, 88.0]],
    "one certain": [[0.0, 200.0, 0.0, 0.0]],
}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("extreme", list(EXTREMES))
def test_extremes_as_eager(backend, extreme, smoothing):
    logits = torch.tensor(EXTREMES[extreme], device=backend.device).repeat(2, 1)
    logits[1] = torch.arange(4)
    target = torch.tensor([1, 2], device=backend.device)
    assert_as_eager(logits, target, None, MEAN, -100, smoothing)
    assert_as_eager(logits, torch.tensor([-100, 2], device=backend.device))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", list(REDUCTIONS))
def test_nothing_counts(backend, reduction, weighted, smoothing):
    logits = torch.randn(3, 5, device=backend.device)
    weight = torch.ones(5, device=backend.device) if weighted else None
    target = torch.full((3,), 2, device=backend.device)
    assert_as_eager(logits, target, weight, reduction, 2, smoothing)


def test_weights_of_zero(backend):
    weight = torch.tensor([0.0, 1.0, 0.0], device=backend.device)
    logits = torch.randn(2, 3, device=backend.device)
    assert_as_eager(logits, torch.tensor([0, 1], device=backend.device), weight)
    assert_as_eager(logits, torch.tensor([0, 2], device=backend.device), weight)


@pytest.mark.parametrize("reduction", list(REDUCTIONS))
def test_no_rows(backend, reduction):
    logits = torch.ones(0, 5, device=backend.device)
    assert_as_eager(
        logits, torch.ones(0, dtype=torch.int64, device=backend.device), None, reduction
    )


def test_a_target_that_is_no_class_raises_on_the_cpu():
    for wrong in (4, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            G.cross_entropy(torch.ones(2, 4), torch.tensor([1, wrong]))


def test_a_target_that_is_no_class_poisons_its_row(triton_backend):
    logits = torch.randn(3, 4, device=triton_backend.device, requires_grad=True)
    target = torch.tensor([1, 4, -1], device=triton_backend.device)
    loss = G.cross_entropy(logits, target, None, NONE)
    assert loss.isnan().tolist() == [False, True, True]
    loss.sum().backward()
    assert logits.grad.isnan().any(-1).tolist() == [False, True, True]


def test_bytes_as_targets(backend):
    logits = torch.randn(3, 4, device=backend.device)
    target = torch.tensor([1, 3, 0], device=backend.device)
    assert torch.equal(G.cross_entropy(logits, target.byte()), G.cross_entropy(logits, target))


def test_equal_runs_give_equal_bits(backend):
    logits = torch.randn(9, 300, device=backend.device)
    target = torch.arange(9, device=backend.device)
    first, second = (both(logits, target)[:2] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_call_is_within_rounding_of_float64(data):
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    scale = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    reduction = data.draw(st.sampled_from(list(REDUCTIONS)))
    smoothing = data.draw(st.sampled_from([0.0, 0.1]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(rows, cols) * scale).to(dtype)
    target = torch.randint(cols, (rows,))
    target[torch.rand(rows) < 0.3] = -100
    x, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = (None, reduction, -100, smoothing)
    ours = G.cross_entropy(x, target, *options, out_dtype=torch.float32)
    theirs = eager(exact, target, *options)
    torch.testing.assert_close(
        ours.double().reshape(-1), theirs.reshape(-1), rtol=4e-6, atol=4e-6, equal_nan=True
    )
    (slope,) = torch.autograd.grad(ours, x, torch.ones_like(ours))
    (truth,) = torch.autograd.grad(theirs, exact, torch.ones_like(theirs))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(slope.double(), truth, rtol=eps, atol=2e-6, equal_nan=True)


def test_saved_are_the_logits_and_two_values_a_row(backend):
    logits = torch.randn(6, 40, device=backend.device).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.cross_entropy(logits, torch.arange(6, device=backend.device), out_dtype=torch.float32)
    assert saved[0].data_ptr() == logits.data_ptr()
    assert [t.numel() for t in saved] == [240, 6, 12, 1]


def test_second_derivative_is_refused(backend):
    logits = torch.randn(2, 4, device=backend.device, requires_grad=True)
    loss = G.cross_entropy(logits, torch.tensor([1, 2], device=backend.device))
    (slope,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::cross_entropy"):
        slope.sum().backward()


X, Y = torch.ones(2, 4), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: G.cross_entropy(X, Y[:1]), OptionError, "1 targets"),
        (lambda: G.cross_entropy(X, Y.float()), UnsupportedError, "target of torch.float32"),
        (lambda: G.cross_entropy(X, Y, torch.ones(3)), OptionError, r"weight \[3\]"),
        (lambda: G.cross_entropy(X.long(), Y), UnsupportedError, "torch.int64"),
        (lambda: G.cross_entropy(X, Y, None, 4), OptionError, "reduction 4"),
        (lambda: G.cross_entropy(X, Y, None, 1, -100, 1.5), OptionError, "label_smoothing 1.5"),
        (lambda: G.cross_entropy(X, Y, classes=5), OptionError, "5 classes"),
    ],
)
def test_errors_say_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_class_weights_have_no_gradient():
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="class weights"):
        G.cross_entropy(X.clone().requires_grad_(), Y, weight).backward()


def test_opcheck():
    logits = torch.randn(2, 3, 37, requires_grad=True)
    target = torch.tensor([[1, 2, 3], [4, -100, 6]])
    torch.library.opcheck(OP.overload, (logits, target, None, MEAN), {})


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [32000, 50257, 128256])
@pytest.mark.parametrize("padded", [False, True])
def test_real_size(check, cols, padded):
    logits = torch.randn(256, cols + (7 * 8 - cols) % 8 * padded, device="cuda").bfloat16()
    logits = (logits * 3)[:, :cols].requires_grad_()
    target = torch.randint(cols, (256,), device="cuda")
    target[::5] = -100
    loss = G.cross_entropy(logits, target, out_dtype=torch.float32)
    (slope,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    (truth,) = torch.autograd.grad(expected, exact)
    assert abs(loss.item() - expected.item()) < 1e-6 * expected.item()
    check.near("gradient", slope, truth, torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    logits = torch.randn(1, 50304, device="cuda").bfloat16().repeat(45000, 1).requires_grad_()
    target = torch.full((45000,), 7, device="cuda")
    loss = G.cross_entropy(logits, target, None, NONE, out_dtype=torch.float32)
    assert (loss == loss[0]).all()
    (slope,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert torch.equal(slope[0], slope[-1])
    assert torch.equal(slope[0], slope[43000])


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_graph_capture(smoothing):
    logits = torch.randn(64, 1000, device="cuda", requires_grad=True)
    target = torch.randint(1000, (64,), device="cuda")
    weight = torch.rand(1000, device="cuda")

    def step():
        loss = G.cross_entropy(logits, target, weight, MEAN, -100, smoothing)
        # Detached: the graph of the first step, made on another stream, must not live on.
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
