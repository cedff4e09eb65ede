"""The rule that CONTRIBUTING shows works as it stands there."""

import re
from pathlib import Path

import torch
from torch import nn

import graphopt
import graphopt.passes

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_rule_of_the_guide_fires_and_is_proved():
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    namespace = {
        "torch": torch,
        "nn": nn,
        "aten": torch.ops.aten,
        "rule": lambda family: graphopt.passes.rule(family, register=False),
    }
    exec(code, namespace)
    made = namespace["relu_of_norm"]
    for model, inputs in made.examples():
        opt = graphopt.optimize(model, inputs, rules=["default", "-layer_norm", made])
        assert "relu_of_norm" in [record.rule for record in opt.rewrites]
        graphopt.verify(opt, inputs).check()
