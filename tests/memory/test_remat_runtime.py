"""What autograd promises holds for dropped values: freed memory, versions, threads, hooks."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import threading

import pytest
import torch
from remat_models import (
    MODELS,
    case,
    dropping,
    everything,
    same,
    twins,
)
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphopt import remat
from graphopt.emit import Program
from graphopt.graph.facts import tensors_of


class Storages(TorchDispatchMode):
    """Counts ops, and the bytes of storages made inside that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.ops[function._opname] += 1
        given = {t.untyped_storage()._cdata for t in tensors_of([*args])}
        for t in tensors_of(result):
            storage = t.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())


class Chain(nn.Module):
    """Each activation is saved by the next one; the first of them may not be the last to go."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = torch.sin(x * self.w)
        return x.sum()


@functools.cache
def _chain(length: int, choose):
    return twins(lambda: Chain(length), choose)


def chain(length: int = 6, choose=everything):
    """A chain that drops nothing and one that does, without gradients; captured once."""
    pair = _chain(length, choose)
    for module in pair:
        module.zero_grad()
    return pair


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 1024 * 8).view(1024, 8)


def grads(opt: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(opt(values), list(opt.parameters())))


# ------------------------------------------------------------------------------ memory and work


def test_dropped_values_are_freed_in_forward() -> None:
    plain, opt = chain()
    values = x()
    alive = []
    for module in (plain, opt):
        module.capture((values,))
        with Storages() as storages:
            y = module(values)
            alive.append(storages.alive - 4)
        y.backward()
    size = values.nbytes
    assert alive[0] == 11 * size  # of each of the sines its argument, of the products the sine
    assert alive[1] == 0


def test_what_a_recipe_reads_is_held_and_no_more() -> None:
    plain, opt = chain(choose=lambda names: [n for n in names if n != "sin_2"])
    values = x()
    opt.capture((values,))
    with Storages() as storages:
        y = opt(values)
        assert storages.alive - 4 == values.nbytes
    y.backward()
    assert torch.equal(opt.w.grad, grads(plain, values)[0])


def test_a_value_is_computed_once_however_many_want_it() -> None:
    _, opt = chain(3)
    values = x()
    y = opt(values)
    with Storages() as storages:
        y.backward()
    assert storages.ops["sin"] == 2  # not the last
    assert storages.ops["cos"] == 3


def test_backward_frees_a_value_with_its_last_handle() -> None:
    _, opt = chain(8)
    values = x()
    opt.capture((values,))
    alive = []
    with Storages() as storages:
        y = opt(values)
        opt.w.register_hook(lambda g: alive.append(storages.alive))
        y.backward()
        assert storages.alive - 4 <= opt.w.nbytes


def test_every_model_frees_what_autograd_saved_of_its_dropped_values() -> None:
    from graphopt.passes.remat import saved_bytes

    for name in ("conv", "chunks"):
        found = case(name)
        saved = saved_bytes(found.body)
        for names in ([], found.names):
            program = found.program(names)
            with Storages() as storages:
                values = program(found.x)
                alive = storages.alive
            if not names:
                plain = alive
        # what is still there: results, what ops keep for themselves, what recipes read
        lost = sum(size for value, size in saved.items() if value in found.names)
        assert plain - alive >= 0.9 * lost, name
        del values


def test_forward_without_backward_leaves_nothing() -> None:
    opt, values = dropping(MODELS["mlp"][0]()), torch.ones(4, 6)
    opt(values)
    gc.collect()
    gc.disable()
    try:
        with Storages() as storages:
            for _ in range(100):
                opt(values)
            assert storages.alive == 0
    finally:
        gc.enable()


def test_handles_and_scopes_need_no_collector() -> None:
    _, opt = chain(3)
    values = x()[:4]
    opt(values)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(40):
            opt(values).backward()
            opt(values)
        assert len(gc.get_objects()) - before < 40
    finally:
        gc.enable()


def test_long_chains_need_no_deep_stack() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    first = value
    for i in range(3000):
        new = graph.call_function(torch.sin, (value,))
        if i:
            held = [[first]] if i == 1 else []
            graph.call_function(remat.drop, (value, value.name, *held))
        value = new
    graph.output((value,))
    from graphopt.graph import Body

    program = Program(Body(graph, nn.Module(), 1), "chain")
    inputs = torch.ones(2, requires_grad=True)
    program(inputs)[0].sum().backward()
    plain = torch.ones(2, requires_grad=True)
    y = plain
    for _ in range(3000):
        y = torch.sin(y)
    y.sum().backward()
    assert torch.equal(inputs.grad, plain.grad)
    del y
    program(inputs)


# ---------------------------------------------------------------------------------- autograd


def test_backward_twice_and_once_more() -> None:
    plain, opt = chain()
    values = x()
    y = opt(values)
    expected = grads(plain, values)
    for last in (False, False, True):
        found = torch.autograd.grad(y, list(opt.parameters()), retain_graph=not last)
        assert same(found, expected)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_double_backward() -> None:
    for length in (1, 3):
        found = []
        for opt in chain(length):
            values = x().requires_grad_()
            (g,) = torch.autograd.grad(opt(values), values, create_graph=True)
            (g**2).sum().backward()
            found.append([values.grad, opt.w.grad])
        assert same(*found)


def test_two_forwards_before_one_backward() -> None:
    plain, opt = chain()
    one, two = x(), x() + 1
    for module in (plain, opt):
        (module(one) + 2 * module(two)).backward()
    assert torch.equal(plain.w.grad, opt.w.grad)
    a, b = opt(one), opt(two)
    opt.w.grad = None
    b.backward()
    a.backward()
    plain.w.grad = None
    plain(two).backward()
    plain(one).backward()
    assert torch.equal(plain.w.grad, opt.w.grad)


def test_part_of_the_gradients_leaves_nothing_cached() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            shared = torch.sin(torch.sin(x))
            return self.a(shared).sum() + torch.cos(self.b(shared)).sum()

    plain, opt = twins(Two)
    values = x().requires_grad_()
    y, expected = opt(values), plain(values)
    with Storages() as storages:
        found = torch.autograd.grad(y, list(opt.b.parameters()), retain_graph=True)
        assert storages.alive == sum(g.nbytes for g in found)
    assert same(found, torch.autograd.grad(expected, list(plain.b.parameters()), retain_graph=True))
    y.backward()
    expected.backward()
    assert torch.equal(opt.a.weight.grad, plain.a.weight.grad)


def test_saved_tensors_can_be_looked_at() -> None:
    _, opt = chain(2, lambda names: ["sin", "mul", "mul_1"])
    y = opt(x())
    saved = y.grad_fn.next_functions[0][0]._saved_self
    assert torch.equal(saved, torch.sin(x() * opt.w) * opt.w)
    y.backward()


def test_batched_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0, 1, 8))

        def forward(self, x):
            return torch.sin(torch.sin(x) * self.w).view(-1)

    found = []
    for opt in twins(Model):
        values = x()[:1].requires_grad_()
        grad = torch.autograd.grad(opt(values), values, torch.eye(8), is_grads_batched=True)
        found.append(grad)
    assert same(*found)


def test_torch_func_runs_the_source() -> None:
    plain, opt = chain()
    values = x()
    state = dict(opt.named_parameters())

    def loss(module):
        return lambda state: torch.func.functional_call(module, state, (values,))

    found = torch.func.grad(loss(opt))(state)
    assert torch.allclose(found["w"], grads(plain, values)[0])


@pytest.mark.parametrize("what", ["input", "weight", "kept"])
def test_a_write_between_forward_and_backward_raises(what) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            kept = torch.exp(torch.sin(x * self.w))
            return torch.sin(kept * 2).sum(), kept

    opt = dropping(Model())
    values = x()
    y, kept = opt(values)
    with torch.no_grad():
        {"input": values, "weight": opt.w, "kept": kept}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_write_that_no_backward_minds_is_none() -> None:
    _, opt = chain(2)
    values = x()
    y = opt(values)
    y2 = y.detach()
    y2.add_(1)
    y.backward()


def test_backward_under_autocast_computes_as_forward_did() -> None:
    plain, opt = twins(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    )
    values = x()
    y, expected = opt(values).sum(), plain(values).sum()
    with torch.autocast("cpu", torch.bfloat16):
        y.backward()
        expected.backward()
    assert same([p.grad for p in opt.parameters()], [p.grad for p in plain.parameters()])


def test_nothing_is_dropped_without_gradients() -> None:
    _, opt = chain()
    values = x()
    with torch.no_grad():
        opt(values)
        with Storages() as storages:
            opt(values)
    assert not storages.ops["detach"]
    assert not opt.entry.program.recipes


def test_an_exception_in_forward_leaves_no_hooks() -> None:
    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname == "sum":
                raise ValueError("no memory")
            return function(*args, **(kwargs or {}))

    plain, opt = chain()
    values = x()
    opt.capture((values,))
    with pytest.raises(ValueError, match="no memory"), Failing():
        opt(values)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert remat._LOCAL.scope is None
    assert same(grads(opt, values), grads(plain, values))


def test_an_exception_in_backward_can_be_tried_again() -> None:
    plain, opt = chain()
    values = x()
    y = opt(values)
    handle = opt.w.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward(retain_graph=True)
    handle.remove()
    opt.w.grad = None
    y.backward()
    assert torch.equal(opt.w.grad, grads(plain, values)[0])


# ---------------------------------------------------------------------- hooks, threads, copies


def test_the_callers_hooks_have_every_tensor() -> None:
    plain, opt = chain()
    values = x()
    expected = grads(plain, values)
    counts = []
    for module in (plain, opt):
        packed: list[torch.Tensor] = []

        def pack(t, packed=packed):
            packed.append(t)
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(values)
        counts.append(len(packed))
        assert same(torch.autograd.grad(y, [module.w]), expected)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "around",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        torch.autograd.graph.allow_mutation_on_saved_tensors,
    ],
)
def test_inside_other_contexts(around) -> None:
    plain, opt = chain()
    values = x()
    opt.capture((values,))
    with around():
        y = opt(values)
        found = torch.autograd.grad(y, [opt.w])
    assert same(found, grads(plain, values))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around(reentrant) -> None:
    found = []
    for opt in twins(MODELS["mlp"][0]):
        values = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        y = checkpoint(opt, values, use_reentrant=reentrant)
        y.sum().backward()
        found.append([values.grad, *(p.grad for p in opt.parameters())])
    assert same(*found)


def test_optimized_modules_one_after_another_and_inside() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(3, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.inner(x)))

    found = []
    for inner in twins(MODELS["mlp"][0]):
        torch.manual_seed(3)
        outer = Outer(inner)
        values = torch.linspace(-1, 1, 24).view(4, 6)
        for module in (outer, dropping(outer)):
            module.zero_grad()
            (module(values) + inner(values)).sum().backward()
            found.append([p.grad.clone() for p in outer.parameters()])
    assert all(same(found[0], other) for other in found[1:])


def test_threads() -> None:
    plain, opt = chain()
    inputs = [x() + i for i in range(4)]
    expected = [grads(plain, v) for v in inputs]
    grads(opt, inputs[0])
    found: list[list[torch.Tensor]] = [[] for _ in inputs]
    losses = [opt(v) for v in inputs]

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = grads(opt, inputs[i])
        # and one whose forward ran on the other thread
        assert same(torch.autograd.grad(losses[i], [opt.w]), expected[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_two_threads_on_one_graph() -> None:
    plain, opt = chain(20)
    values = x()
    expected = grads(plain, values)
    y = opt(values)
    found: list[bool] = []

    def work() -> None:
        for _ in range(10):
            grad = torch.autograd.grad(y, [opt.w], retain_graph=True)
            found.append(same(grad, expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [True] * 30


def test_a_copy_and_a_pickle_drop_too() -> None:
    opt = dropping(MODELS["mlp"][0]())
    values = torch.linspace(-1, 1, 24).view(4, 6)
    expected = grads_of(opt, values)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert same(grads_of(other, values), expected)
        assert other.entry.program.recipes


def grads_of(opt: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(opt(values).sum(), list(opt.parameters())))


def test_sizes_that_vary() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)

        def forward(self, x):
            y = self.w(torch.sin(x.reshape(x.shape[0] * 2, -1, 8)))
            return torch.cos(y.view(-1, x.shape[0], 8)).mean() * x.shape[0]

    torch.manual_seed(0)
    model = Model()
    opt = dropping(copy.deepcopy(model), dynamic=True)
    for rows in (4, 6, 10):
        values = torch.randn(rows, 2, 8)
        assert same(grads_of(opt, values), grads_of(model, values))
    assert len(opt.recaptures) <= 1
    assert opt.entry.program.recipes


def test_held_weights_are_cast_again() -> None:
    import graphopt

    found = []
    for opt in (
        dropping(MODELS["mlp"][0](), choose, "bf16") for choose in (lambda n: [], everything)
    ):
        with torch.no_grad():
            for i, p in enumerate(opt.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + i / 10)
        values = torch.linspace(-1, 1, 24).view(4, 6)
        with graphopt.hold_weights(opt):
            y = opt(values)
            grads_of(opt, values)
        y.sum().backward()
        found.append([p.grad for p in opt.parameters()])
    assert same(*found)


def test_without_a_scope_a_marker_does_nothing() -> None:
    found = case("mlp")
    program = found.program(found.names)
    state = [ref.read() for ref in program.refs]
    assert same(program.function(state, found.x), found.plain[:1])
    assert remat.drop(torch.ones(2), "nothing") is None
