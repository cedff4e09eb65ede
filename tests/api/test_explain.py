"""explain: a dry run that changes nothing, and its table."""

import json

import pytest
import torch
from torch import nn

from graphopt import OptionError, explain


class Block(nn.Module):
    """LayerNorm, and a sum that the LayerNorm after it is fused with."""

    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, x):
        return self.ln_2(x + self.fc(self.ln_1(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16) for _ in range(3)))


@pytest.fixture
def x():
    return torch.ones(4, 16)


def test_it_reports_what_each_rule_did_with_blocks_folded(model, x):
    found = explain(model, x)
    where = {row.rule: row.where for row in found.rules if row.fired}
    assert where["add_layer_norm"] == "*.ln_2 x3"
    assert (found.model, found.mode, found.inputs) == (
        "Sequential",
        "train",
        ("input: f32[4, 16]",),
    )
    assert found.nodes_after < found.nodes_before
    assert found.bytes_after < found.bytes_before


def test_it_changes_nothing(model, x):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(model) is nn.Sequential


def test_the_repr_is_the_table(model, x):
    text = repr(explain(model, x))
    assert text.startswith("Sequential  train  input: f32[4, 16]")
    assert "rule" in text
    assert "*.ln_2 x3" in text
    assert all(len(line) <= 100 for line in text.split("\n")[1:])


def test_mode_follows_the_model(model, x):
    assert explain(model.eval(), x).mode == "eval"


def test_to_dict_is_json(model, x):
    data = json.loads(json.dumps(explain(model, x).to_dict()))
    assert [r["ordinal"] for r in data["rewrites"]] == list(range(len(data["rewrites"])))
    assert sum(row["fired"] for row in data["rules"]) == len(data["rewrites"])


def test_rules_and_max_rewrites_are_kept(model, x):
    assert not [r for r in explain(model, x, rules="default,-add_*").rewrites if "add_" in r.rule]
    assert len(explain(model, x, max_rewrites=1).rewrites) == 1
    with pytest.raises(OptionError, match="layer_nrom"):
        explain(model, x, rules="layer_nrom")


def test_a_refusal_is_listed_with_its_line():
    class Odd(nn.Module):
        def forward(self, x):
            return nn.functional.relu(nn.functional.layer_norm(x, x.shape[1:]))  # two dims

    found = explain(Odd(), torch.ones(2, 3, 4))
    (row,) = [row for row in found.refused if row.rule == "layer_norm"]
    assert "last 2 dims" in row.reason
    assert row.line.startswith("test_explain.py:")
    assert row.reason in " ".join(repr(found).split())


def test_kwargs_and_autocast_are_followed():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(model, example_kwargs={"input": torch.ones(2, 8)})
    assert "materialize_autocast" in [r.rule for r in found.rewrites]


def test_without_inputs_it_says_what_forward_takes(model):
    with pytest.raises(OptionError, match="do not fit the forward of Sequential"):
        explain(model)
    with pytest.raises(OptionError, match="no option 'rulez'"):
        explain(model, torch.ones(4, 16), rulez="default")


def test_precision_is_that_of_optimize(model, x):
    found = explain(model, x, precision="bf16", precision_overrides={"0.fc": "fp32"})
    assert "materialize_autocast" in [r.rule for r in found.rewrites]
    with pytest.raises(OptionError, match="precision is 'fp8'"):
        explain(model, x, precision="fp8")
