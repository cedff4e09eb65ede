"""What can be typed: commands, targets, options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import graphopt
from graphopt.cli import commands

TARGET = (
    "package.module:factory or path/to/file.py:factory, a function without arguments that returns "
    "(model, inputs); inputs is a tensor, a tuple of positional arguments or a dict of keyword "
    "arguments"
)

EXIT_CODES = (
    "Exit codes: 0 good; 1 the verdict is bad, the model cannot be captured, or the output cannot "
    "be written; 2 wrong usage. With --json an error is a JSON object on stdout, too."
)


def make_parser() -> argparse.ArgumentParser:
    """The parser; `arguments.command` is the function to call."""
    parser = argparse.ArgumentParser(
        prog="graphopt",
        description="Rewrite a PyTorch model into a faster graph, and prove it.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=graphopt.__version__)
    found = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = _add(found, "demo", commands.demo, "optimize a GPT-2 with random weights, and prove it")
    demo.add_argument("--device", help="cpu or cuda; by default cuda where there is one")

    text = "dry run: what would be rewritten, and why not"
    explain = _add(found, "explain", commands.explain, text)
    _add_target(explain)

    text = "optimize, then report: what became faster, why not the rest, is it still right"
    report = _add(found, "report", commands.report, text)
    _add_target(report)
    _add_output(report, ".txt, .json or .html")
    report.add_argument("--verify", action="store_true", help="prove every rewrite, and tell it")

    diff = _add(found, "diff", commands.diff, "before and after, by module")
    _add_target(diff)
    _add_output(diff, ".txt, .json or .html")

    text = "optimize, then prove every rewrite against float64"
    verify = _add(found, "verify", commands.verify, text)
    _add_target(verify)

    bisect = _add(found, "bisect", commands.bisect, "find the rewrite that makes the model wrong")
    _add_target(bisect)
    bisect.add_argument(
        "--predicate",
        metavar="MODULE:FUNCTION",
        help="takes the optimized module, returns True where it is right; by default the error "
        "contract over the whole step",
    )

    text = "time eager, torch.compile and graphopt in one run"
    bench = _add(found, "bench", commands.bench, text)
    _add_target(bench)
    bench.add_argument(
        "--against", default="eager,compile", metavar="NAMES", help='"eager,compile" by default'
    )
    bench.add_argument("--seconds", type=float, help="how long each variant is timed")

    text = "what would help most on this device: precision, kernels, memory; it only advises"
    advise = _add(found, "advise", commands.advise, text)
    _add_model(advise)
    advise.add_argument(
        "--measured",
        action=argparse.BooleanOptionalAction,
        help="run every setting, too; by default on a GPU",
    )
    _add_resident(advise)

    text = "where the memory of a step goes, predicted without running it"
    profile = _add(found, "profile", commands.profile, text)
    _add_target(profile)
    _add_output(profile, ".txt, .json, .png, .svg or .pdf")
    profile.add_argument("--eager", action="store_true", help="the model as it is, not optimized")
    profile.add_argument(
        "--train",
        action=argparse.BooleanOptionalAction,
        help="forward and backward, or the forward alone; by default as the model is",
    )
    _add_resident(profile)

    _add(found, "rules", commands.rules, "list the rewrite rules")
    _add(found, "env", commands.env, "versions, devices, and how fused ops run here")
    return parser


def _add(
    found: Any, name: str, command: Callable[[argparse.Namespace], bool], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = found.add_parser(
        name, help=text, description=text, epilog=EXIT_CODES
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised, too"
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help=TARGET)
    parser.add_argument("--mode", choices=("train", "eval"), help="set before; as built by default")


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--rules", default="default", metavar="TEXT", help='for example "default,-glu"'
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="MODULE:RULE",
        help="a rule of your own, package.module:name; may be given several times",
    )
    parser.add_argument("--autocast", choices=("bf16", "fp16"), help="around the forward")
    parser.add_argument("--precision", choices=("bf16", "fp16", "auto"), help="as in optimize()")


def _add_resident(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resident-bytes",
        type=lambda text: int(text) if text.lstrip("-").isdigit() else text,
        default=0,
        metavar="N",
        help="what else lies on the device, such as optimizer state: bytes, or 4GiB",
    )


def _add_output(parser: argparse.ArgumentParser, suffixes: str) -> None:
    parser.add_argument(
        "-o", "--output", metavar="PATH", help=f"write it to a file, by its suffix: {suffixes}"
    )
