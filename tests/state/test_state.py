"""The state machine over six models: short and always the same in CI, as long as you like by hand.

GRAPHOPT_STATE_EXAMPLES=300 GRAPHOPT_STATE_STEPS=40 pytest tests/state -q
python tests/state/run.py --examples 300 --steps 40     the same, with counts of what was done
"""

from __future__ import annotations

import collections
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from state_machine import OPTIMIZERS, Twins
from state_models import SUBJECTS, Subject

import graphopt
import graphopt.kernels

EXAMPLES = int(os.environ.get("GRAPHOPT_STATE_EXAMPLES", "0"))
STEPS = int(os.environ.get("GRAPHOPT_STATE_STEPS", "6"))

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")


def machine_of(subject: Subject) -> type[Twins]:
    attributes = {"subject": subject, "counts": collections.Counter()}
    return type(f"Twins_{subject.name}", (Twins,), attributes)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_source_and_twin_stay_the_same(subject: Subject) -> None:
    machine = machine_of(subject)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or 2,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    assert machine.counts["step"] >= 1


class Checked:
    """A machine that compares the two after each rule, as hypothesis has it do."""

    def __init__(self, machine: Twins) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            getattr(self.machine, name)(*args, **kwargs)
            self.machine.same_state()

        return call


def script(m: Checked) -> None:
    """Every rule once or more, in an order that has the next forward find what changed."""
    m.step(0, 0, requires_grad=True)
    m.optimizer_step()
    for kind in OPTIMIZERS:
        m.other_optimizer(kind, through_source=kind.startswith("sgd"))
        m.step(0, 1, requires_grad=False)
        m.optimizer_step()
        m.zero_grad(set_to_none=kind.endswith("foreach"))
    m.two_forwards((0, 1), 2)
    m.retained(2, 3)
    m.twice_differentiated(0, 4)
    m.mode(training=False, through_source=False)
    for inference in (False, True):
        m.without_gradients(0, 5, inference)
    m.mode(training=True, through_source=True)
    m.mode_of_one(training=False)
    m.step(0, 6, requires_grad=False)
    for which in ("weight", "inner", "all but one"):
        for trains in (False, True):
            m.freeze(trains, which)
            m.step(0, 7, requires_grad=False)
    for assign in (False, True):
        m.load(0.5, assign, through_source=assign)
        m.step(0, 8, requires_grad=False)
    for way in ("deepcopy", "pickle"):
        m.copied(way)
        m.step(0, 9, requires_grad=False)
    m.replaced_parameter(3)
    m.step(0, 0, requires_grad=False)
    for way in ("data", "numpy", "no_grad"):
        m.written_parameter(way)
        m.step(0, 1, requires_grad=False)
    m.attribute(0.3)
    m.step(0, 2, requires_grad=False)
    m.replaced_buffer()
    m.step(0, 3, requires_grad=False)
    for pre in (False, True):
        m.hook_on_top(pre)
        m.step(0, 4, requires_grad=False)
    m.no_hooks()
    m.hook_inside(0, 5)
    m.deterministic_algorithms(0, 1)
    m.step(0, 6, requires_grad=False)
    m.under_autocast(0, 7, grad=True)
    m.under_autocast(0, 7, grad=False)
    m.to_dtype(torch.float64, through_source=False)
    m.step(0, 8, requires_grad=False)
    m.train_step(1, 9)
    m.optimizer_step()


@pytest.mark.parametrize(("name", "attached"), [("mlp", False), ("encoder", True)])
def test_every_rule_once(name: str, attached: bool) -> None:
    subject = next(s for s in SUBJECTS if s.name == name)
    machine = machine_of(subject)()
    try:
        machine.start(torch.float32, attached)
        script(Checked(machine))
    finally:
        machine.teardown()


FAULTS = {
    "a parameter of its own": lambda m: _put(m, "up", "weight", lambda p: p.detach().clone()),
    "a wrong gradient": lambda m: _grad(m, 1.01),
    "a lost gradient": lambda m: _grad(m, None),
    "another mode": lambda m: m.source.__dict__.update(training=not m.eager.training),
    "a stale buffer": lambda m: m.source.register_buffer("late", torch.zeros(1)),
}


def _put(m: Twins, module: str, name: str, make: Any) -> None:
    owner = m.source.get_submodule(module)
    with torch.no_grad():
        setattr(owner, name, torch.nn.Parameter(make(getattr(owner, name)) * 1.0001))


def _grad(m: Twins, factor: float | None) -> None:
    p = m.source.get_parameter("up.weight")
    assert p.grad is not None
    p.grad = None if factor is None else p.grad * factor


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_sees_a_planted_fault(fault: str) -> None:
    machine = machine_of(SUBJECTS[0])()
    machine.start(torch.float32, False)
    machine.step(0, 0, requires_grad=False)
    machine.same_state()
    FAULTS[fault](machine)
    with pytest.raises(AssertionError):
        machine.same_state()


def test_a_gradient_penalty_by_autograd_grad_is_refused() -> None:
    """`backward()` meets the refusal always; `grad(..., inputs)` only on a path to the inputs."""
    x = torch.randn(4, 8, requires_grad=True)
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    y = torch.ops.graphopt.layer_norm(x, weight, bias, 1e-5)
    (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    with pytest.raises(graphopt.UnsupportedError):
        torch.autograd.grad(slope.square().sum(), [x, weight], allow_unused=True)
