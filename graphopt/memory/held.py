"""Tensors that a model holds in plain attributes: alive in a step as parameters and buffers are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

_OF_MODULES = frozenset(nn.Module().__dict__)
_LIBRARIES = ("torch", "graphopt", "builtins")
_OTHERS = (type, Dataset, DataLoader, torch.optim.Optimizer)
"""What a model may know without its being a part of it; an optimizer is `resident_bytes`."""


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path -> each tensor that a model holds beside its parameters and buffers.

    Looked into are lists, tuples, dicts, sets, objects of classes that are not torch's, and modules
    that are not registered (those in a plain list). Optimizers and data sets are left out.

    Args:
        model: the model.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.table, model.caches = torch.zeros(3), {"k": [torch.zeros(4)]}
        >>> {path: t.numel() for path, t in held_tensors(model).items()}
        {'table': 3, "caches['k'][0]": 4}
    """
    modules = dict(model.named_modules())
    seen = {id(part) for part in (*modules.values(), *model.parameters(), *model.buffers())}
    found: dict[str, torch.Tensor] = {}
    left: list[tuple[str, Any]] = []
    for path, module in modules.items():
        left += _attributes(path, module)
    while left:
        path, value = left.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[path] = value
        else:
            left += _inside(path, value)
    return found


def _attributes(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    start = f"{path}." if path else ""
    for name, value in vars(module).items():
        if name not in _OF_MODULES:
            yield start + name, value


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value with their paths."""
    if isinstance(value, nn.Module):
        state = (*value.named_parameters(recurse=False), *value.named_buffers(recurse=False))
        yield from ((f"{path}.{name}", part) for name, part in (*state, *value.named_children()))
        yield from _attributes(path, value)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, _OTHERS) and _is_the_users(type(value)):
        names = (n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()))
        slots = ((n, getattr(value, n)) for n in names if hasattr(value, n))
        parts = (*getattr(value, "__dict__", {}).items(), *slots)
        yield from ((f"{path}.{name}", part) for name, part in parts)


def _is_the_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES
