"""What fused operators cost the host, beside eager: small tensors, and a hundred small blocks.

    python tests/bench/host.py                 # on a GPU: both tables, and torch.compile's steps
    python tests/bench/host.py --device cpu    # no GPU: kernels are compiled, launched into nothing
    python tests/bench/host.py --quick         # half a minute on a GPU

The first table gives microseconds a call, forward and backward, of operators on tensors so small
that the device waits for the host: the time until calls are issued, not until they are done. The
second gives milliseconds a training step (forward, backward, `zero_grad`) of a hundred blocks of
LayerNorm, linear, GELU and linear with a residual, at three widths: what it takes until everything
is done, what the host takes to issue it, and what the device is busy (torch's profiler).
On the CPU only the host's part means anything, and eager's holds the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.errors import GraphoptWarning
from graphopt.kernels._library import direct, positional
from graphopt.kernels._prepared import Launch

Call = Callable[[torch.Tensor], torch.Tensor]
SIZES = ((64, 128), (1024, 512), (8192, 512))
"""Rows and columns of the blocks: nothing to do, something, and enough to fill a GPU."""


def op(name: str, *args: Any, **kwargs: Any) -> Call:
    """An operator of x, called as an optimized module calls it, and its other arguments."""
    overload = getattr(torch.ops.graphopt, name).default
    call, values = direct(overload), positional(overload, (None, *args), kwargs)[1:]
    assert call is not None
    return lambda x: first(call(x, *values))


def first(result: Any) -> torch.Tensor:
    """The result, or the first of several."""
    return result[0] if isinstance(result, tuple) else result


Case = tuple[Call, Call, list[torch.Tensor]]


def cases(device: str, rows: int, cols: int) -> dict[str, Case]:
    """Operator -> graphopt's call, eager's, and x with what else wants a gradient.

    Eager's GELU stands without the gradient of the bias before it, which graphopt's gives, too.
    """

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    x, r, w, b = make(rows, cols), make(rows, cols), make(cols), make(cols)
    heads, table = make(2, 4, rows // 2, cols // 4), torch.randn(rows // 2, cols // 4).to(device)
    seed = torch.tensor(1, device=device)

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * table + torch.cat((-x[..., half:], x[..., :half]), -1) * table

    return {
        "layer_norm": (
            op("layer_norm", w, b, 1e-5), lambda x: F.layer_norm(x, (cols,), w, b), [x, w, b],
        ),
        "add_layer_norm": (
            op("add_layer_norm", r, w, b, 1e-5),
            lambda x: F.layer_norm(x + r, (cols,), w, b), [x, r, w, b],
        ),
        "bias_act gelu": (op("bias_act", b, "gelu", bias_added=True), F.gelu, [x, b]),
        "glu silu": (op("glu", r, "silu"), lambda x: F.silu(x) * r, [x, r]),
        "rms_norm": (op("rms_norm", w, 1e-6), lambda x: F.rms_norm(x, (cols,), w), [x, w]),
        "dropout": (op("dropout", 0.1, seed, 0), lambda x: F.dropout(x, 0.1), [x]),
        "dropout_add": (
            op("dropout_add", r, 0.1, seed, 0), lambda x: F.dropout(x, 0.1) + r, [x, r],
        ),
        "rope": (op("rope", table, table), turned, [heads]),
    }  # fmt: skip


def microseconds(
    calls: list[Call], wrt: list[torch.Tensor], clock: Callable[[], float], repeats: int = 15
) -> list[list[float]]:
    """Of each call the least mean host time: forward, backward, forward without gradients.

    A chain of calls is timed. They take turns, since a host's speed changes while one measures.
    """
    count, best = 50, [[float("inf")] * 3 for _ in calls]
    for turn in range(repeats * len(calls)):
        which = turn % len(calls)
        found = chain(calls[which], wrt, clock, count)
        best[which] = [min(b, f / count * 1e6) for b, f in zip(best[which], found, strict=True)]
    return best


def chain(
    call: Call, wrt: list[torch.Tensor], clock: Callable[[], float], count: int
) -> tuple[float, float, float]:
    """Seconds until a chain of calls is issued: forward, backward, without gradients."""
    y = wrt[0]
    wait()
    start = clock()
    for _ in range(count):
        y = call(y)
    forward = clock() - start
    grad = torch.ones_like(y)
    wait()
    start = clock()
    torch.autograd.grad(y, wrt, grad, allow_unused=True)
    backward = clock() - start
    wait()
    with torch.no_grad():
        start = clock()
        for _ in range(count):
            call(wrt[0])
        return forward, backward, clock() - start


def wait() -> None:
    """Until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def operators(device: str, clock: Callable[[], float], names: list[str]) -> list[dict[str, Any]]:
    """Print and return the first table."""
    print("| operator, 64 x 128 float32 | forward us | eager | backward us | eager "
          "| no gradient us | eager |\n" + "|---" * 7 + "|")  # fmt: skip
    found = []
    for name, (ours, eager, wrt) in cases(device, 64, 128).items():
        if name not in names:
            continue
        a, b = microseconds([ours, eager], wrt, clock)
        cells = [f"{v:.1f}" for pair in zip(a, b, strict=True) for v in pair]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        found.append({"operator": name, "graphopt": a, "eager": b})
    return found


