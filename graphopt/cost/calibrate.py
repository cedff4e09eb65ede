"""Measures what a device does in a second, and keeps it on disk for the next process."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from graphopt.cost.kept import load, store
from graphopt.cost.roofline import Rates, use_rates
from graphopt.errors import OptionError

FILE = "rates.json"

LAUNCHES = 200
"""Small operations whose mean time is the least time of one."""

_GEMM_DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64")


def kept(name: str) -> Rates | None:
    """The rates that an earlier process kept for a device; None where there are none.

    A file that is damaged, of another version or cannot be read counts as none.
    """
    return _rates(load(FILE, name), name)


def calibrate(device: torch.device | str = "cuda", *, refresh: bool = True) -> Rates:
    """Measure copy bandwidth, matrix products and the host link of a device.

    Takes well under a second and at most 1 GiB of the device's memory. The result is used by every
    later estimate of this process and kept on disk (`graphopt.cost.kept`); where that cannot be
    written, a warning says so and the result holds for this process.

    Args:
        device: "cuda", "cuda:1" or "cpu".
        refresh: measure again where an earlier result is there.

    Raises:
        OptionError: for another kind of device, or "cuda" without a GPU.

    Example:
        >>> calibrate("cpu").copy_gbs > 0  # doctest: +SKIP
        True
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device is {device!r}", try_='"cuda" or "cpu"') from error
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"{found.type} devices cannot be calibrated", try_='"cuda" or "cpu"')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "there is no GPU to calibrate", try_='calibrate("cpu"), or a machine with a GPU'
        )
    name = torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu"
    rates = None if refresh else kept(name)
    if rates is None:
        with torch.inference_mode():
            rates = _measure_gpu(found, name) if found.type == "cuda" else _measure_cpu(name)
        _keep(rates)
    use_rates(rates)
    return rates


# ---- measuring


def _measure_gpu(device: torch.device, name: str) -> Rates:
    free = torch.cuda.mem_get_info(device)[0]
    size = min(2**28, free // 8)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _gpu_seconds(lambda: target.copy_(source), device)
    tiny = torch.zeros(1, device=device)
    floor = _gpu_seconds(lambda: _often(tiny), device) / LAUNCHES
    host = torch.empty(min(size, 2**26), dtype=torch.uint8, pin_memory=True)
    link = _gpu_seconds(lambda: target[: host.numel()].copy_(host, non_blocking=True), device)
    sides = {"bfloat16": 8192, "float16": 8192, "tf32": 4096, "float32": 4096, "float64": 2048}
    rates = {}
    fits = 2 ** int(math.log2(max(256.0, (free / 64) ** 0.5)))
    for dtype in _GEMM_DTYPES:
        side = min(sides[dtype], fits)
        rates[dtype] = _gemm(dtype, side, device, lambda run: _gpu_seconds(run, device, 3))
    return Rates(
        name=name,
        copy_gbs=2 * size / copy / 1e9,
        tflops=rates,
        floor_us=max(1.0, floor * 1e6),
        host_gbs=host.numel() / link / 1e9,
        source=_source(),
    )


def _measure_cpu(name: str) -> Rates:
    source = torch.zeros(2**25, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy = _cpu_seconds(lambda: target.copy_(source))
    tiny = torch.zeros(1)
    floor = _cpu_seconds(lambda: _often(tiny)) / LAUNCHES
    device = torch.device("cpu")
    rates = {d: _gemm(d, 256, device, _cpu_seconds) for d in _GEMM_DTYPES}
    return Rates(name, 2 * 2**25 / copy / 1e9, rates, max(1.0, floor * 1e6), source=_source())


def _often(tensor: torch.Tensor) -> None:
    for _ in range(LAUNCHES):
        tensor.add_(1)


def _gemm(
    dtype: str, side: int, device: torch.device, seconds: Callable[[Callable[[], Any]], float]
) -> float:
    """1e12 operations a second of a square product."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        # Not of ones: a GPU computes those at higher clocks than a model's values.
        own = torch.Generator(device).manual_seed(0)
        a = torch.empty(side, side, dtype=kind, device=device).uniform_(-1, 1, generator=own)
        out = torch.empty_like(a)
        return 2 * side**3 / seconds(lambda: torch.mm(a, a, out=out)) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def _gpu_seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """The shortest of a few runs; a run is timed by events on the device."""
    run()
    best = math.inf
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return max(best, 1e-9)


def _cpu_seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    run()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def _source() -> str:
    return f"calibrated {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"


# ---- the file


def _rates(data: Any, name: str) -> Rates | None:
    """Rates from plain data; None where anything in it is not as written."""
    try:
        tflops = {str(k): float(v) for k, v in data["tflops"].items()}
        numbers = [float(data[k]) for k in ("copy_gbs", "floor_us", "host_gbs")]
        source = str(data["source"])
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    sane = all(math.isfinite(v) and v > 0 for v in (*tflops.values(), *numbers[:2]))
    if not sane or "float32" not in tflops:
        return None
    return Rates(name, numbers[0], tflops, numbers[1], max(0.0, numbers[2]), source)


def _keep(rates: Rates) -> None:
    entry = dataclasses.asdict(rates)
    del entry["name"]
    store(FILE, rates.name, entry)
