"""What is known of the memory and time of each node, from one fake forward and backward.

The graph runs node by node on fake tensors. What autograd saves goes through a pack hook, which
tells the storage and its owner; the backward of a node is told by the number that autograd gave to
its node. So the facts are those of autograd's own engine, not of a model of it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphopt.cost.ops import Cost
from graphopt.cost.roofline import Rates, rates_of
from graphopt.graph.body import Body
from graphopt.memory.fakestep import FakeStep, LossFn, Recorder, autocast_of, state_of, told
from graphopt.memory.labels import BACKWARD, LOSS, Label, Labels
from graphopt.memory.tracker import Allocation, storages_of
from graphopt.memory.watcher import Mark, Watcher
from graphopt.remat import is_marker


@dataclasses.dataclass(frozen=True)
class Step:
    """What one node did, in the order of execution.

    Attributes:
        name: the node, "loss", or for a backward step "MulBackward0 of <node>".
        node: the node; for a backward step the one whose backward it is; None for the loss and
            for the arrival of a parameter's gradient.
        backward: whether it belongs to the backward pass.
        before: live bytes as it begins: parameters, gradients, inputs, everything.
        peak: the most live bytes in it.
        unpacks: values whose saved tensors it asks autograd for; a backward that lets go of one of
            them on the way is several steps, and the later ones ask for the others.
        cost: bytes moved and FLOPs.
        ms: time by the roofline.
    """

    name: str
    node: str | None
    backward: bool
    before: int
    peak: int
    unpacks: tuple[str, ...]
    cost: Cost
    ms: float


@dataclasses.dataclass(frozen=True)
class ItemFacts:
    """One of several results of a node, in a storage of its own; fields as of `ValueFacts`."""

    bytes: int
    saved_bytes: int
    last_use: int
    freed: int
    unpacks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """A node that owns storages. Steps are indices of `Facts.steps`.

    Attributes:
        bytes: of all storages of its result, as the allocator hands them out.
        saved_bytes: of those that autograd keeps; 0 where it keeps none.
        internal_bytes: of what autograd keeps beside the result (statistics, masks).
        made: the step that makes it.
        last_use: the last step of the forward that reads it or a view of it; the last one of the
            forward for what forward returns.
        freed: the step after which all its storages are gone; the last step where some stay.
        reads: values that its op reads, views of them included; no state and no inputs.
        unpacks: the backward steps that ask for it, ascending.
        cost: bytes moved and FLOPs of its op.
        ms: time of running its op once more.
        transient: bytes that live only inside its op, beside its result and what autograd keeps.
        backward_transient: the most bytes that its backward holds above what was alive before it.
        backward_ms: time of its backward.
        items: of an op with several results, each that has a storage of its own, by the name of the
            node that takes it.
        spare: by how much the last step that asks for it is lower where it may write over it.
    """

    bytes: int
    saved_bytes: int
    internal_bytes: int
    made: int
    last_use: int
    freed: int
    reads: tuple[str, ...]
    unpacks: tuple[int, ...]
    cost: Cost
    ms: float
    transient: int
    backward_transient: int
    backward_ms: float
    items: dict[str, ItemFacts] = dataclasses.field(default_factory=dict)
    spare: int = 0


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one body.

    Attributes:
        steps: forward nodes, the loss, the backward, in the order of execution.
        values: by node name, in the order in which they are made.
        start_bytes: live before the forward: state, inputs, `resident_bytes`.
        peak_bytes: the most live bytes of the step.
        loss: what the backward began from, in words.
        rates: the rates behind all times.
    """

    steps: tuple[Step, ...]
    values: dict[str, ValueFacts]
    start_bytes: int
    peak_bytes: int
    loss: str
    rates: Rates

    @property
    def forward_ms(self) -> float:
        """Time of the forward and the loss, by the roofline."""
        return sum(s.ms for s in self.steps if not s.backward)

    @property
    def backward_ms(self) -> float:
        """Time of the backward, by the roofline."""
        return sum(s.ms for s in self.steps if s.backward)


