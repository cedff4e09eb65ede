"""One forward of a module as a pure graph, through non-strict `torch.export`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture import signature as sig
from graphopt.capture.aliases import Returned
from graphopt.capture.arguments import refuse_layouts, refuse_unfit
from graphopt.capture.assigned import Attributes, assigned, forward_of, set_back, written_at
from graphopt.capture.before import Before
from graphopt.capture.certain import Certain
from graphopt.capture.failure import convert
from graphopt.capture.functionalize import functionalize
from graphopt.capture.impure import Impure, switching
from graphopt.capture.key import same_objects, switches
from graphopt.capture.normalize import Flat, normalize
from graphopt.capture.places import Places
from graphopt.capture.reads import Reads
from graphopt.capture.shadow import shadow_of
from graphopt.capture.symbols import ShapeGuards
from graphopt.capture.watch import (
    Draws,
    drawing,
    refuse_hooks,
    watching,
)
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.graph.body import Body

logger = logging.getLogger("graphopt.capture")

LOCK = threading.RLock()
"""Held during a capture: `torch.export` works on process-wide state and cannot run in parallel."""


_QUIET = ("fx", "export", "_export", "_subclasses", "_dynamo")
"""Torch loggers that would repeat, at length, what a `CaptureError` says."""


@dataclasses.dataclass
class Capture:
    """One captured forward and how to call it.

    Attributes:
        body: the pure graph.
        inputs: structure of `(args, kwargs)`.
        outputs: structure of the result, whose leaves are the body's user outputs.
        names: a name per input leaf, as a user would write it.
        returned: position of a user output -> what it is, where eager returns the very input or
            state tensor that it wrote to, or a view of it.
        guards: what must hold of the sizes at a call; None when all sizes are fixed.
        places: the Python state that the forward read.
        export_seconds: time inside `torch.export`.
        seconds: time of the whole capture.
    """

    body: Body
    inputs: sig.Structure
    outputs: sig.Structure
    names: list[str]
    returned: dict[int, Returned]
    guards: ShapeGuards | None
    places: Places
    export_seconds: float
    seconds: float


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: dict[int, set[int]] | None = None,
) -> Capture:
    """Capture one forward of a module in its present mode and the ambient grad mode.

    Nothing is computed and nothing outside changes: the trace runs on fake tensors over a shadow of
    the module.

    Args:
        module: the source.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        dynamic: input leaf -> dimensions whose sizes shall be symbolic.

    Returns:
        The captured forward.

    Raises:
        CaptureError: names what cannot be captured, with the user's line and a cure.
        TypeError: when the arguments do not fit forward's signature.

    Example:
        >>> c = capture(nn.Linear(4, 2), (torch.ones(3, 4),))
        >>> [n.target for n in c.body.graph.nodes if n.op == "get_attr"]
        ['weight', 'bias']
    """
    kwargs = kwargs or {}
    started = time.perf_counter()
    signature = sig.signature_of(module)
    refuse_unfit(module, signature, args, kwargs)
    leaves: list[torch.Tensor] = []
    inputs = sig.flatten_arguments(args, kwargs, leaves)
    names = sig.leaf_names(inputs, signature)
    refuse_layouts(module, names, leaves)
    refuse_hooks(module)
    with LOCK:
        exported = _export(module, inputs, leaves, dynamic or {})
        grad = torch.is_grad_enabled()
        tracked = [leaf.requires_grad for leaf in leaves]
        flat = normalize(exported.program, module, names, tracked, grad, exported.tensors)
        exported.refuse_recorded(flat)
        pure = functionalize(flat)
    _drop_dead(pure.graph)
    user_outputs = len(pure.graph.output_node().args[0]) - len(pure.mutations)  # type: ignore[arg-type]
    body = Body(
        graph=pure.graph,
        root=module,
        user_outputs=user_outputs,
        mutations=pure.mutations,
        constants=flat.constants,
        training=module.training,
        grad=grad,
        device=_device(module, leaves),
        result=functools.partial(sig.unflatten, exported.outputs),
    )
    guards = ShapeGuards.of(pure.graph) if dynamic else None
    total = time.perf_counter() - started
    seconds = exported.seconds
    logger.info("%s: %.2f s export, %.2f s in all", type(module).__name__, seconds, total)
    outputs, places = exported.outputs, exported.places
    return Capture(body, inputs, outputs, names, pure.returned, guards, places, seconds, total)


def _export(
    module: nn.Module,
    inputs: sig.Structure,
    leaves: list[torch.Tensor],
    dynamic: dict[int, set[int]],
) -> _Exported:
    """Run `torch.export` on a shadow; twice where the forward decided a setting for good.

    Raises:
        CaptureError: where it would decide otherwise at the next call.
    """
    first = _export_once(module, inputs, leaves, dynamic)
    if not first.switched:
        return first
    # config.problem_type is None: the first forward decides. Later ones must do the same
    try:
        again = _export_once(module, inputs, leaves, dynamic)
    except CaptureError:
        set_back(first.switched)
        raise
    codes = [e.program.graph_module.code for e in (first, again)]
    if again.switched or codes[0] != codes[1]:
        set_back(again.switched)
        set_back(first.switched)
        owner, name, _, new = first.switched[0]
        label = f"{type(owner).__name__}.{name}"
        raise assigned(label, new, written_at(name, [type(m) for m in module.modules()]))
    return again


def _export_once(
    module: nn.Module,
    inputs: sig.Structure,
    leaves: list[torch.Tensor],
    dynamic: dict[int, set[int]],
) -> _Exported:
    found: list[sig.Structure] = []
    recorded: list[bool] = []
    tensors: dict[int, torch.Tensor] = {}
    same = same_objects(leaves)

    def forward(original: Any, flat: tuple[Any, ...]) -> list[Any]:
        flat = tuple(flat[i] for i in same) if same else flat
        args, kwargs = sig.unflatten(inputs, flat)
        results: list[Any] = []
        attributes, modes = Attributes(shadow, sources), switches()
        tracked = [t.requires_grad for t in flat]
        before = None
        try:
            with reads.recording():
                before = Before(dict(shadow.named_modules()), reads, original)
                tensors.update(before.tensors)
                state = (*shadow.parameters(), *shadow.buffers())
                with Certain(), impure.watching(flat, state):
                    result = original(*args, **kwargs)
            found[:] = [sig.flatten(result, results, results=True)]
            attributes.write_buffers(results)
            recorded[:] = [isinstance(t, torch.Tensor) and t.requires_grad for t in results]
            _refuse_changed(inputs, (args, kwargs), flat)
            _refuse_switched(modes, flat, tracked)
            attributes.refuse_changed()
            reads.refuse_draws()
        except Exception as error:
            raise _ForwardError(error) from error
        finally:
            changed = reads.changed()
            outside = before.changed() if before is not None else None
        if changed is None and before is not None and outside is not None:
            label, value, name = outside
            kinds = [type(m) for m in module.modules()]
            at = written_at(name, kinds, before.functions)
            changed = assigned(label, value, at, outside=True)
        if changed is not None:
            raise _ForwardError(changed)
        return results

    shadow, sources = shadow_of(module, forward)
    reads, impure = Reads(sources), Impure()
    with _isolated():
        examples = tuple(_example(leaf) for leaf in leaves)
        shapes = _dynamic_shapes(leaves, dynamic)
        started = time.perf_counter()
        try:
            program = _traced(shadow, examples, shapes)
        except Exception as error:
            logger.debug("torch.export failed", exc_info=True)
            set_back(reads.switched())
            cause = error.cause if isinstance(error, _ForwardError) else error
            raise _placed(convert(cause, type(module).__name__), module) from None
        seconds = time.perf_counter() - started
    if impure.printed:
        warnings.warn(
            f"forward prints ({impure.printed}): a graph does not, only this capture did",
            GraphoptWarning,
            2,
        )
    places = Places(module, reads, impure.environ)
    changed_flags = reads.switched()
    return _Exported(
        program, found[0], places, seconds, changed_flags, recorded, impure.switched, tensors
    )


def _placed(error: BaseException, module: nn.Module) -> BaseException:
    """A refusal that knows no line has that of the model's forward."""
    if isinstance(error, CaptureError) and error.at is None:
        at = forward_of([type(m) for m in module.modules()])
        return CaptureError(error.what, at=at, why=error.why, try_=error.try_)
    return error


