"""Every wrong use ends in a clear error and changes nothing; the table is data, see table.py."""

import pytest
import torch
from every_use import USES
from use import Use, tried
from wrong_models import X, block

import graphopt


@pytest.mark.parametrize("use", USES, ids=str)
def test_wrong_use(use):
    assert tried(use).faults == ()


@pytest.mark.gpu
def test_inputs_on_another_device_than_the_model():
    opt = graphopt.optimize(block().cuda())
    with pytest.raises((graphopt.CaptureError, RuntimeError), match=r"(?i)device"):
        opt(X)
    assert opt(X.cuda()).is_cuda  # and it works afterwards


def test_no_two_have_one_name():
    names = [str(u) for u in USES]
    assert len(names) == len(set(names))


# The table itself must be able to fail.


def faults(call, **changes):
    return tried(Use("x", "x", call, ZeroDivisionError, ("zero",), **changes)).faults


def test_a_use_that_raises_nothing_is_a_fault():
    assert faults(lambda o: None) == ("nothing was raised",)


def test_an_error_that_is_nobodys_is_a_fault():
    assert "neither graphopt's error nor eager's" in faults(lambda o: 1 / 0)[0]
    assert (
        faults(lambda o: 1 / 0, eager=lambda o: 1 / 0)
        == ("the message lacks 'zero': division by zero",)[1:]
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda o: o[0].weight.data.add_(1), "0.weight value"),
        (lambda o: o.eval(), "1.training"),
        (lambda o: o[0].register_forward_hook(print), "0.hooks"),
        (lambda o: setattr(o[0].weight, "grad", torch.ones(8, 8)), "0.weight gradient"),
        (lambda o: setattr(o, "extra", 3), ".attributes"),
        (lambda o: torch.rand(1), "torch's generator"),
        (lambda o: open("left.txt", "w").close(), "files"),
        (lambda o: o[0].weight.requires_grad_(False), "0.weight requires_grad"),
    ],
)
def test_a_change_is_a_fault(change, name):
    def call(model):
        change(model)
        return 1 / 0

    assert f"changed: {name}" in faults(call, eager=lambda o: 1 / 0)
