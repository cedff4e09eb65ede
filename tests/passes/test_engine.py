"""The rewrite engine: matching, refusals, records, ordinals, choosing rules."""

from __future__ import annotations

import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt.errors import OptionError, PassError
from graphopt.graph.pattern import Matcher, Pattern, either
from graphopt.graph.text import ir_text
from graphopt.passes import REGISTRY, PassOptions, all_rules, rule, run_pipeline, select_rules
from tests.passes.bodies import body_of, run

aten = torch.ops.aten


def only(*names: str) -> PassOptions:
    return PassOptions(rules=list(names))


def match(pattern, function, *inputs):
    body = body_of(function, inputs)
    traced = Pattern.of(pattern)
    for node in body.graph.nodes:
        if node.op == "call_function" and node.target in traced.targets:
            matcher = Matcher(traced)
            found = matcher.match(node, lambda bound: None)
            if found is not None:
                return found, matcher
    return None, matcher


def test_constants_match_exactly():
    def pattern(x):
        return aten.mul.Tensor(x, 2.0)

    assert match(pattern, lambda x: x * 2, torch.ones(2))[0]
    assert not match(pattern, lambda x: x * 2.5, torch.ones(2))[0]


def test_a_capture_must_be_the_same_everywhere():
    def pattern(x):
        return aten.mul.Tensor(x, aten.sigmoid.default(x))

    x = torch.ones(2)
    assert match(pattern, lambda x: x * torch.sigmoid(x), x)[0]
    assert not match(pattern, lambda x, y: x * torch.sigmoid(y), x, x.clone())[0]


def test_commuting_operands_match_either_way():
    def pattern(x):
        return aten.add.Tensor(aten.relu.default(x), 1)

    def left(x, y):
        return F.relu(x) + y

    def both(a, b):
        return aten.add.Tensor(aten.relu.default(a), aten.tanh.default(b))

    found, _ = match(both, lambda x, y: torch.tanh(y) + F.relu(x), torch.ones(2), torch.ones(2))
    assert found.captures["a"].name != found.captures["b"].name
    assert match(pattern, lambda x: F.relu(x) + 1, torch.ones(2))[0]
    assert not match(pattern, left, torch.ones(2), torch.ones(2))[0]


def test_schema_defaults_are_filled_in():
    def pattern(x, y):
        return aten.add.Tensor(x, y, alpha=1)

    assert match(pattern, lambda x, y: x + y, torch.ones(2), torch.ones(2))[0]
    assert not match(pattern, lambda x, y: torch.add(x, y, alpha=2), torch.ones(2), torch.ones(2))[
        0
    ]


def test_underscore_parameters_match_anything():
    def pattern(x, _slope):
        return aten.leaky_relu.default(x, _slope)

    found, _ = match(pattern, lambda x: F.leaky_relu(x, 0.3), torch.ones(2))
    assert set(found.captures) == {"x"}


def test_either_backtracks_over_what_it_bound():
    def pattern(x):
        wide = either(aten.to.dtype(x, torch.float32), x)
        return aten.mul.Tensor(wide, aten.sigmoid.default(x))

    narrow = torch.ones(2).bfloat16()
    assert match(pattern, lambda x: x.float() * torch.sigmoid(x), narrow)[0]
    assert match(pattern, lambda x: x * torch.sigmoid(x), narrow)[0]


def test_the_nearest_miss_is_told():
    def pattern(x):
        return aten.tanh.default(aten.relu.default(x))

    _, matcher = match(pattern, lambda x: torch.tanh(torch.sigmoid(x)), torch.ones(2))
    assert str(matcher.miss) == (
        "the pattern wants aten.relu (relu_default) where the graph has aten.sigmoid (sigmoid)"
    )


def test_a_pattern_returns_its_own_ops():
    with pytest.raises(TypeError, match="not one of its ops"):
        Pattern.of(lambda x: x)


def test_inside_value_used_elsewhere_refuses_with_the_user():
    def function(x):
        g = F.silu(x)
        return g * (x + 1), g

    result = run_pipeline(body_of(function, (torch.ones(2, 8),)), only("glu"))
    [refusal] = [r for r in result.refusals if r.rule == "glu"]
    assert refusal.reason == "the inside value silu (aten.silu) is also an output"
    assert refusal.to_dict()["site"]["line"]