def _traced(shadow: nn.Module, examples: tuple[Any, ...], shapes: Any) -> Any:
    """The exported program of a forward that draws no random numbers outside torch.

    Raises:
        CaptureError: when it draws from Python's or numpy's global generator.
    """
    first = draws = Draws(profiled=False)
    for trial in range(3):  # where a generator moved, look again: another thread may have drawn
        draws = draws if trial == 0 else Draws(profiled=True)
        with watching(), draws.watching():
            program = torch.export.export(shadow, examples, dynamic_shapes=shapes, strict=False)
        drawn = draws.seen()
        if drawn is None:
            return program
        if trial == 2 or (trial and "numpy" not in drawn):
            first.restore()
            raise drawing(drawn, draws.place)
    raise AssertionError("unreachable")


def _refuse_changed(inputs: sig.Structure, given: Any, flat: tuple[Any, ...]) -> None:
    """Refuse a forward that changed a container among its arguments (appended to a list, ...)."""
    leaves: list[Any] = []
    same = sig.flatten(given, leaves) == inputs and len(leaves) == len(flat)
    if not same or any(a is not b for a, b in zip(leaves, flat, strict=True)):
        raise CaptureError(
            "forward changes a container among its arguments (a list, a dict, a cache)",
            why="the caller's own object would not see the change",
            try_="return the new values instead; or on_error='fallback'",
        )


