"""What the link between a GPU and pinned host memory carries, measured."""

from __future__ import annotations

import functools
import logging
import statistics

import torch

BYTES = 2**26
"""Of the copies that are timed."""

TIMES = 5

logger = logging.getLogger("graphopt.cost")


def link_gbs(device: torch.device) -> float | None:
    """1e9 bytes a second that the slower of the two directions carries.

    It is the machine's as much as the GPU's, so it is measured here, once in a process: a few
    copies of 64 MiB, some ten milliseconds.

    Args:
        device: whose link.

    Returns:
        The rate; None where there is no GPU, or no memory for the copies.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _measured(index)


@functools.cache
def _measured(index: int) -> float | None:
    device = torch.device("cuda", index)
    try:
        with torch.inference_mode():
            there = torch.zeros(BYTES, dtype=torch.uint8, device=device)
            here = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
            ways = (here, there), (there, here)
            return min(BYTES / 1e6 / _ms(*way, device) for way in ways)
    except torch.cuda.OutOfMemoryError as error:
        logger.warning("the link to host memory could not be measured: %s", error)
        return None


def _ms(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """The median time of a copy; the first, which is slower, left out."""
    found = []
    stream = torch.cuda.current_stream(device)
    for _ in range(TIMES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        to.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[1:])
