"""What the CUDA caching allocator makes of a sequence of requests: blocks, slack, segments.

`torch.cuda.max_memory_allocated` counts the blocks that the allocator hands out, and a block may be
larger than what was asked for: one of more than 1 MiB is cut only where more than 1 MiB would
remain, so up to 1 MiB of each belongs to nobody. How much that is depends on the order in which
memory is taken and given back. The allocator's rules are followed here block by block
(c10/cuda/CUDACachingAllocator.cpp in torch's source, torch 2.11 to 2.14):

- Sizes are rounded up to 512 bytes.
- Up to 1 MiB comes from segments of 2 MiB, cut where at least 512 bytes remain.
- Above 1 MiB and below 10 MiB comes from segments of 20 MiB, from 10 MiB on from segments of the
  size rounded up to 2 MiB; both are cut only where more than 1 MiB remains.
- The smallest free block that is large enough is taken, of equal ones that of the lowest address;
  only where there is none, a new segment is.
- What is given back is merged with free neighbours.

With `expandable_segments:True` segments grow, and all blocks are cut at 512 bytes: no slack.

Not followed: several streams, private pools of CUDA graphs, `max_split_size_mb`,
`roundup_power2_divisions`, and a device that is full, where cached segments are given up.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from graphopt.memory.pool import EXPANDABLE, read_settings
from graphopt.memory.tracker import Allocation

ROUND = 512
"""Bytes to which each request is rounded up, and the smallest block."""

SMALL = 2**20
"""The largest request that the pool of small blocks serves, and the largest rest of a large block
that is not cut off."""

SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
LEAST_OWN = 10 * 2**20
"""From this size on a request has a segment of its own size, rounded up to `OWN_STEP`."""

OWN_STEP = 2 * 2**20

STEPS = 3
"""How many equal steps are followed: the first finds no free blocks, later ones those before."""


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A part of a segment.

    Attributes:
        address: where it begins.
        size: its bytes.
        small: whether it belongs to the pool of small blocks.
        requested: bytes that its holder asked for; 0 while it is free.
        before: the block that ends where it begins, None for a segment's first.
        after: the block that begins where it ends, None for a segment's last.
    """

    address: int
    size: int
    small: bool
    requested: int = 0
    before: Block | None = None
    after: Block | None = None

    @property
    def slack(self) -> int:
        """Bytes that are handed out and used by nobody, beyond the rounding."""
        return self.size - rounded(self.requested) if self.requested else 0


class CachingAllocator:
    """Follows the caching allocator of one device and stream.

    Args:
        expandable: whether segments can grow, as `expandable_segments:True` has it.

    Attributes:
        allocated: bytes of the blocks that are handed out.
        requested: bytes that were asked for, of these.
        reserved: bytes of all segments.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.take(19 * 2**20 + 1)  # from a segment of 20 MiB: too little remains
        >>> allocator.allocated, allocator.reserved, block.slack
        (20971520, 20971520, 1048064)
        >>> allocator.give_back(block)
        >>> allocator.allocated, allocator.reserved
        (0, 20971520)
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.requested = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._end: dict[bool, Block | None] = {True: None, False: None}  # of what can grow
        self._next = 0

    def take(self, size: int) -> Block:
        """Hand out a block.

        Args:
            size: bytes asked for, above 0.
        """
        wanted = rounded(size)
        small = wanted <= SMALL
        block = self._best(wanted, small) or self._new(wanted, small)
        rest = block.size - wanted
        if rest >= ROUND if small or self.expandable else rest > SMALL:
            self._cut(block, wanted)
        block.requested = size
        self.allocated += block.size
        self.requested += size
        return block

    def give_back(self, block: Block) -> None:
        """A block is free again; what is free on both sides of it becomes one with it."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.requested = 0
        if block.before is not None and not block.before.requested:
            block = self._join(block.before, block, freed=block.before)
        if block.after is not None and not block.after.requested:
            block = self._join(block, block.after, freed=block.after)
        self._put(block)

    def free_blocks(self) -> list[Block]:
        """What lies in the cache, the smallest first, small blocks before large ones."""
        return [block for small in (True, False) for _, _, block in self._free[small]]

    def _best(self, wanted: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (wanted, -1))
        return free.pop(at)[2] if at < len(free) else None

    def _new(self, wanted: int, small: bool) -> Block:
        if self.expandable:
            return self._grown(wanted, small)
        size = SMALL_SEGMENT if small else LARGE_SEGMENT if wanted < LEAST_OWN else 0
        size = size or -(-wanted // OWN_STEP) * OWN_STEP
        block = Block(self._next, size, small)
        self._next += size
        self.reserved += size
        return block

    def _grown(self, wanted: int, small: bool) -> Block:
        """The pool's one segment, longer by what its free end lacks."""
        step = SMALL_SEGMENT if small else LARGE_SEGMENT
        end = self._end[small]
        room = end.size if end is not None and not end.requested else 0
        more = -(-(wanted - room) // step) * step
        self.reserved += more
        if end is not None and room:
            self._drop(end)
            end.size += more
            return end
        begin = end.address + end.size if end is not None else int(not small) << 60
        block = Block(begin, more, small, before=end)
        if end is not None:
            end.after = block
        self._end[small] = block
        return block

    def _cut(self, block: Block, wanted: int) -> None:
        rest = Block(block.address + wanted, block.size - wanted, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, wanted
        if self._end[block.small] is block:
            self._end[block.small] = rest
        self._put(rest)

    def _join(self, first: Block, second: Block, freed: Block) -> Block:
        self._drop(freed)
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        if self._end[first.small] is second:
            self._end[first.small] = first
        return first

    def _put(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]


def rounded(size: int) -> int:
    """A size as the allocator rounds it up.

    Example:
        >>> rounded(1), rounded(512), rounded(513)
        (512, 512, 1024)
    """
    return -(-size // ROUND) * ROUND


def allocated_curve(
    allocations: Sequence[Allocation],
    events: Sequence[int],
    start: int,
    *,
    expandable: bool | None = None,
    steps: int = STEPS,
) -> list[int]:
    """Allocated bytes after each event of a step, as the caching allocator counts them.

    The step is followed several times, each after what the one before left has been given back, as
    `zero_grad(set_to_none=True)` does: the cache then holds the blocks of the steps before, as in
    training. The step with the highest peak is told.

    Args:
        allocations: as of `StorageTracker`.
        events: likewise.
        start: the first event of the step; what comes before it happens once.
        expandable: whether segments can grow; None for what the environment says.
        steps: how often the step is followed.

    Returns:
        One entry for each event, none below the sum of what is alive.
    """
    expandable = expandable_segments() if expandable is None else expandable
    allocator = CachingAllocator(expandable)
    held: dict[int, Block] = {}

    def follow(some: Iterable[int]) -> list[int]:
        curve = []
        for event in some:
            if event >= 0:
                if allocations[event].bytes:
                    held[event] = allocator.take(allocations[event].bytes)
            elif ~event in held:
                allocator.give_back(held.pop(~event))
            curve.append(allocator.allocated)
        return curve

    before = follow(events[:start])
    kept, best = set(held), list[int]()
    for _ in range(steps):
        curve = follow(events[start:])
        if not best or max(curve) > max(best):
            best = curve
        if any(index not in held for index in kept):
            break  # what was there before the step died in it: there is no second one
        for index in [i for i in held if i not in kept]:
            allocator.give_back(held.pop(index))
        if not curve:
            break
    return before + best


def expandable_segments() -> bool:
    """Whether the environment has told CUDA's allocator to let segments grow.

    What torch has not read, as it was set too late, does not count.
    """
    return f"{EXPANDABLE}:True" in read_settings()


__all__ = ["Block", "CachingAllocator", "allocated_curve", "expandable_segments", "rounded"]
