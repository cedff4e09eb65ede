"""Dropped values: the same outputs and gradients to the bit, and what may not be dropped."""

from __future__ import annotations

import copy

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from remat_models import (
    GPT,
    MODELS,
    Case,
    ConvNet,
    case,
    droppable,
    dropped,
    dropping,
    everything,
    same,
)
from torch import nn

import graphopt
from graphopt.errors import OptionError, PassError
from graphopt.graph import lint
from graphopt.graph.calls import Call
from graphopt.graph.edit import Editor
from graphopt.graph.recipes import marked, sum_of
from graphopt.graph.text import ir_text, parse
from graphopt.passes.base import Log
from graphopt.passes.clean import Clean
from graphopt.passes.remat import Rematerialize, reasons, saved_bytes, segment_values
from graphopt.remat import drop, is_marker
from graphopt.testing.programs import random_program

CASES = [(name, None) for name in MODELS] + [("gpt", "bf16"), ("conv", "bf16")]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_step_that_drops_everything_is_equal_to_the_bit(name, precision) -> None:
    found = case(name, precision)
    assert len(found.program(found.names).recipes) > 2
    assert same(found.step(found.names), found.plain)


@pytest.mark.parametrize(
    ("name", "precision"), [("mlp", None), ("conv", None), ("chunks", None), ("gpt", "bf16")]
)
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(data=st.data())
def test_a_step_that_drops_any_values_is_equal_to_the_bit(name, precision, data) -> None:
    found = case(name, precision)
    names = data.draw(st.sets(st.sampled_from(found.names)))
    assert same(found.step(names), found.plain)


@pytest.mark.parametrize(("seed", "precision"), [(21, None), (407, "bf16"), (434, "bf16")])
def test_programs_that_once_rounded_otherwise(seed, precision) -> None:
    program = random_program(seed)
    found = Case.of(program.build(), program.example_inputs(1), precision)
    assert same(found.step(found.names), found.plain)


def test_batch_norm_counts_a_batch_once() -> None:
    torch.manual_seed(0)
    eager, x = ConvNet(), torch.randn(2, 3, 8, 8)
    opt = dropping(copy.deepcopy(eager))
    assert "batch_norm_default" in droppable(opt.capture((x,)).compiled.body)
    for model in (eager, opt):
        F.relu(model(x)).sum().backward()
    assert same(list(eager.buffers()), list(opt.source.buffers()))
    assert eager.bn1.num_batches_tracked == 1


def test_batch_norm_without_weights_rounds_as_in_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.LayerNorm(6))
    x = torch.randn(32, 6)
    found = []
    for choose in (lambda names: [], everything):
        opt = dropping(copy.deepcopy(model), choose, "bf16")
        opt(x).float().sin().sum().backward()
        found.append([p.grad for p in opt.parameters()])
    assert "batch_norm_default" in opt.entry.program.recipes
    assert same(*found)


# -------------------------------------------------------------------------------------- reasons


def _reasons_of(function, *inputs: torch.Tensor) -> list[str]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return function(self, *args)

    body = dropping(Model(), lambda names: []).capture(inputs).compiled.body
    found = reasons(body).items()
    return [f"{n.name}: {r}" for n, r in found if n.op == "call_function" and r is not None]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: (torch.rand_like(x) * x * m.w).exp().sum(), "rand_like: draws random"),
        (lambda m, x: F.dropout(x * m.w, 0.5).exp().sum(), "draw_seed_default: draws random"),
        (lambda m, x: (x * m.w).exp(), "exp: is a result of the graph"),
        (lambda m, x: (x * m.w).exp().view(-1), "exp: is a result of the graph"),
        (lambda m, x: (x * m.w).topk(2)[0].exp().sum(), "topk: chooses by comparing floats"),
    ],
)
def test_why_a_value_may_not_be_recomputed(function, reason) -> None:
    found = _reasons_of(function, torch.randn(3, 4))
    assert any(text.startswith(reason) for text in found), found


def test_a_value_of_state_that_forward_writes_is_kept() -> None:
    def forward(m, x):
        y = torch.exp(x * m.seen)
        m.seen.add_(1)
        return (y * m.w).sum()

    found = _reasons_of(forward, torch.randn(3, 4))
    assert "mul: reads seen, which forward writes" in found


def test_a_custom_op_is_kept() -> None:
    @torch.library.custom_op("remat_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda ctx, g: g * 2)
    found = _reasons_of(lambda m, x: twice(x * m.w).exp().sum(), torch.randn(3, 4))
    assert any(text.endswith("is not known to be pure") for text in found), found


@pytest.mark.parametrize("name", ["no_such", "input_1", "linear_default_2"])
def test_what_cannot_be_recomputed_is_refused(name) -> None:
    body = case("mlp").body.copy()
    before = str(body.graph)
    with pytest.raises(PassError, match=f"{name} cannot be recomputed"):
        Rematerialize(frozenset({name})).run(body, Log())
    assert str(body.graph) == before


# ------------------------------------------------------------------------------------- the graph


def test_only_what_autograd_saves_gets_a_marker_and_what_that_needs() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.exp(x + 1) * 2 + 3).sum()

    body = dropping(Model(), lambda n: []).capture((torch.ones(3, requires_grad=True),))
    body = body.compiled.body
    assert saved_bytes(body) == {"exp": 12}
    dropped(body, droppable(body))
    markers = [n.args[1] for n in body.graph.nodes if is_marker(n)]
    assert markers == ["add", "exp"]  # exp saves its result, computed from x + 1


