"""Memory plans on real models: the budget is kept, gradients are equal, the plan is told."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.errors import BudgetError, OptionError
from graphopt.memory.facts import measure
from graphopt.memory.oracle import predict
from graphopt.memory.plan import Problem
from graphopt.memory.search import pareto
from graphopt.memory.simulate import simulate
from graphopt.passes.base import Log
from graphopt.passes.remat import Rematerialize


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, words: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(1)
    return torch.randint(0, 50, (8, 64))


def loss_of(logits):
    return logits.logsumexp(-1).sum()


def step(model, x):
    model.zero_grad()
    loss_of(model(x)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(ids):
    return graphopt.optimize(Model(), ids)


@pytest.fixture(scope="module")
def gradients(plain, ids):
    return step(plain, ids)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_budget_is_kept_with_equal_gradients(ids, gradients, share):
    opt = graphopt.optimize(Model(), ids, memory_budget=share, loss_fn=loss_of)
    found = opt.memory_plan
    assert found.budget_bytes == int(share * found.unplanned_peak_bytes)
    assert found.predicted_peak_bytes <= found.budget_bytes
    assert found.predicted_peak_bytes == predict(opt.body, loss_fn=loss_of).peak_bytes
    assert found.recompute
    got = step(opt, ids)
    assert all(torch.equal(got[n], g) for n, g in gradients.items())
    assert [r.rule for r in opt.rewrites][-1] == "rematerialize"


def test_a_smaller_budget_never_has_a_larger_peak_or_a_faster_step(ids):
    plans = [
        graphopt.explain(Model(), ids, memory_budget=share).memory for share in (0.9, 0.75, 0.6)
    ]
    peaks = [p.predicted_peak_bytes for p in plans]
    times = [p.extra_ms for p in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


def test_a_budget_above_the_peak_changes_nothing(ids, plain):
    opt = graphopt.optimize(Model(), ids, memory_budget="1GiB")
    assert opt.code == plain.code
    assert opt.memory_plan.recompute == ()
    assert opt.memory_plan.extra_ms == 0.0


def test_a_budget_that_cannot_be_kept_says_the_smallest(ids):
    with pytest.raises(BudgetError, match="the smallest peak is") as caught:
        graphopt.optimize(Model(), ids, memory_budget=0.05)
    asked = caught.value.try_.partition("memory_budget=")[2].partition(",")[0].strip("'")
    opt = graphopt.optimize(Model(), ids, memory_budget=asked)  # what the message advises
    assert opt.memory_plan.predicted_peak_bytes <= opt.memory_plan.budget_bytes
    assert "layers." in caught.value.why


def test_without_gradients_the_prediction_alone_is_checked(ids):
    model = Model().eval()
    with torch.no_grad():
        opt = graphopt.optimize(model, ids, memory_budget=1.0)
        with pytest.raises(BudgetError):
            graphopt.optimize(model, ids, memory_budget=2048)
    assert opt.memory_plan.recompute == ()


@pytest.mark.parametrize(
    "options", [{"memory_budget": 0.5}, {"memory_budget": "1GiB"}, {"segments": 2}]
)
def test_a_model_without_a_trainable_part_is_as_without_gradients(ids, options):
    model = Model().requires_grad_(False)
    opt = graphopt.optimize(model, ids, **options)
    assert opt.memory_plan.recompute == ()
    with pytest.raises(BudgetError):
        graphopt.optimize(model, ids, memory_budget=2048)


def test_a_model_may_be_frozen_under_a_budget(ids):
    model = Model()
    opt = graphopt.optimize(model, ids, memory_budget=0.7)
    model.requires_grad_(False)
    assert not opt(ids).requires_grad
    model.requires_grad_(True)
    opt(ids).sum().backward()


def test_other_shapes_are_planned_anew(ids):
    opt = graphopt.optimize(Model(), ids, memory_budget=0.7, dynamic=False)
    first = opt.memory_plan
    opt(ids.repeat(2, 1))
    assert opt.memory_plan.budget_bytes > first.budget_bytes
    assert opt.memory_plan.recompute


def test_resident_bytes_count(ids):
    low = graphopt.explain(Model(), ids, memory_budget=1.0).memory
    high = graphopt.explain(Model(), ids, memory_budget=1.0, resident_bytes="1MiB").memory
    assert high.predicted_peak_bytes - low.predicted_peak_bytes == 2**20


def test_the_loss_counts(ids):
    plain = graphopt.explain(Model(), ids, memory_budget=1.0).memory
    wide = graphopt.explain(
        Model(), ids, memory_budget=1.0, loss_fn=lambda y: y.repeat(9, 1, 1).exp().sum()
    )
    assert wide.memory.predicted_peak_bytes > plain.predicted_peak_bytes
    assert wide.memory.loss == "loss_fn"


def test_an_optimized_module_pickles_with_its_budget(ids, gradients):
    opt = graphopt.optimize(Model(), ids, memory_budget=0.6)
    again = pickle.loads(pickle.dumps(opt))
    assert all(torch.equal(g, gradients[n]) for n, g in step(again, ids).items())
    assert again.memory_plan == opt.memory_plan


def test_attach_takes_a_budget(ids):
    model = graphopt.attach(Model(), ids, memory_budget=0.6)
    assert model.forward.optimized.memory_plan.recompute
    assert graphopt.optimize(Model(), ids).memory_plan is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"memory_budget": "lots"}, "memory_budget is 'lots'"),
        ({"memory_budget": 0.5, "segments": 2}, "given together"),
        ({"segments": 0}, "segments is 0"),
        ({"segments": True}, "segments is True"),
        ({"loss_fn": loss_of}, "loss_fn is given without"),
        ({"resident_bytes": 5}, "resident_bytes is given without"),
        ({"memory_budget": 0.5, "loss_fn": 3}, "loss_fn is of type int"),
        ({"memory_budget": 0.5, "resident_bytes": -1}, "resident_bytes is -1"),
    ],
)
def test_wrong_options(options, what):
    model = Model(1)
    with pytest.raises(OptionError, match=what):
        graphopt.optimize(model, **options)


def test_the_replay_agrees_with_the_oracle(ids, plain):
    body = plain.body
    facts = measure(body)
    problem = Problem.of(body, facts, predict(body).peak_bytes - facts.peak_bytes)
    assert simulate(problem.timeline, ()).peak == predict(body).peak_bytes
    points = pareto(problem.timeline)
    assert len(points) > 5
    for point in points[1 :: max(1, len(points) // 6)]:
        work = body.copy()
        Rematerialize(problem.names(point.dropped)).run(work, Log())
        assert abs(point.peak / predict(work).peak_bytes - 1) < 0.01


def test_a_plan_tells_what_it_does(ids):
    opt = graphopt.optimize(Model(), ids, memory_budget=0.6)
    found = opt.memory_plan
    text = repr(found)
    assert "budget 0.6" in text
    assert "layers.*" in text
    assert "curve:" in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["recompute"][0]["site"]["file"]
    assert sum(r.ms for r in found.recompute) == pytest.approx(found.extra_ms)
    report = graphopt.report(opt)
    assert "How the memory budget is kept" in report.text()
    assert report.to_dict()["memory"]["budget"] == "0.6"


def test_a_fraction_is_one_of_the_largest_graph(ids):
    opt = graphopt.optimize(Model(), ids, memory_budget=0.6, dynamic=False)
    limit = opt.memory_plan.budget_bytes
    opt(ids[:1])  # a last batch that could not be brought down to 0.6 of its own peak
    assert opt.memory_plan.budget_bytes == limit
    with torch.no_grad():
        opt(ids)  # where a fraction says nothing
    assert opt.memory_plan.recompute == ()


def test_segments(ids, gradients):
    opt = graphopt.optimize(Model(), ids, segments=2)
    found = opt.memory_plan
    assert found.budget == "2 segments"
    assert found.predicted_peak_bytes < found.unplanned_peak_bytes
    assert all(torch.equal(g, gradients[n]) for n, g in step(opt, ids).items())
    assert graphopt.optimize(Model(), ids, segments=1).memory_plan.recompute == ()


class Classifier(nn.Module):
    """Little but a loss over many classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 300)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(F.gelu(self.body(x))), labels)


