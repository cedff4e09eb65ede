"""A gradient that is written over its operand, where nothing else reads that: what stays right."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from gated_models import KINDS, Gated, dropped_pair, grads, x
from remat_models import case, everything, same, twins
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphopt.graph.text import python_code
from graphopt.remat import ModifiedError, is_marker


@pytest.fixture(params=KINDS)
def pair(request):
    """A module that drops nothing and one that drops all it may, captured; no gradients yet."""
    for module in dropped_pair(request.param):
        module.zero_grad()
    return dropped_pair(request.param)


def again(opt, wanted):
    """Go backward through one graph three times, with equal gradients; gives what was retained."""
    values = x()
    loss = opt(values).square().sum()
    leaves = [values, *opt.parameters()]
    for keep in (True, True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True)
        assert same([g for g in found if g is not None], wanted)
        yield keep


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
    for _ in again(opt, grads(plain)):
        pass
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


@pytest.fixture(params=KINDS)
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
    for keep in again(opt, grads(plain)):
        assert len(written) == (0 if keep else 2)


def _sums(names: list[str]) -> list[str]:
    return [n for n in names if n.startswith("add")]


def test_what_nothing_else_holds_is_kept_for_a_backward_to_come(written) -> None:
    plain, opt = twins(Gated, _sums)
    for keep in again(opt, grads(plain)):
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
