"""The one ``torch.library.Library`` of graphopt and the helper that defines an operator in it.

How a family file is laid out (see norm.py):

- ``kernels/<family>.py`` holds reference, fake, autograd, cost and ``register(...)``; it imports no
  Triton. ``kernels/_<family>_triton.py`` holds the ``@triton.jit`` functions and the launch
  functions with their heuristics; it imports Triton at its top, and the family file imports it
  inside the launch wrapper, so that ``import graphopt.kernels`` works without Triton and a GPU.
- Triton helpers used by two families stand in ``_tl.py`` (random bits) and ``_tl_activations.py``;
  their plain-torch twins in ``_philox.py`` and ``_activations.py``.
- ``define`` registers: CUDA -> launch; every other device -> reference (or launch, in Triton's
  interpreter: ``_launch.use_triton``); Meta -> fake; Autograd -> one ``autograd.Function`` that is
  entered only if a gradient is needed.
- A backward that launches kernels is an operator of its own, defined without ``gradient``, so that
  tracing (AOTAutograd, export) sees one opaque call. Call it through ``invoke``: it skips the
  dispatcher when no mode and no tensor subclass could want to see the call.

Host cost of a call, H200 host, 2026-12-01: 25 us this way, 53 us through ``custom_op`` and
``register_autograd``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from graphopt.kernels import _launch
from graphopt.kernels._batched import for_each_sample, is_batched
from graphopt.kernels._once import once, without_gradient

LIBRARY = torch.library.Library("graphopt", "DEF")

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Gradient:
    """How an operator is differentiated.

    Args:
        forward: ``forward(*args)``, every argument positional in schema order; returns (outputs,
            tensors to save, anything else to keep). Runs below autograd.
        backward: ``backward(saved, kept, needs, grads)``; ``needs`` says for each argument whether
            its gradient is wanted, ``grads`` holds one tensor or None an output. Returns one
            gradient or None an argument.
        second_from: positions of the arguments that the second output depends on, where that is
            not all: it requires a gradient only where one of them does, as in eager.
    """

    forward: Callable[..., tuple[Any, tuple[torch.Tensor | None, ...], Any]]
    backward: Callable[[Args, Any, tuple[bool, ...], Args], Args]
    second_from: tuple[int, ...] = ()


def define(
    schema: str,
    *,
    launch: Callable[..., Any] | None,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Gradient | None = None,
    own_autograd: bool = False,
    tags: tuple[torch.Tag, ...] = (),
) -> torch._ops.OpOverload:
    """Define ``torch.ops.graphopt.<name>`` and all its implementations.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", without the namespace.
        launch: the Triton path; None if the operator has none. Takes the schema's Python signature
            (keyword-only arguments by keyword), as ``reference`` and ``fake`` do; their defaults
            must be the schema's, since the dispatcher leaves defaults out.
        reference: plain torch, any device and dtype.
        fake: shapes and dtypes only; outputs are contiguous, as the kernels write them.
        gradient: how to differentiate; without one, results refuse to be differentiated.
        own_autograd: whether the caller registers what runs at the level of autograd
            (`differentiable`).
        tags: torch tags, such as ``nondeterministic_seeded``.

    Returns:
        The operator's default overload.

    Example:
        >>> define("double(Tensor x) -> Tensor", launch=None, reference=lambda x: x * 2,
        ...        fake=torch.empty_like)  # doctest: +SKIP
        <OpOverload(op='graphopt.double', overload='default')>
    """
    name = schema.split("(", 1)[0].strip()
    LIBRARY.define(schema, tags=tags)
    overload: torch._ops.OpOverload = getattr(torch.ops.graphopt, name).default
    run = reference if launch is None else _choose(name, launch, reference)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{name}", fake, lib=LIBRARY)
    _DIRECT[overload] = run
    if gradient is not None:
        function, unguarded = _make_functions(name, gradient)
        # `direct` has looked for functorch
        short = Short(_bare_apply(unguarded), _by_position(_DIRECT[overload], overload))
        differentiable(overload, _autograd(overload, function), short)
    elif not own_autograd:
        LIBRARY.impl(name, without_gradient(overload), "Autograd")
    if launch is not None:
        _LAUNCHING.add(overload)
    return overload


_DIRECT: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_LAUNCHING: set[torch._ops.OpOverload] = set()
_ABOVE: dict[torch._ops.OpOverload, Short] = {}


class Short(NamedTuple):
    """What `direct` runs of an operator, by whether a tensor among its operands wants a gradient.

    Both take every argument by position.

    Args:
        recorded: where one does, and gradients are recorded.
        plain: where none does.
    """

    recorded: Callable[..., Any]
    plain: Callable[..., Any]


def differentiable(
    overload: torch._ops.OpOverload, above: Callable[..., Any], short: Short | None = None
) -> None:
    """Register what an operator runs at the level of autograd.

    Args:
        overload: the operator.
        above: takes the schema's Python signature.
        short: the same for `direct`, where nobody is watching; None where ``above`` takes every
            argument by position.
    """
    LIBRARY.impl(overload._schema.name.removeprefix("graphopt::"), above, "Autograd")
    _ABOVE[overload] = short or Short(above, above)


def invoke(overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an internal operator, past the dispatcher when nothing could be watching.

    Watching are dispatch modes (fake tensors, tracing), tensor subclasses and functionalization.
    Saves about 10 us of host time a call. Autograd must have been dealt with by the caller.
    """
    if _dispatch_modes() or _is_functionalizing(_FUNCTIONALIZE):
        return overload(*args, **kwargs)
    values = (*args, *kwargs.values()) if kwargs else args
    # in C: a loop would take twice as long
    if not _ORDINARY.issuperset(map(type, values)) and any(map(_foreign, values)):
        return overload(*args, **kwargs)
    return _DIRECT[overload](*args, **kwargs)


