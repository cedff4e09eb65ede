"""What every test shares: GPU tests are skipped where there is no GPU, hypothesis's profiles."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Before anything imports Triton, which reads it then: without a GPU the tests run its kernels in
# its interpreter (tests/kernels; elsewhere operators on the CPU take their reference all the same).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `pytest -n N`: the workers share the cores instead of each taking all of them.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", settings.get_profile("ci"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _declare_torchvision_ops() -> None:
    """Let timm and transformers import beside a CPU build of torch.

    PyPI's torchvision is compiled for torch's CUDA build and finds none of its ops there. It
    describes two of them to torch at import, which then fails. No test runs them, so declaring
    their schemas is enough.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)
    except ImportError:
        pass


_KEPT_ALIVE: list[torch.library.Library] = []
_declare_torchvision_ops()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine that has none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
