"""When values that go to host memory leave the device and come back, and what that costs.

The link to the host is one resource: copies run one after the other, beside the computation. In
forward a copy begins behind the last use of its value, and the device lets go of the value where
the copy is done. In backward a copy begins in the turn of another value that was dropped, the
latest that leaves it enough time. What the computation between cannot hide is waited for.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

MARGIN = 1.25
"""By so much a copy back begins earlier than it has to, by its time."""

WIDE = 1.6
"""By so much, both ways, where there is memory for it: for links that are slower than foreseen."""

BELOW = 0.98
"""Up to that share of the peak: beside it, the replay of a step is a little off."""

TOLL = 0.03
"""Share of a copy's time by which a step takes longer, though nothing waits. Assumed."""

LATENCY_MS = 0.02
"""Time of a copy beside that of its bytes: the launch, and the link's own."""


@dataclasses.dataclass(frozen=True)
class Movable:
    """A tensor that may go to host memory. Steps are indices of the timeline.

    Attributes:
        name: of the node that made it: an op, or the item of an op with several results.
        bytes: of its storage.
        owner: position of the value that it is, or is a part of.
        last_use: the last step of the forward that reads it or a view of it.
        freed: the step after which it is gone when nothing is planned.
        unpacks: the steps of the backward that ask autograd for it, ascending.
        readers: positions of the values whose ops read it.
        copy_ms: time of its copy, one way.
    """

    name: str
    bytes: int
    owner: int
    last_use: int
    freed: int
    unpacks: tuple[int, ...]
    readers: tuple[int, ...]
    copy_ms: float


@dataclasses.dataclass(frozen=True)
class Times:
    """How long each step takes.

    Attributes:
        ms: of each step.
        forward: how many steps the graph's own forward has; the loss and the backward follow.
    """

    ms: tuple[float, ...]
    forward: int


NO_TIMES = Times((), 0)


