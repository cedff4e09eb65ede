"""What the fused kernels of a graph must move and compute, as the kernels themselves count it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.facts import concrete
from graphopt.kernels import registry
from graphopt.report.table import Table, flops_text, size


@dataclasses.dataclass(frozen=True)
class KernelSummary:
    """All calls of one fused kernel in a step.

    Attributes:
        op: the operator's name.
        calls: how many calls a forward makes.
        bytes_forward: bytes that the forward must read and write at least.
        bytes_backward: the same of the backward, 0 where the graph was captured without gradients.
        flops_forward: floating-point operations, transcendental functions counted as one.
        flops_backward: the same of the backward.
    """

    op: str
    calls: int
    bytes_forward: int
    bytes_backward: int
    flops_forward: int
    flops_backward: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def kernels_of(body: Body) -> tuple[KernelSummary, ...]:
    """The fused kernels of a graph, those that move most first.

    Args:
        body: the body after the passes; symbolic sizes count as in the example.
    """
    found: dict[str, list[int]] = {}
    known = registry()
    for node in body.graph.nodes:
        name = ops.op_name(node.target) if node.op == "call_function" else ""
        op = known.get(name.removeprefix("graphopt.")) if name.startswith("graphopt.") else None
        if op is None or op.launch is None:
            continue
        args, kwargs = map_arg(node.args, _stand_in), map_arg(node.kwargs, _stand_in)
        forward = op.cost(*args, **kwargs)
        counts = [1, forward.bytes, 0, forward.flops, 0]
        if body.grad and op.backward_cost is not None:
            backward = op.backward_cost(*args, **kwargs)
            counts[2], counts[4] = backward.bytes, backward.flops
        total = found.setdefault(name, [0] * 5)
        found[name] = [a + b for a, b in zip(total, counts, strict=True)]
    rows = (KernelSummary(name, *counts) for name, counts in found.items())
    return tuple(sorted(rows, key=lambda r: (-r.bytes_forward - r.bytes_backward, r.op)))


def kernel_table(rows: Sequence[KernelSummary]) -> Table:
    """The kernels as a table."""
    header = ("kernel", "calls", "forward", "backward", "computes, both")
    cells = tuple(
        (
            row.op,
            str(row.calls),
            size(row.bytes_forward),
            size(row.bytes_backward) if row.bytes_backward else "-",
            flops_text(row.flops_forward + row.flops_backward),
        )
        for row in rows
    )
    return Table(header, cells, right=header[1:])


def _stand_in(node: fx.Node) -> Any:
    """The value of an operand as a tensor without memory, its sizes those of the example."""

    def value(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            shape, stride = ([concrete(n) for n in s] for s in (v.shape, v.stride()))
            return torch.empty_strided(shape, stride, dtype=v.dtype, device="meta")
        return concrete(v) if isinstance(v, torch.SymInt) else v

    return tree_map(value, node.meta["val"])
