"""For tests of models that use graphopt: `assert_equivalent`, strategies, a pytest fixture.

`assert_equivalent` needs torch alone. The strategies need hypothesis and the fixture
(`graphopt.testing.plugin`) needs pytest: `pip install 'graphopt[testing]'`.

Example:
    >>> from graphopt.testing import assert_equivalent  # doctest: +SKIP
    >>> assert_equivalent(model, graphopt.optimize(model), x)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.testing.equivalence import Equivalence, assert_equivalent
    from graphopt.testing.failure import EquivalenceError
    from graphopt.testing.programs import Program, programs, random_program
    from graphopt.testing.strategies import (
        dtypes,
        inputs_like,
        laid_out,
        lay_out,
        make_values,
        shapes,
        tensors,
        upstream_gradients,
        values,
    )

__all__ = [
    "Equivalence",
    "EquivalenceError",
    "Program",
    "assert_equivalent",
    "dtypes",
    "inputs_like",
    "laid_out",
    "lay_out",
    "make_values",
    "programs",
    "random_program",
    "shapes",
    "tensors",
    "upstream_gradients",
    "values",
]

# Public name -> the module that defines it; what is not listed here stands in strategies.
_HOME = {
    "Equivalence": "equivalence",
    "EquivalenceError": "failure",
    "Program": "programs",
    "assert_equivalent": "equivalence",
    "programs": "programs",
    "random_program": "programs",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module 'graphopt.testing' has no attribute {name!r}")
    home = importlib.import_module(f"graphopt.testing.{_HOME.get(name, 'strategies')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names that tab completion offers."""
    return sorted({*globals(), *__all__})
