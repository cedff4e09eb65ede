"""The command line: `graphopt explain | report | diff | verify | bisect | bench`, and the like.

Exit codes: 0 good, 1 the verdict is bad or graphopt raised one of its errors, 2 wrong usage (a
factory that raises included).
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from graphopt.cli.output import OutputError, complain, drop, writing
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
        The exit code: 0 good, 1 bad verdict, a graphopt error or output that cannot be written,
        2 usage.

    Example:
        >>> main(["rules", "--json"])  # doctest: +SKIP
        0
    """
    try:
        return _run(argv)
    except OutputError as error:
        complain(f"graphopt: cannot write the output: {error}")
        return BAD
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            drop(sys.stderr)


def _run(argv: Sequence[str] | None) -> int:
    with writing():  # --help and --version write, too
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
    except OutputError:
        raise
    except Exception as error:  # the model's own, which calling it raises, too
        code = _fail(error, BAD, arguments)
        if not arguments.traceback:
            complain("  try  --traceback, which shows where it was raised")
        return code
    except KeyboardInterrupt:
        complain("graphopt: interrupted")
        return INTERRUPTED


def _fail(error: Exception, code: int, arguments: argparse.Namespace) -> int:
    """Tell an error on stderr, and with `--json` on stdout as an object, too."""
    if arguments.traceback:
        complain("".join(traceback.format_exception(error)).rstrip())
    name = "graphopt" if code == USAGE else type(error).__name__
    complain(f"{name}: {error}")
    if arguments.json:
        parts = {key: getattr(error, key, None) for key in ("what", "at", "why")}
        fields = {
            "kind": type(error).__name__,
            "message": str(error),
            **{**parts, "what": parts["what"] or str(error)},
            "try": getattr(error, "try_", None),
            "exit_code": code,
        }
        with writing():
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
    complain(f"{category.__name__}: {message}")
