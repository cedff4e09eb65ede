"""Programs as data: valid, reproducible, printable, cut down to what matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from graphopt.errors import UnsupportedError
from graphopt.testing.programs import (
    Input,
    Instruction,
    Program,
    minimize,
    programs,
    random_program,
)

X = Input(("B", 16))


def line(code: str, *args: int, keep: bool = False) -> Instruction:
    return Instruction(code, args, keep)


@settings(max_examples=20, suppress_health_check=[HealthCheck.data_too_large])
@given(programs())
def test_drawn_programs_run_at_both_sizes_and_backward(program: Program) -> None:
    for sizes in (None, dict(program.other_sizes)):
        outputs = program.build()(*program.example_inputs(1, sizes))
        roots = [y for y in outputs if y.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])


def test_a_seed_gives_one_program_and_one_set_of_values() -> None:
    one, other = random_program(5), random_program(5)
    assert one == other
    assert one != random_program(6)
    runs = (p.build()(*p.example_inputs()) for p in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_building_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    program = random_program(11)
    program.build()
    program.example_inputs(4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_program_survives_json() -> None:
    for seed in range(20):
        program = random_program(seed)
        assert Program.from_dict(json.loads(json.dumps(program.to_dict()))) == program


def test_named_sizes_are_the_callers() -> None:
    program = Program((Input(("B", "S", 4)),), (), (line("F.relu({0})", 0),), (1,))
    assert program.example_inputs(0, {"B": 7})[0].shape == (7, 6, 4)


def test_a_number_of_a_dropped_line_is_given_to_the_next() -> None:
    body = (line("-{0}", 0), line("F.relu({0})", 1), line("{0} + {1}", 1, 2))
    program = Program((X,), (), body, (3,))
    assert program.without(2, 1).body == (line("-{0}", 0), line("{0} + {1}", 1, 1))


def test_what_nothing_reads_goes_with_its_inputs_and_state() -> None:
    body = (line("{1}({0})", 1, 2), line("F.relu({0})", 0))
    program = Program((X, X), ("nn.Linear(16, 4)",), body, (4,)).live()
    assert program == Program((X,), (), (line("F.relu({0})", 0),), (1,))


def test_a_write_into_a_buffer_is_no_dead_code() -> None:
    body = (line("{0}.add_(1.0)", 1, keep=True), line("F.relu({0})", 0))
    program = Program((X,), ("nn.Buffer(torch.zeros(2))",), body, (3,))
    assert program.live() == program


def test_a_write_into_a_dead_value_is() -> None:
    body = (line("-{0}", 0), line("{0}.add_(1.0)", 1, keep=True), line("F.relu({0})", 0))
    assert Program((X,), (), body, (3,)).live().body == (line("F.relu({0})", 0),)


def test_minimize_finds_the_two_lines_that_fail() -> None:
    program = next(
        p for p in map(random_program, range(300)) if p.calls > 9 and "softmax" in p.source()
    )

    def fails(p: Program) -> bool:
        try:
            p.build()(*p.example_inputs())
        except (RuntimeError, ValueError, IndexError):
            return False
        return any("softmax" in i.code for i in p.body)

    small = minimize(program, fails)
    assert fails(small)
    assert small.calls <= 2, small.source()


def test_in_float64_computes_the_same_in_float64() -> None:
    for seed in range(30):
        program = random_program(seed)
        model = program.build().eval()
        exact = program.in_float64().eval()
        inputs = program.example_inputs()
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        for a, b in zip(model(*inputs), exact(*wide), strict=True):
            assert b.dtype == torch.float64
            assert torch.allclose(a.double(), b, rtol=0.1, atol=0.3), program.source()
    assert torch.get_default_dtype() == torch.float32


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(random_program(2).script())
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "def forward" in done.stdout
    assert "the whole step" in done.stdout


def test_without_hypothesis_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(UnsupportedError, match="hypothesis") as caught:
        programs()
    assert "graphopt[testing]" in str(caught.value)
