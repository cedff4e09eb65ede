"""A gradient that is written over its operand, where that was computed again for it alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from remat_models import Case, case, droppable, dropped, dropping, everything, same, twins
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphopt.bench.trace import peak_allocated, record
from graphopt.graph.text import python_code
from graphopt.kernels import activation, glu
from graphopt.memory.facts import measure
from graphopt.memory.oracle import predict
from graphopt.memory.problem import Problem
from graphopt.memory.simulate import Timeline, Value, simulate
from graphopt.remat import ModifiedError, is_marker


class Gated(nn.Module):
    """Two gated units, the gate and the other factor by one product, or by two; or activations."""

    def __init__(self, kind: str = "packed", width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        inside = width if kind == "packed" else 2 * width
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(inside, width) for _ in range(2))

    @property
    def operands(self) -> int:
        """How many values gradients may be written over."""
        return 4 if self.kind == "apart" else 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            if self.kind == "activation":
                x = x + down(F.gelu(up(x)))
                continue
            a, b = up(x).chunk(2, -1) if self.kind == "packed" else (gate(x), up(x))
            x = x + down(F.silu(a) * b)
        return x


@functools.cache
def _pair(kind: str):
    return twins(lambda: Gated(kind), everything)


@pytest.fixture(params=["packed", "apart", "activation"])
def pair(request):
    """A module that drops nothing and one that drops all it may, captured; no gradients yet."""
    for module in _pair(request.param):
        module.zero_grad()
    return _pair(request.param)


@pytest.fixture
def written(monkeypatch) -> list[torch.Tensor]:
    """The gradients that were written into memory that was there."""
    found: list[torch.Tensor] = []
    invoke = glu.invoke

    def seen(overload, *args, **kwargs):
        if overload is glu._BACKWARD_OUT:
            found.append(args[4])
        if overload is activation._BIAS_ACT_OVER:
            found.append(args[1])
        return invoke(overload, *args, **kwargs)

    for family in (glu, activation):
        monkeypatch.setattr(family, "invoke", seen)
    return found


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 5 * 8).view(5, 8).requires_grad_()


def grads(module: nn.Module, **options) -> list[torch.Tensor]:
    values = x()
    wanted = [values, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(module(values).square().sum(), wanted, allow_unused=True, **options)
    return [g.detach().clone() for g in found if g is not None]


def test_gradients_are_equal_and_written_over(pair, written) -> None:
    plain, opt = pair
    wanted = grads(plain)
    assert not written
    assert same(grads(opt), wanted)
    assert len(written) == 2


def test_the_graph_says_so(pair) -> None:
    plain, opt = pair
    grads(opt)
    markers = [n for n in opt.body.graph.nodes if is_marker(n)]
    over = [n for n in markers if n.kwargs.get("overwrite")]
    readers = {u.target._opname for n in over for u in n.args[0].users if not is_marker(u)}
    assert readers <= {"glu", "glu_packed", "bias_act"}
    assert len(over) == plain.operands
    assert python_code(opt.body).count("its gradient written over it") == len(over)


def test_backward_again_computes_anew(pair, written) -> None:
    plain, opt = pair
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    leaves = [values, *opt.parameters()]
    for keep in (True, True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True)
        assert same([g for g in found if g is not None], wanted)
    assert len(written) == 6


def test_not_where_gradients_are_recorded(pair, written) -> None:
    plain, opt = pair
    assert same(grads(opt, create_graph=True), grads(plain, create_graph=True))
    assert not written


def test_two_forwards_before_a_backward(pair, written) -> None:
    for module in pair:
        (module(x()).sum() + module(2 * x()).square().sum()).backward()
    plain, opt = ([p.grad for p in m.parameters() if p.grad is not None] for m in pair)
    assert same(opt, plain)
    assert len(written) == 4


def test_a_copy(pair, written) -> None:
    plain, opt = pair
    other = copy.deepcopy(opt)
    loss = opt(x()).square().sum()
    assert same(grads(other), grads(plain))
    loss.backward()
    assert same([p.grad for p in opt.parameters() if p.grad is not None], grads(plain)[1:])


def _gated(result: torch.Tensor):
    """The node of autograd of the last gated unit before a result."""
    waiting = [result.grad_fn]
    for node in waiting:
        if "Fused" in node.name():
            return node
        waiting += [n for n, _ in node.next_functions if n is not None]
    raise AssertionError("no fused operator")


@pytest.mark.parametrize("when", ["before", "in a hook"])
def test_who_looks_at_what_is_saved_keeps_it(pair, written, when) -> None:
    plain, opt = pair
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    node = _gated(loss)
    held: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def look(*_) -> None:
        held.extend(t for t in node.saved_tensors if t is not None)
        copies.extend(t.clone() for t in held)

    if when == "before":
        look()
    else:
        node.register_prehook(look)
    leaves = [values, *opt.parameters()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert same([g for g in found if g is not None], wanted)
    assert held
    assert same(held, copies)


def test_who_holds_every_tensor_keeps_it(pair) -> None:
    class Holder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for tensor in args:
                if isinstance(tensor, torch.Tensor):
                    self.held.append((tensor, tensor.clone()))
            return function(*args, **(kwargs or {}))

    plain, opt = pair
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    with Holder() as holder:
        found = torch.autograd.grad(loss, [values, *opt.parameters()], allow_unused=True)
    assert same([g for g in found if g is not None], wanted)
    assert all(torch.equal(*pair) for pair in holder.held)


def test_gradients_that_hooks_hold_stay(pair) -> None:
    found = []
    for module in pair:
        held: list[torch.Tensor] = []
        loss = module(x()).square().sum()
        node = _gated(loss)
        node.register_hook(
            lambda given, _, held=held: held.extend(g for g in given if g is not None)
        )
        loss.backward()
        found.append(held)
    assert found[0]
    assert same(*found)


def test_batched_gradients(pair, written) -> None:
    found = []
    for module in pair:
        values = x()
        y = module(values)
        sent = torch.stack([torch.ones_like(y), torch.linspace(0, 1, y.numel()).view_as(y)])
        try:
            found.append(torch.autograd.grad(y, values, sent, is_grads_batched=True)[0])
        except RuntimeError as error:  # as without: an op without a rule for batches
            found.append(str(error)[:40])
    assert not written
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        assert torch.allclose(*found)


def test_torch_func(pair) -> None:
    states = [dict(m.named_parameters()) for m in pair]
    values = x().detach()

    def loss(module, parameters):
        return torch.func.functional_call(module, parameters, (values,)).square().sum()

    found = [
        torch.func.grad(functools.partial(loss, m))(s) for m, s in zip(pair, states, strict=True)
    ]
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu", "hooks"])
def test_hooks_of_the_caller(pair, around) -> None:
    plain, opt = pair
    wanted = grads(plain)

    def run(values: torch.Tensor) -> torch.Tensor:
        if around == "checkpoint":
            return checkpoint(opt, values, use_reentrant=False)
        if around == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return opt(values)
        # numpy arrays: memory that torch counts no holders of
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().numpy(), torch.from_numpy
        ):
            return opt(values)

    values = x()
    loss = run(values).square().sum()
    for keep in (True, False):
        found = torch.autograd.grad(
            loss, [values, *opt.parameters()], retain_graph=keep, allow_unused=True
        )
        assert same([g for g in found if g is not None], wanted)


class Twice(nn.Module):
    """The unit's operand is read once more, before it or behind it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before
        self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        early = wide.exp().sum() if self.before else 0.0
        gate, value = wide.chunk(2, -1)
        y = self.down(F.silu(gate) * value)
        return y + early if self.before else y + wide.cos().sum()


