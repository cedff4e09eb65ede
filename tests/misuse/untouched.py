"""What a wrong use must leave as it was: the model, the process's modes, the current folder."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

_HOOKS = tuple(n for n in nn.Module().__dict__ if n.endswith("_hooks"))


def snapshot(value: Any, folder: Path) -> dict[str, Any]:
    """Everything that is compared, by a name for the message.

    Args:
        value: the model (or whatever stands in its place) of the wrong use.
        folder: the current folder of the call.
    """
    found: dict[str, Any] = dict(_process())
    found["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    if isinstance(value, nn.Module):
        for path, module in value.named_modules():
            found |= {f"{path}.{what}": fact for what, fact in _facts(module).items()}
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    return sorted(n for n in {*before, *after} if not _same(before.get(n), after.get(n)))


def _process() -> dict[str, Any]:
    return {
        "torch's generator": torch.get_rng_state(),
        "python's generator": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "current folder": Path.cwd(),
        "global hooks": [
            len(h)
            for n, h in vars(nn_module).items()
            if n.startswith("_global_") and n.endswith("_hooks") and isinstance(h, dict)
        ],
    }


def _facts(module: nn.Module) -> dict[str, Any]:
    own = module.__dict__
    facts: dict[str, Any] = {
        "class": type(module),
        "training": own.get("training"),
        "attributes": {k: id(v) for k, v in own.items() if not isinstance(v, (dict, set))},
        "dicts": {k: list(v) for k, v in own.items() if isinstance(v, dict)},
        "hooks": {k: list(own[k].values()) for k in _HOOKS if k in own},
    }
    for kind in ("_parameters", "_buffers"):
        for name, tensor in own.get(kind, {}).items():
            facts[f"{name} object"] = id(tensor)
            if isinstance(tensor, torch.Tensor) and not nn.parameter.is_lazy(tensor):
                facts[f"{name} value"] = _value(tensor)
                facts[f"{name} gradient"] = None if tensor.grad is None else _value(tensor.grad)
                facts[f"{name} requires_grad"] = tensor.requires_grad
    return facts


def _value(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # of a sharded module: comparing the whole would communicate
        tensor = tensor.to_local()
    return str(tensor) if tensor.is_meta else tensor.clone()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)
