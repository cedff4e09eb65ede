"""A memory profile as tables, as a timeline of a few lines, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphopt.errors import OptionError
from graphopt.memory.labels import BACKWARD
from graphopt.memory.oracle import Moment, Prediction
from graphopt.memory.shares import Group, Share
from graphopt.report.table import Table, size

PICTURES = (".png", ".svg", ".pdf")
SUFFIXES = (".txt", ".json", *PICTURES)
"""What a profile can be written as."""

ROWS = 12
"""Rows of a table in the text; `to_dict` has all."""

LINES = 16
BAR = 28


def share(part: int, whole: int) -> str:
    """A part of a whole in percent.

    Example:
        >>> share(1, 8), share(0, 0)
        ('12.5%', '-')
    """
    return f"{part / whole:.1%}" if whole else "-"


def shares_table(title: str, found: Sequence[Share], peak: int) -> Table:
    """What each op or module holds.

    Args:
        title: "op" or "module".
        found: the largest first.
        peak: bytes of the whole peak.
    """
    rows = [
        (
            s.name + (f" x{s.count}" if s.count > 1 else ""),
            size(s.saved_bytes),
            size(s.temporary_bytes),
            size(s.peak_bytes),
            share(s.peak_bytes, peak),
        )
        for s in found[:ROWS]
    ]
    header = (title, "saved", "temporary", "at the peak", "share")
    if len(found) > ROWS:
        rest = sum(s.peak_bytes for s in found[ROWS:])
        rows.append((f"{len(found) - ROWS} more", "", "", size(rest), share(rest, peak)))
    return Table(header, tuple(rows), right=header[1:])


def groups_table(found: Sequence[Group]) -> Table:
    """What is alive at the peak, the largest first."""
    rows = [
        (
            size(g.bytes),
            g.what,
            f"{g.dtype}{list(g.shape)}" + (f" x{g.count}" if g.count > 1 else ""),
            " ".join(t for t in (g.op, "in", g.module, f"({g.place})" if g.place else "") if t)
            if g.op
            else g.module,
        )
        for g in found[:ROWS]
    ]
    if len(found) > ROWS:
        rows.append((size(sum(g.bytes for g in found[ROWS:])), f"{len(found) - ROWS} more", "", ""))
    return Table(
        ("alive at the peak", "what", "tensors", "from"), tuple(rows), ("alive at the peak",)
    )


def timeline_text(found: Prediction, names: Mapping[str, str]) -> str:
    """The timeline as bars, one for a stretch of the step.

    Each line has the phase, the most bytes that were alive in the stretch, and whose work that was.

    Args:
        found: the prediction.
        names: what to call a node, where it is not by its own name.
    """
    stretches = _stretches(found.timeline, LINES)
    top = max((m.peak_bytes for m in found.timeline), default=0) or 1
    lines = []
    for stretch in stretches:
        most = max(stretch, key=lambda m: m.peak_bytes)
        bar = "#" * max(1, round(BAR * most.peak_bytes / top))
        name = names.get(most.name, most.name)
        mark = "  <- peak" if most.peak_bytes == top else ""
        lines.append(f"{most.phase:<8} {size(most.peak_bytes):>10} {bar:<{BAR}} {name}{mark}")
    return "\n".join(lines)


def _stretches(moments: Sequence[Moment], count: int) -> list[list[Moment]]:
    """The moments cut into at most so many runs, none across two phases."""
    phases: list[list[Moment]] = []
    for m in moments:
        if not phases or phases[-1][-1].phase != m.phase:
            phases.append([])
        phases[-1].append(m)
    found: list[list[Moment]] = []
    for phase in phases:
        share = max(1, round(count * len(phase) / max(1, len(moments))))
        step = -(-len(phase) // share)
        found += [phase[i : i + step] for i in range(0, len(phase), step)]
    return found


def picture(found: Prediction, names: Mapping[str, str], title: str, path: Path) -> None:
    """Draw live bytes over the step, with what is alive at the peak beside it.

    Args:
        found: the prediction.
        names: as of `timeline_text`.
        title: what stands above it.
        path: where to; .png, .svg or .pdf.

    Raises:
        OptionError: where matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "a picture needs matplotlib", try_="pip install 'graphopt[memory]', or .txt or .json"
        ) from None
    unit, name = _unit(found.peak_bytes)
    figure: Any = Figure(figsize=(11, 5), layout="constrained")
    line, bar = figure.subplots(1, 2, width_ratios=(4, 1))
    heights = [m.peak_bytes / unit for m in found.timeline]
    line.fill_between(range(len(heights)), heights, step="mid", alpha=0.3)
    line.plot(range(len(heights)), heights, drawstyle="steps-mid")
    for i in range(1, len(heights)):
        if found.timeline[i].phase != found.timeline[i - 1].phase:
            line.axvline(i - 0.5, color="gray", linewidth=0.8)
            if found.timeline[i].phase == BACKWARD:
                line.text(i, 0, " backward", va="bottom", color="gray")
    if heights:
        at = max(range(len(heights)), key=heights.__getitem__)
        at_name = found.timeline[at].name
        line.annotate(names.get(at_name, at_name), (at, heights[at]), ha="center", va="bottom")
    line.set(
        xlabel="ops of the step",
        ylabel=name,
        ylim=(0, 1.08 * max(heights, default=1.0)),
        title=title,
    )
    bottom = 0.0
    for kind, held in found.breakdown.items():
        if held:
            bar.bar(0, held / unit, bottom=bottom, label=f"{kind} {size(held)}")
            bottom += held / unit
    bar.set(xticks=[], title=f"peak {size(found.peak_bytes)}", xlim=(-0.5, 0.5))
    bar.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize="small", frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(
            f"{path} could not be written", why=error.strerror or str(error), try_="another path"
        ) from error


def _unit(peak: int) -> tuple[int, str]:
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if peak >= 2**power:
            return 2**power, name
    return 1, "bytes"
