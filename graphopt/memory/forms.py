"""What operations return where torch's fake forms of them are not there, or lack something.

On fake tensors torch runs an operation without a fake form on zeros, on the device itself: that
takes memory and time, and ends in an error of the library's own where zeros, or sizes that nobody
knows yet, are no operands that it takes. So such operations have a form here, by their source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

APART = {"mkldnn_rnn_layer_backward": torch.float32}
"""Operations whose results have a storage each, and that dtype, which their fake forms lack.

The two gradients of biases, places 3 and 4, are one there; torch 2.11 has all in the dtype of the
operands, and without biases gives these two the sizes of weights.
"""


def form_of(func: Any) -> Callable[..., Any] | None:
    """The fake form of an operation for which torch's lacks results; None for any other.

    Args:
        func: the overload.

    Example:
        >>> form_of(torch.ops.aten.relu.default) is None
        True
    """
    return _FORMS.get(func)


def apart(name: str, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of an operation of `APART` as the real ones lie in memory."""
    sizes = [t.shape[:1] if place in (3, 4) else t.shape for place, t in enumerate(out)]
    return [out[0].new_empty(size, dtype=APART[name]) for size in sizes]


def _layer(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    weight_stride: int,
    buffer: torch.Tensor | None,
    *others: Any,
) -> tuple[Any, ...]:
    """A recurrent layer of cuDNN; weights that lie in no buffer are copied into one, a result.

    Args:
        x: the input.
        weights: of all layers and directions.
        weight_stride: how many of them a layer and direction has.
        buffer: in which all weights lie, with room for biases that are not there; or None.
        others: the rest of the schema's arguments.
    """
    if buffer is None:
        size = sum(w.numel() for w in weights)
        if weight_stride in _NO_BIASES:
            size += sum(2 * w.shape[0] for w in weights[::weight_stride])
        buffer = x.new_empty(size)
    out: tuple[Any, ...] = _aten._cudnn_rnn.default(x, weights, weight_stride, buffer, *others)
    return out


_NO_BIASES = (2, 3)
"""How many weights a layer and direction has that has no biases; three with a projection."""


def _layer_backward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    weight_stride: int,
    buffer: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *others: Any,
) -> tuple[Any, ...]:
    """Gradients of a recurrent layer of cuDNN or MIOpen, of all its operands whoever asks.

    That of the input is laid out step by step. Those of the weights are parts of one buffer, laid
    out as the library wants the weights; layers without biases copy them out of it.

    Args:
        x: the input, [batch, steps, size] if batch_first, [steps, batch, size], or packed.
        weights: of all layers and directions.
        weight_stride: how many of them a layer and direction has.
        buffer: in which all weights lie.
        hx: the state before the first step.
        cx: likewise of an LSTM's cells; None for others.
        others: the rest of the schema's arguments: last which gradients are wanted, and batch_first
            the first flag among them.
    """
    batch_first = next(v for v in others if isinstance(v, bool))
    turned = batch_first and x.dim() == 3
    of_x = torch.empty_like(
        x.transpose(0, 1) if turned else x, memory_format=torch.contiguous_format
    )
    of_cx = None if cx is None else cx.new_empty(cx.shape)
    of_weights: list[torch.Tensor] = []
    if others[-1][3]:
        of_weights = _gradients(weights, weight_stride, buffer)
    return of_x.transpose(0, 1) if turned else of_x, hx.new_empty(hx.shape), of_cx, of_weights


def _gradients(
    weights: Sequence[torch.Tensor], weight_stride: int, buffer: torch.Tensor
) -> list[torch.Tensor]:
    if weight_stride in _NO_BIASES:
        return [w.new_empty(w.shape) for w in weights]
    sizes = [w.numel() for w in weights]
    parts = buffer.new_empty(buffer.numel())[: sum(sizes)].split(sizes)
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]


def _gru_cell(
    gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new state, and what backward needs of each of its elements: five numbers."""
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(
    grad: torch.Tensor, kept: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of both gates, the state before, and the biases of both."""
    rows, size = kept.shape[0], 3 * (kept.shape[1] // 5)
    gates = kept.new_empty(rows, size), kept.new_empty(rows, size)
    biases = (kept.new_empty(size), kept.new_empty(size)) if has_bias else (None, None)
    return *gates, grad.new_empty(grad.shape), *biases


_aten = torch.ops.aten
_FORMS: dict[Any, Callable[..., Any]] = {
    _aten._cudnn_rnn.default: _layer,
    _aten._cudnn_rnn_backward.default: _layer_backward,
    _aten.miopen_rnn_backward.default: _layer_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
