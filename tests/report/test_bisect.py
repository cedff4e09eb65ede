"""bisect: the guilty rewrite by the contract, the search, and the cases where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bisect_models import RIGHT, Model, aten, planted, planted_act
from torch import fx, nn

import graphopt
from graphopt.api import PassCompiler
from graphopt.bisect import _Search, _stretches, cure
from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord, Site
from graphopt.passes import Match, rule
from graphopt.report.blame import BisectResult
from graphopt.trials import ContractJudge, Outcome, Ran


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def block() -> Model:
    """One block, for predicates: each of their runs captures the model anew."""
    return Model(1)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 16)


def test_the_guilty_rewrite_is_named_with_place_code_and_cure(
    model: Model, x: torch.Tensor
) -> None:
    found = graphopt.bisect(model, x, rules=[RIGHT, planted("layers.2.norm")])
    assert (found.status, found.good, found.monotone, found.cured) == ("found", False, True, True)
    (culprit,) = found.culprits
    assert culprit.record.site.module == "layers.2.norm"
    assert culprit.alone is not None
    assert culprit.alone.status == "wrong"
    assert "aten.layer_norm(" in culprit.reference
    assert "graphopt.layer_norm(" in culprit.replacement
    text = repr(found)
    assert f"rewrite #{culprit.record.ordinal}, rule planted_norm, at layers.2.norm" in text
    assert "bisect_models.py:" in text
    assert f'rules="{RIGHT}"' in text


def test_one_rewrite_less_is_right_and_with_it_it_is_wrong(model: Model, x: torch.Tensor) -> None:
    rules = [RIGHT, planted("layers.2.norm")]
    culprit = graphopt.bisect(model, x, rules=rules).culprit
    assert culprit is not None
    k = culprit.record.ordinal
    with_it = graphopt.optimize(model, x, rules=rules, max_rewrites=k + 1)
    assert not graphopt.verify(with_it, x).passed
    before = graphopt.optimize(model, x, rules=rules, max_rewrites=k)
    assert graphopt.verify(before, x).passed


def test_the_rules_are_left_out_one_by_one(model: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(model, x, rules=[RIGHT, planted("layers.2.norm")])
    verdicts = {r.rule: r.good for r in found.rules}
    assert verdicts["planted_norm"]
    assert not any(good for name, good in verdicts.items() if name != "planted_norm")


def test_two_guilty_rules_are_both_found(model: Model, x: torch.Tensor) -> None:
    rules = [f"{RIGHT},-bias_act", planted("layers.2.norm"), planted_act("layers.1")]
    found = graphopt.bisect(model, x, rules=rules)
    assert {(c.rule, c.record.site.module) for c in found.culprits} == {
        ("planted_norm", "layers.2.norm"),
        ("planted_relu", "layers.1"),
    }
    assert found.cured
    assert not any(r.good for r in found.rules)
    assert any("guilty together" in note for note in found.notes)


def test_a_right_model_is_said_to_be_right(model: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(model, x)
    assert (found.status, found.good, found.culprits) == ("right", True, ())
    assert "nothing is wrong with all" in repr(found)


def test_what_the_whole_step_hides_is_suspected(x: torch.Tensor) -> None:
    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.relu() * 0.0).sum() + x.mean()

    found = graphopt.bisect(Hidden(), x, rules=[RIGHT, planted_act("")])
    assert found.status == "right"
    assert [c.rule for c in found.suspects] == ["planted_relu"]
    assert not found.good
    assert "wrong when replayed alone" in repr(found)


def test_the_captures_fault_is_told_from_a_rules(block: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(block, x, predicate=lambda opt: False)
    assert found.status == "capture"
    assert "wrong without any rewrite already" in repr(found)
    assert found.culprits == ()


def test_the_captured_graph_is_compared_with_the_model_itself(
    model: Model, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphopt import trials

    true = trials.capture

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = true(*args, **kwargs)
        node = next(n for n in found.body.graph.nodes if n.target is aten.relu.default)
        node.target = aten.silu.default
        return found

    monkeypatch.setattr(trials, "capture", wrong)
    rules = [f"{RIGHT},-bias_act", planted("layers.2.norm")]
    assert graphopt.bisect(model, x, rules=rules).status == "capture"


def test_a_model_with_dropout_is_compared_at_p_0(x: torch.Tensor) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
    found = graphopt.bisect(nn.Sequential(layer), x, rules=[RIGHT, planted("0.norm2")])
    assert [c.record.site.module for c in found.culprits] == ["0.norm2"]


class Dropouts(nn.Module):
    """Dropout by every name."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.mha = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.channels, self.alpha = nn.Dropout2d(0.5), nn.AlphaDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rnn(x)[0]
        h = h + self.mha(h, h, h, need_weights=False)[0]
        h = nn.functional.scaled_dot_product_attention(h, h, h, None, 0.5)
        return self.alpha(self.channels(h.unsqueeze(0)).squeeze(0))


