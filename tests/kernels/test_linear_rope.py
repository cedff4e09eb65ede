"""linear_rope against linear, split and rope: values, gradients, layout, what is kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry

G = torch.ops.graphopt
OP = registry()["linear_rope"]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))
TABLES = (3, 4)
"""Positions of cos and sin among the arguments."""


def leaves(sample: Sample, dtype: torch.dtype | None = None) -> list:
    """The arguments, all tensors but the tables as leaves that want gradients."""
    made = []
    for i, value in enumerate(sample.args):
        if isinstance(value, torch.Tensor):
            value = value.detach().to(dtype or value.dtype, copy=True)
            value.requires_grad_(i not in TABLES)
        made.append(value)
    return made


def separate(x, weight, bias, cos, sin, widths, interleaved=False):
    """The three projections one by one, as a model spells them."""
    biases = [None] * 3 if bias is None else bias.split(widths)
    q, k, v = (F.linear(x, w, b) for w, b in zip(weight.split(widths), biases, strict=True))
    q, k = (t.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for t in (q, k))
    return G.rope(q, cos, sin, interleaved), G.rope(k, cos, sin, interleaved), v


def step(function, args, grads=None):
    outputs = function(*args)
    grads = grads or [torch.randn_like(o) for o in outputs]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    given = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return outputs, torch.autograd.grad(outputs, wanted, given), grads


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(backend, check, index):
    sample = next(itertools.islice(OP.samples(backend.device), index, None))
    outputs, found, grads = step(OP.overload, leaves(sample))
    expected, slopes, _ = step(separate, leaves(sample, torch.float64), grads)
    eps = max(torch.finfo(t.dtype).eps for t in outputs)
    for i, pair in enumerate(zip((*outputs, *found), (*expected, *slopes), strict=True)):
        check.near(f"tensor {i}", *pair, 4 * eps)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (16, 4)])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_heads(triton_backend, check, heads, width):
    device = triton_backend.device
    x = torch.randn(2, 3, 10, device=device)
    widths = [heads[0] * width, heads[1] * width, 7]
    weight = torch.randn(sum(widths), 10, device=device)
    angle = torch.randn(2, 3, width, device=device)
    sample = Sample((x, weight, None, angle[0].cos(), angle[1].sin(), widths))
    outputs, found, grads = step(OP.overload, leaves(sample))
    expected, slopes, _ = step(separate, leaves(sample, torch.float64), grads)
    for i, pair in enumerate(zip((*outputs, *found), (*expected, *slopes), strict=True)):
        check.near(f"tensor {i}", *pair, 4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("with_bias", [False, True])
def test_masters_get_the_gradient_in_their_own_dtype(backend, with_bias):
    x, weight, bias, cos, sin, widths = next(iter(OP.samples(backend.device))).args
    low, given = (
        x.bfloat16().requires_grad_(),
        [w.clone().requires_grad_() for w in weight.split(widths)],
    )
    biases = [b.clone().requires_grad_() for b in bias.split(widths)] if with_bias else []
    held = bias.bfloat16() if with_bias else None
    parts = OP.overload(low, weight.bfloat16(), held, cos, sin, widths, False, given, biases)
    grads = [torch.randn_like(p) for p in parts]
    found = torch.autograd.grad(parts, [low, *given, *biases], grads)
    exact = [t.detach().double().requires_grad_() for t in (low, weight, bias)]
    wanted = separate(
        exact[0], exact[1], exact[2] if with_bias else None, cos.double(), sin.double(), widths
    )
    leaves = exact if with_bias else exact[:2]
    dx, *slopes = torch.autograd.grad(wanted, leaves, [g.double() for g in grads])
    for a, b in zip(found, (dx, *(p for s in slopes for p in s.split(widths))), strict=True):
        assert a.dtype == (torch.bfloat16 if a is found[0] else torch.float32)
        assert a.is_contiguous()
        assert (a.double() - b).norm() < 0.02 * b.norm()


def test_results_are_parts_of_one_buffer(backend):
    sample = next(iter(OP.samples(backend.device)))
    q, k, v = OP.overload(*sample.args)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert (q.stride(), k.stride(), v.stride()) == ((100, 4, 20, 1), (100, 4, 20, 1), (100, 20, 1))
    assert [t.storage_offset() for t in (q, k, v)] == [0, 8, 12]


def test_a_part_without_a_gradient(backend):
    sample = next(iter(OP.samples(backend.device)))
    args, alone = leaves(sample), leaves(sample)
    OP.overload(*args)[1].sin().sum().backward()
    separate(*alone)[1].sin().sum().backward()
    torch.testing.assert_close(args[1].grad, alone[1].grad, rtol=1e-5, atol=1e-5)


def test_gradients_of_any_layout(backend):
    sample = next(iter(OP.samples(backend.device)))
    args, alone = leaves(sample), leaves(sample)
    for function, given in ((OP.overload, args), (separate, alone)):
        q, k, v = function(*given)
        (q.mT.contiguous().mT.sin().sum() + k.sum() + v.cumsum(1).sum()).backward()
    for a, b in zip(args[:3], alone[:3], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_saved_are_x_weight_and_tables(backend):
    args = leaves(next(iter(OP.samples(backend.device))))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        OP.overload(*args)
    wanted = [args[0], args[1], args[3], args[4]]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in wanted]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_the_wanted_gradients(backend, frozen):
    args = leaves(next(iter(OP.samples(backend.device))))
    args[frozen].requires_grad_(False)
    sum(t.sin().sum() for t in OP.overload(*args)).backward()
    assert [t.grad is None for t in args[:3]] == [i == frozen for i in range(3)]


def test_two_backwards_of_one_forward_add_up(backend):
    args = leaves(next(iter(OP.samples(backend.device))))
    loss = sum(t.sin().sum() for t in OP.overload(*args))
    loss.backward(retain_graph=True)
    once = args[1].grad.clone()
    loss.backward()
    assert torch.equal(args[1].grad, 2 * once)


def test_no_rows(backend):
    sample = next(iter(OP.samples(backend.device)))
    args = leaves(Sample((sample.args[0][:0], *sample.args[1:])))
    sum(t.sum() for t in OP.overload(*args)).backward()
    assert not args[1].grad.any()


def test_errors_say_what_is_wrong(backend):
    x, weight, bias, cos, sin, widths = next(iter(OP.samples(backend.device))).args
    for args, error, text in (
        ((x[0], weight, bias, cos, sin, widths), OptionError, r"x is \[B, S, K\]"),
        ((x, weight, bias, cos, sin, [8, 8, 8]), OptionError, r"widths \[8, 8, 8\]"),
        ((x, weight, bias, cos, sin, [10, 6, 4]), OptionError, "heads of as many columns"),
        ((x, weight.half(), bias, cos, sin, widths), UnsupportedError, "float16"),
        ((x.requires_grad_(), weight, bias, cos.clone().requires_grad_(), sin, widths),
         UnsupportedError, "a gradient for cos or sin"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            OP.overload(*args)


def test_fake_tensors_tell_what_comes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = leaves(next(iter(OP.samples(torch.device("cpu")))))
    real = OP.overload(*args)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        seen = OP.overload(*fake)
        (grad,) = torch.autograd.grad([t.sum() for t in seen], fake[1])
    assert [(t.shape, t.stride()) for t in seen] == [(t.shape, t.stride()) for t in real]
    assert grad.shape == args[1].shape


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
def test_real_size(check, interleaved):
    x, weight, bias, cos, sin, widths = OP.example(1024, 2048, torch.bfloat16, "cuda").args
    for given in (widths, [2048, 512, 512]):
        sample = Sample((x, weight[: sum(given)], bias, cos, sin, given, interleaved))
        outputs, found, grads = step(OP.overload, leaves(sample))
        expected, slopes, _ = step(separate, leaves(sample, torch.float64), grads)
        for i, pair in enumerate(zip((*outputs, *found), (*expected, *slopes), strict=True)):
            check.near(f"tensor {i}", *pair, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
def test_tiles_smaller_than_the_threads():
    """Turned in place, no thread may write what another still has to read."""
    for shape, widths in (((1, 1, 16), [2, 2, 2]), ((1, 3, 16), [8, 8, 8]), ((2, 5, 16), [4] * 3)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(sum(widths), 16, device="cuda", dtype=torch.bfloat16)
        angle = torch.randn(2, shape[1], min(widths), device="cuda")
        args = (x, weight, None, angle[0].cos(), angle[1].sin(), widths)
        for _ in range(50):
            for a, b in zip(OP.overload(*args), separate(*args), strict=True):
                torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-2, atol=2e-2)
