"""Where what a command says goes: a full disk is an error of one line, a closed pipe is none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class OutputError(Exception):
    """Standard output cannot be written; its text says why."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Write to standard output in the block, all of it by the end of the block.

    Where the reader has gone (`| head -1`) what is left is dropped, and the command goes on to its
    verdict.

    Raises:
        OutputError: where standard output is closed, or cannot be written, as on a full disk.
    """
    if sys.stdout is None:  # `>&-`
        raise OutputError("standard output is closed")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    except OSError as error:
        drop(sys.stdout)
        raise OutputError(error.strerror or str(error)) from error


def complain(text: str) -> None:
    """Print a line on standard error; where that cannot be written, nobody can be told."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere.

    Python flushes the standard streams as it ends, and would tell of the same fault again.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