def test_an_inside_value_that_is_an_operand_too_refuses():
    def squared(x):
        g = F.gelu(x)
        return g * g  # gate and up of a gated unit are one value

    result = run_pipeline(body_of(squared, (torch.randn(3, 8),)))
    assert not [r for r in result.rewrites if r.rule == "glu"]
    reasons = [r.reason for r in result.refusals if r.rule == "glu"]
    assert any("also the operand up" in reason for reason in reasons), reasons


def test_no_rule_crosses_a_no_grad_region():
    body = body_of(lambda g, u: F.silu(g) * u, (torch.ones(2, 8), torch.ones(2, 8)))
    next(n for n in body.graph.nodes if n.name == "silu").meta["graphopt_no_grad"] = True
    result = run_pipeline(body)
    assert [r.reason for r in result.refusals] == ["its ops stand in different regions (no_grad)"]


def test_a_record_replays_what_it_replaced():
    inputs = (torch.randn(3, 8), torch.randn(3, 8))
    result = run_pipeline(body_of(lambda g, u: F.silu(g) * u, inputs))
    [record] = result.rewrites
    assert record.rule == "glu"
    assert record.ops_before == ("aten.silu", "aten.mul.Tensor")
    assert record.ops_after == ("graphopt.glu",)
    assert (record.bytes_before, record.bytes_after) == (5 * 96, 3 * 96)
    replay = [
        torch.fx.GraphModule(nn.Module(), g)(*inputs)
        for g in (record.reference, record.replacement)
    ]
    torch.testing.assert_close(*replay)


def test_max_rewrites_stops_at_each_ordinal():
    inputs = (torch.randn(3, 8),)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU())
    full = run_pipeline(body_of(model, inputs))
    assert [r.ordinal for r in full.rewrites] == list(range(len(full.rewrites)))
    want = run(full.captured, inputs)[0]
    for k in range(len(full.rewrites) + 1):
        part = run_pipeline(body_of(model, inputs), PassOptions(max_rewrites=k))
        assert [r.rule for r in part.rewrites] == [r.rule for r in full.rewrites][:k]
        torch.testing.assert_close(run(part.body, inputs)[0], want)


def test_the_captured_body_stays_as_it_is():
    body = body_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(2, 8),))
    before = ir_text(body)
    result = run_pipeline(body)
    assert ir_text(body) == before == ir_text(result.captured)


def test_fuse_false_leaves_only_canonical_forms():
    body = body_of(lambda g, u: (g * torch.sigmoid(g)) * u, (torch.ones(2, 8), torch.ones(2, 8)))
    result = run_pipeline(body, PassOptions(fuse=False))
    assert [r.rule for r in result.rewrites] == ["silu"]


@pytest.mark.parametrize(
    ("spec", "has", "lacks"),
    [
        ("default", "glu", None),
        ("default,-glu", "bias_act", "glu"),
        ("-glu", "bias_act", "glu"),
        ("glu,bias_act", "glu", "rope"),
        ("*layer_norm", "add_layer_norm", "rms_norm"),
        (["default", "-rope"], "glu", "rope"),
    ],
)
def test_rules_are_chosen_by_name(spec, has, lacks):
    names = {r.name for r in select_rules(spec)}
    assert has in names
    assert lacks not in names


def test_an_unknown_rule_is_named_with_the_nearest():
    with pytest.raises(OptionError, match=r"no rule is called 'layernorm'(.|\n)*'layer_norm'"):
        select_rules("default,-layernorm")
    with pytest.raises(OptionError, match="holds 3, a int"):
        select_rules([3])


def test_a_rule_of_ones_own():
    @rule("fusion", register=False)
    def relu_twice(x):
        """relu(relu(x)) is relu(x)."""
        return aten.relu.default(aten.relu.default(x))

    @relu_twice.replace
    def _(m):
        return m.call(aten.relu.default, m.x)

    body = body_of(lambda x: F.relu(F.relu(x)), (torch.ones(2),))
    result = run_pipeline(body, PassOptions(rules=["default", relu_twice]))
    assert [r.rule for r in result.rewrites] == ["relu_twice"]
    assert "relu_twice" not in REGISTRY


def test_a_rule_that_raises_is_named():
    @rule("fusion", register=False)
    def broken(x):
        """Raises."""
        return aten.relu.default(x)

    @broken.replace
    def _(m):
        raise RuntimeError("boom")

    with pytest.raises(PassError, match=r"rule broken raised RuntimeError: boom"):
        run_pipeline(body_of(F.relu, (torch.ones(2),)), PassOptions(rules=[broken]))


