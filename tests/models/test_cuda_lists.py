"""Which casts are left in a graph under CUDA's autocast lists, seen without a GPU.

The passes ask torch what autocast does on the device; here they are given CUDA's table instead
(`op_classes`, held against a real GPU in tests/passes/test_op_classes.py), on CPU models.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from contract import optimized
from table import MODELS
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphopt.graph import ops
from graphopt.passes.observe import Observation, casting, dtypes_of, is_float, with_dtype
from graphopt.passes.op_classes import BY_ARGUMENT, DIFFERENCES, FLOAT32, LOW, PROMOTE, class_of


def observe_by_table(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, dtype: torch.dtype
) -> Observation:
    """What `observe` would say on CUDA, going by the table."""
    name = ops.op_name(target).removeprefix("aten.").removesuffix(".default")
    wanted = class_of(name, "cuda")
    flat, spec = tree_flatten((args, kwargs))
    floats = {i: v for i, v in enumerate(flat) if is_float(v)}
    if target in DIFFERENCES:
        return Observation({}, None, (dtype,), inside=True)
    casts: dict[int, torch.dtype] = {}
    mixed = len({v.dtype for v in floats.values()}) > 1
    if wanted == LOW:
        casts = {i: dtype for i, v in floats.items() if v.dtype != dtype}
    elif wanted == FLOAT32 or (wanted == PROMOTE and mixed):
        casts = {i: torch.float32 for i, v in floats.items() if v.dtype != torch.float32}
    for i, to in casts.items():
        flat[i] = flat[i].to(to)
    args, kwargs = tree_unflatten(flat, spec)
    argument = None
    if wanted == BY_ARGUMENT and any(v.dtype != torch.float32 for v in floats.values()):
        argument = torch.float32
        args, kwargs = with_dtype(target, args, kwargs, argument)
    with casting(kind, None), torch.no_grad():
        return Observation(casts, argument, dtypes_of(target(*args, **kwargs)))


EXPECTED: dict[str, list[str]] = {
    "gpt2": [],
    "llama": ["aten.cat"] * 2,  # keys, returned for the cache in float32 as under autocast
    "vit": ["aten.select.int", "placeholder"],
    "timm.swin": ["aten.mean.dim", *["aten.softmax.int"] * 4, "placeholder"],
}
"""Model -> what the casts of activations that are left read."""


@pytest.mark.parametrize("name", EXPECTED)
def test_casts_that_are_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.passes.autocast.observe", observe_by_table)
    entry = MODELS[name]
    with torch.autocast("cpu", torch.bfloat16):
        opt = optimized(entry.make(training=True, dropout=True), entry.batch(0))
    left = [
        node.args[0]
        for node in opt.graph.nodes
        if node.meta.get("graphopt_rule") == "materialize_autocast"
        and node.target is torch.ops.aten.to.dtype
    ]
    read = [ops.op_name(n.target) if n.op == "call_function" else n.op for n in left]
    assert collections.Counter(read) == collections.Counter(EXPECTED[name])