def test_the_loss_runs_in_chunks_where_that_is_cheaper():
    x, labels = torch.randn(4096, 8), torch.randint(0, 300, (4096,))
    plain = graphopt.optimize(Classifier(), (x, labels))
    opt = graphopt.optimize(Classifier(), (x, labels), memory_budget=0.7)
    assert opt.memory_plan.chunked_loss
    assert "chunk" in repr(opt.memory_plan)
    assert [r.ordinal for r in opt.rewrites] == list(range(len(opt.rewrites)))
    for module in (plain, opt):
        module.zero_grad()
        module(x, labels).backward()
        module.saved = [p.grad for p in module.parameters()]
    for a, b in zip(plain.saved, opt.saved, strict=True):
        torch.testing.assert_close(a, b)


def test_a_norm_is_dropped_alone_where_the_sum_under_it_stays(ids, plain):
    body = plain.body
    problem = Problem.of(body, measure(body))
    alone = {i for i, v in enumerate(problem.timeline.values) if v.part_of is not None}
    assert alone
    assert any(p.dropped & alone for p in pareto(problem.timeline))


def test_a_planned_graph_is_proved(ids):
    opt = graphopt.optimize(Model(), ids, memory_budget=0.65, loss_fn=loss_of, verify=True)
    assert any(r.op == "graphopt.add_layer_norm" for r in opt.memory_plan.recompute)


class Checkpointed(nn.Module):
    """Blocks under the user's own checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def test_the_model_s_own_checkpoints_stay_where_they_keep_the_budget():
    x = torch.randn(128, 16)
    own = graphopt.optimize(Checkpointed(), x)
    opt = graphopt.optimize(Checkpointed(), x, memory_budget="1GiB")
    assert opt.code == own.code
    found = opt.memory_plan
    assert found.recompute
    assert found.predicted_peak_bytes == found.unplanned_peak_bytes == predict(own.body).peak_bytes
    with pytest.raises(BudgetError) as caught:
        graphopt.optimize(Checkpointed(), x, memory_budget=2048)
    assert caught.value.lowest_bytes <= found.predicted_peak_bytes


def test_resident_bytes_are_named_where_they_stand_in_the_way(ids):
    with pytest.raises(BudgetError, match="resident_bytes, as given"):
        graphopt.optimize(Model(1), ids, memory_budget=0.9, resident_bytes="1GiB")


def test_a_limit_on_rewrites_that_leaves_the_plan_out_is_told(ids):
    with pytest.warns(graphopt.GraphoptWarning, match="the budget is not kept"):
        opt = graphopt.optimize(Model(1), ids, memory_budget=0.8, max_rewrites=1)
    assert opt.memory_plan is None


def test_the_next_line_of_explain_keeps_the_budget(ids):
    assert "memory_budget=0.9)" in repr(graphopt.explain(Model(1), ids, memory_budget=0.9))


def test_a_curve_that_is_cut_says_so(ids):
    found = graphopt.optimize(Model(), ids, memory_budget=0.6).memory_plan
    assert len(found.curve) > 10
    assert f"(8 of {len(found.curve)} plans)" in repr(found)
    few = dataclasses.replace(found, curve=found.curve[:3])
    assert " of 3 plans" not in repr(few)
