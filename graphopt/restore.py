"""Put a model back as it was: its tensors, gradients, modes and attributes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_DICTS = ("_parameters", "_buffers", "_modules")


@dataclasses.dataclass
class Snapshot:
    """A model's state at one moment.

    Attributes:
        attributes: each module with a shallow copy of its attributes and of its dicts of state.
        values: each tensor of state with a copy of its values, its gradient and a copy of that.
    """

    attributes: list[tuple[nn.Module, dict[str, Any], list[dict[str, Any]]]]
    values: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]

    @staticmethod
    def of(model: nn.Module, *, parameters: bool = True) -> Snapshot:
        """Take a snapshot.

        Args:
            model: the model.
            parameters: copy the values of parameters and their gradients, too, which takes as much
                memory again; buffers' are always copied.
        """
        attributes = [
            (m, dict(m.__dict__), [dict(getattr(m, name)) for name in _DICTS])
            for m in model.modules()
        ]
        tensors = {id(b): b for b in model.buffers()}
        if parameters:
            tensors |= {id(p): p for p in model.parameters()}
        with torch.no_grad():
            values = [
                (t, t.detach().clone(), t.grad, None if t.grad is None else t.grad.clone())
                for t in tensors.values()
            ]
        return Snapshot(attributes, values)

    def restore(self) -> None:
        """Put everything back, in place: optimizers and optimized modules see the same tensors."""
        for module, own, dicts in self.attributes:
            for name, saved in zip(_DICTS, dicts, strict=True):
                held = own[name]
                held.clear()
                held.update(saved)
            module.__dict__.clear()
            module.__dict__.update(own)
        with torch.no_grad():
            for tensor, value, grad, slope in self.values:
                tensor.copy_(value)
                tensor.grad = grad
                if grad is not None and slope is not None:  # a backward adds to it in place
                    grad.copy_(slope)


@contextlib.contextmanager
def restored(model: nn.Module, *, parameters: bool = True) -> Iterator[None]:
    """Whatever the block does to a model is undone after it.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> with restored(model):
        ...     _ = nn.init.zeros_(model.weight)
        >>> bool(model.weight.any())
        True
    """
    before = Snapshot.of(model, parameters=parameters)
    try:
        yield
    finally:
        before.restore()
