"""Casts of autocast move to where they cost least; numbers and the user's casts stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.graph.body import Body
from graphopt.passes import Log
from graphopt.passes.autocast import materialize_autocast
from graphopt.passes.casts import PlaceCasts
from graphopt.passes.casts_part import is_written
from graphopt.passes.clean import Clean
from graphopt.step import Step, step
from tests.passes.test_autocast import body_of

BF16 = torch.bfloat16
aten = torch.ops.aten
N = 8
X = torch.randn(N, N, generator=torch.Generator().manual_seed(0))


class Call(nn.Module):
    """A function of the input and of a module with weights."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(N, N), nn.Linear(N, N)
        self.scale = nn.Parameter(torch.rand(N, N) + 0.5)
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x * self.scale)


def written(call: Callable[..., Any], dtype: torch.dtype = BF16, grad: bool = True) -> Body:
    """The graph of a call with autocast's casts written beside the ops that need them."""
    work = materialize_autocast(body_of(Call(call), X, dtype), "cpu", dtype)
    work.grad = grad
    Clean(fold=False).run(work, Log())
    return work


def placed(body: Body) -> Body:
    """A copy of a body with its casts moved."""
    work = body.copy()
    PlaceCasts().run(work, Log())
    return work


def bytes_of(body: Body) -> int:
    """Bytes that the casts of activations move."""
    casts = [n for n in body.graph.nodes if is_written(n) and n.args[0].op != "get_attr"]
    return sum(n.meta["val"].numel() * 6 for n in casts)


def where(body: Body) -> list[str]:
    """What the casts of activations read."""
    casts = [n for n in body.graph.nodes if is_written(n) and n.args[0].op != "get_attr"]
    return [str(n.args[0].target) for n in casts]


def run(body: Body, like: Step | None = None) -> Step:
    return step(body.graph, body.attribute, [X], ["x"], like=like, backward=body.grad)


def check_same(before: Body, after: Body) -> None:
    """Outputs and gradients are the same to the last bit."""
    first = run(before)
    second = run(after, first)
    assert first.tensors.keys() == second.tensors.keys()
    for name, value in first.tensors.items():
        other = second.tensors[name]
        assert value is not None
        assert other is not None
        torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)


def test_a_narrowing_moves_before_a_copy() -> None:
    before = written(lambda m, x: m.a(x.exp().t().contiguous()))
    after = placed(before)
    assert where(after) == ["aten.exp.default"]
    check_same(before, after)


def test_a_weight_is_cast_itself_and_not_its_transpose() -> None:
    before = written(lambda m, x: x @ m.scale.T)
    after = placed(before)
    casts = [n.args[0] for n in after.graph.nodes if is_written(n)]
    assert "scale" in [str(n.target) for n in casts if n.op == "get_attr"]
    assert where(after) == ["aten.mul.Tensor"]
    check_same(before, after)


@pytest.mark.parametrize(
    ("fill", "moves"),
    [
        (lambda x, m: F.pad(x, (0, 0, 2, 2)), True),
        (lambda x, m: F.pad(x, (0, 0, 2, 2), value=0.1), False),
        (lambda x, m: x.masked_fill(m, 0.0), True),
        (lambda x, m: x.masked_fill(m, -float("inf")), True),
        (lambda x, m: x.masked_fill(m, torch.finfo(torch.float32).min), False),
        (lambda x, m: torch.where(m, x, 2.0), True),
    ],
)
def test_a_fill_is_passed_where_low_precision_has_its_number(
    fill: Callable[..., torch.Tensor], moves: bool
) -> None:
    before = written(lambda m, x: m.a(fill(x.exp(), x > 0)))
    after = placed(before)
    assert (where(after) == ["aten.exp.default"]) == moves
    check_same(before, after)


def test_it_stays_behind_a_slice() -> None:
    before = written(lambda m, x: m.a(torch.cat([x, x])[:N].exp()[:2]))
    assert where(placed(before)) == where(before) == ["aten.slice.Tensor"]


def test_a_widening_stays_behind_a_slice() -> None:
    before = written(lambda m, x: F.pad(m.a(x).t()[:2], (1, 1), mode="replicate"))
    assert where(placed(before)) == where(before)
    assert where(before)[-1] == "aten.slice.Tensor"


def test_the_users_widening_does_not_move() -> None:
    before = written(lambda m, x: m.a(x).to(torch.float32).t()[:2].exp())
    assert where(placed(before)) == where(before)


def test_a_round_trip_through_the_users_widening_goes() -> None:
    before = written(lambda m, x: m.b(m.a(x).to(torch.float32)))
    after = placed(before)
    assert len(where(after)) == len(where(before)) - 1
    assert not [n for n in after.graph.nodes if n.target is aten.to.dtype and not is_written(n)]
    check_same(before, after)


def test_a_concatenation_runs_in_low_precision_where_only_that_is_read() -> None:
    def call(m: Call, x: torch.Tensor) -> torch.Tensor:
        low = m.a(x)
        return m.b(torch.cat([x.exp(), low.to(torch.float32)], 0))

    before = written(call)
    after = placed(before)
    assert where(after)[-1] == "aten.exp.default"
    assert bytes_of(after) < bytes_of(before)
    check_same(before, after)


def test_the_users_rounding_stays() -> None:
    def call(m: Call, x: torch.Tensor) -> torch.Tensor:
        rounded = x.exp().to(BF16).t().contiguous().float()
        return m.a(rounded) + rounded.to(BF16) + F.mse_loss(rounded, x)

    before = written(call)
    after = placed(before)
    users = [n for n in after.graph.nodes if n.target is aten.to.dtype and not is_written(n)]
    rounding = [n.args[0].target for n in users if n.meta["val"].dtype == BF16]
    assert rounding[0] is aten.exp.default
    check_same(before, after)


