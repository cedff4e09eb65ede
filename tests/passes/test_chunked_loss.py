"""ChunkLoss: graph before and after, numbers, that running it twice changes nothing more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.graph import Body, lint, ops
from graphopt.graph.record import RewriteRecord
from graphopt.passes import run_pipeline, wide
from graphopt.passes.base import Log
from graphopt.passes.chunked_loss import ChunkLoss
from tests.passes.bodies import body_of, run

X, Y = torch.randn(2, 5, 8), torch.tensor([[1, 2, -100, 20, 4], [0, 0, 7, -100, 3]])


class Head(nn.Module):
    """A language model's last layer and loss."""

    def __init__(self, *, keep: bool, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keep, self.linear = keep, nn.Linear(8, 21, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.linear(x)
        loss = F.cross_entropy(logits.float().view(-1, 21), y.view(-1), label_smoothing=0.1)
        return (loss, logits) if self.keep else loss


def chunked(target: Any, **pass_options: Any) -> tuple[Body, list[RewriteRecord]]:
    body = run_pipeline(body_of(target, (X, Y))).body
    log = Log()
    ChunkLoss(**pass_options).run(body, log)
    lint.check(body, "chunk_loss", skip=("no dead nodes",))
    return body, log.rewrites


def calls(body: Body) -> list[str]:
    return [ops.op_name(n.target) for n in body.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_loss_become_one_op(bias: bool) -> None:
    body, rewrites = chunked(Head(keep=False, bias=bias), chunk_bytes=4 * 21 * 3)
    assert calls(body) == ["aten.view", "graphopt.linear_cross_entropy"]
    assert [(r.rule, r.kind) for r in rewrites] == [("chunk_loss", "local")]


def test_logits_that_are_a_result_are_read_and_returned() -> None:
    body, _ = chunked(Head(keep=True))
    assert calls(body) == ["aten.view", "aten.linear", "graphopt.linear_cross_entropy"]
    loss = next(n for n in body.graph.nodes if "cross_entropy" in str(n.target))
    assert loss.kwargs["logits"] is next(
        n for n in body.graph.nodes if n.target is torch.ops.aten.linear.default
    )


@pytest.mark.parametrize("keep", [True, False])
def test_numbers_stay(keep: bool) -> None:
    model = Head(keep=keep)
    body, _ = chunked(model, chunk_bytes=4 * 21 * 3)
    found = run(body, (X, Y))
    expected = model(X, Y) if keep else (model(X, Y),)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    slopes = [
        torch.autograd.grad(results[0] + (results[1].sin().sum() if keep else 0), params)
        for results, params in (
            (found, list(body.root.parameters())),
            (expected, list(model.parameters())),
        )
    ]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("keep", [True, False])
def test_the_gradient_of_a_cast_weight_goes_to_the_parameter(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `linear_wide`, in float32, whose rounding a product in bfloat16 would add."""
    monkeypatch.setattr(wide, "WORTH", 0)
    model = Head(keep=keep)
    opt = graphopt.optimize(model, (X, Y), precision="bf16")
    body = opt.body.copy()
    assert "graphopt.linear_wide" in calls(body)
    expected = run(body, (X, Y))
    log = Log()
    ChunkLoss(chunk_bytes=2 * 21 * 3).run(body, log)
    assert [r.rule for r in log.rewrites] == ["chunk_loss"]
    assert ("graphopt.linear_wide" in calls(body)) == keep
    found = run(body, (X, Y))
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(v[0], parameters) for v in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_a_second_run_changes_nothing() -> None:
    body, _ = chunked(Head(keep=True))
    log = Log()
    ChunkLoss().run(body, log)
    assert not log.rewrites


def test_another_op_between_is_left_alone() -> None:
    def capped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.tanh(F.linear(x, torch.ones(21, 8)))
        return F.cross_entropy(logits.view(-1, 21), y.view(-1))

    assert not chunked(capped)[1]


def test_no_room_for_a_rewrite() -> None:
    body = run_pipeline(body_of(Head(keep=False), (X, Y))).body
    log = Log(max_rewrites=0)
    ChunkLoss().run(body, log)
    assert not log.rewrites