def _foreign(value: Any) -> bool:
    """Whether a value is a tensor of a subclass, or a list that may hold one."""
    if isinstance(value, (list, tuple)):
        return not _ORDINARY.issuperset(map(type, value))
    return type(value) not in _ORDINARY and isinstance(value, torch.Tensor)


def watched() -> bool:
    """Whether anything but plain autograd could want to see calls of operators.

    Modes (fake tensors, tracing, `torch.device` as a context), functorch, forward-mode
    differentiation, `torch.jit.trace` and torch's profiler, which shows operators by name.
    """
    return bool(
        _dispatch_modes()
        or _function_modes()
        or _is_functionalizing(_FUNCTIONALIZE)
        or _transforms()
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _profiling()
    )


def direct(overload: Any) -> Callable[..., Any] | None:
    """A call of an operator that skips the dispatcher where nothing is watching.

    The dispatcher and the Python around it cost the host about as much as a launch. What is
    returned takes every argument of the schema by position (see `positional`) and is the operator
    itself whenever `watched`, or when a tensor is of a subclass.

    Args:
        overload: an operator of graphopt's; None is returned for any other callable.

    Example:
        >>> direct(torch.ops.aten.add.Tensor) is None
        True
    """
    above = _ABOVE.get(overload)
    if above is None:
        return None
    recorded, plain = above
    tensors, lists = _places(overload)
    whole = _by_position(overload)

    def call(*values: Any) -> Any:
        if watched():
            return whole(*values)
        run, recording = plain, _grad_mode()
        for i in tensors:
            value = values[i]
            if value is not None:
                if type(value) not in _PLAIN:
                    return whole(*values)
                if recording and value.requires_grad:
                    run, recording = recorded, False
        for i in lists:
            for value in values[i] or ():
                if type(value) not in _PLAIN:
                    return whole(*values)
                if recording and value.requires_grad:
                    run, recording = recorded, False
        return run(*values)

    call.__name__ = call.__qualname__ = overload.__name__
    return call


def positional(overload: Any, args: Args, kwargs: Any) -> Args:
    """All arguments of a call as the dispatcher hands them on: in order, with defaults, floats.

    Example:
        >>> positional(torch.ops.graphopt.rms_norm.default, (1, 2, 3), {"site": 4})
        (1, 2, 3.0, 0.0, None, 0.0, None, 4, 'none', None)
    """
    arguments = _arguments(overload)
    behind = arguments[len(args) :]
    values = (*args, *(kwargs.get(a.name, a.default_value) for a in behind))
    kinds = (str(a.type) for a in arguments)
    return tuple(
        float(value) if kind == "float" and isinstance(value, int) else value
        for value, kind in zip(values, kinds, strict=True)
    )


