"""The command line: `graphopt demo | explain | verify | rules | env`.

Exit codes: 0 good, 1 the verdict is bad or graphopt raised one of its errors, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import graphopt

if TYPE_CHECKING:
    import torch

GOOD, BAD, USAGE = 0, 1, 2

_TARGET = (
    "package.module:factory, a function without arguments that returns (model, inputs); inputs is "
    "a tensor, a tuple of positional arguments or a dict of keyword arguments"
)


class UsageError(Exception):
    """The command line names something that is not there; its text says what."""


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
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    # Imported here: `graphopt --help` need not load torch.
    from graphopt.errors import GraphOptError, OptionError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command(arguments)
    except (UsageError, OptionError) as error:
        print(f"graphopt: {error}", file=sys.stderr)
        return USAGE
    except GraphOptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return BAD
    except BrokenPipeError:
        # The reader of our output (`| head`) has what it wanted. Python would complain at exit
        # when it flushes the closed pipe; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphopt", description="Rewrite a PyTorch model into a faster graph, and prove it."
    )
    parser.add_argument("--version", action="version", version=graphopt.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = _add(commands, "demo", _demo, "optimize a GPT-2 with random weights, and prove it")
    demo.add_argument("--device", help="cpu or cuda; by default cuda where there is one")

    explain = _add(commands, "explain", _explain, "dry run: what would be rewritten, and why not")
    _add_target(explain)
    verify = _add(commands, "verify", _verify, "optimize, then prove every rewrite against float64")
    _add_target(verify)

    _add(commands, "rules", _rules, "list the rewrite rules")
    _add(commands, "env", _env, "versions, devices, and how fused ops run here")
    return parser


def _add(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help=_TARGET)
    parser.add_argument("--mode", choices=("train", "eval"), help="set before; as built by default")
    parser.add_argument(
        "--rules", default="default", metavar="TEXT", help='for example "default,-glu"'
    )


def _demo(arguments: argparse.Namespace) -> int:
    from graphopt import demo

    try:
        result = demo.run(device=arguments.device, quiet=arguments.json)
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise UsageError("the demo needs transformers: pip install 'graphopt[demo]'") from None
    if arguments.json:
        _print_json(result.to_dict())
    return GOOD if result.passed else BAD


def _explain(arguments: argparse.Namespace) -> int:
    from graphopt.report.explain import explain
    from graphopt.report.view import show

    model, args, kwargs = load_target(arguments.target, arguments.mode)
    found = explain(model, args, kwargs, rules=arguments.rules)
    if arguments.json:
        _print_json(found.to_dict())
    else:
        show(found.headline, found.tables())
        show("\n" + found.closing)
    return GOOD


def _verify(arguments: argparse.Namespace) -> int:
    from graphopt.report.proof import proof_table, proof_text
    from graphopt.report.view import show

    model, args, kwargs = load_target(arguments.target, arguments.mode)
    opt = graphopt.optimize(model, args, kwargs, rules=arguments.rules)
    result = graphopt.verify(opt, args, kwargs)
    if arguments.json:
        _print_json(result.to_dict())
    else:
        show("", [proof_table(result)])
        show(proof_text(result))
    return GOOD if result.passed else BAD


def _rules(arguments: argparse.Namespace) -> int:
    from graphopt.passes import all_rules
    from graphopt.report.table import Table
    from graphopt.report.view import show

    rows = [
        {"name": r.name, "family": r.family, "doc": r.doc.split("\n")[0], "module": r.module}
        for r in all_rules()
    ]
    if arguments.json:
        _print_json(rows)
        return GOOD
    cells = (
        (row["name"], row["module"].removeprefix("graphopt.").replace(".", "/") + ".py", row["doc"])
        for row in rows
    )
    show("", [Table(("rule", "lives in", "what it does"), tuple(cells))])
    return GOOD


def _env(arguments: argparse.Namespace) -> int:
    from graphopt.env import describe

    environment = describe()
    if arguments.json:
        _print_json(environment.to_dict())
    else:
        print(environment)
    return GOOD


def load_target(
    text: str, mode: str | None = None
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its inputs that "package.module:factory" makes.

    Args:
        text: where the factory is; the current folder is searched after the installed packages.
        mode: "train" or "eval" to set the model's mode, None to leave it.

    Returns:
        The model, its positional and its keyword arguments.

    Raises:
        UsageError: when there is no such module or function, or it returns something else.
    """
    import torch

    factory = _find_factory(text)
    made = factory()
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


def _find_factory(text: str) -> Callable[[], Any]:
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{text!r} is not of the form package.module:factory")
    # At the end: a folder here named like an installed package must not hide it.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"no module named {error.name!r} here or installed") from None
    factory = getattr(module, name, None)
    if not callable(factory):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{module_name} has no function {name!r}; it has {', '.join(public)}")
    found: Callable[[], Any] = factory
    return found


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
