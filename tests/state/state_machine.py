"""A model and its optimized twin under everything that a training script may do to a model.

Every rule does the same to both and compares at once: results, gradients, buffers, parameters.
Gradients and buffers are then made equal to the last bit, so that rounding does not add up over a
run and the parameters must stay equal to the last bit, whatever the optimizer does with them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition
from hypothesis.stateful import rule as hypothesis_rule
from state_models import Inputs, Subject
from torch import nn

import graphopt
from graphopt.capture.signature import flatten

SHAPES = st.integers(0, 2)
SEEDS = st.integers(0, 9)
FAR = {torch.float64: 1e-8, torch.float32: 2e-4, torch.bfloat16: 0.08}
"""Relative L2 distance at which two runs in a dtype are not the same: a fault is far above it."""

FAR_IN_LOSS = 1e-6
"""The same in float64 for a loss in float32: some units in its last place."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.02, foreach=True),
    # a large eps keeps an update from turning round where a gradient is nothing but rounding
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, fused=True),
}


def rule(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule of the machine whose runs are counted."""

    def decorate(step: Callable[..., None]) -> Any:
        @functools.wraps(step)
        def counted(self: Twins, *given: Any, **drawn: Any) -> None:
            self.counts[step.__name__] += 1
            step(self, *given, **drawn)

        return hypothesis_rule(**strategies)(counted)

    return decorate


def double_result(module: nn.Module, args: Any, result: Any) -> Any:
    """A forward hook that changes what is returned."""
    if isinstance(result, torch.Tensor):
        return result * 2
    if isinstance(result, tuple):
        return (result[0] * 2, *result[1:])
    for key in ("logits",):
        result[key] = result[key] * 2
    return result


def halve_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook that changes the floating arguments."""
    change = lambda v: v * 0.5 if v.is_floating_point() else v  # noqa: E731
    return tuple(map(change, args)), {k: change(v) for k, v in kwargs.items()}


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a result in order."""
    found: list[Any] = []
    flatten(value, found, results=True)
    return [t for t in found if isinstance(t, torch.Tensor)]


def loss_of(value: Any, power: int = 1) -> torch.Tensor:
    """A scalar in which every element has a weight of its own, small enough to train on."""
    total = torch.zeros((), dtype=torch.float64)
    for t in tensors(value):
        if t.requires_grad:
            weights = torch.arange(1, t.numel() + 1, dtype=torch.float64).cos().view(t.shape)
            total = total + (t.double().pow(power) * weights).sum() * (0.3 / t.numel() ** 0.5)
    return total


class Twins(RuleBasedStateMachine):
    """The machine; a subclass names the subject."""

    subject: Subject
    counts: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(dtype=st.sampled_from([torch.float32, torch.float64]), attached=st.booleans())
    def start(self, dtype: torch.dtype, attached: bool) -> None:
        """Both from the same weights, the twin optimized or attached; one step to begin with."""
        self.eager = self.subject.make().to(dtype)
        self.dtype = dtype
        self.autocast = False
        self.twin: Any = copy.deepcopy(self.eager)
        if attached:
            graphopt.attach(self.twin)
        else:
            self.twin = graphopt.optimize(self.twin)
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.new_optimizers("sgd")
        self.step(shape=0, seed=0, requires_grad=False)

    def teardown(self) -> None:
        """Leave no global mode behind."""
        if hasattr(self, "deterministic"):
            torch.use_deterministic_algorithms(self.deterministic)

    # ---- the pair

    @property
    def source(self) -> nn.Module:
        """The module below the twin."""
        found: nn.Module = getattr(self.twin, "source", self.twin)
        return found

    def both(self, do: Callable[[nn.Module], Any], through_source: bool = False) -> None:
        """The same to both."""
        do(self.eager)
        do(self.source if through_source else self.twin)

    def new_optimizers(self, kind: str, through_source: bool = False) -> None:
        """Optimizers from scratch."""
        self.kind = kind
        twin = self.source if through_source else self.twin
        self.optimizers = [OPTIMIZERS[kind](m.parameters()) for m in (self.eager, twin)]

    def batch(self, shape: int, seed: int, requires_grad: bool = False) -> list[Inputs]:
        """The same inputs twice."""
        found = []
        for _ in range(2):
            batch = self.subject.batch(shape, seed, self.dtype)
            for value in batch.values():
                value.requires_grad_(requires_grad and value.is_floating_point())
            found.append(batch)
        return found

    def forward(self, batches: list[Inputs]) -> list[Any]:
        """Both results, compared."""
        results = [self.eager(**batches[0]), self.twin(**batches[1])]
        self.same_results(*results)
        for name, value in batches[0].items():
            self.near(f"argument {name} after the call", value, batches[1][name])
        return results

    # ---- comparisons

    def near(self, name: str, a: Any, b: Any, scale: float = 0.0, slack: float = 1.0) -> None:
        """Two tensors within the rounding of the coarsest dtype in play."""
        assert (a is None) == (b is None), f"{name}: {a is None} {b is None}"
        if a is None:
            return
        facts = [(t.shape, t.dtype, t.requires_grad) for t in (a, b)]
        assert facts[0] == facts[1], f"{name}: {facts}"
        x, y = a.detach().double(), b.detach().double()
        far = slack * FAR[torch.bfloat16 if self.autocast else self.dtype]
        if self.subject.loss_in_float32:
            far = max(far, FAR_IN_LOSS)
        size = max(float(x.norm()), scale, 1e-12)
        apart = float((x - y).norm())
        assert apart <= far * size, f"{name}: {apart:.3g} apart of {size:.3g}"

    def same_results(self, a: Any, b: Any) -> None:
        """Structure, dtypes, strides, values."""
        assert type(a) is type(b), f"{type(a)} {type(b)}"
        x, y = tensors(a), tensors(b)
        assert len(x) == len(y)
        for i, (p, q) in enumerate(zip(x, y, strict=True)):
            self.near(f"result {i}", p, q, scale=float(p.detach().double().abs().max()))
            assert p.stride() == q.stride(), f"result {i}: {p.stride()} {q.stride()}"

    def same_gradients(self, name: str, a: list[Any], b: list[Any]) -> None:
        """Gradients, the small ones on the scale of the step."""
        assert len(a) == len(b)
        scale = max((float(g.double().norm()) for g in a if g is not None), default=0.0)
        # In bfloat16 a ReLU at its kink may turn, and with it one element of few.
        slack, share = (6.0, 0.3) if self.autocast else (1.0, 0.01)
        for i, (p, q) in enumerate(zip(a, b, strict=True)):
            self.near(f"{name} {i}", p, q, scale=share * scale, slack=slack)

    def gradients(self, module: nn.Module) -> list[torch.Tensor | None]:
        """What has gathered in `.grad`."""
        return [p.grad for p in module.parameters()]

    @invariant()
    def same_state(self) -> None:
        """Parameters to the last bit; gradients and buffers near, and then made equal."""
        if not hasattr(self, "eager"):
            return
        assert self.twin.training == self.eager.training
        assert list(self.twin.state_dict()) == list(self.eager.state_dict())
        mine, theirs = (dict(m.named_parameters()) for m in (self.eager, self.twin))
        assert mine.keys() == theirs.keys()
        for name, p in mine.items():
            q = theirs[name]
            assert (p.dtype, p.requires_grad) == (q.dtype, q.requires_grad), name
            assert torch.equal(p, q), f"{name} differs"
        self.same_gradients("gradient", self.gradients(self.eager), self.gradients(self.twin))
        buffers = dict(self.twin.named_buffers())
        for name, b in self.eager.named_buffers():
            self.near(f"buffer {name}", b, buffers[name], scale=float(b.double().abs().max()))
        with torch.no_grad():
            for name, p in mine.items():
                if p.grad is not None:
                    theirs[name].grad.copy_(p.grad)  # type: ignore[union-attr]
            for name, b in self.eager.named_buffers():
                buffers[name].copy_(b)

    # ---- calls

    @rule(shape=SHAPES, seed=SEEDS, requires_grad=st.booleans())
    def step(self, shape: int, seed: int, requires_grad: bool) -> None:
        """Forward and backward."""
        batches = self.batch(shape, seed, requires_grad)
        for result in self.forward(batches):
            loss_of(result).backward()
        ours, theirs = ([v.grad for v in b.values()] for b in batches)
        self.same_gradients("gradient of an argument", ours, theirs)

    @rule(shape=SHAPES, seed=SEEDS, inference=st.booleans())
    def without_gradients(self, shape: int, seed: int, inference: bool) -> None:
        """Under no_grad or in inference mode."""
        with torch.inference_mode() if inference else torch.no_grad():
            self.forward(self.batch(shape, seed))

    @rule(shapes=st.tuples(SHAPES, SHAPES), seed=SEEDS)
    def two_forwards(self, shapes: tuple[int, int], seed: int) -> None:
        """Two forwards, then one backward through both."""
        first = self.forward(self.batch(shapes[0], seed))
        second = self.forward(self.batch(shapes[1], seed + 1))
        for a, b in zip(first, second, strict=True):
            (loss_of(a) + 2 * loss_of(b)).backward()

    @rule(shape=SHAPES, seed=SEEDS)
    def retained(self, shape: int, seed: int) -> None:
        """Backward twice through one graph."""
        for result in self.forward(self.batch(shape, seed)):
            loss_of(result).backward(retain_graph=True)
            loss_of(result, 2).backward()

    @rule(shape=SHAPES, seed=SEEDS)
    def twice_differentiated(self, shape: int, seed: int) -> None:
        """A gradient of gradients: eager's, or an error that says so."""
        results = self.forward(self.batch(shape, seed))
        found: list[Any] = []
        for module, result in zip((self.eager, self.twin), results, strict=True):
            wrt = [p for p in module.parameters() if p.requires_grad]
            try:
                found.append(second_gradients(loss_of(result, 2), wrt))
            except (RuntimeError, graphopt.UnsupportedError) as error:
                found.append(error)
        if isinstance(found[0], RuntimeError):
            return  # eager itself cannot
        if not isinstance(found[1], graphopt.UnsupportedError):
            assert isinstance(found[1], list), found[1]
            self.same_gradients("second gradient", *found)

    @rule(shape=SHAPES, seed=SEEDS, grad=st.booleans())
    def under_autocast(self, shape: int, seed: int, grad: bool) -> None:
        """Autocast around the call; gradients of their own, since they are coarse."""
        self.autocast = True
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
                results = self.forward(self.batch(shape, seed))
            if grad and all(t.requires_grad for r in results for t in tensors(r)[:1]):
                found = []
                for module, result in zip((self.eager, self.twin), results, strict=True):
                    wrt = [p for p in module.parameters() if p.requires_grad]
                    found.append(torch.autograd.grad(loss_of(result), wrt, allow_unused=True))
                self.same_gradients("gradient under autocast", *map(list, found))
            self.same_state()
        finally:
            self.autocast = False

    # ---- training

    @rule(shape=SHAPES, seed=SEEDS)
    def train_step(self, shape: int, seed: int) -> None:
        """As a training loop has it: forward, backward, optimizer step, gradients to None."""
        for result in self.forward(self.batch(shape, seed)):
            loss_of(result).backward()
        self.same_state()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @precondition(lambda self: any(p.grad is not None for p in self.eager.parameters()))
    @rule()
    def optimizer_step(self) -> None:
        """A step of both optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()

    @rule(kind=st.sampled_from(list(OPTIMIZERS)), through_source=st.booleans())
    def other_optimizer(self, kind: str, through_source: bool) -> None:
        """Optimizers of another kind, made of the twin or of the module below it."""
        self.new_optimizers(kind, through_source)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        """Gradients to None or to zero."""
        self.both(lambda m: m.zero_grad(set_to_none=set_to_none))

    @rule(training=st.booleans(), through_source=st.booleans())
    def mode(self, training: bool, through_source: bool) -> None:
        """train() or eval()."""
        self.both(lambda m: m.train(training), through_source)

    @rule(training=st.booleans())
    def mode_of_one(self, training: bool) -> None:
        """A frozen batch norm, or another submodule in a mode of its own."""
        self.both(lambda m: m.get_submodule(self.subject.inner).train(training))

    @rule(trains=st.booleans(), which=st.sampled_from(["weight", "inner", "all but one"]))
    def freeze(self, trains: bool, which: str) -> None:
        """requires_grad of one parameter, of a submodule, of nearly all."""

        def do(module: nn.Module) -> None:
            chosen = dict(module.named_parameters())
            if which == "weight":
                chosen = {self.subject.weight: module.get_parameter(self.subject.weight)}
            elif which == "inner":
                inner = module.get_submodule(self.subject.inner)
                chosen = dict(inner.named_parameters())
            else:
                chosen.pop(next(iter(chosen)))
            for p in chosen.values():
                p.requires_grad_(trains)
                if not trains:
                    p.grad = None

        self.both(do)

    # ---- state

    @rule(factor=st.sampled_from([0.5, 1.25]), assign=st.booleans(), through_source=st.booleans())
    def load(self, factor: float, assign: bool, through_source: bool) -> None:
        """load_state_dict, in place or by assignment."""
        state = {
            k: v * factor if v.is_floating_point() else v + 1
            for k, v in self.eager.state_dict().items()
        }
        self.both(lambda m: m.load_state_dict(copy.deepcopy(state), assign=assign), through_source)
        if assign:
            self.new_optimizers(self.kind)

    @rule(way=st.sampled_from(["deepcopy", "pickle"]))
    def copied(self, way: str) -> None:
        """Both replaced by their copies; gradients stay with a deepcopy alone."""
        self.both(lambda m: m.zero_grad())
        make = copy.deepcopy if way == "deepcopy" else lambda m: pickle.loads(pickle.dumps(m))
        self.eager, self.twin = make(self.eager), make(self.twin)
        self.new_optimizers(self.kind)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]), through_source=st.booleans())
    def to_dtype(self, dtype: torch.dtype, through_source: bool) -> None:
        """.to(dtype)."""
        self.both(lambda m: m.zero_grad())
        self.both(lambda m: m.to(dtype), through_source)
        self.dtype = dtype
        self.new_optimizers(self.kind)

    @rule(seed=SEEDS)
    def replaced_parameter(self, seed: int) -> None:
        """A parameter replaced by another object."""

        def do(module: nn.Module) -> None:
            parent, _, name = self.subject.weight.rpartition(".")
            owner = module.get_submodule(parent)
            old = owner._parameters[name]
            assert old is not None
            generator = torch.Generator().manual_seed(seed)
            new = torch.randn(old.shape, generator=generator).to(old.dtype) * 0.3
            setattr(owner, name, nn.Parameter(new, requires_grad=old.requires_grad))

        self.both(do)
        self.new_optimizers(self.kind)

    @rule(way=st.sampled_from(["data", "numpy", "no_grad"]))
    def written_parameter(self, way: str) -> None:
        """A parameter written past autograd."""

        def do(module: nn.Module) -> None:
            p = module.get_parameter(self.subject.weight)
            if way == "data":
                p.data = p.data * 0.9
            elif way == "numpy":
                array = p.detach().numpy()
                array *= 1.1
            else:
                with torch.no_grad():
                    p.mul_(0.95)

        self.both(do)

    @rule(eps=st.sampled_from([1e-5, 1e-2, 0.3]))
    def attribute(self, eps: float) -> None:
        """A number that a forward reads."""
        self.both(lambda m: setattr(m.get_submodule(self.subject.norm), "eps", eps))

    @rule()
    def replaced_buffer(self) -> None:
        """Every buffer of the root's and of one submodule replaced by a new tensor."""

        def do(module: nn.Module) -> None:
            for owner in (module, module.get_submodule(self.subject.inner)):
                for name, b in list(owner._buffers.items()):
                    if b is not None and b.is_floating_point():
                        setattr(owner, name, b.detach() * 0.5 + 0.1)

        self.both(do)

    # ---- hooks and modes

    @rule(pre=st.booleans())
    def hook_on_top(self, pre: bool) -> None:
        """A hook on the module that is called."""

        def do(module: nn.Module) -> None:
            if pre:
                module.register_forward_pre_hook(halve_inputs, with_kwargs=True)
            else:
                module.register_forward_hook(double_result)

        if not (self.eager._forward_pre_hooks if pre else self.eager._forward_hooks):
            self.both(do)

    @precondition(lambda self: self.eager._forward_hooks or self.eager._forward_pre_hooks)
    @rule()
    def no_hooks(self) -> None:
        """All hooks on top removed."""

        def do(module: nn.Module) -> None:
            for hooks in (module._forward_hooks, module._forward_pre_hooks,
                          module._forward_pre_hooks_with_kwargs):  # fmt: skip
                hooks.clear()

        self.both(do)

    @rule(shape=SHAPES, seed=SEEDS)
    def hook_inside(self, shape: int, seed: int) -> None:
        """A hook on a submodule: kept right or refused by name, and right again without it."""
        inner = [m.get_submodule(self.subject.inner) for m in (self.eager, self.twin)]
        handles = [m.register_forward_hook(double_result) for m in inner]
        try:
            with contextlib.suppress(graphopt.CaptureError), restored(self.eager, self.twin):
                self.forward(self.batch(shape, seed))
        finally:
            for handle in handles:
                handle.remove()
        self.forward(self.batch(shape, seed))

    @rule(shape=SHAPES, seed=SEEDS)
    def deterministic_algorithms(self, shape: int, seed: int) -> None:
        """torch.use_deterministic_algorithms switched; the graph before it is not the one after."""
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
        with torch.no_grad():
            self.forward(self.batch(shape, seed))


def second_gradients(loss: torch.Tensor, wrt: list[torch.nn.Parameter]) -> list[Any]:
    """The gradient of the square of a gradient, as a gradient penalty takes it."""
    if not loss.requires_grad:
        return []
    first = torch.autograd.grad(loss, wrt, create_graph=True, allow_unused=True)
    square = sum((g.double() ** 2).sum() for g in first if g is not None and g.requires_grad)
    if not isinstance(square, torch.Tensor):
        return []
    return list(torch.autograd.grad(square, wrt, allow_unused=True))


@contextlib.contextmanager
def restored(*modules: nn.Module) -> Iterator[None]:
    """Put buffers back when one of the two refuses the call that the other has done."""
    saved = [[(b, b.clone()) for b in m.buffers()] for m in modules]
    try:
        yield
    except graphopt.CaptureError:
        with torch.no_grad():
            for pairs in saved:
                for b, value in pairs:
                    b.copy_(value)
        raise
