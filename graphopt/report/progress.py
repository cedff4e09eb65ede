"""One line on a terminal that says what long work is at; nothing at all anywhere else.

The line goes to stderr, and only where stderr is a terminal, so that neither a pipe nor a log ever
holds it. It appears after a second and is wiped when the work ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

DELAY = 1.0
"""Seconds before the line appears: short work stays silent."""
INTERVAL = 0.2
"""Seconds between two writes of the line."""

Step = Callable[[str], None]


class _Line:
    """The line of this process: what each open `progress` says, outermost first."""

    def __init__(self, stream: TextIO, delay: float) -> None:
        self.stream = stream
        self.delay = delay
        self.texts: list[list[str]] = []
        self.started = time.monotonic()
        self.stop = threading.Event()
        self.shown = 0
        self.thread = threading.Thread(target=self._draw, name="graphopt-progress", daemon=True)
        self.thread.start()

    def _draw(self) -> None:
        wait = self.delay
        while not self.stop.wait(wait):
            wait = INTERVAL
            seconds = time.monotonic() - self.started
            words = ": ".join(" ".join(t for t in text if t) for text in list(self.texts))
            width = shutil.get_terminal_size().columns - 1
            self._write(f"graphopt: {words} ({seconds:.0f} s)"[:width])

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.stream.write("\r" + text.ljust(self.shown) + ("" if text else "\r"))
            self.stream.flush()
            self.shown = len(text)

    def close(self) -> None:
        """Wipe the line."""
        self.stop.set()
        self.thread.join()
        if self.shown:
            self._write("")


_current: _Line | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def progress(
    title: str, *, stream: TextIO | None = None, delay: float | None = None
) -> Iterator[Step]:
    """Show on the terminal what is being done, for as long as the block runs.

    One `progress` inside another adds to the same line. `GRAPHOPT_PROGRESS=0` in the environment
    switches it off.

    Args:
        title: what is being done: "bisect".
        stream: where to, stderr by default.
        delay: seconds before the line appears.

    Yields:
        A function that takes a text, shown behind the title: `step("3 of 12")`.

    Example:
        >>> with progress("counting") as step:
        ...     for i in range(3):
        ...         step(f"{i} of 3")
    """
    global _current
    stream = sys.stderr if stream is None else stream
    if not _is_terminal(stream):
        yield lambda text: None
        return
    with _lock:
        mine = _current is None
        if _current is None:
            _current = _Line(stream, DELAY if delay is None else delay)
        line = _current
        text = [title, ""]
        line.texts.append(text)
    try:
        yield lambda said: text.__setitem__(1, said)
    finally:
        with _lock:
            line.texts.remove(text)
            if mine:
                _current = None
        if mine:
            line.close()


def _is_terminal(stream: TextIO) -> bool:
    off = os.environ.get("GRAPHOPT_PROGRESS") == "0" or os.environ.get("TERM") == "dumb"
    return not off and stream is not None and hasattr(stream, "isatty") and stream.isatty()
