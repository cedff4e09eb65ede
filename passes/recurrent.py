"""Recurrent layers under autocast, where they are no operator of cuDNN: on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

_STACKS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""Composites of several recurrent layers, with dropout between them."""


def one_kernel(target: Any, args: tuple[Any, ...], kind: str) -> bool:
    """Whether eager hands a call to oneDNN, whose layer autocast casts as a whole.

    Torch decides so for an `lstm` without projections whose operands are no float64. oneDNN then
    keeps gates and cell state to itself, in float32, where the layer's inner ops would round them.

    Args:
        target: an ATen overload.
        args: its arguments, with tensors for nodes.
        kind: device type of the autocast.

    Example:
        >>> one_kernel(aten.gru.input, (), "cpu")
        False
    """
    if target is not aten.lstm.input or kind != "cpu":
        return False
    mkldnn: Any = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    hidden, cell = args[1]
    double = torch.float64 in {getattr(v, "dtype", None) for v in tree_leaves(args)}
    return bool(hidden.shape[-1] == cell.shape[-1]) and not double


def inside(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite computes, by the ops that it is made of.

    Torch's decomposition of a stack of recurrent layers leaves out the dropout between them (as of
    2.13), so a stack with dropout is taken apart layer by layer.

    Args:
        target: an ATen overload that is a composite.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if target in _STACKS and not kwargs and args[4] > 1 and args[5] and args[6]:
        return _by_layers(target, *args)
    return target.decompose(*args, **kwargs)


def _by_layers(
    target: Any,
    x: torch.Tensor,
    hx: Any,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """A stack in training, dropout drawn as eager draws it: over (time, batch, features)."""
    pair = target is aten.lstm.input
    states = list(hx) if pair else [hx]
    directions, each = 1 + bidirectional, len(params) // num_layers
    ends = []
    x = x.transpose(0, 1) if batch_first else x
    for i in range(num_layers):
        own = params[i * each : (i + 1) * each]
        begin = [s.narrow(0, i * directions, directions) for s in states]
        x, *end = target.decompose(
            x, begin if pair else begin[0], own, has_biases, 1, 0.0, train, bidirectional, False
        )
        ends.append(end)
        if i < num_layers - 1:
            x = aten.dropout(x, dropout, True)
    y = x.transpose(0, 1) if batch_first else x
    return (y, *(torch.cat(end) for end in zip(*ends, strict=True)))
