"""assert_equivalent passes what is right, catches each planted fault, and leaves all as it was."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from subjects import FAULTS, RIGHT, Block, Twin, inputs, optimized, right_twin
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.errors import OptionError
from graphopt.testing import EquivalenceError, assert_equivalent


def rest(model: Block) -> Block:
    model.drop = 0.0
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "plain"])
def test_an_optimized_module_passes(training: bool, written: bool) -> None:
    model = Block().train(training)
    kwargs = {"seen": torch.zeros(3)} if written else {}
    found = assert_equivalent(model, optimized(model), inputs(), kwargs)
    names = [t.name for t in found.comparison.tensors]
    assert {"output/0", "output/2", "grad/norm.weight", "buffer/mean", "input/x"} <= set(names)
    assert ("grad/argument x" in names) != ("input/seen" in names)
    assert any("dropout" in n for n in found.notes) == training


def test_a_twin_with_parameters_of_its_own_passes() -> None:
    model = Block()
    assert_equivalent(model, right_twin(model), inputs())


def test_an_attached_model_passes() -> None:
    model = Block()
    twin = copy.deepcopy(model)
    graphopt.attach(twin)
    assert_equivalent(model, twin, inputs())


def test_any_other_module_can_be_compared() -> None:
    model = rest(Block())
    assert_equivalent(model, Twin(model, RIGHT), inputs(), {"seen": torch.ones(2)})


def test_any_other_module_has_its_dropouts_at_rest_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    found = assert_equivalent(model, model, torch.randn(3, 4))
    assert "dropout: compared at p = 0" in found.notes


@pytest.mark.parametrize(
    ("upstream", "text"),
    [
        (torch.ones(3), "upstream[0] is of shape [3], result 0 is of shape [2, 4]"),
        ([torch.ones(2, 4), torch.ones(1)], "result 1 is not there"),
    ],
)
def test_an_upstream_gradient_that_fits_no_result_is_told(upstream: Any, text: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match=re.escape(text)):
        assert_equivalent(model, graphopt.optimize(model), torch.ones(2, 4), upstream=upstream)


def test_a_keyword_that_is_no_option_is_told() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="assert_equivalent has no option 'stride'"):
        assert_equivalent(model, model, torch.ones(2, 4), stride=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    step, message = FAULTS[fault]
    model = rest(Block())
    with pytest.raises(EquivalenceError, match=message) as caught:
        assert_equivalent(model, Twin(model, step), inputs(), {"seen": torch.ones(2)}
                          if "effect" in fault else None)  # fmt: skip
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, graphopt.VerifyError)


def test_without_strides_a_copy_of_a_view_passes_only_where_nothing_is_shared() -> None:
    model = nn.Linear(4, 3)
    twin = Twin(model, lambda m, x, seen: m(x).t().contiguous().t())
    x = torch.randn(5, 4)
    with pytest.raises(EquivalenceError, match="stride"):
        assert_equivalent(model, twin, x)
    assert_equivalent(model, twin, x, strides=False)


def test_all_is_left_as_it_was() -> None:
    model = Block().train()
    opt = optimized(model)
    x, seen = inputs(), torch.zeros(2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2)
    state = copy.deepcopy(model.state_dict())
    buffer, versions = model.mean, [p._version for p in model.parameters()]
    random = torch.get_rng_state()
    assert_equivalent(model, opt, x, {"seen": seen})
    with pytest.raises(EquivalenceError):
        assert_equivalent(model, Twin(model, FAULTS["a buffer's update"][0]), x)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    assert model.mean is buffer
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, inputs())
    assert torch.equal(seen, torch.zeros(2))
    assert model.training
    assert model.drop == 0.1


def test_strides_of_arguments_are_kept() -> None:
    seen = []

    class Reader(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            seen.append([(t.stride(), t.storage_offset()) for t in (a, b, c)] + [b is c])
            return a + b + c

    base = torch.randn(20)
    a, b = base[2:11].view(3, 3).t(), torch.randn(1, 3).expand(3, 3)
    model = Reader()
    assert_equivalent(model, Twin3(model), (a, b, b))
    assert seen[0] == [((1, 3), 2), ((0, 1), 0), ((0, 1), 0), True]


class Twin3(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.inner(*args)


def test_random_draws_are_repeated() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand_like(x) + torch.randn(x.shape)

    model = Noisy()
    found = assert_equivalent(model, optimized(model), torch.randn(4, 4))
    assert any("random" in n for n in found.notes)


def test_a_fault_of_the_capture_is_one() -> None:
    """The captured graph is of a model that differs: measured by it alone, all would be well."""
    model = rest(Block())
    other = copy.deepcopy(model)
    other.norm.eps = 1e-2
    with pytest.raises(EquivalenceError, match="the captured graph is not the model") as caught:
        assert_equivalent(model, optimized(other), inputs())
    assert "the capture is" in str(caught.value)
    assert "give factory=" in str(caught.value)
    assert not caught.value.script


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_under_autocast(grad: bool) -> None:
    model = Block().train(grad)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        found = assert_equivalent(model, optimized(model), inputs())
    dtypes = {t.name: t.dtype for t in found.comparison.tensors}
    assert dtypes["output/0"] == "float32"
    assert ("grad/up.weight" in dtypes) == grad


@pytest.mark.parametrize("kind", ["zeros", "expanded"])
def test_upstream_gradients_of_ones_own(kind: str) -> None:
    model = rest(Block())
    g = torch.zeros(6, 16) if kind == "zeros" else torch.ones(()).expand(6, 16)
    assert_equivalent(model, optimized(model), inputs(), upstream=[g, None, torch.zeros(())])


WRONG_USES = {
    "no module": lambda m: assert_equivalent(lambda x: x, m, inputs()),
    "the optimized one as the model": lambda m: assert_equivalent(optimized(m), optimized(m)),
    "an attached model": lambda m: assert_equivalent(graphopt.attach(m), m),
    "other parameters": lambda m: assert_equivalent(m, nn.Linear(2, 2), inputs()),
    "other values": lambda m: assert_equivalent(m, _shifted(m), inputs()),
    "another mode": lambda m: assert_equivalent(m, copy.deepcopy(m).eval(), inputs()),
    "a dict of inputs": lambda m: assert_equivalent(m, optimized(m), {"x": inputs()}),
    "upstream of numbers": lambda m: assert_equivalent(m, optimized(m), inputs(), upstream=1.0),
}


def _shifted(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    return other


@pytest.mark.parametrize("use", WRONG_USES)
@pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")
def test_a_wrong_use_is_told_before_any_run(use: str) -> None:
    with pytest.raises(graphopt.OptionError):
        WRONG_USES[use](Block().train())


def test_what_the_model_raises_is_raised() -> None:
    model = Block()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        assert_equivalent(model, optimized(model), torch.randn(3, 7))


def test_in_float64_the_two_must_agree() -> None:
    """There is no better truth: eager's error is zero, and a rounding no fault."""
    model = rest(Block()).double()
    assert_equivalent(model, optimized(model), inputs().double())
    scaled = Twin(model, lambda m, x, seen: _scaled(m(x, seen), 1 + 1e-8))
    with pytest.raises(EquivalenceError, match="result 0 is off"):
        assert_equivalent(model, scaled, inputs().double())


