"""Advice: settings in the order of their gain, memory on top, what is left out and why."""

import dataclasses
import importlib
import json

import pytest
import torch
from torch import nn

import graphopt
from graphopt import cli
from graphopt.memory.oracle import predict
from graphopt.options import OptionError
from graphopt.report.advice import Setting

advise = importlib.import_module("graphopt.advise")  # the package's `advise` is the function


class Net(nn.Module):
    def __init__(self, width=64, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
        return x.square().mean()


def advised(model=None, **options):
    return graphopt.advise(model or Net(), torch.randn(512, 64), measured=False, **options)


def test_the_first_row_is_the_model_as_it_is():
    found = advised()
    assert found.settings[0].name == "as it is"
    assert found.settings[0].options == {}
    assert sum(b for _, b in found.memory_by_kind) == found.settings[0].peak_bytes


def test_every_setting_looked_at_is_a_row_or_left_out_with_a_reason():
    found = advised()
    rows = {s.name.removeprefix("+ ") for s in found.settings[1:]}
    assert rows | {name for name, _ in found.left_out} == {"precision", "kernels", "memory"}


def test_a_step_that_does_not_fit_gets_a_budget_within_the_device():
    fast = [s for s in advised().settings if s.name != "+ memory"][-1]
    device = int(fast.peak_bytes * 0.9)
    found = advised(memory=device)
    assert found.options["memory_budget"] <= 0.9 * device
    assert "does not fit" in found.settings[-1].why


def test_a_step_that_cannot_fit_is_said_so():
    found = advised(memory="64KiB")
    assert "does not fit" in found.notes[-1]
    assert "memory_budget" not in found.options


def test_what_is_advised_is_what_optimize_does():
    model, x = Net(), torch.randn(512, 64)
    found = graphopt.advise(model, x, measured=False)
    opt = graphopt.optimize(model, x, **found.options)
    assert predict(opt.body).peak_bytes <= found.options["memory_budget"]


def test_a_low_precision_model_is_not_advised_to_lower_it():
    found = graphopt.advise(Net().bfloat16(), torch.randn(8, 64).bfloat16(), measured=False)
    assert ("precision", "the model is in low precision already") in found.left_out


def test_without_a_backward_there_is_no_plan():
    found = advised(Net().eval())
    assert dict(found.memory_by_kind)["gradients"] == 0
    assert "memory" in dict(found.left_out)
    assert found.curve == ()


def test_measured_rows_hold_both_figures():
    found = graphopt.advise(Net(depth=2), torch.randn(64, 64), measured=True)
    assert found.settings[0].measured_ms > 0
    assert "measured ms" in repr(found)


@pytest.mark.parametrize(
    ("times", "short", "at"),
    [
        ((9.0, 4.0, 3.0, 3.2), False, 3),
        ((9.0, 4.0, 5.0, 6.0), False, 1),
        ((9.0, 4.0, 5.0, 4.2), False, 3),  # the budget's row has the kernels, too
        ((9.0, 4.0, 3.0, 6.0), False, 2),
        ((9.0, 4.0, 3.0, 6.0), True, 3),
        ((9.0, 9.5, 9.9, 12.0), False, 0),
        ((None, None, None, None), False, 3),
    ],
)
def test_what_is_advised_is_borne_out_by_the_measurement(times, short, at):
    options = [{}, {"precision": "bf16", "fuse": False}, {"precision": "bf16"}]
    options.append({"precision": "bf16", "memory_budget": 5})
    rows = [Setting(str(o), o, 9.0, 1, measured_ms=t) for o, t in zip(options, times, strict=True)]
    assert advise.borne_out(rows, short) == at


def test_a_setting_that_measures_slower_is_not_in_the_call(monkeypatch):
    monkeypatch.setattr(advise, "borne_out", lambda rows, short: 0)
    found = graphopt.advise(Net(), torch.randn(64, 64), measured=True)
    assert found.options == {}
    assert "is not advised" in repr(found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": -1}, "memory is -1"),
        ({"memory": 0.5}, "memory is 0.5"),
        ({"train": 1}, "train is 1"),
        ({"resident_bytes": 1.5}, "resident_bytes is 1.5"),
        ({"loss_fn": 3}, "loss_fn is not callable"),
        ({"measured": "yes"}, "measured is 'yes'"),
        ({"memry": 1}, "memry"),
    ],
)
def test_bad_options_are_refused_before_any_work(options, text):
    with pytest.raises(OptionError, match=text):
        graphopt.advise(Net(), torch.randn(2, 64), **options)


def test_command_line_prints_json(monkeypatch, capsys, tmp_path):
    (tmp_path / "advised_target.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["advise", "advised_target:make", "--json", "--no-measured"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["call"].startswith("graphopt.optimize(model, inputs")


def test_ops_that_are_not_named_are_counted():
    found = graphopt.advise(nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8))
    ops = tuple((f"op{i}", 10.0 - i) for i in range(8))
    text = repr(dataclasses.replace(found, time_by_op=ops))
    assert "op5 10%, 2 others 13%" in text


def test_a_step_without_gradients_is_the_forward_alone():
    found = graphopt.advise(nn.Sequential(nn.GELU()), torch.ones(4, 8))
    assert ("memory", "nothing waits for a backward in this graph") in found.left_out
    with pytest.raises(OptionError, match="requires a gradient"):
        graphopt.advise(nn.GELU(), torch.ones(4, 8), train=True)
    leaf = torch.ones(4, 8, requires_grad=True)
    assert dict(graphopt.advise(nn.GELU(), leaf).memory_by_kind)["gradients"] > 0