def measure(
    body: Body,
    *,
    loss_fn: LossFn | None = None,
    resident_bytes: int = 0,
    gradients_resident: bool = False,
    device: torch.device | str | None = None,
    result: Callable[[Sequence[Any]], Any] | None = None,
    rates: Rates | None = None,
) -> Facts:
    """Measure a body without computing anything; arguments as of `graphopt.memory.oracle.predict`.

    Args:
        body: the body; nothing of it is changed. What its markers drop is kept all the same.
        loss_fn: makes a scalar of the result of forward, which is let go then.
        resident_bytes: what else lies on the device.
        gradients_resident: whether there are gradients before the step.
        device: whose allocator and rates; by default those of the body's device.
        result: makes the result of forward of the body's outputs.
        rates: of the device, in place of what is known of it.

    Raises:
        OptionError: where loss_fn returns no scalar, or nothing requires a gradient.
        GraphOptError: where an operation cannot run on tensors without values.

    Example:
        >>> from graphopt.capture.export import capture
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
        >>> facts = measure(capture(model, (torch.ones(3, 4),)).body)
        >>> [(name, v.saved_bytes) for name, v in facts.values.items()]
        [('linear', 96), ('gelu', 0)]
    """
    wanted = body.device if device is None else torch.device(device)
    watcher = Watcher(rates or rates_of(wanted))
    recorder = Recorder(
        Labels(lambda: watcher.label),
        device=wanted,
        only=body.device.type,
        inside=wanted.type == body.device.type,
        watch=watcher.dispatched,
        account=watcher,
    )
    watcher.recorder = recorder
    run = _Run(body, recorder, watcher)
    if gradients_resident:
        recorder.hold_gradients()
    try:
        step = recorder.step(
            run.forward, loss_fn, grad=body.grad, finish=lambda values: run.finish(values, result)
        )
    except Exception as error:
        raise told(error, type(body.root).__name__) from error
    return _facts(run, watcher, step, resident_bytes)


