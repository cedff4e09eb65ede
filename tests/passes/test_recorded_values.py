"""What a node says of its result is what it gives: dtype and sizes, after every rule and cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from graphopt.graph.body import Body
from graphopt.graph.edit import fake_value
from graphopt.passes import Rule, all_rules, run_pipeline
from graphopt.passes.autocast import MaterializeAutocast
from graphopt.passes.base import Log
from graphopt.passes.observe import only
from graphopt.passes.overrides import MarkOverrides
from tests.passes.bodies import body_of

BF16 = torch.bfloat16


def _described(value: Any) -> list[Any]:
    return [
        (t.dtype, [str(s) for s in t.shape])
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor)
    ]


def stale(body: Body) -> list[str]:
    """Nodes whose recorded value is not what they give on their operands' recorded values."""
    found = []
    with only(body.autocast):
        for node in body.graph.nodes:
            if node.op == "call_function":
                said, given = _described(node.meta["val"]), _described(fake_value(node))
                if said != given:
                    found.append(f"{node.name} = {node.target}: recorded {said}, gives {given}")
    return found


@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.name)
def test_recorded_values_are_what_nodes_give(rule: Rule) -> None:
    for target, inputs in list(rule.examples())[:2]:
        with only({"cpu": BF16}):  # as for `optimize`: the passes run where the model was captured
            body = body_of(target, inputs)
            body.autocast = {"cpu": BF16}
            MarkOverrides((("*", torch.float32),)).run(body, Log())
            result = run_pipeline(body, leading=(MaterializeAutocast(),))
        assert not stale(result.body)
