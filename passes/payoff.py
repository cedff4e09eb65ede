"""Whether a fusion pays: the time of the device that it saves beside the time of the host it costs.

The host issues kernels while the device runs them, and a step takes as long as the slower of the
two. A fused operator moves fewer bytes, but Python stands around its launch, where eager's
operators are C++: in a model of small tensors, where the device waits for the host, fusing makes a
step slower. So the pass keeps an estimate of both, host and device, and does not make a fusion
by which the slower one would get slower. Where the device is the slower one, as in every model
that fills a GPU, all fusions pay; where the host is, those do that put one call in the place of
several.

The device's time is by the roofline (`graphopt.cost`), with backward at twice a forward. The host's
is the sum of what calls were measured to take (`HOST_US`). Only graphs on CUDA are judged,
and only fusions whose operators stand in the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx

from graphopt.cost.ops import Cost, node_cost
from graphopt.cost.roofline import H200, Rates, rates_of
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.facts import nbytes

aten = torch.ops.aten
graphopt = torch.ops.graphopt

ALWAYS = "always"
"""`fuse="always"`: fusions are made whether they pay or not."""

HOST_US: dict[object, tuple[float, float]] = {
    aten.linear.default: (40.0, 85.0),
    aten.addmm.default: (40.0, 85.0),
    aten.layer_norm.default: (17.0, 55.0),
    aten.add.Tensor: (10.0, 5.0),
    aten.detach.default: (8.0, 0.0),
    graphopt.layer_norm.default: (56.0, 128.0),
    graphopt.add_layer_norm.default: (62.0, 128.0),
    graphopt.rms_norm.default: (48.0, 93.0),
    graphopt.add_rms_norm.default: (54.0, 96.0),
    graphopt.bias_act.default: (43.0, 108.0),
    graphopt.softcap.default: (36.0, 60.0),
    graphopt.glu.default: (34.0, 61.0),
    graphopt.glu_packed.default: (36.0, 61.0),
    graphopt.dropout.default: (46.0, 46.0),
    graphopt.dropout_add.default: (56.0, 82.0),
    graphopt.rope.default: (50.0, 60.0),
}
"""Microseconds of the host for a call with gradients, forward and backward.

Of an H200's host with torch 2.11 (`tests/bench/host.py`, 2026-12-02): for a hundred blocks of
LayerNorm, linear, GELU and linear the sum is eager's measured step, 51.8 ms, on one machine;
another took 32.7. With everything fused it was the measured 80.6 ms; a fifth is taken off the fused
calls for what they were made cheaper by since, as measured without a GPU.
"""
ANY_OP = (14.0, 23.0)
"""The same for an operation that is not in the table."""
VIEW = (6.0, 10.0)
"""The same for a view."""
BIAS_SUM_US = 24.0
"""Of the host for the gradient of a bias that a matrix product adds."""
PARAMETER_US = 16.0
"""Of the host for handing a gradient to its parameter."""


BEYOND_ROOFLINE = 1.25
"""What a step's kernels take of their roofline: 1.15 to 1.35 times it in the steps measured on an
H200 (those blocks at 8192 x 512; a transformer of 153 M parameters in bfloat16)."""


class Balance:
    """What host and device take for a step, as fusions are made.

    Attributes:
        host_us: microseconds of the host.
        device_us: microseconds of the device.
    """

    def __init__(self, graph: fx.Graph, rates: Rates, grad: bool) -> None:
        """The balance of a graph before any fusion.

        Args:
            graph: what runs.
            rates: of its device.
            grad: whether a backward follows.
        """
        self._rates, self._grad = rates, grad
        self.host_us = self.host(graph.nodes)
        self.device_us = self.device(graph.nodes)

    def host(self, nodes: Iterable[fx.Node]) -> float:
        """Microseconds of the host for some nodes."""
        total = 0.0
        for node in nodes:
            if node.op == "get_attr" and self._grad:
                total += PARAMETER_US
            if node.op != "call_function" or node.target is getitem or ops.is_symbolic(node):
                continue
            view = VIEW if ops.is_view(node) else ANY_OP
            forward, backward = HOST_US.get(node.target, view)
            total += forward
            if self._grad:
                total += backward + BIAS_SUM_US * _sums_bias(node)
        return total

    def device(self, nodes: Iterable[fx.Node]) -> float:
        """Microseconds of the device for some nodes."""
        total = 0.0
        for node in nodes:
            if node.op == "call_function":
                total += (3 if self._grad else 1) * self._rates.ms(node_cost(node), _dtype(node))
                if self._grad and _sums_bias(node):
                    total += self._rates.ms(Cost(nbytes(node.meta["val"]), 0), None)
        return 1e3 * BEYOND_ROOFLINE * total

    def refuses(self, old: list[fx.Node], new: list[fx.Node]) -> str | None:
        """Why some nodes should not take the place of others; None, and it counts, if they should.

        Args:
            old: the nodes that are there.
            new: those that would take their place.
        """
        if not any(node.target in HOST_US and _ours(node) for node in new):
            return None
        host = self.host_us + self.host(new) - self.host(old)
        device = self.device_us + self.device(new) - self.device(old)
        if max(host, device) > max(self.host_us, self.device_us):
            extra, saved = host - self.host_us, self.device_us - device
            return (
                f"too small to pay: it would take the host {extra:.0f} us more and the device"
                f" {saved:.0f} us less, in a step of which the host takes {self.host_us / 1e3:.1f}"
                f" ms and the device {self.device_us / 1e3:.1f} ms by estimate;"
                f" fuse={ALWAYS!r} does it all the same"
            )
        self.host_us, self.device_us = host, device
        return None


def balance_of(body: Body) -> Balance | None:
    """The balance of a body where its fusions should be judged, None where they need not be.

    They need not on another device than a GPU, nor where even the fastest one is slower than the
    host would be with everything fused.
    """
    device = _device(body)
    if device is None or device.type != "cuda":
        return None
    found = Balance(body.graph, H200, body.grad)
    if found.device_us > 2 * found.host_us:
        return None
    rates = rates_of(device)
    return found if rates is H200 else Balance(body.graph, rates, body.grad)


def _device(body: Body) -> torch.device | None:
    """Where a body runs: the device of its first operation's result."""
    for node in body.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            return value.device
    return None


_BIAS_AT: dict[object, int] = {aten.linear.default: 2, aten.addmm.default: 0}


def _sums_bias(node: fx.Node) -> bool:
    """Whether the backward of a matrix product sums the gradient of its bias."""
    at = _BIAS_AT.get(node.target)
    bias = node.args[at] if at is not None and at < len(node.args) else None
    return isinstance(bias, fx.Node) and bias.target is not aten.detach.default


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _ours(node: fx.Node) -> bool:
    return str(node.target).startswith("graphopt.")
