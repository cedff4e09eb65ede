"""profile_memory: sums that add up, the model as it is, files, the command line, bad input."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.bench.trace import peak_allocated, record
from graphopt.cli import main
from graphopt.errors import GraphOptError, OptionError
from graphopt.memory import draw


class Layer(nn.Module):
    """A pre-norm MLP block with dropout."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    """Three blocks and a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def inputs():
    return torch.randn(32, 16), torch.randint(0, 5, (32,))


def small():
    """A target for the command line."""
    return Net(), inputs()


def test_sums_by_op_and_module_are_the_peak():
    found = graphopt.profile_memory(Net(), inputs())
    before = sum(found.prediction.breakdown[k] for k in ("parameters", "buffers", "inputs"))
    assert sum(s.peak_bytes for s in found.by_op) == found.peak_bytes - before
    assert sum(s.peak_bytes for s in found.by_module) == found.peak_bytes - before
    assert sum(g.bytes for g in found.at_peak) == found.peak_bytes
    assert sum(s.saved_bytes for s in found.by_module) == found.prediction.saved_bytes


def test_equal_blocks_are_one_row():
    found = graphopt.profile_memory(Net(), inputs())
    rows = {s.name: s for s in found.by_module}
    assert rows["layers.*.up"].count == 3
    assert rows["layers.*.up"].saved_bytes == 3 * 32 * 64 * 4
    assert "layers.*.up x3" in repr(found)


def test_the_model_as_it_is_is_predicted_to_the_byte():
    model, args = Net(), inputs()
    found = graphopt.profile_memory(model, args)

    def step():
        result = model(*args)  # held, as the prediction has it
        result.backward()

    step()
    model.zero_grad(set_to_none=True)
    peak = peak_allocated(record(step, cuda=False, memory=True))
    assert found.peak_bytes - found.prediction.start_bytes == peak


def test_an_optimized_model_stands_beside_its_source():
    model, args = Net(), inputs()
    opt = graphopt.optimize(model, args, fuse=False)
    found = graphopt.profile_memory(opt, args)
    assert found.optimized
    assert found.source_peak_bytes == graphopt.profile_memory(model, args).peak_bytes
    assert any(s.name == "aten.linear" for s in found.by_op)
    assert any(s.name == "layers.*.up" for s in found.by_module)


def test_an_attached_model_is_profiled_as_optimized():
    model, args = Net(), inputs()
    graphopt.attach(model, args)
    assert graphopt.profile_memory(model, args).optimized


def test_the_result_of_forward_has_its_own_form():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return {"logits": self.fc(x)}

    opt = graphopt.optimize(Named(), torch.ones(2, 4))
    found = graphopt.profile_memory(opt, torch.ones(2, 4), loss_fn=lambda out: out["logits"].sum())
    assert found.notes[0] == "backward begins from loss_fn"


def test_lines_of_the_users_code_are_told():
    found = graphopt.profile_memory(Net(), inputs())
    assert any(g.place.startswith("test_profile.py:") for g in found.at_peak)


def test_checkpointed_models_hold_less():
    class Checkpointed(Net):
        def forward(self, x, labels):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return F.cross_entropy(self.head(x), labels)

    x = torch.randn(256, 16), torch.randint(0, 5, (256,))
    plain = graphopt.profile_memory(Net(), x)
    assert graphopt.profile_memory(Checkpointed(), x).peak_bytes < plain.peak_bytes


def test_a_model_under_autocast():
    x = torch.randn(256, 16), torch.randint(0, 5, (256,))
    plain = graphopt.profile_memory(Net(), x)
    with torch.autocast("cpu", torch.bfloat16):
        low = graphopt.profile_memory(Net(), x)
    assert low.prediction.saved_bytes < plain.prediction.saved_bytes
    assert any(g.dtype == "bfloat16" for g in low.at_peak)


def test_forward_alone():
    found = graphopt.profile_memory(Net(), inputs(), train=False)
    assert found.step == "forward"
    assert found.prediction.breakdown["gradients"] == 0
    assert found.peak_bytes < graphopt.profile_memory(Net(), inputs()).peak_bytes


def test_a_model_too_large_to_run_is_profiled():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**18, 2**18, bias=False), nn.ReLU())
        x = torch.empty(4, 2**18)
    found = graphopt.profile_memory(model, x, loss_fn=lambda y: y.sum(), device="cuda")
    assert found.prediction.breakdown["parameters"] == 4 * 2**36


def test_nothing_of_the_model_changes():
    model, args = Net(), inputs()
    model(*args).backward()
    grads = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    graphopt.profile_memory(model, args)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("suffix", ["txt", "json", "png", "svg"])
