"""linear_cross_entropy: the numbers of the unchunked loss, and never more than a chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, cross_entropy, registry
from graphopt.kernels.linear_cross_entropy import chunks

G = torch.ops.graphopt
OP = registry()["linear_cross_entropy"]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))
NONE, MEAN = 0, 1


def whole(x, weight, bias, target, class_weight=None, *options, classes=None, **_):
    logits = F.linear(x, weight, bias)
    return G.cross_entropy(logits, target, class_weight, *options, classes=classes)


def without_class_weights(check, sample):
    sample = check.leaves(sample)
    args = [a.detach() if i == 4 and a is not None else a for i, a in enumerate(sample.args)]
    kwargs = {k: v.detach() if k == "logits" else v for k, v in sample.kwargs.items()}
    return Sample(tuple(args), kwargs)


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode_is_the_unchunked_loss(backend, check, index):
    sample = next(itertools.islice(OP.samples(backend.device), index, None))
    sample = without_class_weights(check, sample)
    outputs, found, grads = check.run(OP.overload, sample)
    exact = without_class_weights(check, Sample(check.leaves(sample, torch.float64).args))
    kwargs = {k: v for k, v in sample.kwargs.items() if k == "classes"}
    expected, slopes, _ = check.run(whole, Sample(exact.args, kwargs), [g.double() for g in grads])
    eps = torch.finfo(sample.args[0].dtype).eps * 2
    check.near("loss", outputs[0], expected[0], eps)
    for a, b in zip(found, slopes, strict=True):
        check.near("gradient", a, b, eps)
        assert a.shape == b.shape
        assert a.dtype == sample.args[0].dtype


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_the_wanted_gradient(backend, wanted):
    values = [torch.randn(s, device=backend.device) for s in ((9, 4), (6, 4), (6,))]
    target = torch.arange(9, device=backend.device) % 6

    def gradients(needs):
        leaves = [v.clone().requires_grad_(i in needs) for i, v in enumerate(values)]
        G.linear_cross_entropy(*leaves, target, chunk_bytes=48).backward()
        return [leaf.grad for leaf in leaves]

    every, alone = gradients((0, 1, 2)), gradients((wanted,))
    assert [g is None for g in alone] == [i != wanted for i in range(3)]
    assert torch.equal(alone[wanted], every[wanted])


@pytest.mark.parametrize("reduction", [NONE, MEAN, 2])
def test_no_rows(reduction):
    x, weight = torch.ones(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    none = torch.ones(0, dtype=torch.int64)
    loss = G.linear_cross_entropy(x, weight, None, none, None, reduction)
    assert torch.equal(loss.isnan(), whole(x, weight, None, none, None, reduction).isnan())
    loss.sum().backward()
    assert x.grad.shape == (0, 4)
    assert not weight.grad.any()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an op gives."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.found = max(self.found, *sizes, 0)
        return result


def test_no_tensor_is_larger_than_a_chunk():
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    with Largest() as largest:
        loss = G.linear_cross_entropy(
            x, weight, None, torch.arange(64) % 50, chunk_bytes=10 * 50 * 4
        )
        loss.backward()
    assert largest.found == 10 * 50


@pytest.mark.parametrize(("classes", "over"), [(48, True), (50, False)])
@pytest.mark.parametrize("reduction", [NONE, MEAN])
def test_a_gradient_is_written_over_its_logits(
    triton_backend, monkeypatch, classes, over, reduction
):
    """Where rows lie as the gradient's do, and to the bit what is written elsewhere."""
    device = triton_backend.device
    values = [torch.randn(s, device=device) for s in ((20, 8), (classes, 8))]
    target = torch.arange(20, device=device) % classes
    target[3] = -100

    def gradients():
        leaves = [v.clone().requires_grad_() for v in values]
        args = (None, target, None, reduction, -100, 0.1)
        G.linear_cross_entropy(*leaves, *args, chunk_bytes=7 * classes * 4).sum().backward()
        return [leaf.grad for leaf in leaves]

    seen, invoke = [], cross_entropy.invoke
    monkeypatch.setattr(cross_entropy, "invoke", lambda op, *a: seen.append(op) or invoke(op, *a))
    found = gradients()
    assert (cross_entropy._BACKWARD_OVER in seen) == over
    assert (cross_entropy._BACKWARD in seen) != over
    beside = lambda *a: invoke(cross_entropy._BACKWARD, *a)  # noqa: E731
    monkeypatch.setattr(cross_entropy, "gradient_over", beside)
    assert all(map(torch.equal, found, gradients()))


