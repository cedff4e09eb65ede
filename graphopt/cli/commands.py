"""The commands: each takes the parsed arguments and returns whether the verdict is good."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.cli.output import writing
from graphopt.cli.target import UsageError, load_function, load_rules, load_target

if TYPE_CHECKING:
    from torch import nn

    from graphopt.module import GraphoptModule
    from graphopt.report.table import Table
    from graphopt.report.view import Part
    from graphopt.verdict import VerifyResult


def demo(arguments: argparse.Namespace) -> bool:
    """`graphopt demo`."""
    from graphopt import demo as demonstration

    try:
        result = demonstration.run(arguments.device, None if arguments.json else _say)
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise UsageError("the demo needs transformers: pip install 'graphopt[demo]'") from None
    if arguments.json:
        _print_json(result.to_dict())
    return result.passed


def explain(arguments: argparse.Namespace) -> bool:
    """`graphopt explain TARGET`."""
    from graphopt.report.explain import explain as explain_

    rules = load_rules(arguments.rules, arguments.rule)
    model, args, kwargs = load_target(arguments.target, arguments.mode)
    with autocast(model, arguments.autocast):
        found = explain_(model, args, kwargs, rules=rules, precision=arguments.precision)
    _show(arguments, found.to_dict(), found.parts())
    return True


def report(arguments: argparse.Namespace) -> bool:
    """`graphopt report TARGET`."""
    import graphopt
    from graphopt.report.save import check_path
    from graphopt.report.summary import SUFFIXES, write

    path = check_path(arguments.output, SUFFIXES) if arguments.output else None
    opt, args, kwargs = _optimized(arguments)
    proof = _proof(arguments, opt, args, kwargs) if arguments.verify else None
    made = graphopt.report(opt, verify=proof)
    if path is not None:
        write(made, path)
        _wrote(arguments, path)
    else:
        _show(arguments, made.to_dict(), made.parts())
    return proof is None or proof.passed


def diff(arguments: argparse.Namespace) -> bool:
    """`graphopt diff TARGET`."""
    import graphopt
    from graphopt.report.save import check_path, json_text, save

    path = check_path(arguments.output, (".txt", ".json", ".html")) if arguments.output else None
    opt, _, _ = _optimized(arguments)
    found = graphopt.diff(opt)
    if path is None:
        _show(arguments, found.to_dict(), found.parts())
        return True
    texts = {".txt": lambda: f"{found!r}\n", ".html": found.html}
    made = texts.get(path.suffix.lower(), lambda: json_text(found.to_dict()))()
    save(path, made)
    _wrote(arguments, path)
    return True


def verify(arguments: argparse.Namespace) -> bool:
    """`graphopt verify TARGET`."""
    from graphopt.report.proof import proof_table, proof_text

    opt, args, kwargs = _optimized(arguments)
    result = _proof(arguments, opt, args, kwargs)
    _show(arguments, result.to_dict(), [proof_table(result), proof_text(result)])
    return result.passed


def bisect(arguments: argparse.Namespace) -> bool:
    """`graphopt bisect TARGET`."""
    import graphopt

    rules = load_rules(arguments.rules, arguments.rule)
    predicate = load_function(arguments.predicate, "predicate") if arguments.predicate else None
    model, args, kwargs = load_target(arguments.target, arguments.mode)
    with autocast(model, arguments.autocast):
        found = graphopt.bisect(
            model, args, kwargs, predicate=predicate, rules=rules, precision=arguments.precision
        )
    _show(arguments, found.to_dict(), found.parts())
    return found.good


def bench(arguments: argparse.Namespace) -> bool:
    """`graphopt bench TARGET`."""
    import graphopt

    options: dict[str, Any] = {}
    if arguments.seconds is not None:
        options["seconds"] = arguments.seconds
    rules = load_rules(arguments.rules, arguments.rule)
    model, args, kwargs = load_target(arguments.target, arguments.mode)
    names = [name.strip() for name in arguments.against.split(",") if name.strip()]
    found = graphopt.bench(
        model,
        args,
        names,
        example_kwargs=kwargs,
        autocast=arguments.autocast,
        rules=rules,
        precision=arguments.precision,
        **options,
    )
    _show(arguments, found.to_dict(), found.parts())
    return found["graphopt"].error is None


def advise(arguments: argparse.Namespace) -> bool:
    """`graphopt advise TARGET`."""
    import graphopt

    model, args, kwargs = load_target(arguments.target, arguments.mode)
    found = graphopt.advise(
        model,
        args,
        kwargs,
        resident_bytes=arguments.resident_bytes,
        measured=arguments.measured,
    )
    _show(arguments, found.to_dict(), found.parts())
    return True


def profile(arguments: argparse.Namespace) -> bool:
    """`graphopt profile TARGET`."""
    import graphopt
    from graphopt.memory.draw import SUFFIXES
    from graphopt.options import has_backward
    from graphopt.report.save import check_path

    path = check_path(arguments.output, SUFFIXES) if arguments.output else None
    subject: nn.Module
    if arguments.eager:
        subject, args, kwargs = load_target(arguments.target, arguments.mode)
    else:
        subject, args, kwargs = _optimized(arguments)
    train = has_backward(subject, args, kwargs) if arguments.train is None else arguments.train
    with autocast(subject, arguments.autocast):
        found = graphopt.profile_memory(
            subject, args, kwargs, train=train, resident_bytes=arguments.resident_bytes
        )
    if path is not None:
        found.save(path)
        _wrote(arguments, path)
    else:
        _show(arguments, found.to_dict(), found.parts())
    return True


def rules(arguments: argparse.Namespace) -> bool:
    """`graphopt rules`."""
    from graphopt.passes import all_rules
    from graphopt.report.table import Table

    rows = [
        {"name": r.name, "family": r.family, "doc": r.doc.split("\n")[0], "module": r.module}
        for r in all_rules()
    ]
    cells = tuple(
        (row["name"], row["module"].removeprefix("graphopt.").replace(".", "/") + ".py", row["doc"])
        for row in rows
    )
    _show(arguments, rows, [Table(("rule", "lives in", "what it does"), cells)])
    return True


def env(arguments: argparse.Namespace) -> bool:
    """`graphopt env`."""
    from graphopt.env import describe

    environment = describe()
    if arguments.json:
        _print_json(environment.to_dict())
    else:
        with writing():
            print(environment)  # a list of one a line, not to be wrapped
    return True


def _optimized(
    arguments: argparse.Namespace,
) -> tuple[GraphoptModule, tuple[Any, ...], dict[str, Any]]:
    """The target's model, optimized, and its inputs."""
    import graphopt

    rules = load_rules(arguments.rules, arguments.rule)
    model, args, kwargs = load_target(arguments.target, arguments.mode)
    with autocast(model, arguments.autocast):
        opt = graphopt.optimize(model, args, kwargs, rules=rules, precision=arguments.precision)
    return opt, args, kwargs


