"""Fused operators: Triton on CUDA, plain torch on every other device, one meaning for both.

``import graphopt.kernels`` defines every ``torch.ops.graphopt.*``. It imports neither Triton nor
touches a GPU: Triton is loaded by the first launch.

Example:
    >>> import torch, graphopt.kernels as kernels
    >>> sorted(kernels.registry())[:2]  # doctest: +SKIP
    ['add_layer_norm', 'add_rms_norm']
    >>> torch.ops.graphopt.rms_norm(torch.ones(2, 8), None, 1e-6).shape
    torch.Size([2, 8])
"""

if __name__ == "kernels":
    raise ImportError(
        "this folder is graphopt's `kernels/`, imported as a top-level package\n"
        "  why  its operators would be defined twice, and the name belongs to another package\n"
        "  try  import graphopt.kernels (install with `pip install -e .`)"
    )

import importlib

from graphopt.kernels._op import Cost, Op, Sample, registry

# One module a family; importing it defines its operators.
FAMILIES = (
    "_philox",
    "norm",
    "activation",
    "glu",
    "dropout",
    "rope",
    "linear",
    "linear_rope",
    "functional",
    "cast",
    "cross_entropy",
    "linear_cross_entropy",
)


def load() -> dict[str, Op]:
    """Import every family and return the registry, by operator name.

    Example:
        >>> load()["layer_norm"].random
        True
    """
    for family in FAMILIES:
        importlib.import_module(f"graphopt.kernels.{family}")
    return registry()


load()

__all__ = ["FAMILIES", "Cost", "Op", "Sample", "load", "registry"]
