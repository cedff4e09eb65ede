"""verify as a function to call: keyword inputs, none at all, something else than a module."""

import pytest
import torch
from torch import nn

import graphopt
from graphopt import OptionError


@pytest.fixture(scope="module")
def opt():
    return graphopt.optimize(nn.Linear(4, 4), torch.ones(2, 4))


def test_keyword_inputs_are_called_as_elsewhere(opt):
    assert graphopt.verify(opt, example_kwargs={"input": torch.ones(2, 4)}).passed


def test_no_inputs_are_told(opt):
    with pytest.raises(OptionError, match="missing a required argument: 'input'"):
        graphopt.verify(opt)


def test_something_else_is_told():
    with pytest.raises(OptionError, match="verify takes an optimized module, not a Linear"):
        graphopt.verify(nn.Linear(4, 4), torch.ones(2, 4))


def test_a_fallback_has_nothing_to_verify():
    class Branch(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with pytest.warns(graphopt.GraphoptWarning):
        opt = graphopt.optimize(Branch(), torch.ones(2), on_error="fallback")
    with pytest.raises(graphopt.GraphOptError, match="no graph to verify"):
        graphopt.verify(opt, torch.ones(2))
