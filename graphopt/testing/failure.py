"""What is wrong between two steps, in words, and the error that says it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from graphopt.capture import signature as sig
from graphopt.errors import VerifyError
from graphopt.numerics import Comparison, TensorError
from graphopt.testing.blame import Suspect
from graphopt.testing.observe import Facts, Observed


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first thing that is wrong.

    Attributes:
        what: in a few words, with the tensor's name.
        why: the numbers.
        tensor: name of the tensor that is off, None where it is none.
        capture: whether the captured graph itself is what is wrong.
        cause: the exception behind it, if any.
    """

    what: str
    why: str
    tensor: str | None = None
    capture: bool = False
    cause: BaseException | None = None

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}: {self.why}"


class EquivalenceError(VerifyError, AssertionError):
    """An optimized module does not do what its model does.

    Both a `VerifyError` and an `AssertionError`, so that test runners count it as a failed test.

    Attributes:
        tensor: name of the first tensor that is off ("output/0", "grad/norm.weight"), or None.
        suspect: the rewrite to blame, as far as it was found.
        script: a Python program that reproduces the failure; "" where none could be written.
        data: tensors too large for the script, by name; `save` writes them beside it.
        comparison: the errors of all tensors, None where the runs could not be compared.
        notes: under what conditions they were taken.
    """

    tensor: str | None = None
    suspect: Suspect = Suspect()
    script: str = ""
    data: dict[str, torch.Tensor]
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        finding: Finding,
        suspect: Suspect,
        script: Any,
        comparison: Comparison | None,
        notes: list[str],
    ) -> EquivalenceError:
        """The error for a finding; its text ends in the script."""
        parts = [finding.why, *(f"note: {n}" for n in notes), *script.notes]
        text = "\n\n" + script.text if script.text else ""
        cure = "; ".join(t for t in (suspect.cure, "run the script below" if text else "") if t)
        error = cls(
            finding.what, at=suspect.text or None, why="\n       ".join(parts), try_=cure + text
        )
        error.tensor, error.suspect = finding.tensor, suspect
        error.script, error.data = script.text, script.data
        error.comparison, error.notes = comparison, tuple(notes)
        error.__cause__ = finding.cause
        return error

    def save(self, folder: str | Path) -> Path:
        """Write the script, and its data where it needs any, into a folder.

        Args:
            folder: an existing folder.

        Returns:
            The path of the script, `reproduce.py`.
        """
        path = Path(folder) / "reproduce.py"
        path.write_text(self.script)
        if self.data:
            torch.save(self.data, path.with_suffix(".pt"))
        return path


def first_tensor(
    comparison: Comparison, eager: Observed, optimized: Observed, exact: dict[str, Any]
) -> Finding:
    """The first tensor outside the contract, with its numbers."""
    bad = next((t for t in comparison.tensors if not t.passed), None)
    if bad is None:
        return Finding("the step is off as a whole", "; ".join(comparison.reasons))
    count = sum(not t.passed for t in comparison.tensors)
    more = f" ({count} of {len(comparison.tensors)} tensors are off)" if count > 1 else ""
    place = _place(*(r.get(bad.name) for r in (eager.tensors, optimized.tensors, exact)))
    why = [bad.verdict + more, _numbers(bad), *([place] if place else [])]
    return Finding(f"{_say(bad.name)} is off", "\n       ".join(why), bad.name)


def _say(name: str) -> str:
    group, _, rest = name.partition("/")
    words = {
        "output": "result",
        "grad": "the gradient of",
        "buffer": "the buffer",
        "input": "the argument after the call,",
    }
    return f"{words.get(group, group)} {rest}"


def _numbers(t: TensorError) -> str:
    shape = ", ".join(map(str, t.shape))
    return (
        f"{t.dtype}[{shape}]: relative L2 error {t.optimized:.2e}, eager's {t.eager:.2e}, "
        f"between the two {t.difference:.2e}"
    )


def _place(
    eager: torch.Tensor | None, optimized: torch.Tensor | None, exact: torch.Tensor | None
) -> str:
    """The element in which the two are furthest apart."""
    if eager is None or optimized is None or eager.shape != optimized.shape or not eager.numel():
        return ""
    wide = torch.complex128 if eager.is_complex() else torch.float64
    a, b = eager.to(wide), optimized.to(wide)
    apart = torch.where(a == b, 0.0, (a - b).abs().nan_to_num(torch.inf, torch.inf))
    flat = int(apart.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), eager.shape)]
    values = [f"eager {_item(eager, flat)}", f"optimized {_item(optimized, flat)}"]
    if exact is not None and exact.shape == eager.shape:
        values.append(f"float64 {_item(exact, flat)}")
    return f"worst element {index}: {', '.join(values)}"


def _item(tensor: torch.Tensor, flat: int) -> str:
    value = tensor.reshape(-1)[flat].item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def facts_differ(eager: Observed, optimized: Observed, *, strides: bool) -> Finding | None:
    """The first difference that is not one of values: structure, dtype, strides, sharing, None."""
    path = structure_differs(eager.structure, optimized.structure)
    if path is not None:
        return Finding("the result has another structure", path)
    for i, (a, b) in enumerate(zip(eager.facts, optimized.facts, strict=True)):
        found = _fact(a, b, strides)
        if found:
            return Finding(f"result {i} is off", found, f"output/{i}")
    for name, value in eager.tensors.items():
        other = optimized.tensors.get(name)
        if name.startswith("grad/") and (value is None) != (other is None):
            what = ("None", "a tensor") if value is None else ("a tensor", "None")
            return Finding(f"{_say(name)} is off", f"{what[1]}, eager has {what[0]}", name)
    return None


def _fact(a: Facts, b: Facts, strides: bool) -> str | None:
    for field in dataclasses.fields(Facts):
        want, got = getattr(a, field.name), getattr(b, field.name)
        if want == got or (field.name == "stride" and not strides):
            continue
        if field.name == "shares":
            words = [", ".join(s) or "nothing" for s in (got, want)]
            return f"it shares memory with {words[0]}, eager's with {words[1]}"
        return f"{field.name} {got}, eager has {want}"
    return None


def structure_differs(a: Any, b: Any, path: str = "result") -> str | None:
    """Where two structures of results first differ, in words; None where nowhere.

    Objects kept by reference are compared by class, since each run makes its own.
    """
    if isinstance(a, sig.Held) or isinstance(b, sig.Held):
        same = type(getattr(a, "value", None)) is type(getattr(b, "value", None))
        return None if same else f"{path}: {_kind(b)}, eager has {_kind(a)}"
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) != len(b):
            return f"{path}: {len(b)} items, eager has {len(a)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            found = structure_differs(x, y, path if i == 0 else f"{path}.{i - 1}")
            if found:
                return found
        return None
    if isinstance(a, dict) and isinstance(b, dict):
        same = a.keys() == b.keys() and all(type(a[k]) is type(b[k]) for k in a)
        return None if same else f"{path}: other attributes"
    if type(a) is float and type(b) is float:
        same = a == b or (a != a and b != b)
    else:
        same = type(a) is type(b) and bool(a == b)
    return None if same else f"{path}: {b!r}, eager has {a!r}"


def _kind(value: Any) -> str:
    return type(getattr(value, "value", value)).__name__
