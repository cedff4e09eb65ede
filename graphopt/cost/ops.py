"""Bytes and FLOPs of one node, when each op runs as one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.facts import concrete, nbytes
from graphopt.remat import is_marker

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes read and written in device memory, and floating-point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        """Cost of both, one after the other."""
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def node_cost(node: fx.Node) -> Cost:
    """Cost of one node: its operands read once, its results written once.

    Views, sizes, items of a tuple, the seed and markers of dropped values are free.

    Example:
        >>> node_cost(fx.Graph().placeholder("x"))
        Cost(bytes=0, flops=0)
    """
    if node.op != "call_function" or node.target is getitem:
        return Cost(0, 0)
    if ops.is_symbolic(node) or ops.is_view(node) or ops.is_draw_seed(node) or is_marker(node):
        return Cost(0, 0)
    moved = nbytes(node.meta.get("val"))
    moved += sum(nbytes(n.meta.get("val")) for n in node.all_input_nodes)
    return Cost(moved, _flops(node))


def nodes_cost(nodes: Iterable[fx.Node]) -> Cost:
    """Cost of some nodes, each run as a kernel of its own."""
    return sum((node_cost(n) for n in nodes), Cost(0, 0))


def _elements(value: object) -> int:
    count = 1
    for size in getattr(value, "shape", ()):
        count *= concrete(size)
    return count


def _flops(node: fx.Node) -> int:
    """Two per multiply-add of a matrix product or convolution, one per output element else."""
    value = node.meta.get("val")
    out = _elements(value) if isinstance(value, torch.Tensor) else 0
    args = ops.arguments(node)

    def shape(i: int) -> list[int]:
        return [concrete(s) for s in args[i].meta["val"].shape]

    if node.target is aten.linear.default:
        return 2 * out * shape(1)[-1]
    if str(node.target) == "graphopt.linear_rope.default":
        return 2 * _elements(args[0].meta["val"]) * shape(1)[0]
    if node.target in (aten.mm.default, aten.bmm.default, aten.matmul.default):
        return 2 * out * shape(0)[-1]
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * out * shape(1)[-1]
    if node.target is aten.scaled_dot_product_attention.default:
        return 4 * out * shape(1)[-2]
    if node.target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
        kernel = shape(1)
        per_output = 1
        for size in kernel[1:]:
            per_output *= size
        return 2 * out * per_output
    return out