@dataclasses.dataclass(frozen=True)
class Stay:
    """When a value is not on the device.

    Attributes:
        value: position among the movable values.
        gone: the step of the forward behind which the device lets go of it.
        back: the step at which its memory is taken again and its copy back begins.
        asked: the step that asks for it first.
        last: the last step that reads it.
        ahead: name of the dropped value in whose turn it comes back; None where it is asked for.
    """

    value: int
    gone: int
    back: int
    asked: int
    last: int
    ahead: str | None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All that goes to host memory.

    Attributes:
        stays: one for each value that backward asks for.
        wait_ms: time that the computation waits for copies.
        toll_ms: by how much it is slower beside them.
    """

    stays: tuple[Stay, ...]
    wait_ms: float
    toll_ms: float


def traffic(
    movable: Sequence[Movable],
    away: Collection[int],
    times: Times,
    turns: Mapping[int, tuple[str, ...]],
    first: Mapping[int, int],
    again_ms: Mapping[int, float],
    margin: float = MARGIN,
) -> Traffic:
    """The stays of some values in host memory.

    Args:
        movable: what may go.
        away: positions of those that go.
        times: of the steps.
        turns: step -> names of the values that are computed again in it.
        first: value -> the step in which it is computed again, for those that are.
        again_ms: step -> time of what is computed again in it.
        margin: by so much a copy back begins earlier than it has to, by its time.
    """
    asked: dict[int, tuple[int, int]] = {}
    for c in away:
        m = movable[c]
        steps = [*m.unpacks, *(first[i] for i in m.readers if i in first)]
        if steps:
            asked[c] = min(steps), max(steps)
    starts = _starts(times, again_ms)
    gone, out_ms = _out(movable, asked, times)
    back = _back(movable, asked, starts, turns, margin)
    in_ms = _waits(movable, asked, starts, back)
    stays = tuple(Stay(c, gone[c], back[c][0], *asked[c], back[c][1]) for c in sorted(asked))
    toll = TOLL * 2 * sum(movable[c].copy_ms for c in asked)
    return Traffic(stays, out_ms + in_ms, toll)


def _starts(times: Times, again_ms: Mapping[int, float]) -> list[float]:
    """When each step begins."""
    spent = list(times.ms)
    for step, ms in again_ms.items():
        spent[step] += ms
    return [0.0, *itertools.accumulate(spent)]


def _out(
    movable: Sequence[Movable], asked: Collection[int], times: Times
) -> tuple[dict[int, int], float]:
    """The step behind which each value is gone, and how long the end of forward waits."""
    ends = list(itertools.accumulate(times.ms[: times.forward]))
    gone: dict[int, int] = {}
    free = 0.0
    for c in sorted(asked, key=lambda c: (movable[c].last_use, c)):
        m = movable[c]
        free = max(free, ends[m.last_use]) + m.copy_ms
        gone[c] = min(bisect.bisect_left(ends, free, lo=m.last_use), times.forward - 1)
    return gone, max(0.0, free - ends[-1]) if asked else 0.0


def _back(
    movable: Sequence[Movable],
    asked: Mapping[int, tuple[int, int]],
    starts: Sequence[float],
    turns: Mapping[int, tuple[str, ...]],
    margin: float,
) -> dict[int, tuple[int, str | None]]:
    """The step at which each copy back begins, as late as the link and the margin allow."""
    called: dict[int, tuple[str, ...]] = dict(turns)
    for c, (step, _) in asked.items():
        called[step] = (*called.get(step, ()), movable[c].name)
    steps = sorted(called)
    found: dict[int, tuple[int, str | None]] = {}
    free = float("inf")
    for c in sorted(asked, key=lambda c: (-asked[c][0], c)):
        step = asked[c][0]
        free = min(free, starts[step]) - margin * movable[c].copy_ms
        earlier = steps[: bisect.bisect_left(steps, step)]
        fit = bisect.bisect_right([starts[s] for s in earlier], free) - 1
        if not earlier:
            found[c] = step, None
        else:
            chosen = earlier[max(0, fit)]
            found[c] = chosen, called[chosen][0]
    return found


def _waits(
    movable: Sequence[Movable],
    asked: Mapping[int, tuple[int, int]],
    starts: Sequence[float],
    back: Mapping[int, tuple[int, str | None]],
) -> float:
    """How long the backward waits in all."""
    free = late = 0.0
    for c in sorted(asked, key=lambda c: (back[c][0], asked[c][0], c)):
        free = max(free, starts[back[c][0]] + late) + movable[c].copy_ms
        late = max(late, free - starts[asked[c][0]])
    return late


def relaxed(
    stays: Sequence[Stay],
    early: Sequence[Stay],
    movable: Sequence[Movable],
    times: Times,
    levels: Sequence[int],
) -> tuple[Stay, ...]:
    """The same stays, shorter at both ends where the peak does not rise by that.

    A link that is slower than foreseen is then waited for later, or not at all.

    Args:
        stays: as foreseen.
        early: the same with a margin of `WIDE`.
        movable: what may go.
        times: of the steps.
        levels: the most bytes alive during each step.
    """
    ends = list(itertools.accumulate(times.ms[: times.forward]))
    live, most = list(levels), int(BELOW * max(levels))
    found = {}
    free = busy = 0.0
    for stay in sorted(stays, key=lambda s: (movable[s.value].last_use, s.value)):
        m = movable[stay.value]
        if ends[m.last_use] > free:
            free = busy = ends[m.last_use]
        free += m.copy_ms
        gone = stay.gone
        while (
            gone + 1 < times.forward
            and ends[gone] < busy + WIDE * (free - busy)
            and live[gone + 1] + m.bytes <= most
        ):
            gone += 1
            live[gone] += m.bytes
        found[stay.value] = dataclasses.replace(stay, gone=gone)
    for other in early:
        stay, size = found[other.value], movable[other.value].bytes
        steps = range(other.back, stay.back)
        if steps and all(live[s] + size <= most for s in steps):
            for s in steps:
                live[s] += size
            found[other.value] = dataclasses.replace(stay, back=other.back, ahead=other.ahead)
    return tuple(found[stay.value] for stay in stays)
