"""What a caller has put around a call, and what work of graphopt's own must not run under."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def hooked() -> bool:
    """Whether hooks on saved tensors are in force, or forbidden.

    Example:
        >>> with torch.autograd.graph.save_on_cpu():
        ...     hooked()
        True
    """
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return True
    return autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Without the caller's hooks on saved tensors (a checkpoint around the call) and anomaly mode.

    They are about the tensors of his step. A capture and a memory prediction run his model beside
    it, on tensors without values, and need hooks themselves where he has forbidden them.

    Example:
        >>> with torch.autograd.graph.save_on_cpu(), unwatched():
        ...     torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        True
    """
    autograd: Any = torch._C._autograd
    forbidden = None
    if not autograd._saved_tensors_hooks_is_enabled():
        forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
        autograd._saved_tensors_hooks_enable()
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if forbidden is not None:
            autograd._saved_tensors_hooks_disable(forbidden)
