"""What operations take inside on a GPU: by one real call each.

Convolutions and attention take a workspace for the length of a call, and reductions over many rows
room for partial results: the sum that is the gradient of a bias takes 125 MiB for 16,384 rows of
1,000 (H200). Others copy what does not lie as they want it. How much is the library's own choice,
so a call of each kind and size runs once on the device (`graphopt.memory.trial`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.memory import trial
from graphopt.memory.cpucalls import keeps_more, lacks_operand
from graphopt.memory.tracker import CUDA_BLOCK
from graphopt.memory.trial import NOTHING, PRODUCTS, Taken, name_of

_book = trial.Book()


def gpu_call(func: Any, args: Any, kwargs: Any, out: Any) -> Taken | None:
    """What one call on a GPU takes beside its results; None where it cannot be run.

    The call runs on new tensors of the same sizes, strides and dtypes; the device's random state
    is put back, its statistics of peaks start anew. Each kind and size of call runs once a machine
    and model of GPU.

    Args:
        func: the operation.
        args: positional arguments; their tensors may be fake.
        kwargs: keyword arguments.
        out: what it returned.
    """
    if not trial.worth_a_call(func):
        return NOTHING
    leaves = trial.flat(args, kwargs)
    if not trial.may_call(leaves, "cuda") or _takes_nothing(func, leaves):
        return NOTHING
    device = next(t.device for t in leaves if isinstance(t, torch.Tensor))
    grad = keeps_more(func)
    key = (*trial.key_of(func, leaves), grad, *_settings())

    def run() -> Taken | None:
        if lacks_operand(func, args) or name_of(func) in trial.BY_VALUE:
            return None
        with _disable_current_modes(), torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own call warns, too
            return _measure(func, args, kwargs, out, device)

    return _book.look(torch.cuda.get_device_name(device), key, run)


def _takes_nothing(func: Any, leaves: list[Any]) -> bool:
    """Pointwise kernels cast as they read and write; cuBLAS multiplies what lies in rows."""
    if torch.Tag.pointwise in func.tags:
        return name_of(func) not in _COMPOSITE
    return name_of(func) in PRODUCTS and all(
        trial.in_rows(t) for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 1
    )


_COMPOSITE = frozenset({"isinf", "ldexp", "mvlgamma", "native_dropout_backward", "prelu"})
"""Operations that are tagged as pointwise, of several kernels."""


def _settings() -> tuple[Any, ...]:
    """What else decides which kernel a call runs, and so its workspace."""
    cudnn = torch.backends.cudnn
    return (
        torch.__version__,
        cudnn.version(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _measure(func: Any, args: Any, kwargs: Any, out: Any, device: torch.device) -> Taken | None:
    with torch.random.fork_rng(devices=[device]):
        return trial.first_that_runs(
            lambda fill: _once(func, trial.made_up(args, kwargs, fill), out, device),
            (trial.zeros, trial.identities),
        )


def _once(func: Any, given: Any, fake: Any, device: torch.device) -> Taken:
    args, kwargs = given
    forward = _LAYERS.get(func)
    if forward is not None:
        args = _with_reserve(func, forward, args)
    func(*args, **kwargs)  # the first call builds plans and takes lasting workspaces
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = func(*args, **kwargs)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return trial.taken(peak - before, func, (args, kwargs), out, fake, CUDA_BLOCK)


_LAYERS = {
    torch.ops.aten._cudnn_rnn_backward.default: torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten.miopen_rnn_backward.default: torch.ops.aten.miopen_rnn.default,
}
"""Backward of a recurrent layer -> its forward."""


def _with_reserve(func: Any, forward: Any, args: Any) -> tuple[Any, ...]:
    """Arguments of a layer's backward, with what its forward keeps for it in the place of zeros."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=True)}
    with torch.enable_grad():
        kept = forward(*(given[a.name] for a in forward._schema.arguments))[3]
    return tuple(kept if name == "reserve" else value for name, value in given.items())