def test_gradients_that_were_summed_in_float32_still_are() -> None:
    def call(m: Call, x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return m.a(h.t().contiguous()) + m.b(h.flip(0).contiguous())

    before = written(call)
    after = placed(before)
    assert sorted(where(after)) == ["aten.flip.default", "aten.t.default"]
    check_same(before, after)
    forward = written(call, grad=False)
    assert where(placed(forward)) == ["aten.exp.default"]
    check_same(forward, placed(forward))


def test_an_expand_is_passed_only_without_gradients() -> None:
    def call(m: Call, x: torch.Tensor) -> torch.Tensor:
        return m.a(x.exp()[None].repeat(3, 1, 1))

    training, inference = written(call), written(call, grad=False)
    assert where(placed(training)) == ["aten.repeat.default"]
    assert where(placed(inference)) in (["aten.unsqueeze.default"], ["aten.exp.default"])
    check_same(inference, placed(inference))


def test_what_leaves_the_graph_keeps_its_precision() -> None:
    def call(m: Call, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.exp().t().contiguous()
        return h, m.a(h)

    before = written(call)
    check_same(before, placed(before))


def test_a_kernel_stores_what_a_moved_cast_asks_for() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.LayerNorm(N), nn.Conv2d(N, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(x).permute(0, 3, 1, 2))

    opt = graphopt.optimize(Net(), torch.randn(2, 4, 4, N), precision="bf16")
    norms = [n for n in opt.graph.nodes if "layer_norm" in str(n.target)]
    assert [n.kwargs["out_dtype"] for n in norms] == [BF16]
    assert opt.precision_plan.casts == tuple(c for c in opt.precision_plan.casts if c.weight)
    assert graphopt.verify(opt, torch.randn(2, 4, 4, N)).passed


def test_it_is_recorded_once_and_only_where_something_moved() -> None:
    log = Log()
    body = written(lambda m, x: m.a(x.exp().flip(0)))
    PlaceCasts().run(body, log)
    assert [(r.rule, r.kind) for r in log.rewrites] == [("place_casts", "global")]
    assert log.rewrites[0].bytes_after < log.rewrites[0].bytes_before
    PlaceCasts().run(body, log)
    assert len(log.rewrites) == 1


class TwoPrecisions(Call):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x.exp().t().contiguous())
        with torch.autocast("cpu", torch.float16):
            return self.b(h.float().flip(0).exp().t().contiguous())


class WithoutAutocast(Call):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).t().contiguous()
        with torch.autocast("cpu", enabled=False):
            h = self.b(h.float())
        return self.a(h.flip(0).contiguous())


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [(TwoPrecisions, [BF16, torch.float16]), (WithoutAutocast, [BF16, torch.float32, BF16])],
)
def test_regions_inside_keep_their_precision(kind: type[Call], dtypes: list[torch.dtype]) -> None:
    model = kind(lambda m, x: x)
    opt = graphopt.optimize(model, X, precision="bf16")
    with torch.autocast("cpu", BF16):
        expected = model(X)
    found, weights = opt(X), list(model.parameters())
    wanted, grads = (
        torch.autograd.grad(y.float().square().sum(), weights, allow_unused=True)
        for y in (expected, found)
    )
    assert torch.equal(expected, found)
    for a, b in zip(wanted, grads, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    linears = [n.meta["val"].dtype for n in opt.graph.nodes if n.target is aten.linear.default]
    assert linears == dtypes
    assert "place_casts" in {r.rule for r in opt.rewrites}


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.t(),
    "copy": lambda x: x.t().contiguous(),
    "flip": lambda x: x.flip(0),
    "view": lambda x: x.reshape(2, -1).reshape(N, N),
    "roll": lambda x: x.roll(1, 0),
    "relu": lambda x: x.relu(),
    "neg": lambda x: -x,
    "half": lambda x: torch.cat([x[: N // 2], x[N // 2 :].flip(0)]),
    "wide": lambda x: x.float(),
    "exp": lambda x: (x * 0.1).exp(),
    "pad": lambda x: F.pad(x[None], (1, 1), mode="replicate")[0, :, 1:-1],  # float32 on the CPU
    "round": lambda x: x.to(BF16),
    "fill": lambda x: x.masked_fill(x > 1, 0.0),
    "zeros": lambda x: F.pad(x[:-2], (0, 0, 1, 1)),
}


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps (op, operand, other operand), operands by position among the values so far."""
    size = draw(st.integers(3, 9))
    names = st.sampled_from([*MOVES, "linear", "linear", "cat", "add"])
    place = st.integers(0, size)
    return [(draw(names), draw(place) % (i + 1), draw(place) % (i + 1)) for i in range(size)]


def interpreted(program: list[tuple[str, int, int]]) -> Callable[..., torch.Tensor]:
    def call(m: Call, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, i, j in program:
            if name == "linear":
                made = m.a(values[i])
            elif name == "cat":
                made = torch.cat([values[i][: N // 2], values[j][N // 2 :]])
            elif name == "add":
                made = values[i] + values[j]
            else:
                made = MOVES[name](values[i])
            values.append(made)
        return m.b(values[-1])

    return call


@given(programs(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_programs_keep_their_numbers(program: list[tuple[str, int, int]], grad: bool) -> None:
    before = written(interpreted(program), grad=grad)
    after = placed(before)
    log = Log()
    PlaceCasts().run(after.copy(), log)
    assert not log.rewrites, "what is placed best stays where it is"
    first = run(before)
    second = run(after, first)
    for name, value in first.tensors.items():
        other = second.tensors[name]
        if value is None or other is None:
            assert value is other
        elif name.startswith("output"):
            assert torch.equal(value, other)
        else:  # a sum of three in float32 may be taken in another order
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
