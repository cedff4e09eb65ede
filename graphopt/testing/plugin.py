"""A pytest fixture around `assert_equivalent`; it writes the script of a failure to a file.

Not loaded by itself: put `pytest_plugins = ["graphopt.testing.plugin"]` into the `conftest.py` at
the root of your tests, or run `pytest -p graphopt.testing.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphopt.errors import UnsupportedError
from graphopt.testing.equivalence import Equivalence, assert_equivalent
from graphopt.testing.failure import EquivalenceError

try:
    import pytest
except ImportError:
    raise UnsupportedError(
        "graphopt.testing.plugin needs pytest, which is not installed",
        try_="pip install 'graphopt[testing]'; assert_equivalent works without it",
    ) from None


@pytest.fixture(scope="session")
def graphopt_equivalent(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Equivalence]:
    """`graphopt.testing.assert_equivalent`, which writes a failure's script to a file as well.

    The file is named in the error's notes; it lies in pytest's temporary folder, with the tensors
    that are too large for it beside it. It may be called any number of times in a test, inside a
    hypothesis test as well: it is of session scope.

    Example:
        >>> def test_block(graphopt_equivalent):  # doctest: +SKIP
        ...     graphopt_equivalent(model, graphopt.optimize(model), x)
    """

    def check(*args: Any, **kwargs: Any) -> Equivalence:
        __tracebackhide__ = True
        try:
            return assert_equivalent(*args, **kwargs)
        except EquivalenceError as error:
            if error.script:
                path = error.save(Path(tmp_path_factory.mktemp("graphopt")))
                _add_note(error, f"the script is {path}")
            raise

    return check


def _add_note(error: Exception, text: str) -> None:
    """A line after the error's message; Python 3.10 has no notes, so it goes into the message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}",)
