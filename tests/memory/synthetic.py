"""Timelines of made-up graphs: chains of blocks, nets with skips, random graphs."""

from __future__ import annotations

import dataclasses
import random

from graphopt.memory.simulate import Timeline, Value


@dataclasses.dataclass
class Op:
    """One op: what it writes, reads and saves, and what its parameters' gradients take."""

    name: str
    bytes: int
    reads: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()  # positions of ops, its own included
    ms: float = 1.0
    gradient: int = 0
    transient: int = 0
    why_not: str | None = None


def timeline(ops: list[Op], base: int = 0) -> Timeline:
    """The step of a list of ops: the forward in order, the loss, the backward in reverse."""
    n = len(ops)
    last = list(range(n))
    unpacks: list[list[int]] = [[] for _ in ops]
    back = [n + 1 + (n - 1 - i) for i in range(n)]
    for i, op in enumerate(ops):
        for j in op.reads:
            last[j] = max(last[j], i)
        for j in op.saves:
            unpacks[j].append(back[i])
    last[n - 1] = n  # the loss reads the last
    values = []
    for i, op in enumerate(ops):
        asked = tuple(sorted(unpacks[i]))
        values.append(
            Value(
                op.name, op.bytes, op.bytes if asked else 0, i, last[i],
                asked[-1] if asked else last[i], asked, op.reads, op.ms, op.transient,
                op.why_not if i < n - 1 else "an output",
            )
        )  # fmt: skip
    steps = 2 * n + 1
    before, peak = [0] * steps, [0] * steps
    gradients = {n - 1: ops[-1].bytes}  # activations' gradients alive
    kept = base
    for step in range(steps):
        live = kept + sum(v.bytes for v in values if v.made < step <= v.freed)
        if step < n:
            before[step], peak[step] = live, live + ops[step].bytes + ops[step].transient
            continue
        if step == n:
            before[step] = peak[step] = live
            continue
        i = 2 * n - step
        mine = gradients.pop(i, 0)
        flowing = sum(gradients.values()) + mine
        made = {j: ops[j].bytes for j in ops[i].reads if j not in gradients}
        before[step] = live + flowing
        peak[step] = live + flowing + sum(made.values()) + ops[i].gradient
        gradients.update(made)
        kept += ops[i].gradient
    return Timeline(tuple(before), tuple(peak), tuple(values))


def transformer(blocks: int, unit: int = 64, gradient: int = 8) -> list[Op]:
    """Blocks of attention and a feed-forward net of four times the width."""
    ops = [Op("embed", unit, (), (), 0.2)]
    x = 0
    for b in range(blocks):
        at = len(ops)
        ops += [
            Op(f"b{b}.norm1", unit, (x,), (x,), 0.2),
            Op(f"b{b}.qkv", 3 * unit, (at,), (at,), 3.0, 3 * gradient),
            Op(f"b{b}.attention", unit, (at + 1,), (at + 1, at + 2), 4.0),
            Op(f"b{b}.project", unit, (at + 2,), (at + 2,), 1.0, gradient),
            Op(f"b{b}.add1", unit, (x, at + 3), (), 0.2),
            Op(f"b{b}.norm2", unit, (at + 4,), (at + 4,), 0.2),
            Op(f"b{b}.up", 4 * unit, (at + 5,), (at + 5,), 4.0, 4 * gradient),
            Op(f"b{b}.gelu", 4 * unit, (at + 6,), (at + 6,), 0.5),
            Op(f"b{b}.down", unit, (at + 7,), (at + 7,), 4.0, 4 * gradient),
            Op(f"b{b}.add2", unit, (at + 4, at + 8), (), 0.2),
        ]
        x = len(ops) - 1
    ops.append(Op("head", 8 * unit, (x,), (x,), 6.0, 8 * gradient))
    ops.append(Op("log_softmax", 8 * unit, (x + 1,), (x + 2,), 1.0))
    return ops


def chain(length: int, unit: int = 64) -> list[Op]:
    """A deep net of one width: linear, activation, linear, ..."""
    ops = [Op("start", unit, (), (), 1.0)]
    for i in range(length):
        x = len(ops) - 1
        ops += [
            Op(f"l{i}.linear", unit, (x,), (x,), 4.0, unit // 8),
            Op(f"l{i}.tanh", unit, (x + 1,), (x + 2,), 0.3),
        ]
    return ops


def random_graph(seed: int, size: int) -> list[Op]:
    """A random graph of ops with one or two operands."""
    rng = random.Random(seed)
    ops = [Op("x", rng.randint(1, 8) * 16, (), (), 1.0)]
    for i in range(1, size):
        near = max(0, i - 4)
        reads = {i - 1} if rng.random() < 0.7 else {rng.randrange(near, i)}
        if rng.random() < 0.4:
            reads.add(rng.randrange(0 if rng.random() < 0.3 else near, i))
        saves = {j for j in reads if rng.random() < 0.6}
        if rng.random() < 0.3:
            saves.add(i)
        ops.append(
            Op(
                f"v{i}", rng.randint(1, 8) * 16, tuple(sorted(reads)), tuple(sorted(saves)),
                rng.choice((0.2, 0.3, 1.0, 3.0, 6.0)), rng.choice((0, 0, 16)), 0,
                "random" if rng.random() < 0.08 else None,
            )
        )  # fmt: skip
    return ops
