"""How the norm family behaves under autograd, no_grad, tracing and dropout."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import registry
from graphopt.kernels._philox import keep_mask

G = torch.ops.graphopt
NORMS = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]


def leaves(backend, *shapes):
    return [torch.randn(s, device=backend.device).requires_grad_() for s in shapes]


def test_second_derivative_is_refused_by_name(backend):
    x, weight = leaves(backend, (3, 8), (8,))
    (slope,) = torch.autograd.grad(G.rms_norm(x, weight, 1e-6).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::rms_norm"):
        slope.sum().backward()


def test_create_graph_alone_gives_the_gradient(backend):
    x, weight = leaves(backend, (3, 8), (8,))
    grads = [
        torch.autograd.grad(G.rms_norm(x, weight, 1e-6).sum(), x, create_graph=flag)[0].detach()
        for flag in (False, True)
    ]
    assert torch.equal(*grads)


def test_retained_graph_runs_backward_twice(backend):
    x, residual, weight = leaves(backend, (3, 8), (3, 8), (8,))
    y, total = G.add_rms_norm(x, residual, weight, 1e-6)
    loss = (y * total).sum()
    first = torch.autograd.grad(loss, (x, residual, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, residual, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_two_inputs_are_not_mutated_together(backend):
    x, residual = leaves(backend, (3, 8), (3, 8))
    y, _ = G.add_rms_norm(x, residual, None, 1e-6)
    y.sum().backward()
    kept = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, kept)


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["y only", "sum only"])
def test_one_output_of_two_used(backend, used):
    x, residual, weight, bias = leaves(backend, (3, 8), (3, 8), (8,), (8,))
    outputs = G.add_layer_norm(x, residual, weight, bias, 1e-5)
    torch.stack(
        [o.square().sum() for o, use in zip(outputs, used, strict=True) if use]
    ).sum().backward()
    got = [x.grad, residual.grad]
    x2, residual2 = (t.detach().double().requires_grad_() for t in (x, residual))
    outputs = registry()["add_layer_norm"].reference(
        x2, residual2, weight.detach().double(), bias.detach().double(), 1e-5
    )
    sum(o.square().sum() for o, use in zip(outputs, used, strict=True) if use).backward()
    for ours, theirs in zip(got, (x2.grad, residual2.grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wanted", ["x", "residual", "weight", "bias"])
def test_only_the_wanted_gradient_is_made(backend, wanted):
    names = ("x", "residual", "weight", "bias")
    tensors = dict(zip(names, leaves(backend, (9, 8), (9, 8), (8,), (8,)), strict=True))
    y, total = G.add_layer_norm(*tensors.values(), 1e-5)
    full = torch.autograd.grad((y.sin() + total).sum(), tensors[wanted])[0]
    alone = {n: t if n == wanted else t.detach() for n, t in tensors.items()}
    y, total = G.add_layer_norm(*alone.values(), 1e-5)
    assert torch.equal(torch.autograd.grad((y.sin() + total).sum(), alone[wanted])[0], full)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NORMS)
def test_no_graph_is_recorded_without_gradients(backend, name, mode):
    op = registry()[name]
    sample = next(iter(op.samples(backend.device)))
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in sample.args]
    with mode():
        y = op.overload(*args)
    y = y if isinstance(y, tuple) else (y,)
    assert all(out.grad_fn is None for out in y)
    expected = op.overload(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert all(torch.equal(a, b) for a, b in zip(y, expected, strict=True))


@pytest.mark.parametrize("trained", ["x", "residual", "weight"])
def test_the_sum_requires_a_gradient_only_where_eagers_does(backend, trained):
    names = ("x", "residual", "weight")
    given = dict(zip(names, leaves(backend, (4, 8), (4, 8), (8,)), strict=True))
    given = {n: t if n == trained else t.detach() for n, t in given.items()}
    for y, total in (
        G.add_layer_norm(*given.values(), None, 1e-5),
        G.add_rms_norm(*given.values(), 1e-5),
    ):
        assert total.requires_grad == (trained != "weight")
        assert torch.autograd.grad(y.square().sum(), given[trained])[0].abs().sum() > 0


def test_in_place_change_of_a_saved_input_is_caught(backend):
    (x,) = leaves(backend, (3, 8))
    h = x * 1
    y = G.rms_norm(h, None, 1e-6)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_the_mask(backend, reentrant):
    (x,) = leaves(backend, (5, 16))
    seed = torch.tensor(3, device=backend.device)

    def block(t):
        return G.layer_norm(t, None, None, 1e-5, dropout_p=0.5, seed=seed).square().sum()

    (plain,) = torch.autograd.grad(block(x), x)
    checkpoint(block, x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, plain)


def test_tangents_are_refused_not_lost(backend):
    import torch.autograd.forward_ad as fwd

    x = torch.randn(3, 8, device=backend.device)
    with fwd.dual_level(), pytest.raises(Exception, match=r"jvp|forward"):
        G.rms_norm(fwd.make_dual(x, torch.ones_like(x)), None, 1e-6)


@pytest.mark.parametrize(("cols", "wide"), [(20, False), (1000, False), (200, True)])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_mask_is_the_references_bit_for_bit(triton_backend, request, cols, wide, seed):
    if wide:
        request.getfixturevalue("narrow_tables")
    device = triton_backend.device
    x, ones = torch.zeros(5, cols, device=device), torch.ones(cols, device=device)
    seeds = torch.tensor(seed, device=device)
    options = {"dropout_p": 0.3, "seed": seeds, "site": 11}
    expected = keep_mask(seed, 11, 5, cols, 0.3)
    y = G.layer_norm(x, None, ones, 1e-5, **options)
    assert torch.equal((y != 0).cpu(), expected)
    _, total = G.add_rms_norm(x + 1, x, None, 1e-6, **options)
    assert torch.equal((total != 0).cpu(), expected)
    x = (x + 1).requires_grad_()
    _, total = G.add_rms_norm(x, torch.zeros_like(x), None, 1e-6, **options)
    total.sum().backward()
    assert torch.equal((x.grad != 0).cpu(), expected)


def test_dropout_keeps_the_mean_and_depends_on_seed_and_site(backend):
    x = torch.zeros(200, 256, device=backend.device)
    ones = torch.ones(256, device=backend.device)

    def drop(seed, site):
        seed = torch.tensor(seed, device=backend.device)
        return G.layer_norm(x, None, ones, 1e-5, dropout_p=0.1, seed=seed, site=site)

    y = drop(1, 0)
    # 51200 draws: 5 standard deviations of the mean are 0.0074.
    assert abs(y.mean().item() - 1) < 0.0074
    assert torch.equal(y, drop(1, 0))
    for other in (drop(2, 0), drop(1, 1)):
        both = ((y != 0) & (other != 0)).double().mean().item()
        assert abs(both - 0.81) < 0.01


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: G.layer_norm(x, None, None, 1e-5, dropout_p=0.5), "dropout without a seed"),
        (lambda x: G.layer_norm(x, None, None, 1e-5, activation="relu6"), "unknown activation"),
        (lambda x: G.rms_norm(x, x[0, :4], 1e-5), r"weight \[4\] does not fit x \[2, 8\]"),
        (lambda x: G.add_rms_norm(x, x[:1], None, 1e-5), "differ in shape"),
        (lambda x: G.rms_norm(x, None, 1e-5, dropout_p=1.5, seed=x[0, 0].long()), "probability"),
    ],
)
def test_errors_say_what_is_wrong(backend, call, text):
    with pytest.raises(OptionError, match=text):
        call(torch.ones(2, 8, device=backend.device))


@pytest.mark.parametrize("name", NORMS)
def test_opcheck(name, check):
    op = registry()[name]
    sample = check.leaves(next(iter(op.samples(torch.device("cpu")))))
    torch.library.opcheck(op.overload, sample.args, sample.kwargs)


@pytest.mark.parametrize("name", NORMS)
def test_fake_agrees_with_real(name):
    op = registry()[name]
    for sample in op.samples(torch.device("cpu")):
        real = op.overload(*sample.args, **sample.kwargs)
        to_meta = {
            k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()
        }
        fake = op.overload(
            *(a.to("meta") if isinstance(a, torch.Tensor) else a for a in sample.args), **to_meta
        )
        real, fake = (o if isinstance(o, tuple) else (o,) for o in (real, fake))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
