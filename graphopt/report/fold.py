"""Repeated blocks folded: `h.0.ln_1`, `h.1.ln_1`, ... become `h.*.ln_1 x12`."""

from __future__ import annotations

from collections.abc import Iterable


def fold(paths: Iterable[str]) -> dict[str, int]:
    """Module paths with the numbers that vary replaced by a star, and how often each occurs.

    Args:
        paths: module paths such as "h.0.ln_1"; "" is the root module. Repeats count.

    Returns:
        Folded path -> number of paths behind it, in the order of first appearance.

    Example:
        >>> fold(["h.0.ln_1", "h.1.ln_1", "ln_f"])
        {'h.*.ln_1': 2, 'ln_f': 1}
        >>> fold(["seq.0.h.1", "seq.0.h.2"])
        {'seq.0.h.*': 2}
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for path in paths:
        parts = path.split(".")
        groups.setdefault(tuple("*" if p.isdigit() else p for p in parts), []).append(parts)
    return {_template(group): len(group) for group in groups.values()}


def fold_text(paths: Iterable[str], limit: int = 6) -> str:
    """The folded paths as one phrase, at most `limit` of them.

    Example:
        >>> fold_text(["h.0.ln_1", "h.1.ln_1", "ln_f", ""])
        'h.*.ln_1 x2, ln_f, (root)'
    """
    counts = fold(paths)
    shown = [
        (path or "(root)") + (f" x{count}" if count > 1 else "")
        for path, count in list(counts.items())[:limit]
    ]
    rest = len(counts) - limit
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _template(group: list[list[str]]) -> str:
    """The parts that all paths of a group share, a star where they differ."""
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*group, strict=True))
