"""Every model of the zoo keeps the error contract, trained and evaluated, at two input shapes."""

from __future__ import annotations

import pytest
import torch
from contract import eager_step, judge, optimized
from zoo import SHAPES, ZOO

import graphopt
from graphopt.replay import dropout_arguments

AUTOCAST = ("gpt2", "llama", "bert", "resnet50")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ZOO)
def test_outputs_and_gradients(name: str, training: bool) -> None:
    entry = ZOO[name]
    model = entry.make(training=training)
    opt = optimized(model, entry.batch(0))
    assert any(r.kind == "local" for r in opt.rewrites) or name == "resnet50"
    for shape in SHAPES:
        found = judge(model, opt, entry.batch(shape))
        assert found.passed, f"{name}, shape {shape}\n{found!r}"
    assert len(opt.recaptures) <= 1, "a second size is one recapture"


@pytest.mark.parametrize("name", ZOO)
def test_inference(name: str) -> None:
    entry = ZOO[name]
    model = entry.make(training=False)
    with torch.no_grad():
        opt = optimized(model, entry.batch(0))
        found = judge(model, opt, entry.batch(0))
    assert found.passed, f"{name}\n{found!r}"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_under_autocast(name: str, training: bool) -> None:
    entry = ZOO[name]
    model = entry.make(training=training)
    with torch.autocast("cpu", torch.bfloat16):
        opt = optimized(model, entry.batch(0))
    found = judge(model, opt, entry.batch(0), torch.bfloat16)
    assert found.passed, f"{name}\n{found!r}"


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_every_rewrite_with_dropout_on(name: str, autocast: bool) -> None:
    entry = ZOO[name]
    model = entry.make(training=True, dropout=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        opt = optimized(model, entry.batch(0))
        result = graphopt.verify(opt, (), entry.batch(0))
    result.check()
    assert autocast == any(c.rule == "materialize_autocast" for c in result.checks)
    dropping = [n for n in opt.graph.nodes if dropout_arguments(n)]
    assert any(str(n.target).startswith("graphopt.") for n in dropping)


@pytest.mark.parametrize("name", ["llama", "whisper", "resnet50"])
def test_every_rewrite_without_gradients(name: str) -> None:
    entry = ZOO[name]
    with torch.no_grad():
        opt = optimized(entry.make(training=False), entry.batch(0))
        graphopt.verify(opt, (), entry.batch(0)).check()


def test_a_seeded_dropout_repeats() -> None:
    entry = ZOO["gpt2"]
    opt = optimized(entry.make(training=True, dropout=True), entry.batch(0))
    batch, runs = entry.batch(0), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(eager_step(opt, batch, {}))
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))
    assert not torch.equal(runs[0]["output/0"], runs[2]["output/0"])


def test_labels_are_an_input_of_their_own() -> None:
    entry = ZOO["llama"]
    model = entry.make(training=True)
    ids = entry.batch(0)["input_ids"]
    opt = optimized(model, {"input_ids": ids, "labels": ids})
    batch = entry.batch(0)
    assert not torch.equal(batch["input_ids"], batch["labels"])
    with torch.no_grad():
        torch.testing.assert_close(opt(**batch).loss, model(**batch).loss)
