"""What `precision=` asks for, and what became of it in a graph.

`precision="bf16"` captures a model as `torch.autocast` of that dtype would run it, and writes the
casts into the graph (`graphopt.passes.autocast`). An ambient `torch.autocast` at a call wins over
the option.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import GraphoptWarning
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.facts import concrete
from graphopt.graph.record import site_of
from graphopt.passes.overrides import NO_LOW

LOW: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The low precisions by their names as options."""

_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Lowering:
    """The autocast that a precision means for a model as it is now.

    Attributes:
        device: kind of device.
        dtype: None where the model runs as it is.
    """

    device: str
    dtype: torch.dtype | None

    def context(self) -> AbstractContextManager[Any]:
        """The autocast; nothing where there is none, or one is on already."""
        if self.dtype is None or any(map(torch.is_autocast_enabled, _DEVICES)):
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.dtype)


def lowering(model: nn.Module, precision: str) -> Lowering:
    """What a precision means for a model.

    Args:
        model: the source.
        precision: "bf16", "fp16" or "auto".
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    first = next((t for t in tensors if t.is_floating_point()), None)
    kind = "cpu" if first is None else first.device.type
    if precision != "auto":
        return Lowering(kind, LOW[precision])
    part, most = own_low(model)
    return Lowering(kind, None if most else LOW[part or _resolved(kind)])


def lowered(model: nn.Module, precision: str | None) -> AbstractContextManager[Any]:
    """The autocast in which a model of this precision is captured and called.

    Args:
        model: the source.
        precision: "bf16", "fp16", "auto" or None.

    Returns:
        `torch.autocast` of the model's device; nothing without a precision, where an autocast is
        on already, and with "auto" for a model most of which is in low precision itself.
    """
    if precision is None or any(map(torch.is_autocast_enabled, _DEVICES)):
        return contextlib.nullcontext()
    return lowering(model, precision).context()


def own_low(model: nn.Module) -> tuple[str | None, bool]:
    """The low precision that a part of a model is in, and whether the model is to stay as it is.

    It stays where most of its state is in low precision, or parts are in several; else one with a
    part in low precision gets that for the rest, so that no part is converted.

    Example:
        >>> own_low(nn.Linear(2, 2)), own_low(nn.Linear(2, 2).half())
        ((None, False), ('fp16', True))
    """
    sizes: collections.Counter[torch.dtype] = collections.Counter()
    for t in itertools.chain(model.parameters(), model.buffers()):
        if t.is_floating_point():
            sizes[t.dtype] += t.numel()
    low = [name for name, dtype in LOW.items() if sizes[dtype]]
    most = len(low) > 1 or 2 * sum(sizes[LOW[name]] for name in low) > sizes.total()
    return (low[0] if low else None), most


def has_bf16(kind: str) -> bool:
    """Whether a kind of device computes in bfloat16, and does not emulate it.

    Example:
        >>> has_bf16("cpu")
        True
    """
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache
def _resolved(kind: str) -> str:
    """The precision that "auto" means on a device: bf16 where the hardware has it."""
    if has_bf16(kind):
        return "bf16"
    warnings.warn(
        "precision='auto' is fp16 on this GPU, which has no bfloat16: scale the loss with"
        " torch.amp.GradScaler, or small gradients become 0",
        GraphoptWarning,
        stacklevel=7,
    )
    return "fp16"


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast that was written into a graph.

    Attributes:
        node: its name.
        source: the state path, or the name of the node that is cast.
        module: path of the module in which it is needed.
        weight: whether state is cast, and not an activation.
        dtype: the dtype cast to.
        bytes: read and written; symbolic sizes count as in the example.
    """

    node: str
    source: str
    module: str
    weight: bool
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionPlan:
    """In which precision each op of a graph runs, and what the casts move.

    Attributes:
        ambient: the low precision of the graph, None in a graph without any.
        ops: (op, dtype of its result) -> how many.
        casts: the casts that were written; those that a kernel's load or store took in are gone.
        pinned: nodes that an override decided: (node, module, op, dtype).
        unmatched: patterns of `precision_overrides` that decide nothing in this graph, and why.
    """

    ambient: str | None
    ops: dict[tuple[str, str], int]
    casts: tuple[Cast, ...]
    pinned: tuple[tuple[str, str, str, str], ...]
    unmatched: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """A table."""
        lines = [f"precision: {self.ambient or 'as the model is'}"]
        for weight, label in ((True, "weights"), (False, "activations")):
            chosen = [c for c in self.casts if c.weight == weight]
            total = sum(c.bytes for c in chosen) / 2**20
            lines.append(f"casts of {label}: {len(chosen)}, {total:.2f} MiB moved a forward")
        lines += [f"{count:6d}  {op:36s} {dtype}" for (op, dtype), count in self.ops.items()]
        if self.pinned:
            lines.append("decided by precision_overrides:")
            lines += [f"  {dtype}  {op}  {module}" for _, module, op, dtype in self.pinned]
        if self.unmatched:
            lines.append("precision_overrides that decide nothing here:")
            lines += [f"  {pattern!r}: {why}" for pattern, why in self.unmatched]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ambient": self.ambient,
            "ops": [{"op": o, "dtype": d, "count": n} for (o, d), n in self.ops.items()],
            "casts": [dataclasses.asdict(c) for c in self.casts],
            "pinned": [
                dict(zip(("node", "module", "op", "dtype"), p, strict=True)) for p in self.pinned
            ],
            "unmatched": [{"pattern": p, "why": why} for p, why in self.unmatched],
        }


