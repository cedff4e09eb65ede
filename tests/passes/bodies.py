"""Bodies for pass tests, straight from `torch.export`, for functions that mutate nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from graphopt.graph import Body


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def body_of(target: Callable[..., Any], inputs: tuple[torch.Tensor, ...], **export: Any) -> Body:
    """Export a function or module without mutations into a body."""
    root = target if isinstance(target, nn.Module) else _Function(target)
    program = torch.export.export(root, inputs, strict=False, **export)
    state = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    graph, env = fx.Graph(), {}
    constants = {}
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        if node.op == "placeholder" and node.name in state:
            path = state[node.name]
            if path in program.constants and path not in dict(root.named_buffers()):
                constants[path] = program.constants[path]
                path = f"_graphopt_constants.{path}"
            env[node] = graph.create_node("get_attr", path)
            env[node].meta = dict(node.meta)
        elif node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [fx.node.map_arg(a, env.__getitem__) for a in program.graph.output_node().args[0]]
    graph.output(tuple(outputs))
    _hoist(graph)
    return Body(graph, root, len(outputs), constants=constants, training=root.training)


def _hoist(graph: fx.Graph) -> None:
    """Placeholders first, then state."""
    for kind in ("get_attr", "placeholder"):
        for node in reversed([n for n in graph.nodes if n.op == kind]):
            first = next(iter(graph.nodes))
            if node is not first:
                first.prepend(node)


def run(body: Body, inputs: tuple[torch.Tensor, ...], seed: int = 7) -> tuple[Any, ...]:
    """Run a body's graph with a given dropout seed."""
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = body.attribute(str(node.target))
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], env.__getitem__))
        elif str(node.target) == "graphopt.draw_seed.default":
            env[node] = torch.tensor(seed)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")
