"""One wrong use as data, and how it is tried."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from untouched import changed, snapshot
from wrong_models import block

from graphopt.errors import GraphOptError, OptionError


@dataclasses.dataclass(frozen=True)
class Use:
    """A wrong use of graphopt.

    Attributes:
        area: the function or part that is used.
        name: what is wrong, in a few words; the test's id with the area.
        call: the wrong use, given what `model` makes.
        expect: class of the error.
        words: what its message must hold.
        model: makes what is compared before and after.
        env: environment variables that are set around the call.
        eager: the same call without graphopt, where eager's own error is the right one: its class
            must be the same.
        files: makes files in the current folder before the call.
    """

    area: str
    name: str
    call: Callable[[Any], object]
    expect: type[BaseException]
    words: tuple[str, ...]
    model: Callable[[], Any] = block
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eager: Callable[[Any], object] | None = None
    files: Callable[[], object] | None = None

    def __str__(self) -> str:
        """The test's id."""
        return f"{self.area}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a wrong use did.

    Attributes:
        error: what was raised, None for nothing.
        faults: what is not as it must be; empty is good.
    """

    error: BaseException | None
    faults: tuple[str, ...]


def tried(use: Use) -> Outcome:
    """Do a wrong use in an empty folder and say what is not as it must be."""
    with _folder() as folder, mock.patch.dict(os.environ, use.env), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = use.model()
        if use.files is not None:
            use.files()
        before = snapshot(model, folder)
        exported = mock.Mock(wraps=torch.export.export)
        with mock.patch.object(torch.export, "export", exported):
            error = _raised(lambda: use.call(model))
        faults = _faults(use, error)
        if isinstance(error, OptionError) and exported.called:
            faults.append("work was done before the argument was refused")
        faults += [f"changed: {name}" for name in changed(before, snapshot(model, folder))]
        if use.eager is not None and error is not None:
            own = _raised(lambda: use.eager(use.model()))  # type: ignore[misc]
            if type(own) is not type(error):
                faults.append(f"eager raises {own!r}")
    return Outcome(error, tuple(faults))


def _faults(use: Use, error: BaseException | None) -> list[str]:
    if error is None:
        return ["nothing was raised"]
    if type(error) is not use.expect:
        return [f"{type(error).__name__} in place of {use.expect.__name__}: {error}"]
    missing = [w for w in use.words if w not in str(error)]
    faults = [f"the message lacks {w!r}: {error}" for w in missing]
    if isinstance(error, GraphOptError):
        if not error.try_:
            faults.append(f"the message has no cure: {error}")
    elif use.eager is None:
        faults.append(f"neither graphopt's error nor eager's: {error!r}")
    return faults


def _raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An empty current folder, in which what is written by mistake shows."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name).resolve()
        finally:
            os.chdir(before)
