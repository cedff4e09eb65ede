"""Tensors and state in the scripts that `assert_equivalent` writes."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import math
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

SMALL = 8
"""Tensors of up to so many elements are written as numbers."""

BUDGET = 6 * 1024
"""How many characters of packed tensors one script may hold."""


def packed(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that `pack` made a text of.

    Example:
        >>> x = torch.arange(3.0)
        >>> packed(pack(x), x.dtype, (3,)).tolist()
        [0.0, 1.0, 2.0]
    """
    raw = bytearray(zlib.decompress(base64.b85decode(text)))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).clone()


def pack(tensor: torch.Tensor) -> str:
    """The bytes of a tensor, compressed, as text."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return base64.b85encode(zlib.compress(raw, 9)).decode()


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, mean: float = 0.0, std: float = 1.0
) -> torch.Tensor:
    """Normal numbers that depend on the seed alone, the same on every machine.

    Example:
        >>> normal((2,), torch.float32, seed=0).dtype
        torch.float32
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn * std + mean).to(dtype)


def integers(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, low: int, high: int
) -> torch.Tensor:
    """Whole numbers from `low` up to and including `high`, by the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def stored(script: str, name: str, otherwise: torch.Tensor) -> torch.Tensor:
    """A tensor from the file beside a script (`reproduce.pt`), or a stand-in without one."""
    path = Path(script).with_suffix(".pt")
    if not path.exists():
        return otherwise
    data: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return data.get(name, otherwise)


class Holder(nn.Module):
    """A module that holds state under given paths; its children are also its items.

    Example:
        >>> m = Holder(); m.put("h.0.weight", torch.ones(2), trains=True)
        >>> m.h[0].weight.requires_grad
        True
    """

    def __getitem__(self, index: int | str) -> Any:
        """A child by number."""
        return getattr(self, str(index))

    def put(self, path: str, value: torch.Tensor, *, trains: bool | None = None) -> None:
        """Register a parameter (with `trains` its `requires_grad`) or, with None, a buffer."""
        owner: nn.Module = self
        *parents, name = path.split(".")
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, Holder())
            owner = owner._modules[part]  # type: ignore[assignment]
        if trains is None:
            owner.register_buffer(name, value)
        else:
            owner.register_parameter(name, nn.Parameter(value, requires_grad=trains))

    def tie(self, path: str, to: str) -> None:
        """Let a path hold the very tensor of another one."""
        parent, _, name = to.rpartition(".")
        owner = self.get_submodule(parent)
        cells = owner._parameters if name in owner._parameters else owner._buffers
        self.put(path, torch.empty(0), trains=True if cells is owner._parameters else None)
        parent, _, last = path.rpartition(".")
        other = self.get_submodule(parent)
        (other._parameters if last in other._parameters else other._buffers)[last] = cells[name]  # type: ignore[assignment]


def fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Write values into the parameters and buffers of a model, by their names."""
    known = dict((*model.named_parameters(), *model.named_buffers()))
    with torch.no_grad():
        for name, value in state.items():
            known[name].copy_(value)


def load(name: str) -> ModuleType:
    """Import an installed module by its name."""
    return importlib.import_module(name)


def load_file(path: str) -> ModuleType:
    """Import a Python file by its path, wherever it lies."""
    digest = hashlib.sha1(path.encode()).hexdigest()[:8]
    name = f"{Path(path).stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def number(value: Any) -> str:
    """A Python number as source; `inf` and `nan` are names in the scripts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)


def numbers(value: Any) -> str:
    """A nested list of numbers as source."""
    if isinstance(value, list):
        return f"[{', '.join(map(numbers, value))}]"
    return number(value)
