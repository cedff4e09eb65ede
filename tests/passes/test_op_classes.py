"""The table of op classes is what `torch.autocast` of the installed torch does, op by op."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphopt.passes.observe import observe
from graphopt.passes.op_classes import (
    AS_IT_IS,
    BY_ARGUMENT,
    CPU,
    CUDA,
    DIFFERENCES,
    FLOAT32,
    LOW,
    MEANING,
    PROMOTE,
    REFUSED,
    TABLES,
    class_of,
    observed_class,
)
from tests.passes.op_samples import NOT_CALLED, SAMPLES, Maker

BF16 = torch.bfloat16
aten = torch.ops.aten
NEWEST = (2, 13)
"""The newest torch whose lists the table has been compared with."""
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
NOT_FAKE = {"ctc_loss.IntList", "ctc_loss.Tensor", "linalg_lstsq", "_grid_sampler_2d_cpu_fallback"}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    NOT_FAKE |= {"quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar"}
"""Ops that fake tensors do not run, so that no graph holds them and nothing observes them."""
NAMED = ("imname", "names_")
"""In the names of overloads for named tensors, which torch 2.13 has no more."""
WIDE = {torch.float32, torch.complex64}


def overload(op: str) -> Any:
    name, _, which = op.partition(".")
    return getattr(getattr(aten, name), which or "default")


def is_listed(op: str, kind: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", KEYS[kind])


def operands(wanted: str, device: str) -> torch.dtype:
    """Float32 for an op that should narrow, low precision for one that should widen."""
    return torch.float32 if wanted == LOW else BF16


def check(op: str, kind: str) -> None:
    """Run an op under autocast and observe it; both must say what the table says."""
    if not is_listed(op, kind):
        pytest.skip("not on the list of this torch")
    wanted, target = class_of(op, kind), overload(op)
    args = SAMPLES[op](Maker(operands(wanted, kind), kind))
    if wanted == REFUSED:
        with pytest.raises(RuntimeError, match="autocast"), torch.autocast(kind, BF16):
            target(*args)
        return
    with torch.autocast(kind, BF16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = target(*args)
    leaves = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]
    if "attention" in op:
        leaves = leaves[:1]  # its statistics are in float32 always
    found = {v.dtype for v in leaves if v.dtype.is_floating_point or v.dtype.is_complex}
    assert not found or (found == {BF16} if wanted == LOW else found <= WIDE), found
    if op in NOT_FAKE:
        return
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, args)
    seen = observe(target, fake, {}, kind, BF16)
    if overload(op) not in DIFFERENCES:
        assert observed_class(seen, BF16) in allowed(op, wanted)


def allowed(op: str, wanted: str) -> set[str]:
    """The classes that an observation may amount to, for a class of the table."""
    if wanted == PROMOTE:  # with a float32 operand the others are widened
        return {FLOAT32}
    if wanted == BY_ARGUMENT or op.startswith("norm."):
        return {BY_ARGUMENT, FLOAT32}
    return {wanted}


CALLED = {kind: [op for op in table if op not in NOT_CALLED] for kind, table in TABLES.items()}


@pytest.mark.parametrize("op", CALLED["cpu"])
def test_on_the_cpu(op: str) -> None:
    check(op, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op", CALLED["cuda"])
def test_on_cuda(op: str) -> None:
    check(op, "cuda")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_table_has_every_op_that_torch_lists(kind: str) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST:
        pytest.skip(f"newer than {NEWEST}: its lists are not compared yet")
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    listed = {n.removeprefix("aten::") for n in names if is_listed(n.removeprefix("aten::"), kind)}
    assert {n for n in listed if not any(part in n for part in NAMED)} <= set(TABLES[kind])


def test_every_op_has_a_sample_or_a_reason() -> None:
    assert {*CPU, *CUDA} == {*SAMPLES, *NOT_CALLED}


def test_every_class_is_explained_and_every_difference_has_a_reason() -> None:
    assert {*CPU.values(), *CUDA.values(), AS_IT_IS} <= set(MEANING)
    assert all(d.reason for d in DIFFERENCES.values())
    assert class_of("add.Tensor", "cuda") == AS_IT_IS