@pytest.mark.parametrize("before", [True, False])
def test_an_operand_that_others_read(before, written) -> None:
    plain, opt = twins(lambda: Twice(before), everything)
    assert same(grads(opt), grads(plain))
    # what reads it first in forward asks for it last in backward
    assert len(written) == (0 if before else 1)


def _but_operands(names: list[str]) -> list[str]:
    return [n for n in names if "linear" not in n]


@functools.cache
def _keeping(kind: str):
    return twins(lambda: Gated(kind), _but_operands)


@pytest.fixture(params=["packed", "apart", "activation"])
def keeping(request):
    """A module that drops nothing, and one that drops all but what gradients are written over."""
    for module in _keeping(request.param):
        module.zero_grad()
    return _keeping(request.param)


def test_what_is_kept_is_written_over_too(keeping, written) -> None:
    plain, opt = keeping
    assert same(grads(opt), grads(plain))
    assert len(written) == 2
    assert python_code(opt.body).count("remat.spend(") == plain.operands


def test_what_is_kept_and_asked_for_again_is_not(keeping, written) -> None:
    plain, opt = keeping
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    leaves = [values, *opt.parameters()]
    for keep in (True, True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True)
        assert same([g for g in found if g is not None], wanted)
        assert len(written) == (0 if keep else 2)


