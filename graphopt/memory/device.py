"""What operations take from the allocator beside their results: workspaces and inner buffers.

A dispatch mode sees what an operation returns, not what it allocates inside. Three things matter:

- cuBLAS keeps one workspace a thread and stream, taken at the first product ever and never given
  back: the forward's thread has one, autograd's another (32 MiB each on an H200, measured).
  cuBLASLt, which adds a bias to a product, has another for each thread (1 MiB, measured).
- Operations take workspaces and copies for the length of a call: each kind and size of call is
  measured once on the device (`graphopt.memory.cpucalls`, `graphopt.memory.gpucalls`).
- graphopt's kernels allocate in their launch functions, which run on fake tensors with the kernels
  themselves left out.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphopt.memory import trial
from graphopt.memory.cpucalls import cpu_call, guessed
from graphopt.memory.forms import APART, apart
from graphopt.memory.gpucalls import gpu_call
from graphopt.memory.inplace import beside
from graphopt.memory.labels import Label
from graphopt.memory.tracker import Allocation, StorageTracker, storages_of

GEMMS = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "dot"})
"""ATen operations that run on cuBLAS."""


def gemm_workspace(device: torch.device) -> int:
    """Bytes that cuBLAS keeps for one thread, as torch sets it up.

    `CUBLAS_WORKSPACE_CONFIG` is honoured; else 32 MiB from compute capability 9.0 on and 8,320 KiB
    below. 0 on the CPU.
    """
    if device.type != "cuda":
        return 0
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    parts = given.split(":")[1:]
    if given.startswith(":") and len(parts) % 2 == 0 and all(p.isdigit() for p in parts):
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return 1024 * sum(int(size) * int(count) for size, count in pairs)
    major = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 9
    return 32 * 2**20 if major >= 9 else 8320 * 1024


def lt_workspace(device: torch.device) -> int:
    """Bytes that cuBLASLt keeps for one thread beside cuBLAS, as torch sets it up.

    1 MiB, or the KiB that `CUBLASLT_WORKSPACE_SIZE` says, and no more than cuBLAS has; 0 where it
    shares that of cuBLAS, where it is switched off (`DISABLE_ADDMM_CUDA_LT`), and on the CPU.
    """
    # torch can tell its size since it shares cuBLAS's by itself; before, one had to ask for that
    by_itself = hasattr(torch.backends.cuda, "cublaslt_workspace_size")
    shared = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", str(int(by_itself)))
    if device.type != "cuda" or shared == "1" or os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return 0
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return min(1024 * int(given) if given.isdigit() else 2**20, gemm_workspace(device))


def adds_bias(name: str, args: Any) -> bool:
    """Whether an operation is a product that cuBLASLt adds a bias to."""
    if name == "linear":
        return len(args) > 2 and args[2] is not None and min(args[1].shape) > 1
    if name != "addmm" or args[0].dim() != 1:
        return False
    return min(args[2].shape) > 1 and args[0].shape[0] == args[2].shape[1]


class Inside:
    """Adds what operations take inside to a tracker's record.

    Args:
        device: whose operations they are.
        real: whether calls may be measured there.

    Attributes:
        unknown: operations whose inner allocations could not be measured.
    """

    def __init__(self, device: torch.device, real: bool) -> None:
        self.device = device
        self.unknown: set[str] = set()
        self._real = real
        self._workspace, self._lt_workspace = gemm_workspace(device), lt_workspace(device)
        self._kept: dict[tuple[str, bool], Allocation] = {}
        self._inside = 0  # of the operation between `whole` and `add`

    def begin(self, tracker: StorageTracker) -> None:
        """Before the step: what cuBLAS and cuBLASLt keep is there from the step before.

        How much it is shows at the first product of each thread.

        Args:
            tracker: the record.
        """
        for backward, name in ((False, "the forward's thread"), (True, "autograd's thread")):
            for library in ("cuBLAS", "cuBLASLt"):
                taken = tracker.take(
                    0, Label(f"{library} of {name}"), "", str(self.device), "workspaces"
                )
                self._kept[library, backward] = taken

    def add(
        self, tracker: StorageTracker, label: Any, backward: bool, call: tuple[Any, Any, Any, Any]
    ) -> None:
        """Add one operation.

        Args:
            tracker: the record.
            label: who ran it.
            backward: whether autograd's thread did.
            call: the overload, its arguments and its result.
        """
        func, args, _, _ = call
        if func.namespace == "aten":
            name = trial.name_of(func)
            if name in GEMMS:
                self._kept["cuBLAS", backward].bytes = self._workspace
            if adds_bias(name, args):
                self._kept["cuBLASLt", backward].bytes = self._lt_workspace
        size, self._inside = self._inside, 0
        if size:
            tracker.give_back(tracker.take(size, label, str(func), str(self.device), "temporaries"))

    def whole(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The results of an operation as the real ones lie in memory; comes before `add`.

        Args:
            func: the overload.
            args: positional arguments.
            kwargs: keyword arguments.
            out: what its fake form returned.
        """
        self._inside = 0
        name = trial.name_of(func)
        if func.namespace == "aten" and name in APART:
            out = tuple(apart(name, out))
        if not self._real:
            return out
        if func.namespace not in trial.NAMESPACES and _is_a_user_s(func, out):
            self.unknown.add(f"{func.namespace}.{name}")
        call = gpu_call if self.device.type == "cuda" else cpu_call
        taken = call(func, args, kwargs, out)
        if taken is None:
            self.unknown.add(name)
            self._inside = guessed(func, args, out) if call is cpu_call else 0
            return out
        self._inside = taken.inside + beside(func, args)
        return trial.refitted(out, taken.results) if taken.results else out


def _is_a_user_s(func: Any, out: Any) -> bool:
    """Whether an operation computes something that nobody here knows."""
    own = func.namespace.startswith("graphopt") or func.namespace in _TORCHS
    return not own and next(storages_of(out), None) is not None


_TORCHS = frozenset({"prim", "profiler", "c10d", "_c10d_functional", "inductor_prims", "rngprims"})


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Triton kernels that are launched on fake tensors do nothing in this block.

    So the launch functions run as they are, with every buffer that they allocate. Launches on real
    tensors, from other threads, go through.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with _lock_launches:
        run = JITFunction.run

        def skip(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, FakeTensor) for a in args):
                return None
            return run(self, *args, **kwargs)

        JITFunction.run = skip
        try:
            yield
        finally:
            JITFunction.run = run


_lock_launches = threading.RLock()