def test_a_replacement_of_another_shape_is_refused_loudly():
    @rule("fusion", register=False)
    def shrinks(x):
        """Wrong."""
        return aten.relu.default(x)

    @shrinks.replace
    def _(m):
        return m.call(aten.sum.default, m.x)

    with pytest.raises(PassError, match=r"gives torch.float32\[\] where the model has"):
        run_pipeline(body_of(F.relu, (torch.ones(2),)), PassOptions(rules=[shrinks]))


def test_a_capture_may_not_hide_an_attribute_of_match():
    @rule("fusion", register=False)
    def hides(root):
        """Its capture is called like Match.root."""
        return aten.relu.default(root)

    with pytest.raises(ValueError, match=r"\['root'\] are attributes of Match"):
        _ = hides.patterns


def test_two_rules_may_not_share_a_name():
    with pytest.raises(ValueError, match="two rules are called 'glu'"):

        @rule("fusion")
        def glu(x):
            """Another."""
            return aten.relu.default(x)


def test_rules_pickle_by_where_they_stand():
    for made in all_rules():
        assert pickle.loads(pickle.dumps(made)) is made


def test_norms_go_before_a_larger_dropout_pattern():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x + self.drop(self.linear(x)))

    result = run_pipeline(body_of(Block(), (torch.ones(2, 8),)))
    assert [r.rule for r in result.rewrites if r.kind == "local"] == ["add_layer_norm"]


def test_pairs_keep_their_second_result():
    def function(x, r):
        s = x + r
        return F.layer_norm(s, (8,)), s * 2

    inputs = (torch.randn(3, 8), torch.randn(3, 8))
    body = run_pipeline(body_of(function, inputs)).body
    items = [n.args[1] for n in body.graph.nodes if n.target is operator.getitem]
    assert items == [0, 1]
    for a, b in zip(run(body, inputs), function(*inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("word", ["before", "after", "changes"])
def test_print_shows_stages_on_stderr(word, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHOPT_PRINT", word)
    run_pipeline(body_of(lambda g, u: F.silu(g) * u, (torch.ones(2, 8), torch.ones(2, 8))))
    shown = capsys.readouterr()
    assert not shown.out
    assert ("captured" in shown.err) == (word == "before")
    assert ("graphopt.glu" in shown.err) == (word != "before")


def test_print_rejects_other_words(monkeypatch):
    monkeypatch.setenv("GRAPHOPT_PRINT", "everything")
    with pytest.raises(OptionError, match="before, after or changes"):
        run_pipeline(body_of(F.relu, (torch.ones(2),)))


def test_dump_writes_each_stage_as_python(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "stages"))
    run_pipeline(body_of(lambda g, u: F.silu(g) * u, (torch.ones(2, 8), torch.ones(2, 8))))
    files = sorted((tmp_path / "stages").iterdir())
    assert files[0].name.endswith("_captured.py")
    for file in files:
        compile(file.read_text(), file.name, "exec")
    assert "graphopt.glu(" in files[-1].read_text()


def test_dump_into_a_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "taken"))
    with pytest.raises(OptionError, match="cannot be written"):
        run_pipeline(body_of(F.relu, (torch.ones(2),)))


def test_a_replacement_that_returns_nothing_is_named():
    @rule("fusion", register=False)
    def forgetful(x):
        """Returns nothing."""
        return aten.relu.default(x)

    @forgetful.replace
    def _(m):
        m.call(aten.relu.default, m.x)

    with pytest.raises(PassError, match="rule forgetful returned a NoneType, not a node"):
        run_pipeline(body_of(F.relu, (torch.ones(2),)), PassOptions(rules=[forgetful]))


def test_an_unknown_family_is_refused_at_once():
    with pytest.raises(ValueError, match="canonical or fusion, not 'zzz'"):
        rule("zzz")


def test_a_rule_of_ones_own_may_not_take_a_known_name():
    @rule("fusion", register=False)
    def glu(x):
        """Another."""
        return aten.relu.default(x)

    @glu.replace
    def _(m):
        return m.call(aten.relu.default, m.x)

    with pytest.raises(OptionError, match="two rules are called 'glu'"):
        select_rules(["default", glu])
