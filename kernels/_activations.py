"""Activations by name and their derivatives in plain torch; ``_tl_activations.py`` in Triton."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from graphopt.errors import OptionError

NAMES = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")


def check(name: str) -> None:
    """Refuse an unknown activation.

    Raises:
        OptionError: the name is not one of ``NAMES``.
    """
    if name not in NAMES:
        raise OptionError(f"unknown activation {name!r}", try_="one of " + ", ".join(NAMES))


def apply(z: torch.Tensor, name: str) -> torch.Tensor:
    """The activation of z, in z's dtype.

    Example:
        >>> apply(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
    """
    check(name)
    if name == "none":
        return z
    if name == "gelu":
        return F.gelu(z)
    if name == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    if name == "silu":
        return F.silu(z)
    return {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[name](z)


def derivative(z: torch.Tensor, name: str) -> torch.Tensor:
    """The derivative of the activation at z, in z's dtype; 0 for relu at 0, as torch has it.

    Example:
        >>> derivative(torch.tensor([-1.0, 0.0, 2.0]), "relu")
        tensor([0., 0., 1.])
    """
    check(name)
    if name == "none":
        return torch.ones_like(z)
    if name == "relu":
        return torch.where(z <= 0, 0.0, 1.0).to(
            z.dtype
        )  # 1 at NaN: the gradient passes, as torch's
    if name == "gelu":
        density = torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * density
    if name == "gelu_tanh":
        k, c = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(k * (z + c * z * z * z))
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * c * z * z)
    if name == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if name == "tanh":
        t = torch.tanh(z)
        return 1 - t * t
    s = torch.sigmoid(z)
    return s * (1 - s)
