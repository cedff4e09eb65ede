"""Fake forms of operations for which torch has none."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.memory.fakestep import fake_mode
from graphopt.memory.forms import form_of
from graphopt.memory.tracker import StorageTracker, storages_of

aten = torch.ops.aten
LSTM, GRU = 2, 3  # cuDNN's numbers of them


def _layer(mode: int, bias: bool, batch_first: bool, has_buffer: bool = True):
    """A layer of two directions on fake tensors: its operands, and its result."""
    gates = {LSTM: 4, GRU: 3}[mode] * 8
    shapes = [(gates, 5), (gates, 8), (gates,), (gates,)][: 4 if bias else 2] * 2
    weights = [torch.empty(s, requires_grad=True) for s in shapes]
    buffer = torch.empty(sum(w.numel() for w in weights)) if has_buffer else None
    x = torch.empty(3, 7, 5, requires_grad=True)
    hx = torch.empty(2, 3 if batch_first else 7, 8, requires_grad=True)
    cx = torch.empty_like(hx, requires_grad=True) if mode == LSTM else None
    rest = (mode, 8, 0, 1, batch_first, 0.0, True, True, [], None)
    out = aten._cudnn_rnn.default(x, weights, len(shapes) // 2, buffer, hx, cx, *rest)
    return [x, *weights, hx, *([] if cx is None else [cx])], out


@pytest.mark.parametrize("mode", [LSTM, GRU])
@pytest.mark.parametrize("has_buffer", [True, False])
def test_a_layer_of_cudnn_goes_backward_without_a_call(mode: int, has_buffer: bool) -> None:
    with fake_mode(), StorageTracker(form=form_of):
        operands, out = _layer(mode, bias=True, batch_first=True, has_buffer=has_buffer)
        assert out[4].numel() == sum(w.numel() for w in operands[1:9])
        torch.autograd.backward([out[0], out[1]], [torch.empty_like(t) for t in out[:2]])
    for operand in operands:
        assert operand.grad.shape == operand.shape
        assert operand.grad.dtype == operand.dtype


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_weights_with_biases_are_parts_of_one_buffer(bias: bool) -> None:
    with fake_mode(), StorageTracker(form=form_of) as seen:
        operands, out = _layer(LSTM, bias, batch_first=True)
        torch.autograd.backward([out[0]], [torch.empty_like(out[0])])
    weights = operands[1:-2]
    made = [a.bytes for a in seen.allocations if "_cudnn_rnn_backward" in a.op]
    sizes = [w.nbytes for w in weights]
    assert made[3:] == ([sum(sizes)] if bias else sizes)  # behind input, state and cells


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_gradient_of_the_input_lies_step_by_step(batch_first: bool) -> None:
    x, h = torch.empty(3, 7, 5), torch.empty(1, 3 if batch_first else 7, 8)
    weights = [torch.empty(32, 5), torch.empty(32, 8)]
    rest = (LSTM, 8, 0, 1, batch_first, 0.0, True, False, [], None, torch.empty(9))
    form = form_of(aten._cudnn_rnn_backward.default)
    args = (x, weights, 2, torch.empty(9), h, h, x, x, None, None, *rest, [True, True, True, False])
    found = form(*args)
    assert found[0].shape == x.shape
    assert (found[0].transpose(0, 1) if batch_first else found[0]).is_contiguous()
    assert found[3] == []


def test_a_gru_cell_goes_forward_and_backward_without_a_call() -> None:
    with fake_mode(), StorageTracker(form=form_of):
        x, h = torch.empty(6, 12, requires_grad=True), torch.empty(6, 12, requires_grad=True)
        state, bias = torch.empty(6, 4, requires_grad=True), torch.empty(12, requires_grad=True)
        new = aten._thnn_fused_gru_cell.default(x, h, state, bias, bias)[0]
        new.backward(torch.empty_like(new))
    assert all(t.grad.shape == t.shape for t in (x, h, state, bias))


class _Compare(TorchDispatchMode):
    """Runs real operations, and holds the forms of those that have one against their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        form = form_of(func)
        if form is not None:
            self.names.add(func._schema.name)
            if func is not aten._cudnn_rnn.default:  # whose reserve only a call tells
                assert _lies(form(*args, **(kwargs or {}))) == _lies(out)
            elif args[3] is None:
                assert _lies(form(*args, **(kwargs or {}))[4]) == _lies(out[4])
        return out


def _lies(out):
    """Sizes, strides and dtypes of results, and how many bytes their storages have."""
    found = list(storages_of(out))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return [(t.shape, t.stride(), t.dtype) for t in found], list(storages.values())


@pytest.mark.gpu
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_forms_are_what_cudnn_gives(make, bias, batch_first) -> None:
    layer = make(16, 32, 2, bias=bias, batch_first=batch_first, bidirectional=True).cuda()
    apart = copy.deepcopy(layer)
    for p in apart.parameters():
        p.data = p.data.clone()  # no longer parts of one buffer
    x = torch.randn(5, 7, 16, device="cuda", requires_grad=True)
    with _Compare() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the weights that lie apart
        for model in (layer, apart):
            model(x)[0].sum().backward()
    assert seen.names == {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"}


@pytest.mark.gpu
def test_the_forms_are_what_a_gru_cell_gives() -> None:
    cell, x = nn.GRUCell(16, 32).cuda(), torch.randn(5, 16, device="cuda")
    with _Compare() as seen:
        cell(x).sum().backward()
    assert seen.names == {"aten::_thnn_fused_gru_cell", "aten::_thnn_fused_gru_cell_backward"}
