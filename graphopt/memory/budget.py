"""What a user may write as a memory budget, and what is said where it cannot be kept."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
from collections.abc import Sequence
from typing import Any

from graphopt.errors import BudgetError, OptionError
from graphopt.memory.oracle import Holder

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Units of a budget that is text; case does not matter."""

LEAST = 1024
"""The smallest number of bytes that is taken for a budget: less is meant as something else."""

_BYTES = "a number of bytes, '12GiB' or '900MB'"
SHARE = "the peak without a plan"
"""What a fraction is one of, unless said otherwise."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as it was asked for; one of the two is set.

    Attributes:
        size: bytes.
        fraction: share of the predicted peak without a plan, above 0 and up to 1.
    """

    size: int | None = None
    fraction: float | None = None

    def bytes_of(self, plain: int) -> int:
        """The budget in bytes.

        Args:
            plain: the predicted peak without a plan, in bytes.

        Example:
            >>> Budget(fraction=0.5).bytes_of(1000), Budget(size=4096).bytes_of(1000)
            (500, 4096)
        """
        return self.size if self.size is not None else math.floor((self.fraction or 1.0) * plain)

    def __str__(self) -> str:
        """As a user writes it."""
        if self.size is not None:
            return shown(self.size)
        return "1.0" if self.fraction == 1.0 else f"{self.fraction:g}"


def _forms(share: str | None) -> str:
    return f"{_BYTES}, or a fraction of {share} such as 0.5" if share else _BYTES


