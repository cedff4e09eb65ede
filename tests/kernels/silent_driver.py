"""A Triton driver without a GPU: kernels are compiled for one, loaded and launched into nothing.

`install()` makes graphopt launch its kernels on CPU tensors that way, so that what a launch costs
the host, and which compiled kernel it picks, can be looked at on any machine. Results are whatever
the memory held. For a process of its own, in which Triton's interpreter is not asked for.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphopt.kernels import _launch

LAUNCHES: list[tuple[str, int, tuple[int, int, int], tuple[Any, ...]]] = []
"""What was launched while `Silent.recording`: kernel, function, grid, arguments."""


class Launcher:
    """Takes the place of Triton's launcher."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any,
        launch_metadata: Any, enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        """Launch nothing."""
        if Silent.recording:
            LAUNCHES.append((self.name, function, (x, y, z), arguments))


class Utils:
    """What Triton's driver does with binaries."""

    _handles = itertools.count(1)

    @classmethod
    def load_binary(cls, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, most threads), each load a function of its own."""
        return 1, next(cls._handles), 32, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None:
        """Nothing to unload."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """Of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class Silent:
    """The driver."""

    recording = False
    utils = Utils()
    launcher_cls = Launcher

    def get_current_device(self) -> int:
        """The one device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The one stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """As on an H200."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors lie."""
        return torch.device("cpu")


def install() -> None:
    """From now on every operator launches, on any tensor."""
    driver.set_active(Silent())
    _launch.use_triton = lambda tensor: True
    _launch.INTERPRETER_SMS = 132
