"""glu's gradients written into memory that is there: the bits of those in memory of their own."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels import glu
from graphopt.kernels._overwrite import lend, may_overwrite, operands_of, overwriting

G = torch.ops.graphopt
LAYOUTS = {
    "rows": lambda rows, cols: torch.randn(rows, cols),
    "columns": lambda rows, cols: torch.randn(cols, rows).t(),
    "part": lambda rows, cols: torch.randn(rows, cols + 3)[:, 3:],
    "expanded": lambda rows, cols: torch.randn(1, 1).expand(rows, cols),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 17), (2, 1500), (0, 4), (5, 0)], ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
def test_over_the_whole(backend, dtype, shape, gate_first):
    rows, cols = shape
    packed = torch.randn(rows, 2 * cols, device=backend.device, dtype=dtype)
    dy = torch.randn(rows, cols, device=backend.device, dtype=dtype)
    wanted = G.glu_packed_backward(dy, packed, "silu", gate_first)
    overwriting(G.glu_packed_backward.default).over(dy, packed, "silu", gate_first)
    assert torch.equal(packed, wanted)


@pytest.mark.parametrize("activation", glu.NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_both(backend, activation, layout):
    gate, up = (torch.randn(4, 20, device=backend.device) for _ in "ab")
    dy = LAYOUTS[layout](4, 20).to(backend.device)
    wanted = G.glu_backward(dy, gate, up, activation)
    overwriting(G.glu_backward.default).over(dy, gate, up, activation)
    assert torch.equal(gate, wanted[0])
    assert torch.equal(up, wanted[1])


@pytest.mark.parametrize("which", [0, 1])
def test_over_one_of_two_dtypes(backend, which):
    gate = torch.randn(2, 3, 9, device=backend.device)
    up = torch.randn(2, 3, 9, device=backend.device).bfloat16()
    dy = torch.randn(2, 3, 9, device=backend.device).bfloat16()
    wanted = G.glu_backward(dy, gate, up, "gelu")
    given = gate.clone(), up.clone()
    out = [torch.empty_like(gate), torch.empty_like(up)]
    out[which] = given[which]
    assert G.glu_backward_out(dy, *given, "gelu", *out) is None
    assert all(map(torch.equal, out, wanted))
    assert torch.equal(given[1 - which], (gate, up)[1 - which])


def test_which_operands():
    assert operands_of(G.glu.default) == (0, 1)
    assert operands_of(G.glu_packed.default) == (0,)
    assert operands_of(torch.ops.aten.silu.default) == ()


def test_what_is_lent_may_be_written_over_once():
    grad = torch.ones(3)
    with torch.no_grad():
        saved = (torch.ones(3), torch.ones(3))
        lend(saved[0])
        assert may_overwrite(saved, 0, grad)
        assert not may_overwrite(saved, 0, grad)
        assert not may_overwrite(saved, 1, grad)


@pytest.mark.parametrize(
    "case", ["a reference", "a view", "strides", "a batch", "recorded", "a subclass"]
)
def test_what_must_not_be_written_over(case):
    def lent(tensor):
        with torch.set_grad_enabled(case == "recorded"):
            lend(tensor)
        return (tensor,)

    grad = torch.ones(3, 4)
    tensor = torch.ones(4, 3).t() if case == "strides" else torch.ones(3, 4)
    if case == "a subclass":
        tensor = torch.nn.Buffer(tensor)
        tensor.__class__ = type("Mine", (torch.Tensor,), {})
    saved = lent(tensor)
    held = tensor.view(-1) if case == "a view" else None
    if case != "a reference":
        del tensor
    if case == "a batch":
        with torch.no_grad():
            torch.func.vmap(lambda g: _refused(saved, g))(grad[None])
    else:
        assert not may_overwrite(saved, 0, grad)
    del held


def _refused(saved, grad):
    assert not may_overwrite(saved, 0, grad)
    return grad


def test_nothing_stays_of_what_was_lent():
    from graphopt.kernels._overwrite import _LOCAL

    before = len(_LOCAL.lent)
    with torch.no_grad():
        lend(torch.ones(3))
    assert len(_LOCAL.lent) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_size(dtype):
    for cols in (5632, 5631):
        packed = torch.randn(4096, 2 * cols, device="cuda", dtype=dtype)
        dy = torch.randn(4096, cols, device="cuda", dtype=dtype)
        wanted = G.glu_packed_backward(dy, packed, "silu", True)
        overwriting(G.glu_packed_backward.default).over(dy, packed, "silu", True)
        assert torch.equal(packed, wanted)
        gate, up = (torch.randn(4096, cols, device="cuda", dtype=dtype) for _ in "ab")
        apart = G.glu_backward(dy, gate, up, "gelu")
        overwriting(G.glu_backward.default).over(dy, gate, up, "gelu")
        assert torch.equal(gate, apart[0])
        assert torch.equal(up, apart[1])
