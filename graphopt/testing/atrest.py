"""Dropout at rest: run a module with every dropout probability at zero, without changing it.

A fused kernel drops other elements than eager does, so the two are compared where nothing is
dropped: each call of a dropout, of attention or of a recurrent layer is handed on with p = 0. The
graph stays the one with dropout in it, fused as it is in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphopt.capture.entry import Entry

_POSITIONS = {
    "dropout": ("p", 1),
    "dropout_": ("p", 1),
    "dropout1d": ("p", 1),
    "dropout2d": ("p", 1),
    "dropout3d": ("p", 1),
    "alpha_dropout": ("p", 1),
    "alpha_dropout_": ("p", 1),
    "feature_dropout": ("p", 1),
    "feature_dropout_": ("p", 1),
    "feature_alpha_dropout": ("p", 1),
    "feature_alpha_dropout_": ("p", 1),
    "native_dropout": ("p", 1),
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}
"""Functions that drop: name and position of the probability."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class AtRest(TorchFunctionMode):
    """While it is entered, nothing is dropped, and graphopt draws no seed.

    Attributes:
        found: how many calls had a probability above zero.

    Example:
        >>> with AtRest() as mode:
        ...     kept = torch.nn.functional.dropout(torch.ones(3), 0.5)
        >>> kept.tolist(), mode.found
        ([1.0, 1.0, 1.0], 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand a call on, with p = 0 where it drops."""
        kwargs = dict(kwargs or {})
        if str(func) == "graphopt.draw_seed.default":
            return torch.zeros((), dtype=torch.int64, device=args[0])
        found = self.found
        for name, position in _probabilities(func, args):
            if not _off(name, position, args, kwargs):
                args = self._still(name, position, args, kwargs)
        result = func(*args, **kwargs)
        if self.found > found and _is_input(result, args):
            # at p = 0 a dropout hands its input on, at any other it makes a new tensor
            return result if _in_place(func, args, kwargs) else result.mul(1)
        return result

    def _still(
        self, name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        if name in kwargs:
            self.found += bool(kwargs[name])
            kwargs[name] = 0.0
        elif position < len(args):
            self.found += bool(args[position])
            return (*args[:position], 0.0, *args[position + 1 :])
        elif name == "p":  # left out, it is one half
            self.found += 1
            kwargs[name] = 0.0
        return args


def _off(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call says that it is not in training and so drops nothing."""
    if kwargs.get("training") is False or kwargs.get("train") is False:
        return True  # attention itself has no such flag: what follows its probability is causality
    return name != "dropout_p" and position + 1 < len(args) and args[position + 1] is False


def _is_input(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result is its first argument, or a view of it."""
    first = args[0] if args else None
    if not (isinstance(result, torch.Tensor) and isinstance(first, torch.Tensor)):
        return False
    return result.untyped_storage()._cdata == first.untyped_storage()._cdata


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout writes into its input."""
    named = str(getattr(func, "__name__", "")).partition(".")[0].endswith("_")
    return named or bool(kwargs.get("inplace")) or (len(args) > 3 and args[3] is True)


def _probabilities(func: Any, args: tuple[Any, ...]) -> list[tuple[str, int]]:
    """Name and position of each dropout probability that a function takes."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        own = "dropout" in schema.name.rpartition("::")[2]
        return [
            (a.name, i)
            for i, a in enumerate(schema.arguments)
            if a.name in ("dropout_p", "dropout") or (own and a.name == "p")
        ]
    name = getattr(func, "__name__", "")
    if name in _RECURRENT:  # two signatures: the probability is the one float among the arguments
        return [("dropout", i) for i, a in enumerate(args) if type(a) is float]
    return [_POSITIONS[name]] if name in _POSITIONS else []


@contextlib.contextmanager
def graph_at_rest(entry: Entry | None) -> Iterator[None]:
    """Run the graph of an optimized module with dropout at rest; the call around it is as ever.

    A mode around the whole call would be part of what selects a graph, hence only the graph's own
    function is run under it.
    """
    if entry is None:
        yield
        return
    function: Callable[..., Any] = entry._function

    def still(*values: Any) -> Any:
        with AtRest():
            return function(*values)

    entry._function = still
    try:
        yield
    finally:
        entry._function = function