class _Run:
    """Runs a graph node by node, letting go of each value as the emitted program does."""

    def __init__(self, body: Body, recorder: Recorder, watcher: Watcher) -> None:
        self.body, self.recorder, self.watcher = body, recorder, watcher
        self.owner: dict[int, str] = {}
        self.items: dict[
            int, tuple[str, str]
        ] = {}  # allocation -> (its op, the node that takes it)
        self.last_read: dict[int, int] = {}  # allocation -> the last step of the forward
        self.reads: dict[str, dict[str, None]] = {}
        self.last_use: dict[str, int] = {}
        self.step_of: dict[str, int] = {}
        self._env: dict[fx.Node, Any] = {}
        for path, (kind, tensor) in state_of(body, body.device.type).items():
            recorder.hold(path, kind, recorder.fakes.of(tensor), tensor)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                twin = recorder.fakes.like(node.meta.get("val"))
                self._env[node] = recorder.hold(node.name, "inputs", twin)
            elif node.op == "get_attr":
                real = body.attribute(str(node.target))
                twin = recorder.fakes.of(real)
                self._env[node] = recorder.hold(str(node.target), "buffers", twin, real)

    def forward(self) -> list[Any]:
        """The body's outputs."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.watcher.pack, self.watcher.unpack)
        done = _last_uses(self.body.graph)
        with autocast_of(self.body), hooks:
            for node in self.body.graph.nodes:
                if node.op == "call_function" and not is_marker(node):
                    self._call(node)
                for gone in done.get(node, ()):
                    del self._env[gone]
        outputs = self.body.output.args[0]
        return [self._env[n] if isinstance(n, fx.Node) else n for n in outputs]  # type: ignore[union-attr]

    def _call(self, node: fx.Node) -> None:
        watcher = self.watcher
        watcher.label = Label(node.name)
        watcher.begin(watcher.label, node.name, (node.name, watcher.label.phase))
        index = len(watcher.marks) - 1
        self.step_of[node.name] = index
        args, kwargs = map_arg((node.args, node.kwargs), self._env.__getitem__)
        roots = dict.fromkeys(self._owners((args, kwargs)))
        for name in roots:
            self.last_use[name] = index
        for found in map(self.recorder.tracker.find, storages_of((args, kwargs))):
            if found is not None:
                self.last_read[found.index] = index
        born = len(self.recorder.tracker.allocations)
        out = node.target(*args, **kwargs)  # type: ignore[operator]
        self.recorder.labels.note(watcher.label)
        for part in storages_of(out):
            found = self.recorder.tracker.find(part)
            if found is not None and found.index >= born:
                self.owner.setdefault(found.index, node.name)
            source = node.args[0] if node.target is operator.getitem else None
            if found is not None and isinstance(source, fx.Node):
                self.items.setdefault(found.index, (source.name, node.name))
        self.reads[node.name] = roots
        self._env[node] = out

    def _owners(self, value: Any) -> Iterable[str]:
        for part in storages_of(value):
            found = self.recorder.tracker.find(part)
            if found is not None and found.index in self.owner:
                yield self.owner[found.index]

    def finish(self, values: list[Any], result: Callable[[Sequence[Any]], Any] | None) -> Any:
        """The user's result; what was written back is let go."""
        for name in self._owners(values):
            self.last_use[name] = len(self.watcher.marks) - 1
        self.watcher.label = Label(LOSS, LOSS)
        own = values[: self.body.user_outputs]
        values.clear()
        for node in [n for n in self._env if n.op == "call_function"]:
            del self._env[node]  # inputs and state stay the caller's
        if result is not None:
            return result(own)
        return own[0] if len(own) == 1 else tuple(own)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> calls whose last use it is, as the emitted program deletes them."""
    seen = set(graph.output_node().all_input_nodes)
    done: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or is_marker(node):
            continue
        for used in (*node.all_input_nodes, node):
            if used not in seen and used.op == "call_function":
                seen.add(used)
                done.setdefault(node, []).append(used)
    return done


def _facts(run: _Run, watcher: Watcher, step: FakeStep, resident_bytes: int) -> Facts:
    tracker, marks = step.tracker, watcher.marks
    curve = [resident_bytes + live for live in tracker.curve()]
    starts = [m.event for m in marks]
    steps = []
    for i, mark in enumerate(marks):
        end = starts[i + 1] if i + 1 < len(marks) else len(curve)
        before = curve[mark.event - 1] if mark.event else resident_bytes
        asked = dict.fromkeys(run.owner[a.index] for a in mark.unpacked if a.index in run.owner)
        steps.append(
            Step(
                name=mark.name,
                node=mark.label.name if mark.label.name in run.step_of else None,
                backward=mark.label.phase == BACKWARD,
                before=before,
                peak=max([before, *curve[mark.event : end]]),
                unpacks=tuple(asked),
                cost=Cost(mark.bytes, mark.flops),
                ms=mark.ms,
            )
        )
    return Facts(
        steps=tuple(steps),
        values=_values(run, watcher, step, steps),
        start_bytes=curve[step.resident - 1] if step.resident else resident_bytes,
        peak_bytes=max(curve[max(0, step.resident - 1) :], default=resident_bytes),
        loss=step.loss,
        rates=watcher.rates,
    )


def _values(
    run: _Run, watcher: Watcher, step: FakeStep, steps: Sequence[Step]
) -> dict[str, ValueFacts]:
    allocations = step.tracker.allocations
    owned: dict[str, list[Allocation]] = {}
    for index, name in run.owner.items():
        owned.setdefault(name, []).append(allocations[index])
    internal: dict[str, int] = {}
    for index, label in watcher.saved.items():
        made = allocations[index]
        if index not in run.owner and not made.kind:
            internal[label.name] = internal.get(label.name, 0) + made.bytes
    asked: dict[str, list[int]] = {}
    taken: dict[int, list[int]] = {}
    for i, mark in enumerate(watcher.marks):
        for index in dict.fromkeys(a.index for a in mark.unpacked):
            taken.setdefault(index, []).append(i)
    items: dict[str, dict[str, ItemFacts]] = {}
    for index, (op, item) in run.items.items():
        if run.owner.get(index) == op:
            made = allocations[index]
            items.setdefault(op, {})[item] = ItemFacts(
                bytes=made.bytes,
                saved_bytes=made.bytes if index in watcher.saved else 0,
                last_use=run.last_read.get(index, 0),
                freed=_freed([made], watcher.marks),
                unpacks=tuple(taken.get(index, ())),
            )
    backward: dict[str, list[Step]] = {}
    for i, s in enumerate(steps):
        for name in s.unpacks:
            asked.setdefault(name, []).append(i)
        if s.backward and s.node is not None:
            backward.setdefault(s.node, []).append(s)
    found = {}
    for name in (n for n in run.step_of if n in owned):
        at, mine = run.step_of[name], owned[name]
        size, inside = sum(a.bytes for a in mine), internal.get(name, 0)
        behind = backward.get(name, [])
        spared = watcher.marks[asked[name][-1]].spared if asked.get(name) else {}
        found[name] = ValueFacts(
            bytes=size,
            saved_bytes=sum(a.bytes for a in mine if a.index in watcher.saved),
            internal_bytes=inside,
            made=at,
            last_use=max(at, run.last_use.get(name, at)),
            freed=_freed(mine, watcher.marks),
            reads=tuple(run.reads[name]),
            unpacks=tuple(asked.get(name, ())),
            cost=steps[at].cost,
            ms=steps[at].ms,
            transient=max(0, steps[at].peak - steps[at].before - size - inside),
            backward_transient=max((s.peak - behind[0].before for s in behind), default=0),
            backward_ms=sum(s.ms for s in behind),
            items=items.get(name, {}),
            spare=spared.get(mine[0].index, 0) if len(mine) == 1 else 0,
        )
    return found


def _freed(mine: Sequence[Allocation], marks: Sequence[Mark]) -> int:
    """The step in which the last of some storages died; the last one where one is alive still."""
    last = len(marks) - 1
    if any(a.died is None for a in mine):
        return last
    died = max(a.died for a in mine if a.died is not None)
    return max((i for i, m in enumerate(marks) if m.event <= died), default=last)
