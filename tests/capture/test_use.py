"""How people use a module: threads, transforms, compilers, generators, several passes at once."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import graphopt
from graphopt.errors import GraphoptWarning
from graphopt.module import GraphoptModule

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


def in_threads(*functions):
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


# ---- threads


def test_first_calls_from_several_threads():
    model = net()
    opt, reference = graphopt.optimize(model), copy.deepcopy(model)

    def calls(rows):
        x = torch.randn(rows, 4)
        for _ in range(5):
            torch.testing.assert_close(opt(x), reference(x))

    in_threads(*[lambda n=n: calls(n) for n in (2, 3, 2, 5, 3, 2)])


def test_threads_with_their_own_grad_mode():
    opt = graphopt.optimize(net())
    x = torch.randn(2, 4)

    def tracked():
        assert all(opt(x).requires_grad for _ in range(20))

    def untracked():
        with torch.no_grad():
            assert not any(opt(x).requires_grad for _ in range(20))

    in_threads(tracked, untracked, tracked, untracked)


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)])
def test_another_thread_runs_the_source_and_draws_during_a_capture(draw):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    opt = GraphoptModule(model)
    done = threading.Event()
    drawn = []

    def work():
        while not done.is_set():
            assert type(model(torch.ones(1, 4))) is torch.Tensor
            drawn.append(draw())

    def capture():
        try:
            opt(torch.ones(2, 4))
        finally:
            done.set()

    in_threads(work, capture)
    values = [float(v) for v in drawn]
    assert len(set(values)) == len(values)  # no generator was set back


# ---- autograd


def test_reentrant_calls():
    model = nn.Linear(4, 4)
    opt = graphopt.optimize(model)
    x = torch.ones(1, 4)
    torch.testing.assert_close(opt(opt(opt(x))), model(model(model(x))))
    plain = opt(x)

    def hook(module, args, result):  # the call inside needs a capture of its own
        return result + opt(torch.cat([x, x]))[:1] if len(args[0]) == 1 else None

    with model.register_forward_hook(hook):
        torch.testing.assert_close(opt(x), 2 * plain)


def test_retain_graph_and_two_forwards_before_a_backward():
    model = net()
    opt = graphopt.optimize(model)
    x = torch.randn(2, 4, requires_grad=True)
    first, second = opt(x).square().sum(), opt(2 * x).sin().sum()
    first.backward(retain_graph=True)
    once = x.grad.clone()
    first.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    second.backward()
    x.grad = None
    model(2 * x).sin().sum().backward()
    got = x.grad.clone()
    x.grad = None
    opt(2 * x).sin().sum().backward()
    torch.testing.assert_close(x.grad, got)


# ---- torch.func


def test_functional_call_takes_other_parameters():
    model = net()
    opt = graphopt.optimize(model, torch.ones(2, 4))
    x = torch.randn(2, 4)
    other = {n: (p * 2).detach().requires_grad_() for n, p in model.named_parameters()}
    want = torch.func.functional_call(model, other, (x,))
    got = torch.func.functional_call(opt, other, (x,))
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    assert all(p.grad is not None for p in other.values())
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(opt(x), model(x))


def functional(model, parameters, x):
    return torch.func.functional_call(model, parameters, (x,)).square().sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, p, x: torch.func.grad(lambda p: functional(m, p, x))(p),
        lambda m, p, x: torch.func.vmap(m)(torch.stack([x, 2 * x])),
        lambda m, p, x: torch.func.jvp(m, (x,), (x,)),
        lambda m, p, x: torch.func.jacrev(m)(x),
        lambda m, p, x: torch.func.vmap(
            torch.func.grad(lambda p, x: functional(m, p, x[None])), (None, 0)
        )(p, x),
    ],
    ids=["grad", "vmap", "jvp", "jacrev", "per-sample"],
)
@pytest.mark.parametrize("captured", [False, True])
def test_transforms_run_the_source_and_say_so(transform, captured):
    model = net()
    opt = GraphoptModule(model)
    x = torch.randn(3, 4)
    if captured:
        opt(x)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.warns(GraphoptWarning, match="unoptimized: torch.func"):
        got = transform(opt, parameters, x)
    torch.testing.assert_close(got, transform(model, parameters, x))


def test_forward_mode_differentiation():
    model = net()
    opt = graphopt.optimize(model)
    x = torch.randn(2, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        want, got = (forward_ad.unpack_dual(m(dual)).tangent for m in (model, opt))
    torch.testing.assert_close(got, want)


# ---- torch.compile


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_compile_runs_the_optimized_graph(captured, wrapped):
    model = net()
    opt = graphopt.optimize(model)
    x = torch.randn(2, 4, requires_grad=True)
    if captured:
        opt(x)
    compiled = torch.compile((lambda x: opt(x * 2) + 1) if wrapped else opt, backend="eager")
    want = model(x * 2) + 1 if wrapped else model(x)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), want)
    assert len(opt._store.entries()) >= 1
    compiled(x).sum().backward()
    assert x.grad is not None


def test_torch_compile_of_a_whole_graph_says_why_not():
    opt = graphopt.optimize(net())
    compiled = torch.compile(opt, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="graphopt: an optimized module runs a graph of its own"):
        compiled(torch.ones(1, 4))


# ---- generators and switches


def dropping():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))


def test_a_restored_generator_draws_the_same():
    opt = graphopt.optimize(dropping())
    x = torch.randn(4, 8)
    opt(x)
    state = torch.get_rng_state()
    drawn = [opt(x) for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.set_rng_state(state)
    assert all(torch.equal(opt(x), y) for y in drawn)


def test_a_capture_draws_nothing():
    opt = graphopt.optimize(dropping())
    state, numbers = torch.get_rng_state(), random.getstate()
    opt.capture((torch.ones(2, 8),))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers


def test_deterministic_algorithms():
    model = net()
    opt = graphopt.optimize(model)
    x = torch.randn(2, 4, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(opt(x), model(x))
        opt(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_default_device_is_a_part_of_the_key():
    class Creates(nn.Module):
        def forward(self, x):
            return torch.zeros(2)

    opt = GraphoptModule(Creates())
    x = torch.ones(2)
    assert opt(x).device.type == "cpu"
    with torch.device("meta"):
        assert opt(x).device.type == "meta"
    assert opt(x).device.type == "cpu"