def _places(overload: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which arguments are tensors, and which are lists of them."""
    kinds = [str(a.type).removeprefix("Optional[").removesuffix("]") for a in _arguments(overload)]
    one = tuple(i for i, kind in enumerate(kinds) if kind == "Tensor")
    return one, tuple(i for i, kind in enumerate(kinds) if kind.startswith("List[Tensor"))


def _arguments(overload: Any) -> Any:
    return overload._schema.arguments


def _by_position(function: Any, overload: Any = None) -> Callable[..., Any]:
    """A function of the schema's Python signature, as one that takes everything by position."""
    arguments = _arguments(overload or function)
    first = sum(not a.kwarg_only for a in arguments)
    names = [a.name for a in arguments[first:]]
    if not names:
        return function  # type: ignore[no-any-return]
    return lambda *values: function(
        *values[:first], **dict(zip(names, values[first:], strict=True))
    )


def implementation(overload: Any) -> Callable[..., Any] | None:
    """What an operator of graphopt runs below autograd; None for any other callable.

    A memory profile follows the operations inside it where it is plain torch.

    Example:
        >>> implementation(torch.ops.aten.add.Tensor) is None
        True
    """
    return _DIRECT.get(overload)


def launches(overload: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator of graphopt launches a kernel of its own for these arguments.

    Example:
        >>> launches(torch.ops.aten.add.Tensor, ())
        False
    """
    return overload in _LAUNCHING and _launch.use_triton(args[0])


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_ORDINARY = _PLAIN | {int, float, bool, str, type(None), torch.dtype}
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
_is_functionalizing = torch._C._dispatch_tls_is_dispatch_key_included
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_grad_mode = torch.is_grad_enabled


def _choose(
    name: str, launch: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _launch.use_triton(args[0]):
            return reference(*args, **kwargs)
        try:
            return launch(*args, **kwargs)
        except Exception as error:
            told = _launch.triton_failure(name, error)
            if told is None:
                raise
            raise told from error

    return run


def _bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`Function.apply` without its Python, which looks for functorch."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, in half its host time where functorch has no part in it.

    Example:
        >>> from graphopt.kernels._once import Once
        >>> applied(Once)("an op", 1, torch.ones(2))
        (tensor([1., 1.]),)
    """
    bare = _bare_apply(function)

    def call(*values: Any) -> Any:
        if _transforms():
            return function.apply(*values)
        return bare(*values)

    return call


def _autograd(
    overload: torch._ops.OpOverload, function: type[torch.autograd.Function]
) -> Callable[..., Any]:
    arguments = overload._schema.arguments
    defaults = [a.default_value for a in arguments]
    place = {a.name: i for i, a in enumerate(arguments)}

    def run(*args: Any, **kwargs: Any) -> Any:
        if differentiated(*args, *kwargs.values()):
            values = [*args, *defaults[len(args) :]]
            for key, value in kwargs.items():
                values[place[key]] = value
            return function.apply(*values)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return run


def differentiated(*values: Any) -> bool:
    """Whether a call with these operands has to go through its `autograd.Function`."""
    if torch.is_grad_enabled():
        for value in values:  # a loop: a generator costs more than the tests
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return True
    # In forward mode as well: the Function refuses dual tensors, whose tangents would be lost.
    return forward_ad._current_level >= 0


def _make_functions(
    name: str, gradient: Gradient
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """The Function of an operator, and the same for where nobody is watching.

    Forward and backward run without recording. Below autograd, too, where operators may go through
    the dispatcher: they would be asked for their gradient again. To say so costs the host about a
    microsecond.
    """
    sources = gradient.second_from

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs, saved, kept = gradient.forward(*args)
            ctx.save_for_backward(*saved)
            ctx.kept = kept
            ctx.set_materialize_grads(False)
            if sources:
                needs = ctx.needs_input_grad
                for i in sources:
                    if needs[i]:
                        return outputs
                ctx.mark_non_differentiable(outputs[1])
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            needs = ctx.needs_input_grad
            there = False
            for grad in grads:
                if grad is not None:
                    if is_batched(grad):
                        return for_each_sample(Fused.backward, ctx, grads)
                    there = True
            if not there:
                return (None,) * len(needs)
            # Outside the guard: torch.utils.checkpoint runs the forward again to give them.
            saved = ctx.saved_tensors
            if not _grad_mode():
                if not _dispatch_modes():
                    return gradient.backward(saved, ctx.kept, needs, grads)
                with torch._C._AutoDispatchBelowAutograd():
                    return gradient.backward(saved, ctx.kept, needs, grads)
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                results = gradient.backward(saved, ctx.kept, needs, grads)
            return once(name, results, (*saved, *grads))

    class GuardedFused(Fused):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return Fused.forward(ctx, *args)

    for function in (GuardedFused, Fused):
        function.__name__ = function.__qualname__ = f"graphopt_{name}"
    return GuardedFused, Fused