def test_every_dropout_is_off_when_capture_is_judged() -> None:
    torch.manual_seed(0)
    judge = ContractJudge(
        Dropouts().train(), (torch.randn(2, 5, 8),), {}, PassCompiler(), None, None
    )
    outcome = judge.nothing()
    assert outcome.good, outcome.detail


class Told:
    """A judge that is told its verdicts: no model, no graphs."""

    repeats = True

    def __init__(
        self, right: Callable[[int, Sequence[str]], bool], passes: Sequence[int] = ()
    ) -> None:
        self.right, self.passes, self.count, self.asked = right, passes, 12, 0
        self.body = Body(fx.Graph(), nn.Module(), 0)

    def run(self, limit: int | None, without: Sequence[str]) -> Outcome:
        self.asked += 1
        kinds = ["global" if k in self.passes else "local" for k in range(self.count)]
        records = [record(k, kinds[k]) for k in range(self.count) if f"rule{k}" not in without]
        kept = records[: self.count if limit is None else limit]
        good = self.right(len(kept), without)
        ran = Ran("", tuple(kept), self.body)
        return Outcome(good, "" if good else "told so", (ran,))

    def nothing(self) -> Outcome:
        return self.run(0, ())


def record(ordinal: int, kind: str) -> RewriteRecord:
    name = f"rule{ordinal}"
    return RewriteRecord(
        ordinal, "fusion", name, kind, (), (), (), (), Site(), ("aten.a",), ("aten.b",)
    )


def searched(judge: Told) -> BisectResult:
    search = _Search(judge, "default", lambda text: None)
    search.go()
    return search.result("Model", "a test", 0.0)


@pytest.mark.parametrize("first", range(1, 13))
def test_every_position_is_found_in_few_runs(first: int) -> None:
    judge = Told(lambda n, without: n < first or f"rule{first - 1}" in without)
    found = searched(judge)
    assert [c.record.ordinal for c in found.culprits] == [first - 1]
    assert found.cure == f'rules="default,-rule{first - 1}"'
    limits = [t.rewrites for t in found.trials if not t.without]
    assert len(limits) <= 2 + 2 + 4 + 1 + 4  # the ends twice, the search, once more, the probes


def test_a_verdict_that_turns_twice_is_scanned() -> None:
    found = searched(Told(lambda n, without: bool(without) or n not in (2, 3, 5, 6, 9, 10, 11, 12)))
    assert found.status == "found"
    assert not found.monotone
    assert [c.record.ordinal for c in found.culprits] == [1, 4, 8]
    (note,) = [n for n in found.notes if "turns more than once" in n]
    assert note.endswith(
        "right with 0 to 1, wrong with 2 to 3, right with 4, wrong with 5 to 6, "
        "right with 7 to 8, wrong with 9 to 12"
    )


def test_a_guilty_pass_is_cured_by_stopping_before_it() -> None:
    found = searched(Told(lambda n, without: n < 5, passes=(4,)))
    assert [c.record.ordinal for c in found.culprits] == [4]
    assert (found.cure, found.cured) == ("max_rewrites=4", True)
    assert "rule rule4, at the whole graph" in repr(found)


def test_a_judge_that_changes_its_mind_in_the_middle_is_told() -> None:
    asked: dict[int, int] = {}

    def right(n: int, without: Sequence[str]) -> bool:
        asked[n] = asked.get(n, 0) + 1
        return n < 7 or (n == 7 and asked[n] > 1)

    found = searched(Told(right))
    assert (found.status, found.culprits) == ("flaky", ())
    assert "7 rewrites were wrong at first and right when asked again" in repr(found)


