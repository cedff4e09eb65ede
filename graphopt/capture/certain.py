"""Comparisons of a uniform random draw that are decided before it is drawn.

LayerDrop (Fan et al., 2020) as models write it, `if torch.rand([]) < self.layerdrop`, branches on a
tensor's value, which no graph can hold; with a probability of 0 the branch is none: a draw lies in
[0, 1), so that `draw < 0` is False and `draw >= 0` True, whatever is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWS = (torch.rand, torch.rand_like)
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def decided(name: str, bound: float) -> bool | None:
    """What `draw <name> bound` is for every draw from [0, 1); None where that depends on it.

    Args:
        name: "lt", "le", "gt" or "ge".
        bound: what the draw is compared with.

    Example:
        >>> decided("lt", 0.0), decided("le", 0.0), decided("lt", 1.0), decided("gt", 0.5)
        (False, None, True, None)
    """
    below, above = bound >= 1.0, bound < 0.0  # every draw is below, or above, the bound
    if name in ("lt", "ge"):
        above = bound <= 0.0  # a draw of 0 is not below a bound of 0
    if not (below or above):
        return None
    return below == (name in ("lt", "le"))


class Certain(TorchFunctionMode):
    """Gives decided comparisons as constants while a forward is traced.

    Example:
        >>> with Certain():
        ...     (torch.rand(()) < 0.0).item()
        False
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a draw; answer a comparison of one that is decided."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _MIRRORED and len(args) == 2 and not kwargs:
            found = self._compare(name, *args)
            if found is not None:
                return found
        result = func(*args, **kwargs)
        if func in _DRAWS and "out" not in kwargs:
            self._draws.append(result)
        return result

    def _compare(self, name: str, left: Any, right: Any) -> torch.Tensor | None:
        """The constant that a comparison gives, None where it is left to the graph."""
        for draw, bound, way in ((left, right, name), (right, left, _MIRRORED[name])):
            if type(bound) in (int, float) and self._is_draw(draw):
                answer = decided(way, float(bound))
                if answer is not None:
                    device = draw.device if draw.dim() else None
                    value = torch.tensor(answer, device=device)
                    return value.expand(draw.shape) if draw.dim() else value
        return None

    def _is_draw(self, value: Any) -> bool:
        """Whether a value is a draw that nothing has written to since."""
        if not any(value is d for d in self._draws):
            return False
        with torch._C.DisableTorchFunction():
            return not value.is_inference() and value._version == 0