def test_files(tmp_path, suffix):
    found = graphopt.profile_memory(Net(), inputs())
    path = tmp_path / f"memory.{suffix}"
    found.save(path)
    assert path.stat().st_size > 500
    if suffix == "json":
        assert json.loads(path.read_text())["peak_bytes"] == found.peak_bytes
    if suffix == "txt":
        assert path.read_text() == f"{found!r}\n"


def test_a_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    found = graphopt.profile_memory(Net(), inputs())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="needs matplotlib") as error:
        found.save(tmp_path / "memory.png")
    assert "graphopt[memory]" in error.value.try_


def test_text_has_all_its_parts_and_fits_its_width():
    text = repr(graphopt.profile_memory(Net(), inputs(), resident_bytes=1000))
    for title in ("at the peak", "module", "op ", "alive at the peak", "live bytes", "resident"):
        assert title in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_timeline_marks_the_peak_once():
    found = graphopt.profile_memory(Net(), inputs())
    text = draw.timeline_text(found.prediction, {})
    assert text.count("<- peak") == 1
    assert len(text.splitlines()) <= draw.LINES + 4


class Reads(nn.Module):
    """Needs a value."""

    def forward(self, x):
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("a text", {}, "takes a model, not a str"),
        (Net(), {"loss_fn": 3}, "loss_fn is a int"),
        (Net(), {"train": "yes"}, "train"),
        (Net(), {"resident_bytes": -1}, "resident_bytes is -1"),
        (Net(), {"resident_bytes": True}, "resident_bytes is True"),
        (Net(), {"device": "abacus"}, "device is 'abacus'"),
        (Net(), {"measure": True}, "needs a model on a GPU"),
        (Net(), {"lossfn": None}, "no option 'lossfn'"),
        (Net(), {"loss_fn": lambda y: [y]}, "loss_fn returned a list"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_input_is_refused(model, options, text):
    with pytest.raises(OptionError, match=text):
        graphopt.profile_memory(model, inputs(), **options)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="do not fit the forward of Net"):
        graphopt.profile_memory(Net(), torch.ones(2))


def test_a_model_that_needs_values_is_told():
    with pytest.raises(GraphOptError, match="cannot be predicted") as error:
        graphopt.profile_memory(Reads(), torch.ones(2, requires_grad=True))
    assert "bench" in error.value.try_


def test_nothing_to_differentiate():
    with pytest.raises(OptionError, match="nothing that forward returns requires a gradient"):
        graphopt.profile_memory(nn.ReLU(), torch.ones(2))


def _target(tmp_path, monkeypatch):
    (tmp_path / "profiled_target.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Linear(8, 16), nn.ReLU()).train(), torch.ones(4, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "profiled_target:small"


def test_command_prints_text_and_json(tmp_path, monkeypatch, capsys):
    target = _target(tmp_path, monkeypatch)
    assert main(["profile", target]) == 0
    assert "the model as it is" in capsys.readouterr().out
    assert main(["profile", target, "--eager", "--no-train", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["optimized"], data["step"]) == (False, "forward")


def test_command_writes_a_file_or_says_why_not(tmp_path, monkeypatch, capsys):
    target = _target(tmp_path, monkeypatch)
    assert main(["profile", target, "-o", "memory.svg"]) == 0
    assert (tmp_path / "memory.svg").exists()
    assert main(["profile", target, "-o", "memory.gif"]) == 2
    assert main(["profile", target, "--resident-bytes", "-3"]) == 2
    assert "resident_bytes is -3" in capsys.readouterr().err


def test_importing_graphopt_loads_no_matplotlib(tmp_path):
    code = "import sys, graphopt; graphopt.profile_memory; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.gpu
def test_measured_beside_predicted():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    for subject in (model, graphopt.optimize(model, x)):
        found = graphopt.profile_memory(
            subject, x, loss_fn=lambda y: y.square().mean(), measure=True
        )
        assert found.peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.03)


def test_other_inputs_leave_the_graph_in_force(tmp_path):
    opt = graphopt.optimize(nn.Linear(8, 8), torch.ones(4, 8))
    code = opt.code
    graphopt.profile_memory(opt, torch.ones(2, 8), resident_bytes="1KiB")
    assert opt.code == code


def test_a_caller_s_inference_mode_does_not_matter():
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    expected = graphopt.profile_memory(model, x).peak_bytes
    with torch.inference_mode():
        assert graphopt.profile_memory(model, x).peak_bytes == expected


def test_a_lazy_module_that_was_not_called():
    with pytest.raises(OptionError, match="weight has no shape yet"):
        graphopt.profile_memory(nn.LazyLinear(8), torch.ones(4, 8))
