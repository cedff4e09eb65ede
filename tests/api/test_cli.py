"""The command line: what it prints, its JSON, its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphopt
from graphopt import cli

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _in_folder_of_factories(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)


def usage(argv):
    """The exit code of a command line that argparse itself refuses."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    return exit_.value.code


def test_version(capsys):
    assert usage(["--version"]) == 0
    assert capsys.readouterr().out.strip() == graphopt.__version__


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["explain"], ["explain", "m:f", "--mode", "x"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    assert usage(argv) == 2
    assert "usage: graphopt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("factories", "not of the form package.module:factory"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        ("factories:absent", "factories has no function 'absent'; it has"),
        ("factories:not_a_pair", "returned Linear, not a pair (model, inputs)"),
        ("factories:wrong_inputs", "inputs of type list"),
    ],
)
def test_wrong_target_exits_with_2_and_says_why(target, text, capsys):
    assert cli.main(["explain", target]) == 2
    assert text in capsys.readouterr().err


def test_import_error_inside_the_target_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_target.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        cli.load_target("broken_target:f")


@pytest.mark.parametrize(
    ("name", "args", "kwargs"), [("chain", 1, []), ("positional", 1, []), ("keyword", 0, ["input"])]
)
def test_inputs_may_be_a_tensor_a_tuple_or_a_dict(name, args, kwargs):
    model, positional, keyword = cli.load_target(f"factories:{name}")
    assert (len(positional), list(keyword)) == (args, kwargs)
    assert isinstance(model(*positional, **keyword), torch.Tensor)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mode_sets_the_model(mode):
    model, _, _ = cli.load_target("factories:chain", mode)
    assert model.training == (mode == "train")


def test_explain_prints_the_table(capsys):
    assert cli.main(["explain", "factories:chain"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Sequential  train  ")
    assert "bytes saved" in out


def test_explain_json(capsys):
    assert cli.main(["explain", "factories:chain", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["nodes_after"] < data["nodes_before"]
    assert data["rewrites"][0]["ordinal"] == 0


def test_unknown_rule_is_wrong_usage(capsys):
    assert cli.main(["explain", "factories:chain", "--rules", "layer_nrom"]) == 2
    assert "layer_nrom" in capsys.readouterr().err


def test_capture_error_exits_with_1(capsys):
    assert cli.main(["explain", "factories:branch"]) == 1
    err = capsys.readouterr().err
    assert "CaptureError: " in err
    assert "factories.py" in err


def test_verify_passes(capsys):
    assert cli.main(["verify", "factories:chain"]) == 0
    assert capsys.readouterr().out.strip()


def test_verify_json(capsys):
    assert cli.main(["verify", "factories:keyword", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_rules_lists_each_rule_with_a_line(capsys):
    assert cli.main(["rules", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 10
    assert [row["name"] for row in rows if not row["doc"]] == []
    assert cli.main(["rules"]) == 0
    out = capsys.readouterr().out
    assert all(row["name"] in out for row in rows)


def test_env_says_how_fused_ops_run(capsys):
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in out
    assert ("triton: fused ops" in out) == torch.cuda.is_available()


def test_env_json(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHOPT_PRINT", "after")
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variables"]["GRAPHOPT_PRINT"] == "after"


def test_installed_script_stops_quietly_when_its_reader_does():
    script = Path(sys.executable).with_name("graphopt")
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [script, "rules"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "")
