"""graphopt: a PyTorch module in, a readable and faster fx graph with the same numbers out.

Example:
    >>> import graphopt
    >>> opt = graphopt.optimize(model, (x,))  # doctest: +SKIP
    >>> print(opt.code)  # doctest: +SKIP

Public names load on first use: ``import graphopt`` costs next to nothing and touches neither
Triton nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.advise import advise
    from graphopt.api import optimize, verify
    from graphopt.attach import attach, detach
    from graphopt.bench import bench
    from graphopt.bisect import bisect
    from graphopt.diff import diff
    from graphopt.errors import (
        BudgetError,
        CaptureError,
        GraphOptError,
        GraphoptWarning,
        OptionError,
        PassError,
        UnsupportedError,
        VerifyError,
    )
    from graphopt.fit import fit
    from graphopt.hold import hold_weights
    from graphopt.memory.pool import configure_memory_pool
    from graphopt.memory.profile import profile_memory
    from graphopt.precision_check import precision_check
    from graphopt.report.explain import explain
    from graphopt.report.summary import report

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CaptureError",
    "GraphOptError",
    "GraphoptWarning",
    "OptionError",
    "PassError",
    "UnsupportedError",
    "VerifyError",
    "__version__",
    "advise",
    "attach",
    "bench",
    "bisect",
    "configure_memory_pool",
    "detach",
    "diff",
    "explain",
    "fit",
    "hold_weights",
    "optimize",
    "precision_check",
    "profile_memory",
    "report",
    "testing",
    "verify",
]

# Public name -> the module that defines it.
_HOME = {
    "advise": "graphopt.advise",
    "BudgetError": "graphopt.errors",
    "CaptureError": "graphopt.errors",
    "GraphOptError": "graphopt.errors",
    "GraphoptWarning": "graphopt.errors",
    "OptionError": "graphopt.errors",
    "PassError": "graphopt.errors",
    "UnsupportedError": "graphopt.errors",
    "VerifyError": "graphopt.errors",
    "attach": "graphopt.attach",
    "bench": "graphopt.bench",
    "bisect": "graphopt.bisect",
    "configure_memory_pool": "graphopt.memory.pool",
    "detach": "graphopt.attach",
    "diff": "graphopt.diff",
    "explain": "graphopt.report.explain",
    "fit": "graphopt.fit",
    "hold_weights": "graphopt.hold",
    "optimize": "graphopt.api",
    "precision_check": "graphopt.precision_check",
    "profile_memory": "graphopt.memory.profile",
    "report": "graphopt.report.summary",
    "verify": "graphopt.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name == "testing":
        return importlib.import_module("graphopt.testing")
    if name not in _HOME:
        raise AttributeError(f"module 'graphopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names that tab completion offers."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package itself: a public function wins over a submodule of the same name.

    Importing ``graphopt.verify`` makes Python bind that module on the package, which would hide the
    function ``graphopt.verify``. ``from graphopt.verify import ...`` works as ever.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