def check_budget(
    budget: Any, name: str = "memory_budget", share: str | None = SHARE
) -> Budget | None:
    """A budget from what a user wrote; None for none.

    Args:
        budget: a number of bytes, a text with a unit, or a fraction in (0, 1] as a float.
        name: of the option, for messages.
        share: what a fraction is one of, for messages; None where only bytes are meant.

    Raises:
        OptionError: for anything else.

    Example:
        >>> check_budget("1.5 GiB"), check_budget(0.25)
        (Budget(size=1610612736, fraction=None), Budget(size=None, fraction=0.25))
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        return Budget(size=_parsed(budget, name, share))
    forms = _forms(share)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise OptionError(f"{name} is {budget!r}"[:100], try_=forms)
    if isinstance(budget, numbers.Integral):
        count = operator.index(budget)
        if count < LEAST:
            cure = f"1.0 for {share}, '1GiB' for bytes" if count == 1 and share else forms
            raise OptionError(f"{name} is {count} byte{'s' * (count != 1)}", why=_LITTLE, try_=cure)
        return Budget(size=count)
    given = float(budget)
    if not 0.0 < given <= 1.0:
        cure = f"{int(given)}, a whole number of bytes" if LEAST <= given < math.inf else forms
        why = f"a float is a fraction of {share}: above 0, and up to 1" if share else None
        raise OptionError(f"{name} is {budget!r}", why=why, try_=cure)
    return Budget(fraction=given)


_LITTLE = "no step fits into that; a whole number is a number of bytes"
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _parsed(text: str, name: str, share: str | None = None) -> int:
    forms = _forms(share)
    found = _TEXT.fullmatch(text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in UNITS:
        cure, why = forms, "it is no number with a unit"
        if text.strip().endswith("%") and share:
            cure = f"a fraction of {share} as a float: 0.5 for 50%"
        elif found and not unit:
            cure, why = f"'{found[1]}B' for bytes, '{found[1]}GiB' for GiB", "it has no unit"
            if share and 0.0 < float(found[1]) <= 1.0:
                cure = f"{float(found[1]):g}, a float, for that part of {share}; '{found[1]}GiB'"
        elif found:
            why = "the unit is not known"
            if f"{unit}ib" in UNITS:
                upper = unit.upper()
                cure = f"'{found[1]}{upper}iB' (powers of 1024) or '{found[1]}{upper}B'"
        raise OptionError(f"{name} is {text!r}"[:100], why=why, try_=cure)
    count = int(float(found[1]) * UNITS[unit])
    if count < LEAST:
        raise OptionError(f"{name} is {text!r}", why=_LITTLE, try_=forms)
    return count


def check_resident(count: Any) -> int:
    """Bytes that lie on the device beside the step (an optimizer's state), from what a user wrote.

    Raises:
        OptionError: for anything but a number of bytes from 0, or a text with a unit.
    """
    if isinstance(count, str):
        return _parsed(count, "resident_bytes")
    whole = isinstance(count, numbers.Integral) and not isinstance(count, bool)
    if not whole or count < 0:
        raise OptionError(
            f"resident_bytes is {count!r}"[:100],
            try_="a number of bytes from 0, or '4GiB': what the optimizer keeps, AdamW 8 bytes a"
            " float32 parameter",
        )
    return operator.index(count)


def unreachable(
    asked: Budget,
    limit: int,
    lowest: int,
    plain: int,
    live: Sequence[Holder],
    *,
    resident: int = 0,
    low: bool = False,
    offloaded: int | None = None,
) -> BudgetError:
    """The error for a budget that cannot be kept.

    Args:
        asked: the budget.
        limit: the same in bytes.
        lowest: the smallest predicted peak that any plan has.
        plain: the predicted peak without a plan.
        live: what is alive at the smallest peak.
        resident: bytes that the user said lie there, too.
        low: whether the graph is in low precision already.
        offloaded: the smallest predicted peak with values in host memory, where that was asked.
    """
    groups: dict[str, list[Holder]] = {}
    for h in live:
        groups.setdefault(line(h), []).append(h)
    if resident:
        groups[f"{shown(resident):>10}  resident_bytes, as given"] = []
    sizes = {text: sum(h.bytes for h in same) or resident for text, same in groups.items()}
    largest = sorted(groups, key=lambda text: (-sizes[text], text))[:6]
    times = {text: f" x{len(groups[text])}" if len(groups[text]) > 1 else "" for text in largest}
    held = "".join(f"\n         {text}{times[text]}" for text in largest)
    left = [h for text, same in groups.items() if text not in largest for h in same]
    more = sum(h.bytes for h in left)
    rest = f"\n         {shown(more)} in {len(left)} others" if left else ""
    same = f" of the {shown(plain)} without a plan" if asked.fraction is not None else ""
    named = [h for text in largest for h in groups[text]]
    cures = [f"memory_budget={_next(lowest)}", "a smaller batch (graphopt.fit finds the largest)"]
    if offloaded is not None and (offloaded <= limit or offloaded < 0.99 * lowest):
        cures.insert(0, f"offload='auto' (reaches {shown(offloaded)})")
    error = BudgetError(
        f"memory_budget={asked} ({shown(limit)}{same}) cannot be kept:"
        f" the smallest peak is {shown(lowest)}",
        at=next((f"{h.site}" for h in named if h.site.file and h.kind != "parameters"), None),
        why=f"there these are alive:{held}{rest}" if held else None,
        try_=", ".join(cures) + ("" if low else ", precision='bf16'"),
    )
    error.lowest_bytes = lowest
    return error


def line(held: Holder) -> str:
    """One line for a storage: bytes, what it is, where it comes from."""
    shape = "x".join(map(str, held.shape))
    who = held.name or held.op or "unnamed"
    place = f", {held.site}" if held.site.module or held.site.file else ""
    phase = "" if held.phase == "forward" else f" ({held.phase})"
    return f"{shown(held.bytes):>10}  {held.kind:12} {who}{phase}  {held.dtype}[{shape}]{place}"


def shown(count: int) -> str:
    """Bytes as a text that is a budget again, rounded to nothing.

    Example:
        >>> shown(3 * 2**30), shown(1536), shown(1000)
        ('3GiB', '1.5KiB', '1000B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= UNITS[unit.lower()]:
            return f"{count / UNITS[unit.lower()]:.4g}{unit}"
    return f"{count}B"


def _next(lowest: int) -> str:
    """A budget that is kept, as short as can be."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = UNITS[unit.lower()]
        if lowest >= size:
            return f"'{math.ceil(lowest / size * 100) / 100:g}{unit}'"
    return str(max(lowest, LEAST))
