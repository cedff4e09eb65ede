"""The Python functions behind attributes, the names in their code, and whose code it is."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_BESIDE_TORCH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))), "")
"""The folder in which torch is installed, whatever its name: `pip install --target`, say."""


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a class attribute: a method, a property, a decorated one.

    Example:
        >>> [f.__name__ for f in functions_in(property(lambda self: 1))]
        ['<lambda>']
    """
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.cached_property):
        value = value.func
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, types.FunctionType):
        yield value


def names_of(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, inner functions' too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)


def is_torchs(module: str | None) -> bool:
    """Whether a module, by its name, is torch's."""
    return (module or "").partition(".")[0] == "torch"


@functools.cache
def is_librarys(module: str | None) -> bool:
    """Whether a module belongs to an installed package: its globals are taken as fixed."""
    name = module or "builtins"
    top = name.partition(".")[0]
    if top in ("torch", "graphopt") or (top in sys.stdlib_module_names and name != "__main__"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return installed or file.startswith(_BESIDE_TORCH)
