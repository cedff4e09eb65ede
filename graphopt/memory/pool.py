"""`graphopt.configure_memory_pool`: how much of a GPU this process takes, and in what manner."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from typing import Any

import torch

from graphopt.errors import OptionError
from graphopt.options import check_choice, names_checked

EXPANDABLE = "expandable_segments"
CONF = "PYTORCH_ALLOC_CONF"
OLD_CONF = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable's name up to torch 2.8; where both are set, torch reads this one."""


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPool:
    """What `configure_memory_pool` did. Its repr tells it, with lines for a shell.

    Attributes:
        gpu: name of the GPU, None where there is none.
        fraction: the share of its memory that this process may take; None where nothing was set.
        variables: environment variables that were set for this process and its children.
        too_late: what could not take effect in this process any more, and why.
        notes: what else there is to know.
        exports: variable -> value for a shell, for processes that are still to be started.
    """

    gpu: str | None
    fraction: float | None
    variables: dict[str, str]
    too_late: tuple[str, ...]
    notes: tuple[str, ...]
    exports: dict[str, str]

    @property
    def shell(self) -> str:
        """Lines for a shell, before processes are started that share the GPU."""
        return "\n".join(f"export {name}={value}" for name, value in self.exports.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        """What was set and what was not, and the lines for a shell."""
        lines = []
        if self.fraction is not None:
            lines.append(f"this process takes at most {self.fraction:.0%} of the {self.gpu}")
        lines += [f"set {name}={value}" for name, value in self.variables.items()]
        lines += [f"too late: {text}" for text in self.too_late]
        lines += self.notes
        if self.exports:
            lines += ["for processes that are still to be started:", self.shell]
        return "\n".join(lines)


@names_checked
def configure_memory_pool(
    fraction: float = 0.8,
    expandable_segments: bool = True,
    jax: bool | float = True,
    tensorflow: bool = True,
    *,
    device: int | None = None,
) -> MemoryPool:
    """Limit what this process takes of a GPU, and leave room for other libraries on it.

    Best called first thing: torch reads its allocator's settings once, when it first touches the
    GPU, and JAX and TensorFlow when they do. What comes too late is said in the result; its
    `.shell` has the lines to set beforehand. Without a GPU nothing is set.

    Args:
        fraction: the share of the GPU's memory that torch may take in this process; beyond it torch
            raises its out-of-memory error.
        expandable_segments: let torch's blocks grow in place, so that less lies unused between them
            (Linux).
        jax: what JAX may take up: True for what `fraction` leaves, a number for that share, False
            to leave JAX alone.
        tensorflow: have TensorFlow take memory as it needs it, not all of it at its start.
        device: which GPU; by default torchrun's `LOCAL_RANK`, else the current one.

    Raises:
        OptionError: for a share outside 0 to 1, or shares that are more than all of it.

    Example:
        >>> import graphopt
        >>> print(graphopt.configure_memory_pool(0.8))  # doctest: +SKIP
        this process takes at most 80% of the NVIDIA H200
        set PYTORCH_ALLOC_CONF=expandable_segments:True
    """
    share = _check(fraction, expandable_segments, jax, tensorflow, device)
    conf = _conf(expandable_segments)
    exports = {name: conf for name in (CONF, OLD_CONF) if conf}
    exports |= _of_others(share, tensorflow)
    if not torch.cuda.is_available():
        note = "there is no GPU that torch could use: nothing was set"
        return MemoryPool(None, None, {}, (), (note,), exports)
    index = _index(device)
    late, notes = _late(conf, share, tensorflow), _notes(exports)
    os.environ.update(exports)
    torch.cuda.set_per_process_memory_fraction(float(fraction), index)
    return MemoryPool(
        torch.cuda.get_device_name(index),
        float(fraction),
        exports,
        tuple(late),
        tuple(notes),
        exports,
    )


def _conf(expandable_segments: bool) -> str:
    """The allocator's settings: those of the user, and ours in the place of theirs."""
    given = os.environ.get(OLD_CONF) or os.environ.get(CONF) or ""
    kept = [p for p in given.split(",") if p and not p.strip().startswith("expandable_segments:")]
    if sys.platform.startswith("linux"):  # torch has them nowhere else
        kept.append(f"expandable_segments:{expandable_segments}")
    return ",".join(kept)


def _of_others(share: float | None, tensorflow: bool) -> dict[str, str]:
    """The variables of JAX and TensorFlow."""
    found = {}
    if share is not None and share >= 0.01:
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
    elif share is not None:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if tensorflow:
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


_unread: set[str] = set()
"""Settings that were written after torch had read its own."""


def read_settings() -> list[str]:
    """The settings in the environment that torch's allocator has read or will read, one by one.

    Empty where they were set after it had read others.
    """
    given = os.environ.get(OLD_CONF) or os.environ.get(CONF) or ""
    return [] if given in _unread else [part.strip() for part in given.split(",") if part.strip()]


def _late(conf: str, share: float | None, tensorflow: bool) -> list[str]:
    """What this process has begun already."""
    late = []
    read = os.environ.get(OLD_CONF) or os.environ.get(CONF) or ""
    if torch.cuda.is_initialized() and (conf != read or conf in _unread):
        _unread.add(conf)
        late.append(f"torch has touched the GPU and read {CONF} before")
    for wanted, name in ((share is not None, "jax"), (tensorflow, "tensorflow")):
        if wanted and name in sys.modules:
            late.append(f"{name} is imported: it keeps what it took of the GPU, if it did")
    return late


def _notes(exports: dict[str, str]) -> list[str]:
    notes = [
        f"{name} was {os.environ[name]!r} before"
        for name, value in exports.items()
        if os.environ.get(name, value) != value
    ]
    if not sys.platform.startswith("linux"):
        notes.append("expandable segments are there on Linux alone")
    return notes


def _index(device: int | None) -> int:
    if device is None:
        rank = os.environ.get("LOCAL_RANK", "")
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        device = int(rank) if rank.isdigit() and not torch.cuda.is_initialized() else current
    if device >= torch.cuda.device_count():
        raise OptionError(
            f"there is no GPU {device}", try_=f"device= below {torch.cuda.device_count()}"
        )
    return device


def _check(fraction: Any, expandable: Any, jax: Any, tensorflow: Any, device: Any) -> float | None:
    """Check the arguments; the share that JAX gets, None for none of our business."""
    if not _is_share(fraction):
        raise OptionError(f"fraction is {fraction!r}", try_="a share above 0 and up to 1, as 0.8")
    check_choice("expandable_segments", expandable, (True, False))
    check_choice("tensorflow", tensorflow, (True, False))
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise OptionError(f"device is {device!r}", try_="the number of a GPU, as 0")
    if device is not None and device < 0:
        raise OptionError(f"device is {device}", try_="the number of a GPU, from 0")
    if isinstance(jax, bool):
        return round(1.0 - float(fraction), 2) if jax else None
    if not _is_share(jax):
        raise OptionError(f"jax is {jax!r}", try_="True, False, or a share above 0 and up to 1")
    if fraction + jax > 1:
        raise OptionError(
            f"fraction {fraction} and jax {jax} are more than the whole GPU",
            try_=f"jax=True, which is what is left: {1 - fraction:.2f}",
        )
    return float(jax)


def _is_share(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value) and 0 < value <= 1