def _sums(names: list[str]) -> list[str]:
    return [n for n in names if n.startswith("add")]


def test_what_nothing_else_holds_is_kept_for_a_backward_to_come(written) -> None:
    plain, opt = twins(Gated, _sums)
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    leaves = [values, *opt.parameters()]
    for keep in (True, True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True)
        assert same([g for g in found if g is not None], wanted)
        assert len(written) == (0 if keep else 2)


def test_what_others_hold_stays_autograds(keeping, written) -> None:
    _, opt = keeping
    loss = opt(x()).square().sum()
    node = _gated(loss)
    held: list[torch.Tensor] = []
    again: list[torch.Tensor] = []
    node.register_prehook(lambda _: held.extend(t for t in node.saved_tensors if t is not None))
    node.register_hook(lambda *_: again.extend(t for t in node.saved_tensors if t is not None))
    loss.backward()
    assert len(written) == 1
    assert held
    assert same(again, held)


def test_what_is_kept_and_nothing_is_dropped_is_not(written) -> None:
    plain, _ = _keeping("packed")
    grads(plain)
    assert not written


@pytest.mark.parametrize("when", ["before", "in a hook", "after"])
def test_who_looks_at_what_is_kept(keeping, written, when) -> None:
    plain, opt = keeping
    wanted = grads(plain)
    values = x()
    loss = opt(values).square().sum()
    node = _gated(loss)
    held: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def look(*_) -> None:
        if when == "after":
            with pytest.raises(ModifiedError, match="saved for backward is gone"):
                node.saved_tensors  # noqa: B018
            return
        held.extend(t for t in node.saved_tensors if t is not None)
        copies.extend(t.clone() for t in held)

    if when == "before":
        look()
    elif when == "in a hook":
        node.register_prehook(look)
    else:
        node.register_hook(look)
    found = torch.autograd.grad(loss, [values, *opt.parameters()], allow_unused=True)
    assert same([g for g in found if g is not None], wanted)
    assert same(held, copies)
    assert len(written) == (2 if when == "after" else 1)


def test_a_write_to_what_is_kept_raises(keeping) -> None:
    _, opt = keeping
    loss = opt(x()).square().sum()
    kept = next(t for t in _gated(loss).saved_tensors if t is not None)
    kept.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_batched_gradients_of_what_is_kept(keeping, written) -> None:
    found = []
    for module in keeping:
        values = x()
        y = module(values)
        sent = torch.stack([torch.ones_like(y), torch.linspace(0, 1, y.numel()).view_as(y)])
        found.append(torch.autograd.grad(y, values, sent, is_grads_batched=True)[0])
    assert torch.equal(*found)
    assert not written


def test_a_value_that_lay_in_host_memory(written) -> None:
    given = case("llama")
    wide = [
        n.args[0].name
        for n in given.body.graph.nodes
        if n.target is torch.ops.graphopt.glu_packed.default
    ] or [
        a.name
        for n in given.body.graph.nodes
        if n.target is torch.ops.graphopt.glu.default
        for a in n.args[:2]
    ]
    assert wide
    assert same(given.step([], offload=wide), given.plain)
    assert written


# --------------------------------------------------------------------------------- predicted


