"""A failure names the rewrite, and its script reproduces it in a process of its own."""

from __future__ import annotations

import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import WRONG_RULES, Block, inputs, make_block, optimized, wrong_norm
from torch import nn

import graphopt
from graphopt.testing import EquivalenceError, assert_equivalent

aten = torch.ops.aten


def failure(model: nn.Module, opt: nn.Module, *inputs: Any, **options: Any) -> EquivalenceError:
    with pytest.raises(EquivalenceError) as caught:
        assert_equivalent(model, opt, *inputs, **options)
    return caught.value


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=script.parent, check=False
    )


def run_here(script: Path) -> EquivalenceError | None:
    """The same in this process, which is faster."""
    try:
        runpy.run_path(str(script))
    except EquivalenceError as error:
        return error
    return None


def test_the_rewrite_is_named_by_its_replay() -> None:
    model = Block()
    error = failure(model, optimized(model, rules=WRONG_RULES), inputs())
    assert (error.suspect.rule, error.suspect.how) == ("planted_norm", "verify")
    text = str(error)
    assert "planted_norm at norm (" in text
    assert "leave planted_norm out of your rules=" in text
    assert "result 0 is off" in text
    assert text.endswith(error.script)
    assert error.tensor == "output/0"


def test_the_rewrite_is_found_by_halving_where_its_replay_is_right() -> None:
    """A rule that is right on the values met, and counts calls to go wrong in the whole."""
    model = Block()
    opt = optimized(model, rules=WRONG_RULES)
    from graphopt.testing import blame
    from graphopt.verify import verify_body

    def blind(*args: Any, **kwargs: Any) -> Any:
        found = verify_body(*args, **kwargs)
        return type(found)((), found.whole, found.notes)

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(blame, "verify_body", blind)
        error = failure(model, opt, inputs())
    assert (error.suspect.rule, error.suspect.how) == ("planted_norm", "max_rewrites")


@pytest.mark.parametrize("factory", [make_block, None], ids=["factory", "graph"])
def test_the_script_reproduces_it(factory: Any, tmp_path: Path) -> None:
    model = make_block()
    seen = torch.tensor([1.0, torch.inf, torch.nan])
    x = inputs().t().contiguous().t()
    opt = optimized(model, rules=WRONG_RULES)
    error = failure(model, opt, (x,), {"seen": seen}, factory=factory)
    path = error.save(tmp_path)
    if factory is None:
        text = str(run_here(path))
    else:  # once in a process of its own, which takes seconds
        found = run(path)
        assert (found.returncode, found.stdout) == (1, "")
        text = found.stderr.partition("EquivalenceError: ")[2]
    assert text.startswith("result 0 is off")
    assert "planted_norm at" in text
    assert ("make_block" in error.script) == (factory is not None)
    # with the real rules in the place of the wrong one it passes: it is the rule that fails
    right = ["optimized = optimize(model)" if line.startswith("optimized = ") else line
             for line in error.script.splitlines()]  # fmt: skip
    path.write_text("\n".join(right))
    assert run_here(path) is None


def test_large_tensors_lie_beside_the_script(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200))
    opt = optimized(model, rules=WRONG_RULES)
    error = failure(model, opt, torch.randn(4, 200))
    assert set(error.data) == {"0.weight"}
    assert len(error.script) < 30_000
    path = error.save(tmp_path)
    assert path.with_suffix(".pt").exists()
    assert "planted_norm" in str(run_here(path))
    path.with_suffix(".pt").unlink()  # by its seed it still stands alone
    assert "planted_norm" in str(run_here(path))


@pytest.mark.parametrize("case", ["no_grad", "autocast", "upstream", "tied"])
def test_the_script_keeps_the_mode(case: str, tmp_path: Path) -> None:
    model: nn.Module = Block()
    options: dict[str, Any] = {}
    if case == "tied":
        model = Tied()
    if case == "upstream":
        options["upstream"] = [torch.ones(6, 16).t().contiguous().t(), None, torch.zeros(())]
    opt = optimized(model, rules=WRONG_RULES)
    with (
        torch.set_grad_enabled(case != "no_grad"),
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
    ):
        error = failure(model, opt, inputs(), **options)
    again = run_here(error.save(tmp_path))
    assert again is not None
    assert (again.what, again.suspect.rule) == (error.what, error.suspect.rule)
    assert again.suspect.ordinal == error.suspect.ordinal


class Tied(nn.Module):
    """Two names for one weight, a constant, items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x)) + torch.tensor([0.5, 1.5] * 8)
        return x


def test_a_rule_out_of_reach_of_the_script_is_told() -> None:
    local = wrong_norm(lambda m: m.call(aten.mul.Tensor, m.x, 2))
    model = Block()
    opt = optimized(model, rules=["default,-layer_norm,-add_layer_norm", local])
    error = failure(model, opt, inputs())
    assert "the script leaves out the rule planted_norm" in str(error)


def test_a_factory_out_of_reach_of_the_script_is_told() -> None:
    model = Block()
    opt = optimized(model, rules=WRONG_RULES)
    error = failure(model, opt, inputs(), factory=lambda: Block())
    assert "the factory is not at the top level" in " ".join(str(error).split())
    assert "class Captured" in error.script


def test_a_submodule_in_another_mode_is_so_in_the_script(tmp_path: Path) -> None:
    model = make_normed()
    model[1].eval()
    opt = optimized(model, rules=WRONG_RULES)
    error = failure(model, opt, inputs(), factory=make_normed)
    assert "model.get_submodule('1').training = False" in error.script
    again = run_here(error.save(tmp_path))
    assert again is not None
    assert again.what == error.what


def make_normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.LayerNorm(16))


def test_the_error_crosses_a_process_border() -> None:
    model = Block()
    error = failure(model, optimized(model, rules=WRONG_RULES), inputs())
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, EquivalenceError)
    assert str(back) == str(error)


def test_symbolic_sizes() -> None:
    model = Block()
    opt = optimized(model, rules=WRONG_RULES, dynamic=True)
    error = failure(model, opt, inputs())
    assert "dynamic=True" in error.script
    assert error.suspect.rule == "planted_norm"


def test_without_blame_no_rewrite_is_looked_for() -> None:
    model = Block()
    error = failure(model, optimized(model, rules=WRONG_RULES), inputs(), blame=False)
    assert error.suspect.rule == ""


def test_without_hypothesis_all_but_the_strategies_works(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import graphopt\n"
        "graphopt.testing.assert_equivalent\n"
        "try:\n    graphopt.testing.tensors\n"
        "except graphopt.UnsupportedError as e:\n    print(e)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "pip install 'graphopt[testing]'" in found.stdout


def test_a_capture_error_stays_one() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(graphopt.CaptureError):
        assert_equivalent(Branch(), optimized(Branch()), torch.ones(3))