def _scaled(found: dict[str, Any], factor: float) -> dict[str, Any]:
    y = found["y"] * factor
    return {"y": y, "pair": (y.t(), y.sum())}


def test_of_a_handful_of_tensors_the_mean_does_not_count() -> None:
    model = nn.Linear(16, 16)
    found = assert_equivalent(model, optimized(model), inputs())
    assert not found.comparison.mean_counts


def test_a_dropout_at_rest_shares_nothing_with_its_input() -> None:
    """With p = 0 eager hands the input on; what is compared is what training does."""

    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = x * 2
            return h, F.dropout(h, 0.3, self.training)

    model = Both()
    assert_equivalent(model, optimized(model), inputs())


def test_low_precision_is_measured_beside_eager_under_autocast() -> None:
    model = Block().train()
    found = assert_equivalent(model, optimized(model, precision="bf16"), inputs())
    assert any("precision='bf16'" in n for n in found.notes)
    assert found.comparison.tensors[0].eager > 1e-4


def test_a_small_loss_of_precision_is_seen() -> None:
    """Less than ten times eager's error, on every input: no luck."""
    model = rest(Block())
    worse = Twin(model, lambda m, x, seen: _scaled(m(x, seen), 1 + 4e-7))
    with pytest.raises(EquivalenceError, match="result 0 is off") as caught:
        assert_equivalent(model, worse, inputs())
    assert caught.value.comparison is not None
    assert 2 < caught.value.comparison.tensors[0].ratio < 16


def test_what_is_luck_on_one_input_is_settled_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphopt.testing import judge, trial

    real, calls = judge.judge, []

    def unlucky(*steps: Any) -> Any:
        calls.append(1)
        found = real(*steps)
        if len(calls) > 1:
            return found
        first = dataclasses.replace(found.tensors[0], ratio=3.0, verdict="error 3.00 times")
        return dataclasses.replace(found, tensors=(first, *found.tensors[1:]))

    monkeypatch.setattr(trial, "judge", unlucky)
    model = rest(Block())
    assert assert_equivalent(model, optimized(model), inputs()).comparison.passed
    assert len(calls) == trial.DRAWS


def test_a_gradient_that_is_zero_in_truth_is_not_judged_by_its_rounding() -> None:
    """The mean of a layer norm's result is its bias's: nothing flows back but rounding."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (16,)).mean(-1)

    model = Mean()
    found = assert_equivalent(model, optimized(model), inputs())
    by_name = {t.name: t for t in found.comparison.tensors}
    assert by_name["grad/argument x"].eager > 0.5
