"""The errors of graphopt: one base class, one layout (what, at, why, try)."""

from __future__ import annotations


def layout(what: str, at: str | None, why: str | None, try_: str | None) -> str:
    """The text of an error: what happened, where, why, and what to do about it.

    Args:
        what: the construct or fact, in a few words.
        at: the user's own place, "file:line in function    code".
        why: the reason.
        try_: the cure.

    Example:
        >>> print(layout("data-dependent branch", "model.py:8 in forward", None, "torch.where"))
        data-dependent branch
          at   model.py:8 in forward
          try  torch.where
    """
    lines = [what]
    for label, text in (("at", at), ("why", why), ("try", try_)):
        if text:
            lines.append(f"  {label:<4} {text}")
    return "\n".join(lines)


class GraphOptError(Exception):
    """Base of every error that graphopt raises on purpose.

    Args:
        what: what happened, in a few words.
        at: where, in the user's own code: "file:line in function    code".
        why: the reason.
        try_: what to do about it.

    Attributes:
        what, at, why, try_: the four parts, as given.

    Example:
        >>> raise GraphOptError("no kernel", why="the tensor is complex", try_="fuse=False")
        Traceback (most recent call last):
            ...
        graphopt.errors.GraphOptError: no kernel
          why  the tensor is complex
          try  fuse=False
    """

    def __init__(
        self,
        what: str,
        *,
        at: str | None = None,
        why: str | None = None,
        try_: str | None = None,
    ) -> None:
        super().__init__(layout(what, at, why, try_))
        self.what = what
        self.at = at
        self.why = why
        self.try_ = try_

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the four parts, so that errors cross process borders."""
        return _rebuild, (type(self), self.what, self.at, self.why, self.try_)


def _rebuild(
    kind: type[GraphOptError], what: str, at: str | None, why: str | None, try_: str | None
) -> GraphOptError:
    return kind(what, at=at, why=why, try_=try_)


class CaptureError(GraphOptError):
    """The model holds a construct that cannot be captured as one graph and kept right."""


class PassError(GraphOptError):
    """A pass failed, or left an invalid graph; names the pass, the rule and the node."""


class VerifyError(GraphOptError):
    """A rewrite, or the whole optimized module, is outside the error contract."""


class BudgetError(GraphOptError):
    """The memory budget cannot be kept; says the smallest peak that can be had.

    Attributes:
        lowest_bytes: that peak.
    """

    lowest_bytes: int | None = None


class UnsupportedError(GraphOptError):
    """A device, dtype or combination of options that graphopt does not serve."""


class OptionError(GraphOptError):
    """An argument or option has a wrong type or value; says which are allowed."""


class GraphoptWarning(UserWarning):
    """Something worked, yet not as well as it could; said once per cause."""