def test_the_replay_knows(pair) -> None:
    """On a GPU's count, where no reference takes memory inside, the replay is exact."""
    plain, _ = pair
    grads(plain)
    body = plain.body
    options = {"device": "cuda", "loss_fn": lambda y: y.square().sum()}
    facts = measure(body, **options)
    assert facts.peak_bytes == predict(body, **options).peak_bytes
    problem = Problem.of(body, facts)
    place = {v.name: i for i, v in enumerate(problem.timeline.values)}
    every = frozenset(place[n] for n in droppable(body))
    found = predict(dropped(body.copy(), droppable(body)), **options)
    # cuBLASLt's workspace, taken where backward's thread adds its first bias, no value brings
    assert found.peak_bytes - simulate(problem.timeline, every).peak in (0, 2**20)
    spared = [v for v in problem.timeline.values if v.spare]
    assert len(spared) == plain.operands
    assert all(v.spare == v.bytes for v in spared)


def test_a_step_is_lower_where_the_gradient_is_written_over() -> None:
    values = (Value("a", 8, 8, 0, 1, 3, (3,), spare=6),)
    line = Timeline((0, 8, 8, 8), (8, 12, 12, 16), values)
    assert simulate(line, (), levels=True).levels == (8, 12, 12, 16)
    assert simulate(line, {0}, levels=True).levels == (8, 12, 4, 10)
    other = Value("b", 1, 1, 0, 1, 3, (2,))
    line = dataclasses.replace(line, values=(*values, other))
    assert simulate(line, {1}, levels=True).levels == (8, 12, 12, 9)
    other = dataclasses.replace(other, unpacks=(3,), reads=(0,))
    line = dataclasses.replace(line, values=(*values, other))
    assert simulate(line, {1}, levels=True).levels == (8, 12, 11, 16)  # held for b


class Wide(nn.Module):
    """The highest steps are those of the unit and of the product behind it, as in a llama."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        y = F.silu(gate) * value
        return torch.ops.graphopt.linear_wide(y, self.down * 2, None, [self.down])


@pytest.mark.parametrize("some", [["linear"], ["glu_packed_default"], []])
def test_the_replay_knows_what_is_let_go_of_on_the_way(some) -> None:
    given = Case.of(Wide(), (torch.randn(999, 8),))
    names = [n for n in given.names if n in some or not some]
    assert names
    options = {"device": "cuda", "loss_fn": lambda y: y.square().sum()}
    timeline = Problem.of(given.body, measure(given.body, **options)).timeline
    place = {v.name: i for i, v in enumerate(timeline.values)}
    found = predict(dropped(given.body.copy(), names), **options)
    assert simulate(timeline, [place[n] for n in names]).peak == found.peak_bytes


@pytest.mark.parametrize("kind", ["packed", "apart", "activation"])
def test_a_real_step_on_the_cpu_takes_what_is_predicted_to_the_byte(kind, written) -> None:
    opt = dropping(Gated(kind, 32))
    values = torch.randn(64, 32)

    def run() -> None:
        opt(values).square().sum().backward()

    for _ in range(2):
        run()
        opt.zero_grad()
    written.clear()
    measured = peak_allocated(record(run, cuda=False, memory=True))
    assert len(written) == 2
    state = sum(t.nbytes for t in (*opt.parameters(), values))
    said = predict(opt.body, loss_fn=lambda y: y.square().sum())
    assert said.peak_bytes == state + measured


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["packed", "apart", "activation"])
def test_a_real_step_on_a_gpu_takes_what_is_predicted(kind, written) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    stray = torch.cuda.memory_allocated()  # of tests before
    torch.manual_seed(0)
    model = Gated(kind, 1024).cuda()
    values = torch.randn(16384, 1024, device="cuda")
    found = []
    for choose in (lambda names: [], lambda names: [n for n in names if "linear" in n], everything):
        opt = dropping(model, choose, precision="bf16")
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            opt(values).square().sum().backward()
            peak = torch.cuda.max_memory_allocated() - stray
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        said = predict(opt.body, loss_fn=lambda y: y.square().sum()).peak_bytes
        assert abs(said / peak - 1) < 0.01
        fused = any(name in opt.code for name in ("graphopt.glu", "graphopt.bias_act"))
        del opt
    assert bool(written) == fused
    assert same(found[1], found[0])
    assert same(found[2], found[0])
