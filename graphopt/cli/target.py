"""What a command works on: the factory, the rules and the functions that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from graphopt.passes import Rule


class UsageError(Exception):
    """The command line names something that is not there or fails; its text says what."""


def load_target(
    text: str, mode: str | None = None
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its inputs that "package.module:factory" makes.

    Args:
        text: where the factory is; the current folder is searched after the installed packages. In
            place of the module the path of a file may stand, "scripts/train.py:factory".
        mode: "train" or "eval" to set the model's mode, None to leave it.

    Returns:
        The model, its positional and its keyword arguments.

    Raises:
        UsageError: when there is no such module or function, it raises, or returns something else.
    """
    import torch

    factory = load_function(text, "factory")
    try:
        made = factory()
    except (Exception, SystemExit) as error:  # the user's code; `--traceback` shows all of it
        raise UsageError(f"{text} raised {_told(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise UsageError(f"{text} returned {type(made).__name__}, not a pair (model, inputs)")
    model, inputs = made
    if mode is not None:
        model.train(mode == "train")
    if isinstance(inputs, torch.Tensor):
        return model, (inputs,), {}
    if isinstance(inputs, tuple):
        return model, inputs, {}
    if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding is one too
        return model, (), dict(inputs)
    raise UsageError(
        f"{text} returned inputs of type {type(inputs).__name__}; "
        "a tensor, a tuple or a dict is needed"
    )


def load_rules(names: str, own: list[str]) -> str | list[str | Rule]:
    """The `rules=` argument that `--rules` and `--rule` spell.

    Args:
        names: what `--rules` says.
        own: each `--rule`, "package.module:name".

    Raises:
        UsageError: when there is no such rule.
    """
    from graphopt.passes import Rule

    if not own:
        return names
    found: list[str | Rule] = [names]
    for text in own:
        rule = load_object(text, "rule")
        if not isinstance(rule, Rule):
            raise UsageError(f"{text} is a {type(rule).__name__}, not a graphopt.passes.Rule")
        found.append(rule)
    return found


def load_function(text: str, what: str) -> Callable[..., Any]:
    """The function that "package.module:name" names.

    Args:
        text: where it is.
        what: what it is to be, for messages.

    Raises:
        UsageError: when it is not there or cannot be called.
    """
    found = load_object(text, what)
    if not callable(found):
        raise UsageError(f"{text} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def load_object(text: str, what: str) -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        UsageError: when the module or the name is not there, or the module fails as it is imported.
    """
    module_name, colon, name = text.rpartition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{text!r} is not of the form package.module:{what}")
    # At the end: a folder here named like an installed package must not hide it.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    is_file = module_name.endswith(".py")
    if is_file and not os.path.isfile(module_name):
        raise UsageError(f"there is no file {module_name}")
    try:
        module = _run_file(module_name) if is_file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"no module named {error.name!r} here or installed") from None
        raise UsageError(f"importing {module_name} raised {_told(error)}") from error
    except (Exception, SystemExit) as error:  # the user's code; `--traceback` shows all of it
        raise UsageError(f"importing {module_name} raised {_told(error)}") from error
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{module_name} has no function {name!r}; it has {', '.join(public)}")
    return getattr(module, name)


def _run_file(path: str) -> types.ModuleType:
    """The module that a file makes; what lies beside it can be imported, as when it is run."""
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    if folder not in sys.path:
        sys.path.append(folder)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == os.path.join(folder, file):
        return known
    if known is not None or name in sys.stdlib_module_names:  # must not stand in for that one
        name = f"_graphopt_target_{name}"
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: BaseException) -> str:
    """An error of the user's code with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {error}{place}"
