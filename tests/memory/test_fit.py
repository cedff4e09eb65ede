"""The largest batch that fits."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from graphopt import optimize
from graphopt.errors import BudgetError, CaptureError, OptionError
from graphopt.fit import fit


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh())))


def batch_of(count):
    return torch.ones(count, 32)


BUDGET = 96 * 1024


@pytest.fixture(scope="module")
def found():
    return fit(net(), batch_of, BUDGET)


def test_one_more_does_not_fit(found):
    assert found.predicted_peak_bytes <= BUDGET
    optimize(net(), batch_of(found.batch), memory_budget=BUDGET)
    with pytest.raises(BudgetError):
        optimize(net(), batch_of(found.batch + 1), memory_budget=BUDGET)


def test_few_batches_are_tried(found):
    assert len(found.tried) <= 12
    assert f"batch {found.batch}" in repr(found)
    assert json.loads(json.dumps(found.to_dict()))["batch"] == found.batch


def test_recomputing_makes_room(found):
    without = fit(net(), batch_of, BUDGET, recompute=False)
    assert without.batch < found.batch
    assert without.plan.recompute == ()
    assert without.predicted_peak_bytes <= BUDGET


def test_multiples_only(found):
    assert fit(net(), batch_of, BUDGET, multiple_of=8).batch == found.batch // 8 * 8


def test_keyword_arguments_and_resident_bytes(found):
    def named(count):
        return {"input": batch_of(count)}

    assert fit(net(), named, BUDGET, resident_bytes=BUDGET // 4).batch < found.batch


def test_nothing_fits():
    with pytest.raises(BudgetError, match="the smallest peak is"):
        fit(net(), batch_of, "4KiB")


@pytest.mark.parametrize(
    ("arguments", "options", "what"),
    [
        ((batch_of(2), BUDGET), {}, "make_inputs is of type Tensor"),
        ((batch_of, None), {}, "budget is None"),
        ((batch_of, 0.5), {}, "the model is on cpu"),
        ((batch_of, BUDGET), {"multiple_of": 0}, "multiple_of is 0"),
        ((lambda n: None, BUDGET), {}, r"make_inputs\(1\) is None"),
        ((lambda n: (1, 2, 3), BUDGET), {}, "do not fit the forward"),
        ((batch_of, BUDGET), {"batchsize": 2}, "no option 'batchsize'"),
        ((batch_of, BUDGET), {"multiple_of": True}, "multiple_of is True"),
        ((lambda n: 1 / 0, BUDGET), {}, r"make_inputs\(1\) raised ZeroDivisionError"),
        ((lambda: batch_of(1), BUDGET), {}, r"make_inputs\(1\) raised TypeError"),
    ],
)
def test_wrong_arguments(arguments, options, what):
    with pytest.raises(OptionError, match=what):
        fit(net(), *arguments, **options)


def test_without_recomputing_nothing_is_listed():
    with pytest.raises(BudgetError) as caught:
        fit(net(), batch_of, "4KiB", recompute=False)
    assert caught.value.why is None


def test_a_fraction_is_one_of_the_gpu():
    with pytest.raises(OptionError, match="a fraction of the memory of the model's GPU"):
        fit(nn.Linear(8, 8), lambda batch: torch.ones(batch, 8), 1e9)


DATA = torch.ones(40, 32)


@pytest.mark.parametrize(
    "make_inputs", [lambda count: torch.ones(4, 32), lambda count: DATA[:count]]
)
def test_inputs_that_do_not_grow_with_the_batch(make_inputs):
    with pytest.raises(OptionError, match="are of the same sizes"):
        fit(net(), make_inputs, "1GiB")


def test_a_large_budget_is_used_up_without_memory():
    """Inputs of a tenth of 2 TiB would not fit here."""
    found = fit(net(), lambda count: torch.randn(count, 32), "2TiB", recompute=False)
    assert found.batch > 2**20
    assert found.limit is None
    assert 0.999 * 2**41 < found.predicted_peak_bytes <= 2**41


@pytest.mark.parametrize(
    "make_inputs",
    [
        lambda count: torch.frombuffer(bytearray(128 * count), dtype=torch.float32).view(-1, 32),
        lambda count: DATA[0].expand(count, 32),
        lambda count: torch.randn(count, 32)[torch.randperm(count).tolist()],
    ],
    ids=["made elsewhere", "from a real tensor", "by values"],
)
def test_where_inputs_are_real_the_result_says_that_the_search_ended(monkeypatch, make_inputs):
    monkeypatch.setattr(sys.modules["graphopt.fit"], "MOST", 100)
    found = fit(net(), make_inputs, "1GiB", multiple_of=8)
    assert found.batch == found.limit == 96
    assert "none beyond 96 was looked for, since make_inputs makes real tensors" in repr(found)
    assert found.to_dict()["limit"] == 96


def test_the_budget_ends_a_search_with_real_inputs():
    real = torch.ones(512, 32)
    found = fit(net(), lambda count: real[:count], BUDGET)
    assert found.limit is None
    assert "looked for" not in repr(found)


def test_make_inputs_draws_nothing():
    before = torch.get_rng_state()
    fit(net(), lambda count: torch.randn(count, 32), BUDGET)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_refuses_a_batch_of_one():
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    found = fit(model, batch_of, BUDGET)
    assert min(batch for batch, _, _ in found.tried) == 2
    with pytest.raises(BudgetError, match="no batch fits: of batch 2"):
        fit(model, batch_of, "2KiB")


class Fours(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(4, -1, 32).mean()


def test_the_batch_that_a_model_does_not_take_is_told():
    with pytest.raises(CaptureError, match="of batch 1: Fours cannot be captured") as caught:
        fit(Fours(32, 32), batch_of, BUDGET)
    assert caught.value.try_ == "multiple_of=, where the model takes some batches alone"
    assert fit(Fours(32, 32), batch_of, BUDGET, multiple_of=4).batch % 4 == 0


def test_a_caller_s_inference_mode_does_not_matter(found):
    model = net()
    with torch.inference_mode():
        assert fit(model, batch_of, BUDGET).batch == found.batch