def parts(device: str, clock: Callable[[], float]) -> None:
    """Print what the launches are of it: as they are, as Triton makes them, and none at all."""
    print("\n| operator, us forward / backward | as it is | launched by Triton | not launched |\n"
          + "|---" * 4 + "|")  # fmt: skip
    repeated = Launch.__call__
    ways: tuple[Any, ...] = (repeated, Launch._by_triton, lambda self, *pointers: None)
    made = cases(device, 64, 128)
    for name in ("layer_norm", "bias_act gelu"):
        ours, _, wrt = made[name]
        cells = []
        for way in ways:
            Launch.__call__ = way  # type: ignore[method-assign]
            forward, backward, _ = microseconds([ours], wrt, clock)[0]
            cells.append(f"{forward:.1f} / {backward:.1f}")
        Launch.__call__ = repeated  # type: ignore[method-assign]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


class Blocks(nn.Module):
    """A hundred small blocks, each with a skip."""

    def __init__(self, width: int, count: int = 100) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
            )
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out."""
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def turns(
    modules: dict[str, Any], x: torch.Tensor, clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Median ms of a step of each module, which take turns: until done, until issued."""
    times: dict[str, list[list[float]]] = {name: [[], []] for name in modules}
    for _ in range(rounds):
        for name, module in modules.items():
            wait()
            start = clock()
            step(module, x)
            issued = clock()
            wait()
            times[name][0].append(1e3 * (clock() - start))
            times[name][1].append(1e3 * (issued - start))
    return {name: [statistics.median(t[3:]) for t in both] for name, both in times.items()}


def step(module: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    module.zero_grad()
    module(x).backward()


def busy_ms(module: nn.Module, x: torch.Tensor) -> float:
    """What the device does in a step, by torch's profiler, which slows what comes after it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step(module, x)
        wait()
    return float(sum(e.self_device_time_total for e in seen.key_averages()) / 1e3)


def variants(
    device: str, size: tuple[int, int], options: argparse.Namespace
) -> tuple[dict[str, Any], torch.Tensor]:
    """The blocks of a size, as they are and optimized, and their input."""
    torch.manual_seed(0)
    model = Blocks(size[1], options.blocks).to(device)
    x = torch.randn(size, device=device)
    made: dict[str, Any] = {"eager": model, "graphopt": graphopt.optimize(model, x)}
    if made["graphopt"].refusals:
        made["graphopt, fuse='always'"] = graphopt.optimize(model, x, fuse="always")
    if device == "cuda" and not (options.no_compile or options.quick):
        made["torch.compile"] = torch.compile(model)
    return made, x


Made = dict[tuple[int, int], tuple[dict[str, Any], torch.Tensor]]


def prepared(device: str, options: argparse.Namespace) -> Made:
    """The variants of each size."""
    sizes = SIZES if device == "cuda" else SIZES[:1]
    sizes = (SIZES[0], SIZES[-1]) if options.quick and device == "cuda" else sizes
    return {size: variants(device, size, options) for size in sizes}


def blocks(
    device: str, clock: Callable[[], float], made: Made, rounds: int
) -> list[dict[str, Any]]:
    """Print and return the second table."""
    head = ("rows x columns", "variant", "step ms", "to eager", "issued ms", "device busy ms")
    print(f"\n| {' | '.join(head)} |\n" + "|---" * len(head) + "|")
    times = {size: turns(modules, x, clock, rounds) for size, (modules, x) in made.items()}
    rows = []
    for size, (modules, x) in made.items():
        for name, module in modules.items():
            done, issued = times[size][name]
            busy = busy_ms(module, x) if device == "cuda" else 0.0
            cells = (
                f"{size[0]} x {size[1]}", name, f"{done:.2f}",
                f"{done / times[size]['eager'][0]:.2f}", f"{issued:.2f}", f"{busy:.2f}",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
            rows.append({"size": size, "variant": name, "ms": [done, issued, busy]})
        fused = sum(r.kind == "local" for r in modules["graphopt"].rewrites)
        refused = sorted({r.reason for r in modules["graphopt"].refusals})
        print(f"({fused} rewrites; {refused[0] if refused else 'nothing refused'})", flush=True)
    return rows


def launch_nothing() -> None:
    """On the CPU: kernels are compiled and launched into nothing."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
    import silent_driver

    silent_driver.install()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="half a minute: less of everything")
    parser.add_argument("--blocks", type=int, default=100, help="how many the model has")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device; --device cpu measures the host alone", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", GraphoptWarning)
    clock = time.perf_counter if device == "cuda" else time.thread_time
    torch.set_num_threads(1)
    if device == "cuda":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    names = list(cases(device, 64, 128))[: 4 if options.quick else None]
    measured = prepared(device, options)
    if device == "cpu":
        launch_nothing()
    called = operators(device, clock, names)
    if not options.quick:
        parts(device, clock)
    # last, since torch's profiler slows what comes after it
    stepped = blocks(device, clock, measured, 11 if options.quick else 25)
    if options.json:
        options.json.write_text(json.dumps({"steps": stepped, "operators": called}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
