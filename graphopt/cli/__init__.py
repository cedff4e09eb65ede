"""The command line: `graphopt explain | report | diff | verify | bisect | bench`, and the like.

Exit codes: 0 good, 1 the verdict is bad or graphopt raised one of its errors, 2 wrong usage (a
factory that raises included).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from graphopt.cli.parser import make_parser
from graphopt.cli.target import UsageError, load_target

__all__ = ["BAD", "GOOD", "USAGE", "UsageError", "load_target", "main"]

GOOD, BAD, USAGE = 0, 1, 2
INTERRUPTED = 130  # as a shell has it for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, those of the process by default.

    Returns:
        The exit code: 0 good, 1 bad verdict or a graphopt error, 2 usage.

    Example:
        >>> main(["rules", "--json"])  # doctest: +SKIP
        0
    """
    arguments = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], bool] = arguments.command
    # Imported here: `graphopt --help` need not load torch.
    from graphopt.errors import GraphOptError, OptionError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return GOOD if command(arguments) else BAD
    except (UsageError, OptionError) as error:
        return _fail(error, USAGE, arguments)
    except GraphOptError as error:
        return _fail(error, BAD, arguments)
    except KeyboardInterrupt:
        print("graphopt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has what it wanted. Python would complain at exit
        # when it flushes the closed pipe; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD


def _fail(error: Exception, code: int, arguments: argparse.Namespace) -> int:
    """Tell an error on stderr, and with `--json` on stdout as an object, too."""
    if arguments.traceback:
        traceback.print_exception(error)
    name = "graphopt" if code == USAGE else type(error).__name__
    print(f"{name}: {error}", file=sys.stderr)
    if arguments.json:
        parts = {key: getattr(error, key, None) for key in ("what", "at", "why")}
        fields = {
            "kind": type(error).__name__,
            "message": str(error),
            **{**parts, "what": parts["what"] or str(error)},
            "try": getattr(error, "try_", None),
            "exit_code": code,
        }
        print(json.dumps({"error": fields}, indent=2))
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings on one line: the place in graphopt's own code says nothing to a user."""
    print(f"{category.__name__}: {message}", file=sys.stderr)