def plan_of(captured: Body, body: Body) -> PrecisionPlan:
    """The precision plan of a graph.

    Args:
        captured: the body before the passes.
        body: the body that runs.
    """
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    casts, pinned = [], []
    for node in body.graph.nodes:
        val = node.meta.get("val")
        first = val[0] if isinstance(val, (tuple, list)) and val else val
        if node.op != "call_function" or not isinstance(first, torch.Tensor):
            continue
        if str(node.target) == "graphopt.cast_weights.default":
            casts += [_cast(node, s, s.meta["val"].numel(), first.dtype) for s in node.args[0]]
            continue
        if node.target is operator.getitem:
            continue
        if not first.is_floating_point() or ops.is_view(node):
            continue
        dtype, name = _short(first.dtype), ops.op_name(node.target)
        if node.target is torch.ops.aten.to.dtype:
            if node.meta.get("graphopt_rule") == "materialize_autocast":
                casts.append(_cast(node, node.all_input_nodes[0], first.numel(), first.dtype))
            continue
        found[name, dtype] += 1
        if "graphopt_precision" in node.meta:
            pinned.append((node.name, site_of(node).module, name, dtype))
    ambient = next(iter(captured.autocast.values()), None)
    return PrecisionPlan(
        None if ambient is None else _short(ambient),
        dict(sorted(found.items())),
        tuple(casts),
        tuple(pinned),
        tuple(captured.unmatched.items()),
    )


def tell_unmatched(
    body: Body, overrides: Iterable[tuple[str, torch.dtype]], told: set[str] | None = None
) -> None:
    """Warn of precision overrides that decide nothing in a graph.

    It is no error: an op or a module may run in one mode alone, or for some inputs, and the graphs
    of others are captured later. So each pattern is told of in the first graph that it could have
    decided in, and the precision plan of each graph holds it.

    Args:
        body: the graph, marked by `MarkOverrides`.
        overrides: the (pattern, dtype) pairs that it was marked by.
        told: what earlier graphs have told; what this one tells is added.
    """
    told = set() if told is None else told
    low = NO_LOW not in body.unmatched.values()
    for pattern, why in body.unmatched.items():
        if (pattern if low else NO_LOW) in told:
            continue
        mode = "training" if body.training else "eval"
        warnings.warn(
            f"precision_overrides: {pattern!r} decides nothing in the {mode} graph of"
            f" {type(body.root).__name__}: {why}",
            GraphoptWarning,
            stacklevel=2,
        )
        if not low:
            break  # it holds for all patterns alike
    told.update({pattern for pattern, _ in overrides} if low else {NO_LOW})


def _cast(node: fx.Node, source: fx.Node, count: Any, dtype: torch.dtype) -> Cast:
    moved = concrete(count) * (dtype.itemsize + source.meta["val"].element_size())
    weight = source.op == "get_attr"
    label = str(source.target) if weight else source.name
    return Cast(node.name, label, site_of(node).module, weight, _short(dtype), moved)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
