"""Write a result to a file: checked before any work, and never half-written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphopt.errors import OptionError


def check_path(path: Any, suffixes: Sequence[str]) -> Path:
    """A path that can be written, with one of some suffixes.

    Args:
        path: text or a `Path`.
        suffixes: which are served: ".txt", ".json".

    Raises:
        OptionError: for another type or suffix; when the folder is not there or the path cannot be
            written. Nothing is left behind.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"path is of type {type(path).__name__}", try_="a text or a pathlib.Path")
    found = Path(path)
    if found.suffix.lower() not in suffixes:
        raise OptionError(
            f"{found} ends in {found.suffix or 'no suffix'!r}", try_=f"one of {', '.join(suffixes)}"
        )
    if found.is_dir():
        raise OptionError(f"{found} is a folder", try_=f"{found / 'report'}{suffixes[0]}")
    if not found.parent.is_dir():
        raise OptionError(f"there is no folder {found.parent}", try_="make it first")
    if found.exists() and not os.access(found, os.W_OK):
        raise OptionError(f"{found} cannot be written", try_="another path")
    try:
        os.unlink(_temporary(found))
    except OSError as error:
        raise OptionError(
            f"{found} cannot be written", why=error.strerror or str(error), try_="another path"
        ) from None
    return found


def save(path: Path, text: str) -> None:
    """Write a text as UTF-8, all of it or none: a file that was there stays until it is complete.

    Raises:
        OptionError: when it cannot be written, such as on a full disk.
    """
    temporary = ""
    try:
        temporary = _temporary(path)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OptionError(
            f"{path} could not be written",
            why=error.strerror or str(error),
            try_="another path; what was there before is as it was",
        ) from error


def _temporary(path: Path) -> str:
    """A new, empty file beside a path, with the permissions that a new file has."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, 0o666 & ~mask)
    return name


def json_text(data: Any) -> str:
    """Plain data as JSON text; infinities and NaNs, which JSON cannot hold, become null.

    Example:
        >>> print(json_text([float("inf")]).split())
        ['[', 'null', ']']
    """
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(k): _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
