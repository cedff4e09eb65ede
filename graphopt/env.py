"""What this machine has, and what that means for graphopt: the facts that a bug report needs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "networkx", "rich", "transformers", "timm")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Versions, devices and settings of this process.

    Attributes:
        versions: package name -> version, None where it is not installed; "python" too.
        platform: operating system and processor, as `platform.platform()` says it.
        devices: one text per CUDA device: name, compute capability, memory.
        cuda: CUDA version that torch was built for, None for a CPU build.
        kernels: "triton" where the fused ops run as Triton kernels, "reference" where not.
        why: one sentence: what `kernels` comes from and what it means.
        variables: the GRAPHOPT_* and TRITON_INTERPRET variables that are set.

    Example:
        >>> describe().kernels in ("triton", "reference")
        True
    """

    versions: dict[str, str | None]
    platform: str
    devices: tuple[str, ...]
    cuda: str | None
    kernels: str
    why: str
    variables: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The same facts, one a line."""
        rows = {name: version or "not installed" for name, version in self.versions.items()}
        rows["platform"] = self.platform
        rows["cuda"] = self.cuda or "none (CPU build of torch)"
        rows["devices"] = "; ".join(self.devices) or "none"
        rows["kernels"] = f"{self.kernels}: {self.why}"
        rows["settings"] = " ".join(f"{k}={v}" for k, v in self.variables.items()) or "none"
        return "\n".join(f"{name:<13} {value}" for name, value in rows.items())


def describe() -> Environment:
    """Look at this process: versions, devices, and how the fused ops will run here.

    Nothing is imported or compiled for it but torch.

    Example:
        >>> describe().versions["torch"] == torch.__version__
        True
    """
    devices = tuple(_device(i) for i in range(torch.cuda.device_count()))
    has_triton = importlib.util.find_spec("triton") is not None
    kernels, why = _kernels(bool(devices), has_triton)
    names = ("GRAPHOPT_", "TRITON_INTERPRET")
    return Environment(
        versions={
            "graphopt": _version("graphopt"),
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        platform=platform.platform(),
        devices=devices,
        cuda=torch.version.cuda,
        kernels=kernels,
        why=why,
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(names)},
    )


def _kernels(has_device: bool, has_triton: bool) -> tuple[str, str]:
    if has_device and has_triton:
        return "triton", "fused ops on CUDA tensors run as Triton kernels"
    if has_device:
        return (
            "reference",
            "Triton is not installed, so fused ops run their plain torch reference and nothing "
            "gets faster; `pip install triton`",
        )
    return (
        "reference",
        "no CUDA device, so fused ops run their plain torch reference: same graph, same numbers, "
        "no speed-up",
    )


def _device(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    gib = properties.total_memory / 2**30
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {gib:.0f} GiB"


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # the build's own word: names the local build (+cpu, +cu130)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
