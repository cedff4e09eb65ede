"""Weights of linear layers get their gradients from the matrix product itself, in float32.

A cast that is differentiated gives each weight a gradient in low precision first, which is then
widened: written, read and written again. Where the copy is read by one linear layer, backward's
product can write float32, and the rows of its result are the parameters' gradients.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor
from graphopt.graph.facts import concrete
from graphopt.passes.base import Log
from graphopt.passes.weights import cast_sources

aten = torch.ops.aten
NAME = "wide_gradients"
WORTH = 1 << 32
"""Multiply-adds of a product from which it pays: a call through Python costs the host some 30 us
more than a plain linear, which a GPU has to be busy for."""


@dataclasses.dataclass(frozen=True)
class WideGradients:
    """The pass: backward's product for a cast weight stores the gradient in float32.

    Large linear layers, and every `linear_rope`.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return NAME

    def run(self, body: Body, log: Log) -> None:
        """Replace the linear layers of trained weights; recorded as one global rewrite."""
        if not body.grad or not log.room:
            return
        products = [n for n in body.graph.nodes if _call(n, body) is not None]
        if not products:
            return
        before = copy_graph(body.graph)
        editor = Editor(body.graph, NAME)
        for node in products:
            call = _call(node, body)  # again: what it reads may have been replaced
            assert call is not None
            new = editor.call(call[0], *call[1], before=node, like=node)
            editor.replace_uses(node, new)
            editor.erase([node])
        log.add_global(self.name, before, body, ())


def _call(node: fx.Node, body: Body) -> tuple[Any, tuple[Any, ...]] | None:
    """The call that takes a node's place; None where there is none."""
    if node.op != "call_function" or node.meta.get("graphopt_no_grad"):
        return None
    if node.target is torch.ops.graphopt.linear_rope.default:
        return _rope_call(node, body)
    if node.target is aten.linear.default:
        x, weight, bias = ops.arguments(node)
    elif node.target is aten.mm.default:
        (x, weight), bias = node.args, None
    elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        bias, x, weight = node.args
    else:
        return None
    transposed = node.target is not aten.linear.default
    masters = _masters(weight, body)
    if masters is None or (transposed and len(masters) > 1) or weight.meta["val"].dim() != 2:
        return None
    if x.meta["val"].dim() < 2 or (bias is not None and bias.meta["val"].dim() != 1):
        return None
    if concrete(x.meta["val"].numel()) * node.meta["val"].shape[-1] < WORTH:
        return None
    rest: tuple[Any, ...] = (_masters(bias, body),) if bias is not None else (None,)
    rest = (*rest, True) if transposed else rest
    if rest == (None,):
        rest = ()
    return torch.ops.graphopt.linear_wide.default, (x, weight, bias, masters, *rest)


def _rope_call(node: fx.Node, body: Body) -> tuple[Any, tuple[Any, ...]] | None:
    x, weight, bias, cos, sin, widths, interleaved, *_ = ops.arguments(node)
    masters = _masters(weight, body)
    if masters is None:
        return None
    rest = () if bias is None else (_masters(bias, body),)
    return node.target, (x, weight, bias, cos, sin, widths, interleaved, masters, *rest)


def _masters(copy: Any, body: Body) -> list[fx.Node] | None:
    """The trained weights that a value is the low-precision copy of, read by one op alone."""
    if not isinstance(copy, fx.Node) or copy.target is not operator.getitem:
        return None
    sources = cast_sources(copy)
    if sources is None or len(copy.users) != 1:
        return None
    trained = all(body.attribute(str(s.target)).requires_grad for s in sources)
    return sources if trained else None