def _proof(
    arguments: argparse.Namespace,
    opt: GraphoptModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> VerifyResult:
    """The proof of an optimized module under the autocast that was asked for."""
    import graphopt

    with autocast(opt, arguments.autocast):
        return graphopt.verify(opt, args, kwargs)


def autocast(model: nn.Module, name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast on a model's device to "bf16" or "fp16"; nothing for None."""
    import torch

    if name is None:
        return contextlib.nullcontext()
    tensors = (*model.parameters(), *model.buffers())
    device = tensors[0].device.type if tensors else "cpu"
    return torch.autocast(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[name])


def _say(text: str, tables: Sequence[Table] = ()) -> None:
    from graphopt.report.view import show

    with writing():
        show(text, tables)


def _show(arguments: argparse.Namespace, data: Any, parts: Sequence[Part]) -> None:
    from graphopt.report.view import show_parts

    if arguments.json:
        _print_json(data)
    else:
        with writing():
            show_parts(parts)


def _wrote(arguments: argparse.Namespace, path: Path) -> None:
    if arguments.json:
        _print_json({"written": str(path)})
    else:
        with writing():
            print(f"wrote {path}")


def _print_json(data: Any) -> None:
    from graphopt.report.save import json_text

    with writing():
        print(json_text(data), end="")
