"""The emitted module: a GraphModule over the source's own state that runs captured graphs."""

from __future__ import annotations

import copy
import html
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture import signature as sig
from graphopt.capture.entry import Compiled, Entry
from graphopt.capture.key import GraphKey, ambient, leaf_facts, same_objects, transformed
from graphopt.capture.shadow import SOURCE_OF
from graphopt.capture.store import GraphStore, Recapture, Settings
from graphopt.errors import CaptureError, GraphOptError, OptionError
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.precision import Lowering, PrecisionPlan, lowered, lowering, plan_of

__all__ = ["Compiled", "GraphoptModule", "Recapture", "Settings"]

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Dicts that the optimized module and its source hold in common: state and hooks stay one."""

_OWN = frozenset(
    {
        SOURCE_OF,
        "_store",
        "_settings",
        "_compile_body",
        "_compiled_call_impl",
        "forward",  # a wrapper's (torch.cuda.make_graphed_callables, accelerate), around our own
        "training",
    }
)

_SHOWN = frozenset({
    "graph", "code", "rewrites", "refusals", "recaptures",
    "precision_plan", "memory_plan", "entry", "body",
})  # fmt: skip
"""What an optimized module shows and nobody sets."""

_CONTAINER = ("__len__", "__getitem__", "__setitem__", "__iter__", "__contains__", "__reversed__")
"""Special methods of a source that holds items (`nn.Sequential`)."""


class GraphoptModule(fx.GraphModule):
    """A module that runs captured, optimized graphs of its source.

    It shares parameters, buffers, submodules and root hooks with the source, so that state paths,
    `state_dict` keys and parameter identity are the source's. Unknown attributes are the source's.
    Graphs are captured at the first call of each kind and kept.

    Example:
        >>> opt = GraphoptModule(nn.Linear(4, 2))
        >>> type(opt).__name__, opt(torch.ones(1, 4)).shape
        ('OptimizedLinear', torch.Size([1, 2]))
    """

    def __new__(cls, source: nn.Module, *args: Any, **kwargs: Any) -> GraphoptModule:
        """An instance of a class of its own, which shows the source's name and signature."""
        forward = _forward_like(source)
        names: dict[str, Any] = {
            "forward": forward,
            "__module__": cls.__module__,
            "__doc__": source.__doc__,
        }
        names |= {n: _delegate(n) for n in _CONTAINER if hasattr(type(source), n)}
        kind = type(f"Optimized{type(source).__name__}", (cls,), names)
        return object.__new__(kind)

    def __init__(
        self,
        source: nn.Module,
        settings: Settings | None = None,
        compile_body: Callable[[Body], Compiled] = Compiled,
    ) -> None:
        """Wrap a source; nothing is captured yet.

        Args:
            source: the module to optimize; it stays usable, on the same state.
            settings: how to capture.
            compile_body: turns a captured body into the one to run; it must not change the body
                that it is given, and must pickle when the module shall.
        """
        _prepare_dynamo()
        self.__dict__[SOURCE_OF] = source
        nn.Module.__init__(self)
        self.__dict__.update({name: source.__dict__[name] for name in _SHARED})
        self.__dict__["meta"] = {}
        del self.__dict__["_is_full_backward_hook"]  # the source's, as its hooks are
        self._settings = settings or Settings()
        self._compile_body = compile_body
        self._store = GraphStore(source, self._settings, compile_body)

    # ---- calls

    _lineno_map: dict[int, int | None] = {}  # noqa: RUF012  (Dynamo reads it off a GraphModule)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        precision = self._settings.precision
        if precision is None:
            return self._called(args, kwargs)
        if precision != "auto":
            with lowered(self.source, precision):
                return self._called(args, kwargs)
        known = self._store.chosen
        state = None if known is None else known[0].state()
        if known is not None and state is not None:
            with known[1].context():
                return self._called(args, kwargs, (known[0], state))
        chosen = lowering(self.source, precision)
        with chosen.context():
            return self._called(args, kwargs, chosen=chosen)

    def _called(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        checked: tuple[Entry, list[torch.Tensor]] | None = None,
        chosen: Lowering | None = None,
    ) -> Any:
        """Run the graph of a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            checked: a graph whose state was checked just now, and that state.
            chosen: what "auto" means for the state as it is; kept beside the graph, whose guard
                compares the dtypes and sizes that decide it.
        """
        store = self._store
        if transformed():
            return store.unoptimized("torch.func or forward-mode differentiation").call(
                [], [], args, kwargs
            )
        leaves: list[torch.Tensor] = []
        try:
            structure = sig.flatten_arguments(args, kwargs, leaves)
            facts = leaf_facts(leaves)
        except CaptureError as error:
            return store.fallback(error).call([], leaves, args, kwargs)
        key = GraphKey(self.source.training, ambient(), structure, facts, same_objects(leaves))
        entry = store.exact.get(key)
        if checked is not None and entry is checked[0]:
            state: Any = checked[1]
        else:
            state = entry.state() if entry is not None else None
        while entry is None or state is None:  # again where another thread changes the state
            entry = store.find(key, args, kwargs)
            state = entry.state()
        if isinstance(entry, Entry):
            store.last = entry
            if chosen is not None:
                store.chosen = entry, chosen
        return entry.call(state, leaves, args, kwargs)

    def capture(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Entry | None:
        """Capture the graph for these arguments in the present mode, without running it.

        Args:
            args: positional arguments of forward.
            kwargs: keyword arguments.

        Returns:
            The graph in force for them; None where the source runs (`on_error="fallback"`).

        Raises:
            OptionError: where `args` is no tuple or list.
            CaptureError: when the model cannot be captured.
        """
        if not isinstance(args, (tuple, list)):
            raise OptionError(
                f"args is of type {type(args).__name__}", try_="a tuple: opt.capture((x,))"
            )
        args, kwargs = tuple(args), kwargs or {}
        leaves: list[torch.Tensor] = []
        with lowered(self.source, self._settings.precision):
            structure = sig.flatten_arguments(args, kwargs, leaves)
            key = GraphKey(
                self.source.training, ambient(), structure, leaf_facts(leaves), same_objects(leaves)
            )
            entry = self._store.find(key, args, kwargs)
        if not isinstance(entry, Entry):
            return None
        self._store.last = entry
        return entry

    # ---- what is in force

    @property
    def source(self) -> nn.Module:
        """The module that this one was made from."""
        source: nn.Module = self.__dict__[SOURCE_OF]
        return source

    @property
    def entry(self) -> Entry:
        """The graph in force: the latest one of the present training mode.

        Raises:
            GraphOptError: when nothing was captured yet.
        """
        last, training = self._store.last, self.source.training
        if last is not None and last.compiled.body.training == training:
            return last
        for entry in reversed(self._store.entries()):
            if entry.compiled.body.training == training:
                return entry
        if last is not None:
            return last
        failed = self._store.failed
        if failed is not None:
            raise GraphOptError(
                f"no graph: {type(self.source).__name__} runs unoptimized, for {failed.what}",
                at=failed.at,
                why=f"on_error='fallback', and the capture failed: {failed.why or failed.what}",
                try_=failed.try_,
            )
        raise GraphOptError(
            "no graph yet",
            why="a graph is captured at the first call",
            try_="call the module once, or pass example_inputs to optimize()",
        )

    @property
    def body(self) -> Body:
        """The body in force, after the passes."""
        return self.entry.compiled.body

    @property  # type: ignore[misc]  # `__setattr__` refuses a new one
    def graph(self) -> fx.Graph:
        """The graph in force, after the passes."""
        asking = _asking()
        if any(name.startswith(("torch.export", "torch._jit", "torch.jit")) for name in asking):
            raise GraphOptError(
                "an optimized module cannot be exported, scripted or traced",
                why="its graph is not the whole of it: what it writes back and the form of its "
                "result stand outside",
                try_="its source: torch.export.export(opt.source, ...)",
            )
        if self._store.last is None and asking[0].startswith("torch._dynamo"):
            return fx.Graph()  # it looks at the graph of every GraphModule that it meets
        return self.body.graph

    @property
    def code(self) -> str:
        """The graph in force as Python source."""
        from graphopt.graph.text import python_code

        return python_code(self.body)

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Print and return the graph in force as Python source."""
        text = self.code
        if print_output:
            print(text)
        return text

    @property
    def rewrites(self) -> list[Any]:
        """What the passes did to the graph in force."""
        return list(getattr(self.entry.compiled.result, "rewrites", ()))

    @property
    def refusals(self) -> list[Any]:
        """What the passes did not do to the graph in force, and why."""
        return list(getattr(self.entry.compiled.result, "refusals", ()))

    @property
    def precision_plan(self) -> PrecisionPlan:
        """In which precision the ops of the graph in force run, and what the casts move."""
        result = self.entry.compiled.result
        return plan_of(self.entry.capture.body if result is None else result.captured, self.body)

    @property
    def memory_plan(self) -> Any:
        """What the graph in force recomputes to keep its memory budget; None without a budget.

        A `graphopt.memory.plan.MemoryPlan`: `.predicted_peak_bytes`, `.recompute`, `.extra_ms`,
        `.curve`; its repr is a table.
        """
        return self.entry.compiled.memory

    @property
    def recaptures(self) -> list[Recapture]:
        """Captures after the first, with their reasons."""
        return list(self._store.recaptures)

    def recompile(self) -> Any:
        """Nothing to do: the code of each graph is made once, when it is captured."""
        return None

    # ---- one with the source

    @property
    def training(self) -> bool:
        """The source's training flag."""
        return self.source.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_store" in self.__dict__:  # not while nn.Module's own __init__ runs
            self.source.training = mode

    def train(self, mode: bool = True) -> GraphoptModule:
        """Set the source's mode, through its own `train`; the graph of that mode is in force."""
        self.source.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GraphoptModule:
        self.source._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The source's `state_dict`."""
        return self.source.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The source's `load_state_dict`."""
        return self.source.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get(SOURCE_OF)
        if source is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "_store" not in self.__dict__:
            object.__setattr__(self, name, value)
        elif name in _SHOWN and not hasattr(self.source, name):
            raise GraphOptError(
                f"{name} of an optimized module cannot be set",
                why="one module holds a graph per mode and kind of input",
                try_="rules= of optimize(), or work on copy_graph(opt.graph)",
            )
        else:
            setattr(self.source, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "forward":
            object.__delattr__(self, name)
        else:
            delattr(self.source, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.source)})

    def __repr__(self) -> str:
        return f"Optimized{self.source!r}\ngraphopt: {self._summary()}"

    __str__ = __repr__

    def _summary(self) -> str:
        """One line: what graph is in force."""
        if self._store.last is None:
            failed = self._store.failed
            return "no graph yet" if failed is None else f"runs unoptimized, for {failed.what}"
        entry = self.entry
        before, after = (ops.count(b.graph) for b in (entry.capture.body, entry.compiled.body))
        mode = "train" if entry.compiled.body.training else "eval"
        return (
            f"{mode} graph, {before} ops -> {after}, {len(self.rewrites)} rewrites; .code shows it"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the summary, and code and modules to unfold; everything is escaped."""
        shown = [("modules", repr(self.source))]
        if self._store.last is not None:
            shown.insert(0, ("code", self.code))
        folded = "".join(
            f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"
            for title, text in shown
        )
        name = html.escape(type(self).__name__)
        return f"<p><b>{name}</b>: {html.escape(self._summary())}</p>{folded}"

    # ---- copies

    def __reduce__(self) -> tuple[Any, ...]:
        given = (GraphoptModule, self.source, self._settings, self._compile_body)
        return _rebuild, given, self._wrapped()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _wrapped(self) -> dict[str, Any]:
        """What a wrapper has set on this module and not on its source."""
        return {"forward": self.__dict__["forward"]} if "forward" in self.__dict__ else {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> GraphoptModule:
        new = _rebuild(*self.__reduce__()[1])
        new.__setstate__(self._wrapped())
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphoptModule:
        source = copy.deepcopy(self.source, memo)
        new = _rebuild(GraphoptModule, source, self._settings, self._compile_body)
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self._wrapped(), memo))
        return new


def graphopt_of(module: Any) -> GraphoptModule | None:
    """The optimized module behind what `optimize` or `attach` gave, None for anything else."""
    attached = getattr(module, "__dict__", {}).get("forward")
    found = getattr(attached, "optimized", module)
    return found if isinstance(found, GraphoptModule) else None


def _delegate(name: str) -> Callable[..., Any]:
    """A special method that is the source's (Python looks for it on the class alone)."""

    def method(self: GraphoptModule, *args: Any) -> Any:
        return getattr(type(self.source), name)(self.source, *args)

    method.__name__ = name
    return method


def _run(module: GraphoptModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call(args, kwargs)


_outside_dynamo = _run
"""`_run`, where `torch.compile` breaks its graph: an optimized module has a graph of its own."""


def _prepare_dynamo() -> None:
    """Make the graph break; not at import, since it imports all of Dynamo (as capture does)."""
    global _outside_dynamo
    if _outside_dynamo is _run:
        _outside_dynamo = torch.compiler.disable(
            _run, reason="graphopt: an optimized module runs a graph of its own"
        )


def _asking() -> list[str]:
    """Whose code reads the property that calls this: names of modules, the innermost first."""
    names: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(names) < 6:
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _rebuild(
    kind: type[GraphoptModule],
    source: nn.Module,
    settings: Settings,
    compile_body: Callable[[Body], Compiled],
) -> GraphoptModule:
    return kind(source, settings, compile_body)


def _forward_like(source: nn.Module) -> Callable[..., Any]:
    """A forward for the optimized class, with the source's signature and docstring."""

    def forward(self: GraphoptModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _outside_dynamo(self, args, kwargs)
        return self._call(args, kwargs)

    signature = sig.signature_of(source)
    if signature is not None:
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if any(p.kind is p.POSITIONAL_ONLY for p in signature.parameters.values()):
            me = me.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
        if "self" in signature.parameters:  # a forward(self, self_) cannot name both
            me = me.replace(name="_self", kind=inspect.Parameter.POSITIONAL_ONLY)
        parameters = [me, *signature.parameters.values()]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    forward.__doc__ = source.forward.__doc__
    return forward
