"""Values that refer to modules of a source, made to refer to their copies in a shadow.

A list of layers, a bound method, a `partial`, a function whose closure, defaults or globals hold a
module (`model.forward = lambda x: model.layer(x)`): run as they are, they would read, write and
call the source itself, past the shadow that is traced.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from typing import Any

from graphopt.capture.functions import is_librarys, names_of

_DEEPEST = 4
"""How far containers and functions are followed from one value to the next."""


def mended(value: Any, links: dict[int, Any], depth: int = 0) -> Any:
    """The value with each source module in it replaced by its copy.

    Args:
        value: an attribute of a module; itself unchanged.
        links: id of a module of the source -> its copy; copies of lists, dicts and functions are
            added, so that what two modules share stays shared between their copies.
        depth: of the containers around it.

    Returns:
        The value itself where nothing in it refers to a source module.
    """
    if id(value) in links:
        return links[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in links:
        return types.MethodType(value.__func__, links[id(value.__self__)])
    if isinstance(value, weakref.ref) and id(value()) in links:
        return weakref.ref(links[id(value())])
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        found = [mended(part, links, depth) for part in parts]
        if all(a is b for a, b in zip(parts, found, strict=True)):
            return value
        count = len(value.args) + 1
        named = dict(zip(value.keywords, found[count:], strict=True))
        return functools.partial(found[0], *found[1:count], **named)
    if isinstance(value, types.FunctionType):
        return _function(value, links) if _reaches(value, links, set(), 0) else value
    if depth >= _DEEPEST or type(value) not in (list, tuple, dict):
        return value
    copy = _container(value, links, depth + 1)
    if type(value) is not tuple:
        links[id(value)] = copy
    return copy


def _container(value: Any, links: dict[int, Any], depth: int) -> Any:
    if type(value) is dict:
        return {k: mended(v, links, depth) for k, v in value.items()}
    items = [mended(v, links, depth) for v in value]
    if type(value) is tuple and all(a is b for a, b in zip(items, value, strict=True)):
        return value
    return type(value)(items)


def _reaches(value: Any, links: dict[int, Any], seen: set[int], depth: int) -> bool:
    """Whether a value refers to a source module (or to what has a copy already)."""
    if id(value) in links:
        return True
    if id(value) in seen or depth > _DEEPEST:
        return False
    seen.add(id(value))
    inner: Any = ()
    if isinstance(value, types.MethodType):
        inner = (value.__self__,)
    elif isinstance(value, weakref.ref):
        inner = (value(),)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        inner = (
            *_cells(value).values(),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *_globals(value).values(),
        )
    elif type(value) in (list, tuple):
        inner = value
    elif type(value) is dict:
        inner = value.values()
    return any(_reaches(part, links, seen, depth + 1) for part in inner)


def _function(function: types.FunctionType, links: dict[int, Any]) -> types.FunctionType:
    """The same code over cells, defaults and globals in which the copies stand.

    A cell without a source module stays the same cell, so that what the function writes to it is
    seen; so do globals, of which a copy is made only where one names a source module.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    new = {n: _new_cell(n, cell, function, links) for n, cell in cells.items()}
    named = {n: v for n, v in _globals(function).items() if _reaches(v, links, set(), 1)}
    scope = {**function.__globals__} if named else function.__globals__
    made = types.FunctionType(
        function.__code__, scope, function.__name__, closure=tuple(new.values()) or None
    )
    links[id(function)] = made  # before what it holds: a function may refer to itself
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__defaults__ = mended(function.__defaults__, links)
    made.__kwdefaults__ = mended(function.__kwdefaults__, links)
    scope.update((name, mended(value, links)) for name, value in named.items())
    for name, cell in new.items():
        if cell is not cells[name]:
            cell.cell_contents = mended(cells[name].cell_contents, links)
    return made


def _new_cell(
    name: str, cell: types.CellType, function: types.FunctionType, links: dict[int, Any]
) -> types.CellType:
    held = _cells(function)
    return types.CellType() if name in held and _reaches(held[name], links, set(), 1) else cell


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet assigned
            found[name] = cell.cell_contents
    return found


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a user's function names."""
    if is_librarys(function.__module__):
        return {}
    scope = function.__globals__
    return {n: scope[n] for n in dict.fromkeys(names_of(function.__code__)) if n in scope}
