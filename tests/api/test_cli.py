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


def test_import_error_inside_the_target_is_not_hidden(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_target.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "broken_target:f"]) == 2
    err = capsys.readouterr().err
    assert "importing broken_target raised ModuleNotFoundError" in err
    assert "no_such_dependency" in err
    assert "broken_target.py:1" in err


def test_a_target_may_be_the_path_of_a_file(tmp_path, capsys):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside_target.py").write_text("WIDTH = 8\n")
    (folder / "signal.py").write_text(  # named like a module of the standard library
        "import torch\nfrom beside_target import WIDTH\n\n\n"
        "def make():\n    return torch.nn.LayerNorm(WIDTH), torch.ones(2, WIDTH)\n"
    )
    assert cli.main(["explain", f"{folder}/signal.py:make"]) == 0
    assert "layer_norm" in capsys.readouterr().out
    assert cli.main(["explain", f"{folder}/absent.py:make"]) == 2
    assert f"there is no file {folder}/absent.py" in capsys.readouterr().err
    (folder / "broken_file.py").write_text("1 / 0\n")
    assert cli.main(["bisect", f"{folder}/broken_file.py:make"]) == 2
    assert "raised ZeroDivisionError" in capsys.readouterr().err


def test_bench_takes_a_precision(capsys):
    argv = ["bench", "factories:chain", "--against", "eager", "--seconds", "0.02", "--json"]
    assert cli.main([*argv, "--precision", "bf16"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("precision='bf16'" in note for note in notes)


def test_a_factory_that_raises_is_told_without_a_traceback(capsys):
    assert cli.main(["explain", "factories:raises"]) == 2
    err = capsys.readouterr().err
    assert "factories:raises raised FileNotFoundError: no weights here" in err
    assert "factories.py:" in err
    assert "Traceback" not in err


def test_traceback_shows_where_the_factory_raised(capsys):
    assert cli.main(["explain", "factories:raises", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert 'raise FileNotFoundError("no weights here")' in err


@pytest.mark.parametrize(
    ("target", "code", "kind"),
    [("factories:raises", 2, "UsageError"), ("factories:branch", 1, "CaptureError")],
)
def test_an_error_is_json_on_stdout_too(target, code, kind, capsys):
    assert cli.main(["verify", target, "--json"]) == code
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert set(error) == {"kind", "message", "what", "at", "why", "try", "exit_code"}
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert error["what"] in err


def test_report_answers_the_three_questions(capsys):
    assert cli.main(["report", "factories:chain", "--verify"]) == 0
    out = capsys.readouterr().out
    for title in ("1. What became faster", "2. Why not the rest", "3. Is it still right"):
        assert title in out
    assert "Yes: 1 rewrites and the whole step" in out


def test_report_and_diff_write_files(tmp_path, capsys):
    for command in ("report", "diff"):
        path = tmp_path / f"{command}.html"
        assert cli.main([command, "factories:chain", "-o", str(path)]) == 0
        assert path.read_text().startswith("<!doctype html>")
        assert capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize("command", ["report", "diff"])
def test_a_path_that_cannot_be_written_is_wrong_usage_before_the_factory_runs(command, capsys):
    assert cli.main([command, "factories:raises", "-o", "/no/such/folder/x.html"]) == 2
    assert "no folder" in capsys.readouterr().err


def test_diff_prints_what_changed(capsys):
    assert cli.main(["diff", "factories:chain"]) == 0
    out = capsys.readouterr().out
    assert "+++ optimized" in out
    assert "graphopt.layer_norm(" in out


def test_bisect_names_the_planted_rule_of_a_12_layer_model_in_one_command(capsys):
    argv = ["bisect", "factories:twelve", "--rules", "default,-layer_norm,-add_layer_norm"]
    assert cli.main([*argv, "--rule", "factories:planted_norm"]) == 1
    out = capsys.readouterr().out
    assert "guilty: rewrite #" in out
    assert "rule planted_norm, at layers.7.norm" in out
    assert "factories.py:" in out
    assert "graphopt.layer_norm(" in out
    assert "cure: optimize(..., rules=" in out


def test_bisect_with_a_predicate_and_json(capsys):
    argv = ["bisect", "factories:chain", "--predicate", "factories:no_fused_norm", "--json"]
    assert cli.main(argv) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "graphopt.bisect/1"
    assert [c["rewrite"]["rule"] for c in found["culprits"]] == ["layer_norm"]


def test_bisect_of_a_right_model_is_good(capsys):
    assert cli.main(["bisect", "factories:chain"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "text"),
    [("factories:chain", "not a graphopt.passes.Rule"), ("factories:nope", "no function 'nope'")],
)
def test_a_rule_that_is_none_is_wrong_usage(rule, text, capsys):
    assert cli.main(["explain", "factories:chain", "--rule", rule]) == 2
    assert text in capsys.readouterr().err


def test_bench_prints_its_table(capsys):
    argv = ["bench", "factories:chain", "--against", "eager", "--seconds", "0.01", "--json"]
    assert cli.main(argv) == 0
    assert "rows" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--autocast", "--precision"])
def test_low_precision(option, capsys):
    assert cli.main(["report", "factories:chain", option, "bf16", "--verify", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "materialize_autocast" in [row["rule"] for row in data["rules"] if row["fired"]]
    assert data["verification"]["passed"]


def test_a_wrong_rewrite_is_a_bad_verdict(capsys):
    argv = ["factories:chain", "--rules", "default,-layer_norm", "--rule", "factories:wrong_norm"]
    assert cli.main(["report", *argv, "--verify"]) == 1
    out = capsys.readouterr().out
    assert "still right: NO" in out
    assert "wrong: wrong_norm at 1 " in out
    assert cli.main(["verify", *argv]) == 1


@pytest.mark.parametrize(
    ("predicate", "text"),
    [
        ("says_nothing", "the predicate returned None"),
        ("breaks", "without any rewrite, too, the predicate raised ZeroDivisionError"),
    ],
)
def test_a_predicate_that_cannot_tell_is_wrong_usage(predicate, text, capsys):
    argv = ["bisect", "factories:chain", "--predicate", f"factories:{predicate}"]
    assert cli.main(argv) == 2
    assert text in capsys.readouterr().err


def test_a_factory_that_exits_is_told(capsys):
    assert cli.main(["explain", "factories:exits"]) == 2
    assert "factories:exits raised SystemExit: 3" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(capsys):
    assert cli.main(["explain", "factories:interrupted"]) == 130
    assert capsys.readouterr().err == "graphopt: interrupted\n"


def test_help_does_not_load_torch():
    code = (
        "import sys\nfrom graphopt import cli\n"
        "try: cli.main(['bisect', '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


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


def target_file(folder, code):
    path = folder / "odd_target.py"
    path.write_text(f"import sys\nimport torch\nfrom torch import nn\n{code}\n")
    return f"{path}:made"


BATCH_NORM = "def made(): return nn.Sequential(nn.BatchNorm1d(4)), torch.ones(1, 4)"


def test_what_the_model_raises_is_told_without_a_traceback(tmp_path, capsys):
    target = target_file(tmp_path, BATCH_NORM)
    assert cli.main(["explain", target, "--json"]) == 1
    printed, told = capsys.readouterr()
    assert told.startswith("ValueError: Expected more than 1 value per channel")
    assert "--traceback" in told
    assert "Traceback" not in told
    assert json.loads(printed)["error"]["kind"] == "ValueError"
    assert cli.main(["explain", target, "--traceback"]) == 1
    assert "_verify_batch_size" in capsys.readouterr().err


def test_a_script_that_exits_as_it_is_imported_is_wrong_usage(tmp_path, capsys):
    assert cli.main(["explain", target_file(tmp_path, "sys.exit(0)")]) == 2
    assert "raised SystemExit" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["advise", "profile"])
def test_a_model_without_gradients_has_no_backward(command, tmp_path, capsys):
    frozen = "def made(): return nn.Linear(4, 4).requires_grad_(False), torch.ones(1, 4)"
    assert cli.main([command, target_file(tmp_path, frozen), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if command == "profile":
        assert found["step"] == "forward"
    else:
        assert dict(found["memory_by_kind"])["gradients"] == 0