def _refuse_switched(modes: Any, flat: tuple[Any, ...], tracked: list[bool]) -> None:
    """Refuse a forward that leaves a mode switched (also set back), or an input's requires_grad."""
    what = None
    if switches() != modes:
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[2])
        what = "forward leaves the grad mode, the default dtype or autocast switched"
    elif any(t.is_leaf and t.requires_grad and not b for t, b in zip(flat, tracked, strict=True)):
        what = "forward switches requires_grad of an input"
    if what:
        raise CaptureError(
            what,
            why="a graph would not do that: the caller would not see it after later calls",
            try_="a context manager (with torch.no_grad(): ...); or on_error='fallback'",
        )


@dataclasses.dataclass
class _Exported:
    """What one `torch.export` of a shadow gave.

    Attributes:
        program: the exported program.
        outputs: structure of the result.
        places: what the forward read.
        seconds: how long it took.
        switched: settings that the forward decided.
        recorded: per result, whether it requires grad in the trace.
        recording_at: the line that made an intermediate value require grad, if there is one.
        tensors: id -> tensor that the forward could reach outside its modules.
    """

    program: Any
    outputs: sig.Structure
    places: Places
    seconds: float
    switched: list[tuple[Any, str, Any, Any]]
    recorded: list[bool]
    recording_at: str | None
    tensors: dict[int, torch.Tensor]

    def refuse_recorded(self, flat: Flat) -> None:
        """Refuse a graph in which a result would not require grad as it does in the trace.

        Raises:
            CaptureError: names the line that made an intermediate value require grad.
        """
        if self.recording_at is None:
            return
        results: Any = flat.graph.output_node().args[0]
        for node, recorded in zip(results, self.recorded, strict=True):
            if recorded and node not in flat.grads:
                raise switching(self.recording_at)


class _ForwardError(Exception):
    """Carries a failure of the model's forward out of `torch.export`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause

    def __setattr__(self, name: str, value: Any) -> None:
        # torch.export prints the whole partial graph of an exception that takes this attribute
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


def _example(leaf: torch.Tensor) -> torch.Tensor:
    """An alias with an identity of its own: two arguments that are one object stay two inputs."""
    with torch.no_grad():
        alias = leaf.detach()
        if alias.is_inference():
            alias = torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )
    return alias.requires_grad_() if leaf.requires_grad else alias


def _dynamic_shapes(leaves: list[torch.Tensor], dynamic: dict[int, set[int]]) -> Any:
    if not dynamic:
        return None
    auto = torch.export.Dim.AUTO
    per_leaf = tuple(
        dict.fromkeys(sorted(dynamic[i]), auto) if i in dynamic else None
        for i in range(len(leaves))
    )
    return (per_leaf,)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Export out of inference mode, its own logs quiet, autocast's cache kept.

    Generators need no care: random operations on fake tensors draw nothing, and setting one back
    would undo what another thread drew meanwhile.

    An ambient autocast stays on, so that dtypes the model reads off its tensors are those of a
    run under it; the recorded operations hold no casts (`MaterializeAutocast` writes them).
    """
    cached = torch.is_autocast_cache_enabled()
    loggers = [logging.getLogger(f"torch.{n}") for n in _QUIET]
    levels = [log.level for log in loggers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", message="The tensor attribute")  # refused by name
        grad = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
        # the caller's hooks on saved tensors (torch.utils.checkpoint's) are not for fake tensors
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        torch.set_autocast_cache_enabled(False)  # it would keep casts of fake tensors
        for log in loggers:
            log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for log, level in zip(loggers, levels, strict=True):
                log.setLevel(level)
            torch.set_autocast_cache_enabled(cached)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _device(module: nn.Module, leaves: list[torch.Tensor]) -> torch.device:
    """Where the body computes: the first accelerator found among inputs and state, else the CPU."""
    devices = [t.device for t in (*leaves, *module.parameters(), *module.buffers())]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _drop_dead(graph: fx.Graph) -> None:
    """Remove operations without users (random ones included: no result depends on them)."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
