"""A plain road from a module to a body, for tests that need no capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphopt.graph.body import Body


def plain_body(model: nn.Module, *inputs: torch.Tensor) -> Body:
    """Export a module whose forward is functional and whose outputs are flat."""
    exported = torch.export.export(model, inputs, strict=False)
    graph = exported.module(check_guards=False).graph
    for node in list(graph.nodes):
        if node.op == "call_module" or "_assert_tensor_metadata" in str(node.target):
            graph.erase_node(node)
    output = next(iter(reversed(graph.nodes)))
    return Body(graph, model, user_outputs=len(output.args[0]), training=model.training)


@pytest.fixture
def make_body() -> Callable[..., Body]:
    """`plain_body`."""
    return plain_body