def test_logits_that_are_there_are_not_saved():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    logits = F.linear(x, weight)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        loss = G.linear_cross_entropy(x, weight, None, torch.arange(6), logits=logits)
    assert max(t.numel() for t in saved) == weight.numel()
    assert torch.equal(loss, G.cross_entropy(logits, torch.arange(6)))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func._schema.name in ("aten::linear", "aten::mm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


def _operands(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 8), torch.randn(20, 8), torch.randn(20) if bias else None
    operands = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    return operands, torch.arange(9) % 5


@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, 3), (torch.float16, 4)])
def test_logits_are_computed_once_but_in_float16(dtype, products):
    operands, target = _operands(dtype, bias=False)
    with Products() as seen:
        G.linear_cross_entropy(*operands, target, chunk_bytes=2**20).backward()
    assert seen.found == products


@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0])
def test_the_losss_own_gradient_is_a_factor(factor):
    operands, target = _operands()
    loss = G.linear_cross_entropy(*operands, target, chunk_bytes=4 * 20 * 4)
    found = torch.autograd.grad(loss * factor, operands)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*operands), target) * factor, operands)
    torch.testing.assert_close(found, expected)


def test_the_losss_gradient_is_not_rounded_to_the_inputs_precision():
    """1 + 2^-10 is 1 in bfloat16; times 129 it makes a difference of one unit in the last place."""
    x = torch.full((1, 1), 1.0).bfloat16().requires_grad_()
    weight = torch.tensor([[0.0], [2.0 * 129 / 128]]).bfloat16()
    loss = G.linear_cross_entropy(x, weight, None, torch.tensor([0]), out_dtype=torch.float32)
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x, torch.tensor(1 + 2.0**-8 + 2.0**-9))
    expected = (once.float() * (1 + 2.0**-8 + 2.0**-9)).bfloat16()
    assert torch.equal(again, expected)


def test_a_second_backward_has_the_same_gradients():
    operands, target = _operands()
    loss = G.linear_cross_entropy(*operands, target, chunk_bytes=4 * 20 * 4)
    first = [g.clone() for g in torch.autograd.grad(loss * 2, operands, retain_graph=True)]
    torch.testing.assert_close(list(torch.autograd.grad(loss * 2, operands)), first)


def test_a_step_between_forward_and_backward_is_seen():
    operands, target = _operands()
    loss = G.linear_cross_entropy(*operands, target)
    with torch.no_grad():
        operands[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_cover_the_rows_once():
    assert chunks(10, 4, 12) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert chunks(5, 100, 1) == [(i, i + 1) for i in range(5)]
    assert chunks(300, 4, 4 * 200) == [(0, 128), (128, 256), (256, 300)]
    assert chunks(0, 4, 12) == []


def test_the_weights_gradient_is_added_in_float32(backend):
    """256 chunks of one row each: in bfloat16 the sum would stop growing."""
    x = torch.ones(256, 4, device=backend.device, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(256, dtype=torch.int64, device=backend.device)
    G.linear_cross_entropy(x, weight, None, target, None, 2, chunk_bytes=1).backward()
    assert weight.grad[:, 0].tolist() == [-128.0, 128.0]


X, W, Y = torch.ones(2, 4), torch.ones(3, 4), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: G.linear_cross_entropy(X, W.t(), None, Y), OptionError, r"weight \[4, 3\]"),
        (lambda: G.linear_cross_entropy(X, W, None, Y[:1]), OptionError, "1 targets"),
        (lambda: G.linear_cross_entropy(X, W, None, Y, chunk_bytes=0), OptionError, "0 bytes"),
        (lambda: G.linear_cross_entropy(X.long(), W, None, Y), UnsupportedError, "torch.int64"),
        (lambda: G.linear_cross_entropy(X, W, None, Y + 1), IndexError, "Target 3 is out"),
    ],
)
def test_errors_say_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_size(check, dtype):
    x = torch.randn(1024, 512, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(32001, 512, device="cuda") / 8).to(dtype).requires_grad_()
    target = torch.randint(32001, (1024,), device="cuda")
    target[::7] = -100
    args = (x, weight, None, target)
    found = torch.autograd.grad(
        G.linear_cross_entropy(*args, out_dtype=torch.float32, chunk_bytes=2**25), (x, weight)
    )
    expected = torch.autograd.grad(whole(*args), (x, weight))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = torch.autograd.grad(whole(*exact, None, target), exact)
    for ours, theirs, right in zip(found, expected, truth, strict=True):
        errors = [float((t.double() - right).norm() / right.norm()) for t in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6


@pytest.mark.gpu
def test_memory_is_that_of_chunks():
    x = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32000, (8192,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    G.linear_cross_entropy(x, weight, None, target, chunk_bytes=2**25).backward()
    sums = 2 * 4 * weight.numel() + 2 * 2 * (x.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**25 + sums
