"""Small JSON files of measurements, kept for the next process."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptWarning

VERSION = 1
"""Of the files' layout; a file of another version counts as none."""

_told: set[str] = set()


def folder() -> Path:
    """Where they lie: `$GRAPHOPT_CACHE_DIR`, else `graphopt` in the user's cache folder.

    Raises:
        RuntimeError: where the user has no home.
    """
    given = os.environ.get("GRAPHOPT_CACHE_DIR")
    if not given:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        given = os.path.join(base, "graphopt")
    return Path(given).expanduser()


def load(file: str, device: str) -> dict[str, Any]:
    """What is kept for a device; empty where there is nothing, or a file is damaged.

    Args:
        file: its name in `folder()`.
        device: the device's name.
    """
    found = _devices(file).get(device)
    return found if isinstance(found, dict) else {}


def store(file: str, device: str, entry: dict[str, Any]) -> bool:
    """Keep something for a device; whether it could be written. A warning says so once where not.

    Args:
        file: its name in `folder()`.
        device: the device's name.
        entry: plain data.
    """
    temporary = ""
    try:
        path = folder() / file
        data = {"version": VERSION, "devices": {**_devices(file), device: entry}}
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file}.", dir=path.parent)
        with open(handle, "w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=1)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
        if file not in _told:
            _told.add(file)
            warnings.warn(
                f"what was measured of {device} could not be kept ({error}): it holds for this"
                " process. GRAPHOPT_CACHE_DIR names another folder",
                GraphoptWarning,
                stacklevel=3,
            )
        return False
    return True


def _devices(file: str) -> dict[str, Any]:
    try:
        data = json.loads((folder() / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none there, damaged, no home
        return {}
    if not isinstance(data, dict) or data.get("version") != VERSION:
        return {}
    devices = data.get("devices")
    return devices if isinstance(devices, dict) else {}