def test_a_marked_graph_is_valid_and_survives_cleaning() -> None:
    found = case("gpt")
    body = dropped(found.body.copy(), found.names)
    count = sum(map(is_marker, body.graph.nodes))
    assert count > 10
    lint.check(body, "rematerialize")
    assert Editor(body.graph).drop_dead() == []
    Clean().run(body, Log())
    assert sum(map(is_marker, body.graph.nodes)) == count


def test_a_marker_stands_behind_the_last_use_of_every_view() -> None:
    found = case("gpt")
    qkv = next(n for n in found.body.graph.nodes if "bias_act" in n.name or "linear" in n.name)
    body = dropped(found.body.copy(), [qkv.name])
    marker = next(n for n in body.graph.nodes if is_marker(n))
    assert marker.args[1] == qkv.name
    assert "scaled_dot_product_attention" in marker.prev.name  # reads views of its views


@pytest.mark.parametrize(("name", "precision"), [("gpt", "bf16"), ("conv", None)])
def test_the_printed_program_is_the_graph(name, precision) -> None:
    model, inputs = MODELS[name]
    opt = dropping(model(), precision=precision)
    opt.capture((inputs(),))
    assert "remat.drop(" in opt.code
    body = opt.body.copy()
    body.graph = parse(opt.code, body)
    ours, theirs = (
        [n.target for n in b.graph.nodes if n.op == "call_function"] for b in (opt.body, body)
    )
    assert ours == theirs
    assert "drop(" in ir_text(opt.body)


def test_verify_runs_the_recipes(monkeypatch) -> None:
    model, inputs = MODELS["mlp"]
    opt, x = dropping(model()), inputs()
    opt.capture((x,))
    assert [r.rule for r in opt.rewrites][-1] == "rematerialize"
    assert graphopt.verify(opt, x).passed
    from graphopt.graph import recipes

    right = recipes.again

    def wrong(node):
        call = right(node)
        if node.target is torch.ops.graphopt.bias_act.default:
            return Call(call.target, (*call.args[:2], "relu"))
        return call

    monkeypatch.setattr(recipes, "again", wrong)
    found = graphopt.verify(opt, x)
    assert [c.rule for c in found.checks if c.status == "wrong"] == ["rematerialize"]
    assert found.whole.status == "wrong"


def test_max_rewrites_leaves_the_pass_out() -> None:
    found = case("mlp")
    log = Log(max_rewrites=0)
    body = found.body.copy()
    Rematerialize(frozenset(found.names)).run(body, log)
    assert not log.rewrites
    assert not any(map(is_marker, body.graph.nodes))


def test_a_norm_of_a_sum_with_dropout_comes_from_the_sum() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x, r):
            total = r + F.dropout(x, 0.5, True)
            return self.linear(self.norm(total)) * total

    torch.manual_seed(0)
    inputs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    plain = dropping(Model(), lambda names: [])
    body = plain.capture(inputs).compiled.body
    norm = next(n.name for n in body.graph.nodes if sum_of(n) is not None)
    opt = dropping(plain.source, lambda names: [norm])
    found = []
    for model in (plain, opt):
        torch.manual_seed(1)
        y = model(*inputs)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), inputs)])
    drops = [n for n in opt.body.graph.nodes if n.target is drop]
    assert [str(h.args[1]) for n in drops for h in marked(n).held if h.args] == ["1"]
    assert all(map(torch.equal, *found))


# ------------------------------------------------------------------------------------- segments


def test_segments_keep_what_crosses_their_borders() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(layers=6, width=32), torch.randint(0, 31, (2, 16))
    opt = dropping(model, lambda names: [])
    body = opt.capture((tokens,)).compiled.body
    saved, names = saved_bytes(body), droppable(body)
    assert segment_values(body, 1) == frozenset()
    kept = {}
    for n in (2, 3, 6):
        chosen = segment_values(body, n)
        norms = chosen - set(names)
        assert len(norms) == n - 1  # each beside the sum that crosses a border
        kept[n] = sum(size for name, size in saved.items() if name not in chosen)
        borders = (n - 1) * saved["add_layer_norm_default_3"]
        assert kept[n] - borders == pytest.approx(sum(saved.values()) / n, rel=0.1)
    assert kept[6] < kept[3] < kept[2]
    work = dropped(body.copy(), segment_values(body, 3))
    markers = [n for n in work.graph.nodes if n.target is drop]
    held = {h for n in markers for h in marked(n).held}
    borders = {h.args[0].name for h in held if h.name.startswith("getitem")}
    assert all(h.args[1] == 1 for h in held if h.name.startswith("getitem"))
    assert borders == {"add_layer_norm_default_3", "add_layer_norm_default_7"}


def test_segments_give_equal_gradients() -> None:
    for name in ("gpt", "chunks"):
        found = case(name)
        for n in (3, 50):
            assert same(found.step(segment_values(found.body, n)), found.plain)


def test_no_segments_are_refused() -> None:
    with pytest.raises(OptionError, match="segments=0"):
        segment_values(case("mlp").body, 0)


def test_more_segments_than_nodes_are_as_many_as_there_are_nodes():
    body = case("mlp").body
    assert segment_values(body, 10**9) == segment_values(body, len(list(body.graph.nodes)))
