"""Optimize a model in place: the same object, whose forward runs the optimized graphs."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from graphopt.api import optimize
from graphopt.capture.shadow import ATTACHED, eager_forward
from graphopt.errors import GraphoptWarning, OptionError
from graphopt.module import GraphoptModule
from graphopt.options import check_names, disabled

M = TypeVar("M", bound=nn.Module)

_REPLICATE = "_replicate_for_data_parallel"
_PLAIN = frozenset({torch.Tensor, type(None), bool, int, float, str, tuple, list, dict})


def attach(
    model: M,
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> M:
    """Optimize a model in place.

    The model stays the object that it is: its class, config, hooks, `state_dict` keys, methods such
    as `generate` and `save_pretrained`, and the signature of its `forward` do not change. Only
    `model.forward` is replaced, by one that runs optimized graphs of the model. A deepcopy of it
    and a model that is pickled and loaded are attached, too, each to its own parameters; they
    capture anew at their first call.

    A call with a key-value cache (each step of Hugging Face's `generate`) changes that cache in
    place and runs the model's own forward; so do the replicas of `nn.DataParallel`. Each is said
    by a warning, once.

    Args:
        model: the model, in the mode that example inputs are to be captured in.
        example_inputs: as for `optimize`.
        example_kwargs: as for `optimize`.
        **options: those of `optimize`.

    Returns:
        The model itself. `model.forward.optimized` is the `GraphoptModule` behind it, with the
        graph, the rewrites and the refusals. With `GRAPHOPT_DISABLE=1` in the environment nothing
        is attached.

    Raises:
        OptionError: when the model is attached already, and for wrong options.
        CaptureError: when the model cannot be captured.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        >>> attach(model) is model, type(model).__name__
        (True, 'Sequential')
        >>> _ = model(torch.ones(2, 4))
        >>> model.forward.optimized.rewrites[0].rule
        'bias_act'
    """
    if isinstance(model, nn.Module) and _attached(model) is not None:
        raise OptionError(
            f"{type(model).__name__} is attached already",
            try_="graphopt.detach(model) first, to attach it with other options",
        )
    check_names("attach", options, list(inspect.signature(optimize).parameters)[3:])
    opt = optimize(model, example_inputs, example_kwargs, **options)
    if isinstance(opt, GraphoptModule):  # not with GRAPHOPT_DISABLE=1
        forward = AttachedForward(model, opt)
        model.__dict__["forward"] = forward
        model.__dict__[_REPLICATE] = forward.replicate
    return model


attach.__signature__ = inspect.signature(optimize).replace(  # type: ignore[attr-defined]
    return_annotation="nn.Module"
)


def detach(model: M) -> M:
    """Undo `attach`: the model runs its own forward again.

    Args:
        model: what `attach` returned, or a deepcopy of it.

    Returns:
        The model itself. With `GRAPHOPT_DISABLE=1` in the environment a model that is not attached
        comes back as it is.

    Raises:
        OptionError: when the model is not attached.

    Example:
        >>> model = attach(nn.Linear(4, 8))
        >>> "forward" in model.__dict__, "forward" in detach(model).__dict__
        (True, False)
    """
    forward = _attached(model) if isinstance(model, nn.Module) else None
    if forward is None:
        if disabled() and isinstance(model, nn.Module):
            return model
        raise _not_attached(model)
    del model.__dict__["forward"]
    model.__dict__.pop(_REPLICATE, None)
    if forward.previous is not None:
        model.__dict__["forward"] = forward.previous
    return model


def _attached(model: nn.Module) -> AttachedForward | None:
    forward = model.__dict__.get("forward")
    return forward if isinstance(forward, AttachedForward) else None


def _not_attached(model: Any) -> OptionError:
    kind = type(model).__name__
    if isinstance(model, GraphoptModule):
        return OptionError(f"{kind} came from optimize", try_="opt.source is the model itself")
    if not isinstance(model, nn.Module):
        return OptionError(
            f"model is of type {kind}, not an nn.Module", try_="what attach was given"
        )
    own = model.__dict__.get("forward")
    if own is not None and _wraps_attached(own):
        return OptionError(
            f"something else replaced the forward of {kind} after it was attached",
            try_="undo that first (accelerate: unwrap_model), then detach",
        )
    return OptionError(f"{kind} is not attached", try_="detach takes what attach was given")


def _wraps_attached(function: Any) -> bool:
    """Whether an attached forward can be reached through `__wrapped__`, `func` and `__func__`."""
    for _ in range(16):
        if isinstance(function, AttachedForward):
            return True
        inner = (getattr(function, name, None) for name in ("__wrapped__", "func", "__func__"))
        function = next((f for f in inner if f is not None), None)
    return False


class AttachedForward:
    """The forward of an attached model: an object bound to it, as a method is.

    An object and not a method, because a pickled method comes back as the class's own.

    Attributes:
        model: the model that it stands on.
        previous: the forward that stood in the model's own dict before, None where none did.
    """

    def __init__(self, model: nn.Module, optimized: GraphoptModule) -> None:
        """Bind a model to its optimized twin."""
        self.model = model
        self.previous: Any = model.__dict__.get("forward")
        self._making = (optimized._settings, optimized._compile_body)
        self._optimized: GraphoptModule | None = optimized
        self._said: set[str] = set()
        setattr(self, ATTACHED, True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, from the optimized graphs wherever they serve."""
        for value in (*args, *kwargs.values()):
            if type(value) not in _PLAIN and _is_cache(value):
                self._say(
                    f"calls with a {type(value).__name__} run the model's own forward, unoptimized:"
                    " they change it in place"
                )
                return eager_forward(self.model)(*args, **kwargs)
        optimized = self._optimized
        if optimized is None:
            if disabled():
                return eager_forward(self.model)(*args, **kwargs)
            optimized = self.optimized
        return optimized._call(args, kwargs)

    @property
    def optimized(self) -> GraphoptModule:
        """The optimized module over the model's state: graph, code, rewrites, refusals."""
        if self._optimized is None:
            self._optimized = GraphoptModule(self.model, *self._making)
        return self._optimized

    def replicate(self) -> nn.Module:
        """A replica for `nn.DataParallel`, which runs the model's own forward."""
        self._say("replicas of nn.DataParallel run the model's own forward, unoptimized")
        replica = type(self.model)._replicate_for_data_parallel(self.model)
        detached: nn.Module = detach(replica)
        return detached

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"{type(self.model).__name__}: {text}", GraphoptWarning, 4)

    # ---- looks like the model's own forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(eager_forward(self.model))

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __wrapped__(self) -> Any:
        return eager_forward(self.model)

    @property
    def __self__(self) -> nn.Module:
        return self.model

    def __repr__(self) -> str:
        return f"<optimized forward of {type(self.model).__name__}>"

    # ---- copies: each on its own model, captured anew

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimized": None, "_said": set()}

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedForward:
        new = object.__new__(AttachedForward)
        memo[id(self)] = new
        new.__dict__.update(self.__getstate__())
        new.model = copy.deepcopy(self.model, memo)
        new.previous = copy.deepcopy(self.previous, memo)
        return new


def _is_cache(value: Any) -> bool:
    """Whether an argument is a key-value cache, which forward changes in place."""
    return any(c.__name__.endswith("Cache") for c in type(value).__mro__)
