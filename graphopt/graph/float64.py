"""A graph as it would run in float64: the truth that errors are measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from graphopt.errors import UnsupportedError
from graphopt.graph.ops import argument, arguments

DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def to_float64(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose every float dtype literal says float64.

    Casting parameters and inputs is not enough: `to.dtype(x, float32)`, `softmax(x, -1, float32)`
    or `full(.., dtype=bfloat16)` would bring the run back to float32. Factories that leave their
    dtype to the default get float64 spelled out. Metadata is copied and no longer describes the
    values. Run it with every floating parameter and input cast to float64.

    Args:
        graph: functional ATen and graphopt ops.

    Raises:
        UnsupportedError: when an op reads the bits of a float (`view.dtype`), which has no float64
            counterpart.

    Example:
        >>> g = fx.Graph(); x = g.placeholder("x")
        >>> y = g.call_function(torch.ops.aten.to.dtype, (x, torch.bfloat16)); _ = g.output((y,))
        >>> [n.args[1] for n in to_float64(g).nodes if n.op == "call_function"]
        [torch.float64]
    """
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = env[node] = copy.node_copy(node, env.__getitem__)
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.view.dtype:
            raise UnsupportedError(
                "a tensor viewed as another dtype has no float64 counterpart", at=node.name
            )
        new.args = map_aggregate(new.args, _double)
        new.kwargs = map_aggregate(new.kwargs, _double)
        if _leaves_dtype_to_default(node):
            new.kwargs = {**new.kwargs, "dtype": torch.float64}
        if node.target is torch.ops.aten.rms_norm.default and argument(node, "eps") is None:
            # Left out, eps is that of the input's dtype: the truth must not take another.
            eps = torch.finfo(node.args[0].meta["val"].dtype).eps
            new.args, new.kwargs = tuple(arguments(new)[:3]), {"eps": eps}
    return copy


def _double(value: Any) -> Any:
    return DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


def _leaves_dtype_to_default(node: fx.Node) -> bool:
    """Whether a factory op makes a float tensor without saying of which dtype."""
    schema = getattr(node.target, "_schema", None)
    val = node.meta.get("val")
    if schema is None or not isinstance(val, torch.Tensor) or not val.is_floating_point():
        return False
    takes_tensor = any("Tensor" in str(a.type) for a in schema.arguments)
    takes_dtype = any(a.name == "dtype" for a in schema.arguments)
    return takes_dtype and not takes_tensor and node.kwargs.get("dtype") is None
