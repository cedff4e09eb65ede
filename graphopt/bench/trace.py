"""Where the time of a step goes and what it allocates, read from a trace of `torch.profiler`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from graphopt.bench.kinds import KINDS, kind_of_kernel, kind_of_op
from graphopt.bench.result import DeviceTime, KernelTime

Event = Mapping[str, Any]
"""One event of a Chrome trace: "cat", "name", "ts" and "dur" in microseconds, "tid", "args"."""

ROWS = 30
"""Kernels or operations that are kept by name."""

_LOG = re.compile(rb"(USDT|STAGE|INFO):\d{4}-\d\d-\d\d [\d:]+ \d+:\d+ \w+\.cpp:\d+\] ")
"""How a line begins that the profiler's library logs where nothing is wrong."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def record(run: Callable[[], object], *, cuda: bool, memory: bool = False) -> list[Event]:
    """The events of a run, from the profiler's own file format.

    Args:
        run: what to run; it must wait for the device itself.
        cuda: record what runs on the GPU, else operations on the CPU.
        memory: record allocations, too.
    """
    wanted = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    seen = profile(activities=[wanted], profile_memory=memory)
    with contextlib.ExitStack() as stack:
        with _without_log():
            stack.enter_context(seen)
        try:
            run()
        finally:
            with _without_log():
                stack.close()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        seen.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events: list[Event] = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return events


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Leave out what the profiler's library logs to standard error as it starts and stops.

    Its level is that of the process, read once from the environment: the user's own profiles shall
    log as before. So what is written meanwhile is kept, and written without those lines afterwards.
    """
    with contextlib.ExitStack() as stack:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
            real = os.dup(2)
            stack.callback(os.close, real)
            kept = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(kept.fileno(), 2)
        except OSError:  # it is closed, or there is no room for a file
            yield
            return
        try:
            yield
        finally:
            os.dup2(real, 2)
            kept.seek(0)
            for line in kept:
                if not _LOG.match(line):
                    os.write(2, line)


def device_time(events: Iterable[Event], steps: int, step_ms: float) -> DeviceTime | None:
    """The kernels of a trace by kind, for one step; None where the trace holds none.

    Args:
        events: of a run on a GPU.
        steps: how many steps were run.
        step_ms: the time of a step as measured without the profiler; what no kernel fills of it
            is idle.
    """
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE and "dur" in e]
    if not kernels:
        return None
    spent = [(str(e["name"]), kind_of_kernel(str(e["name"])), float(e["dur"])) for e in kernels]
    busy = _union((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels)
    busy_ms = busy / 1e3 / steps
    return DeviceTime(
        kinds=_by_kind(spent, 1e3 * steps),
        busy_ms=busy_ms,
        idle_ms=max(0.0, step_ms - busy_ms),
        kernels=_by_name(spent, steps, 1e3 * steps),
    )


def host_time(
    events: Iterable[Event], steps: int, profiled_ms: float, step_ms: float
) -> DeviceTime | None:
    """The operations of a trace on the CPU by kind, for one step.

    An operation counts as what the outermost one around it is that has a kind: the multiplications
    inside an attention are attention, those inside a fused op are fused.

    Args:
        events: of a run on the CPU.
        steps: how many steps were run.
        profiled_ms: what a step took under the profiler.
        step_ms: what a step takes without it: times are scaled by the ratio of the two.
    """
    operations = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation") and "dur" in e]
    if not operations or profiled_ms <= 0:
        return None
    spent = _self_times(operations)
    divisor = 1e3 * steps * profiled_ms / step_ms
    kinds = _by_kind(spent, divisor)
    busy = sum(kinds.values())
    return DeviceTime(kinds, busy, max(0.0, step_ms - busy), _by_name(spent, steps, divisor))


def peak_allocated(events: Iterable[Event]) -> int | None:
    """The most bytes of CPU memory that a trace held at once above its start; None for no record.

    Only torch's own allocator is seen: not what libraries and compiled code take by themselves.
    """
    sizes = [
        (float(e["ts"]), int(e["args"]["Bytes"]))
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type", 0) == 0
    ]
    held, most = 0, 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        held += size
        most = max(most, held)
    return most if sizes else None


def _self_times(operations: Sequence[Event]) -> list[tuple[str, str, float]]:
    """(name, kind, microseconds without those of operations inside it) of each operation."""
    spent: list[list[Any]] = []
    stacks: dict[Any, list[tuple[float, int]]] = {}  # thread -> (end, index) of what is open
    for e in sorted(operations, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, length, name = float(e["ts"]), float(e["dur"]), str(e["name"])
        stack = stacks.setdefault(e.get("tid"), [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        kind = kind_of_op(name)
        if stack:
            parent = spent[stack[-1][1]]
            parent[2] -= length
            kind = parent[1] if parent[1] != "other" else kind
        stack.append((start + length, len(spent)))
        spent.append([name, kind, length])
    return [(name, kind, max(0.0, length)) for name, kind, length in spent]


def _by_kind(spent: Iterable[tuple[str, str, float]], divisor: float) -> dict[str, float]:
    kinds = dict.fromkeys(KINDS, 0.0)
    for _, kind, length in spent:
        kinds[kind] += length / divisor
    return kinds


def _by_name(
    spent: Iterable[tuple[str, str, float]], steps: int, divisor: float
) -> tuple[KernelTime, ...]:
    times: dict[tuple[str, str], list[float]] = {}
    for name, kind, length in spent:
        times.setdefault((name, kind), []).append(length)
    rows = [
        KernelTime(name, kind, sum(lengths) / divisor, len(lengths) / steps)
        for (name, kind), lengths in times.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.ms)[:ROWS])


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the time that at least one interval covers."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
