"""`offload="auto"`: values that wait for backward in host memory, chosen by the plan.

On a CPU nothing is gained by it, so a link of a made-up rate stands in: the copies are plain ones
then, at the same places, and all else is as on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle

import pytest
import torch
from remat_models import GPT, Feedforward
from torch import nn

import graphopt
from graphopt.cost import roofline
from graphopt.errors import BudgetError, GraphoptWarning, OptionError
from graphopt.graph.calls import Call, Held, Recipe
from graphopt.memory import away
from graphopt.memory.oracle import predict
from graphopt.memory.simulate import Timeline, Value, simulate
from graphopt.memory.trips import TOLL, Movable, Times, relaxed
from graphopt.offload import HostCopy, Line, fetched
from graphopt.remat import drop, is_release, scope

RECIPE = Recipe("y", Call(fetched, (Held(0),)), ())


def blocks(count: int = 4, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Feedforward(width) for _ in range(count)))


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def linked():
    """A link to host memory that carries about a third of what the forward makes."""
    rates = dataclasses.replace(roofline.CPU, host_gbs=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(roofline._measured, "cpu", rates)
        yield rates


@pytest.fixture(scope="module")
def opt(linked):
    found = optimized(blocks())
    assert found.memory_plan.offload
    return found


@pytest.fixture(scope="module")
def expected():
    return step(graphopt.optimize(blocks(), X))


def loss_of(y):
    return y.square().sum()


def optimized(model, x=X, budget=0.5, **options):
    options = {"loss_fn": loss_of, "offload": "auto", **options}
    return graphopt.optimize(model, x, memory_budget=budget, **options)


def step(model, x=X, scale=1.0):
    model.zero_grad()
    torch.manual_seed(2)
    (scale * loss_of(model(x))).backward()
    return [p.grad.clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# ---- what a user sees


def test_a_budget_is_kept_with_equal_gradients(opt, expected):
    found = opt.memory_plan
    assert found.predicted_peak_bytes <= found.budget_bytes
    assert found.predicted_peak_bytes == predict(opt.body, loss_fn=loss_of).peak_bytes
    assert same(step(opt), expected)


def test_it_is_not_slower_than_recomputing_alone(linked):
    plans = [optimized(blocks(), offload=o).memory_plan for o in (False, "auto")]
    assert not plans[0].offload
    assert plans[1].extra_ms < plans[0].extra_ms


def test_smaller_peaks_can_be_had(linked, expected):
    lowest = []
    for offload in (False, "auto"):
        with pytest.raises(BudgetError) as caught:
            optimized(blocks(), budget=1024, offload=offload)
        lowest.append(caught.value.lowest_bytes)
    assert lowest[1] < lowest[0]
    assert same(step(optimized(blocks(), budget=lowest[1] + 1024)), expected)
    # and the error says so
    with pytest.raises(BudgetError, match=r"offload='auto' \(reaches [0-9.]+KiB\)"):
        optimized(blocks(), budget=sum(lowest) // 2, offload=False)


def test_a_smaller_budget_never_has_a_larger_peak_or_a_faster_step(linked):
    plans = [optimized(blocks(), budget=b).memory_plan for b in (0.9, 0.7, 0.5)]
    peaks, times = ([getattr(p, n) for p in plans] for n in ("predicted_peak_bytes", "extra_ms"))
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


def test_the_plan_tells_it(opt):
    found = opt.memory_plan
    one = found.offload[0]
    assert one.bytes > 0
    assert one.ms > 0
    assert one.value in {n.name for n in opt.graph.nodes}
    assert "in host memory" in repr(found)
    assert json.loads(json.dumps(found.to_dict()))["offload"][0]["value"] == one.value
    assert any(p.offloaded for p in found.curve)


def test_the_graph_tells_it(opt):
    assert "# kept in host memory" in opt.code
    assert "remat.release(" in opt.code
    assert any(map(is_release, opt.graph.nodes))


def test_explain_and_report_tell_it(linked):
    found = graphopt.explain(blocks(), X, memory_budget=0.5, offload="auto", loss_fn=loss_of)
    assert "wait in host memory" in repr(found)
    assert "offload='auto'" in repr(found)


def test_it_is_off_by_default(linked):
    assert optimized(blocks(), offload=None).memory_plan.offload == ()
    assert graphopt.optimize(blocks(), X, memory_budget=0.5).memory_plan.offload == ()


def test_nothing_goes_where_the_budget_is_kept_without(linked):
    found = optimized(blocks(), budget="1GiB").memory_plan
    assert (found.offload, found.recompute) == ((), ())


def test_on_a_cpu_a_warning_says_that_it_brings_nothing(monkeypatch):
    monkeypatch.setitem(roofline._measured, "cpu", roofline.CPU)
    with pytest.warns(GraphoptWarning, match="host memory already"):
        opt = optimized(blocks())
    assert opt.memory_plan.offload == ()
    assert opt.memory_plan.recompute


def test_fit_takes_it(linked):
    def found(offload):
        return graphopt.fit(
            blocks(2), lambda n: torch.ones(n, 32), "400KiB", multiple_of=64, loss_fn=loss_of,
            offload=offload,
        )  # fmt: skip

    assert found("auto").plan.offload


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "always", "memory_budget": 0.5}, "offload is 'always'"),
        ({"offload": 2, "memory_budget": 0.5}, "offload is 2"),
        ({"offload": "auto"}, "without memory_budget"),
        ({"offload": True, "segments": 2}, "offload and segments"),
    ],
)
def test_wrong_uses(options, said):
    with pytest.raises(OptionError, match=said):
        graphopt.optimize(blocks(), X, **options)


# ---- in use


def test_two_forwards_before_a_backward(opt, expected):
    opt.zero_grad()
    loss, other = loss_of(opt(X)), loss_of(opt(2 * X))
    loss.backward()
    assert same([p.grad for p in opt.parameters()], expected)
    other.backward()


def test_backward_twice(opt):
    loss, wanted = loss_of(opt(X)), list(opt.parameters())
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert same(torch.autograd.grad(loss, wanted), first)


def test_part_of_a_backward_then_all_of_it(opt, expected):
    loss = loss_of(opt(X))
    torch.autograd.grad(loss, [*opt.parameters()][-1], retain_graph=True)
    opt.zero_grad()
    loss.backward()
    assert same([p.grad for p in opt.parameters()], expected)


def test_a_backward_that_raises_leaves_the_next_one_right(opt, expected):
    x = X.clone().requires_grad_()
    hook = opt[2].up.weight.register_hook(lambda g: 1 / 0)
    loss = loss_of(opt(x))
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    hook.remove()
    opt.zero_grad()
    loss.backward()
    assert same([p.grad for p in opt.parameters()], expected)


def _interrupted(lines: list[Line]) -> None:
    value = torch.ones(8, 8, requires_grad=True).exp()
    with scope({"y": RECIPE}):
        drop(value, "y", host=True)
        lines += [o for o in gc.get_objects() if type(o) is Line and o._leaving]
        _ = 1 / 0


def test_a_forward_that_raises_keeps_nothing():
    """A value is on its way when a later op of the same forward raises."""
    lines: list[Line] = []
    with pytest.raises(ZeroDivisionError):
        _interrupted(lines)
    assert [line._leaving for line in lines] == [{}]


def test_dropout_is_repeated(linked):
    torch.manual_seed(0)
    model, ids = GPT(layers=4, width=32), torch.randint(0, 31, (8, 32))
    plain = graphopt.optimize(copy.deepcopy(model), ids)
    opt = optimized(model, ids)
    assert opt.memory_plan.offload
    assert same(step(opt, ids), step(plain, ids))


def test_copies_and_pickles(opt, expected):
    twin = copy.deepcopy(opt)
    assert same(step(twin), expected)
    loaded = pickle.loads(pickle.dumps(opt))
    assert same(step(loaded), expected)
    assert loaded.memory_plan.offload


def test_under_no_grad_nothing_goes(opt, monkeypatch):
    monkeypatch.setattr(HostCopy, "__init__", lambda *_: pytest.fail("a value was sent"))
    with torch.no_grad():
        opt(X)


def test_a_scaled_loss_in_low_precision(linked):
    opt = optimized(blocks(), budget=0.75, precision="bf16")
    plain = graphopt.optimize(blocks(), X, precision="bf16")
    assert opt.memory_plan.offload
    assert same(step(opt, scale=1024.0), step(plain, scale=1024.0))


def test_nothing_outlives_the_step(opt):
    step(opt)
    gc.collect()
    assert not any(type(o) is HostCopy for o in gc.get_objects())


def test_it_is_proved(opt):
    assert graphopt.verify(opt, X).passed


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = away.host_room()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert away.host_room() == alone // 4


def test_the_host_has_room_for_it(linked, monkeypatch):
    monkeypatch.setattr(away, "host_room", lambda: 2**17)
    found = optimized(blocks()).memory_plan
    assert sum(away.pinned(o.bytes) for o in found.offload) <= 2**17
    monkeypatch.setattr(away, "host_room", lambda: 0)
    assert optimized(blocks()).memory_plan.offload == ()


# ---- the replay


def _line(copy_ms: float) -> Timeline:
    """Two values that backward asks for in reverse, with a second op behind each of them."""
    values = (
        Value("a", 8, 8, 0, 1, 6, (6,)),
        Value("b", 8, 8, 2, 3, 5, (5,)),
    )
    movable = tuple(
        Movable(v.name, 8, i, v.last_use, v.freed, v.unpacks, (), copy_ms)
        for i, v in enumerate(values)
    )
    live = (0, 8, 8, 16, 16, 16, 8)
    peak = (8, 8, 16, 16, 20, 16, 8)
    return Timeline(live, peak, values, movable, Times((1.0,) * 7, 4))


def test_a_value_stays_until_its_copy_is_done():
    quick, slow = (simulate(_line(ms), (), (0,)).stays[0] for ms in (0.5, 1.5))
    assert (quick.gone, slow.gone) == (2, 3)


def test_a_value_away_is_not_at_the_peak():
    assert simulate(_line(0.5), ()).peak == 20
    assert simulate(_line(0.5), (), (0,)).peak == 16


def test_it_stays_for_longer_where_there_is_room():
    line = _line(0.5)
    outcome = simulate(line, (), (0,), levels=True)
    slow = tuple(dataclasses.replace(m, copy_ms=0.9) for m in line.movable)
    found = [
        relaxed(outcome.stays, (), slow, line.times, (20, 8, 8, level, 8, 8, 8))[0].gone
        for level in (8, 20)
    ]
    assert found == [3, 2]  # the next step is as high as any, or not
    early = tuple(dataclasses.replace(s, back=4, ahead="b") for s in outcome.stays)
    found = [
        relaxed(outcome.stays, early, line.movable, line.times, (20, 8, 8, 8, level, 8, 8))[0].ahead
        for level in (8, 20)
    ]
    assert found == ["b", None]


def test_what_is_waited_for_costs_time():
    found = simulate(_line(0.5), (), (0,))
    assert found.wait_ms == 0.5  # nobody's turn is before its own
    assert found.ms == pytest.approx(0.5 + 2 * TOLL * 0.5)
    # "a" comes in b's turn; b's own copies are waited for on both ways
    assert simulate(_line(0.5), (), (0, 1)).wait_ms == pytest.approx(1.0)
    assert simulate(_line(3.0), (), (0, 1)).wait_ms > 3.0


def test_the_copy_back_begins_in_the_turn_of_another():
    stays = {s.value: s for s in simulate(_line(0.5), (), (0, 1)).stays}
    assert stays[0].ahead == "b"
    assert stays[0].back == stays[1].asked == 5
    assert stays[1].ahead is None