def test_an_optimized_module_brings_its_own_rules(model: Model, x: torch.Tensor) -> None:
    opt = graphopt.optimize(model, x, rules=[RIGHT, planted("layers.1.norm")])
    found = graphopt.bisect(opt, x)
    assert [c.record.site.module for c in found.culprits] == ["layers.1.norm"]


def test_options_beside_an_optimized_module_are_told(block: Model, x: torch.Tensor) -> None:
    with pytest.raises(graphopt.OptionError, match="optimized already"):
        graphopt.bisect(graphopt.optimize(block), x, rules="default,-glu")


def test_autocast_around_the_call_is_followed(model: Model, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert graphopt.bisect(model, x).good
        found = graphopt.bisect(model, x, rules=[RIGHT, planted("layers.2.norm")])
    assert [c.record.site.module for c in found.culprits] == ["layers.2.norm"]


def test_precision_is_that_of_optimize(model: Model, x: torch.Tensor) -> None:
    options: dict[str, Any] = {
        "precision": "bf16",
        "precision_overrides": {"layers.0.*": "fp32"},
        "rules": [RIGHT, planted("layers.2.norm")],
    }
    for found in (
        graphopt.bisect(model, x, **options),
        graphopt.bisect(graphopt.optimize(model, x, **options), x),
    ):
        assert [c.record.site.module for c in found.culprits] == ["layers.2.norm"]
    assert graphopt.bisect(model, x, precision="bf16").good


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "bisect needs example_inputs, or a predicate"),
        ({"predicate": 3}, "predicate is a int"),
        ({"predicate": lambda opt: True}, "the predicate did not call the module"),
        ({"example_inputs": torch.ones(2, 16), "predicate": lambda o: None}, "returned None"),
        ({"example_inputs": torch.ones(2, 16), "rules": "layer_nrom"}, "layer_nrom"),
        ({"example_inputs": {"x": 1}}, "example_inputs is a dict"),
        ({"example_inputs": torch.ones(2, 16), "precision": "fp8"}, "precision is 'fp8'"),
        ({"example_input": torch.ones(2, 16)}, "no option 'example_input'"),
    ],
)
def test_wrong_arguments_are_told(model: Model, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(graphopt.OptionError, match=text):
        graphopt.bisect(model, **arguments)


def test_to_dict_is_json_with_these_keys(model: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(model, x, rules=[RIGHT, planted("layers.2.norm")])
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == "graphopt.bisect/1"
    assert list(data) == [
        "schema", "good", "model", "judged_by", "status", "rewrites", "graphs", "monotone", "cure",
        "cured", "notes", "seconds", "culprits", "suspects", "rules", "trials",
    ]  # fmt: skip
    assert set(data["culprits"][0]) == {
        "rewrite", "without", "detail", "alone", "reference", "replacement", "change", "cure",
        "graph",
    }  # fmt: skip


def test_worse_rounding_alone_is_said_to_be_that(model: Model, x: torch.Tensor) -> None:
    @rule("fusion", register=False)
    def rounded_norm(x, shape, weight, bias, eps, _cudnn):  # type: ignore[no-untyped-def]
        """A LayerNorm of an input that was rounded."""
        return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)

    @rounded_norm.replace
    def _(m: Match) -> Any:
        low = m.call(aten.to.dtype, m.x, torch.bfloat16)
        high = m.call(aten.to.dtype, low, torch.float32)
        return m.call(torch.ops.graphopt.layer_norm.default, high, m.weight, m.bias, m.eps)

    found = graphopt.bisect(model, x, rules=[RIGHT, rounded_norm])
    assert {c.rule for c in found.culprits} == {"rounded_norm"}
    assert any("in float64 both graphs agree" in note for note in found.notes)


def test_html_is_escaped(x: torch.Tensor) -> None:
    page = graphopt.bisect(Model(1), x, predicate=lambda opt: False)._repr_html_()
    assert "judged by &lt;lambda&gt;" in page


def test_cure_keeps_the_users_other_rules() -> None:
    mine, other = planted(), planted_act()
    assert cure("default,-rope", ["glu"]) == 'rules="default,-rope,-glu"'
    assert cure(["default", mine], ["planted_norm"]) == 'rules="default"'
    assert cure([mine, other], ["glu"]) == 'rules=["default,-glu", planted_norm, planted_relu]'


def test_stretches_in_words() -> None:
    assert _stretches([True, True, False, True]) == "right with 0 to 1, wrong with 2, right with 3"
