"""How long an operation takes, from its bytes and FLOPs and the rates of a device."""

from __future__ import annotations

import dataclasses
import functools

import torch

from graphopt.cost.ops import Cost


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        name: the device, as torch names it.
        copy_gbs: bytes read and written by a large copy, in 1e9 bytes a second.
        tflops: matrix products by dtype ("bfloat16", "float16", "float32", "tf32", "float64"), in
            1e12 operations a second, two for a multiply-add.
        floor_us: the least time that a kernel takes, launch included, in microseconds.
        host_gbs: copies to and from pinned host memory, in 1e9 bytes a second and direction; 0
            where there is no such link.
        source: where the figures come from.

    Example:
        >>> rates = Rates("mine", 1000.0, {"float32": 10.0}, 4.0)
        >>> rates.ms(Cost(10**9, 0), torch.float32)
        1.0
    """

    name: str
    copy_gbs: float
    tflops: dict[str, float]
    floor_us: float
    host_gbs: float = 0.0
    source: str = "given"

    def ms(self, cost: Cost, dtype: torch.dtype | None) -> float:
        """Milliseconds of one operation; no time at all for one that does nothing.

        Args:
            cost: what it moves and computes.
            dtype: of its operands; None counts as float32.
        """
        if not cost.bytes and not cost.flops:
            return 0.0
        moving = cost.bytes / (self.copy_gbs * 1e6)
        computing = cost.flops / (self.tflops_of(dtype) * 1e9)
        return max(self.floor_us / 1e3, moving, computing)

    def tflops_of(self, dtype: torch.dtype | None) -> float:
        """The rate of matrix products of a dtype; float32's where the dtype has none."""
        name = str(dtype or torch.float32).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        return self.tflops.get(name) or self.tflops["float32"]

    def offload_ms(self, size: int) -> float:
        """Milliseconds to move some bytes to the host, one way; infinite without a link."""
        return size / (self.host_gbs * 1e6) if self.host_gbs else float("inf")


# Measured on 2026-12-02 with graphopt's benchmarks: copy, floor, the link to the host, and bf16
# products as they ran within a language model's training step (772 over all of a step's; alone, on
# a cooler device, one reached 806). What was not measured is the data sheet's: tf32 at half of
# bf16, float32 and float64 outside and inside tensor cores.
H200 = Rates(
    name="NVIDIA H200",
    copy_gbs=4250.0,
    tflops={
        "bfloat16": 770.0,
        "float16": 770.0,
        "tf32": 385.0,
        "float32": 60.0,
        "float64": 60.0,
    },
    floor_us=4.0,
    host_gbs=54.0,
    source="H200, 2026-12-02",
)

# `calibrate("cpu")` with one thread on a shared x86 server core that has no fast float16.
CPU = Rates(
    name="cpu",
    copy_gbs=13.4,
    tflops={"bfloat16": 0.134, "float16": 0.003, "float32": 0.09, "tf32": 0.09, "float64": 0.04},
    floor_us=3.0,
    source="one core of a shared x86 server, 2026-12-01",
)

_measured: dict[str, Rates] = {}
"""Device name -> what `calibrate` found in this process."""


def use_rates(rates: Rates) -> None:
    """Take some rates for a device from now on, in this process."""
    _measured[rates.name] = rates


def rates_of(device: torch.device | str) -> Rates:
    """The rates of a device.

    What was calibrated (in this process, or before and kept on disk) comes first, then what is
    built in; a GPU that neither knows is calibrated now, in well under a second.

    Args:
        device: "cpu", "cuda", "cuda:1"; "cuda" without a GPU here means an H200.

    Example:
        >>> rates_of("cpu").copy_gbs > 0
        True
    """
    from graphopt.cost.calibrate import calibrate, kept

    found = torch.device(device)
    if found.type != "cuda":
        return _measured.get("cpu") or kept("cpu") or CPU
    if not torch.cuda.is_available():
        return H200
    name = _gpu_name(found.index if found.index is not None else torch.cuda.current_device())
    known = _measured.get(name) or kept(name)
    if known is not None:
        return known
    return H200 if H200.name in name else calibrate(found)


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
