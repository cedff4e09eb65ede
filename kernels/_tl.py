"""Triton helpers for dropout; ``_tl_activations.py`` holds those for activations.

The plain-torch twin is ``_philox.random_bits``. A kernel that takes ``site`` and ``threshold``
lists them under ``do_not_specialize``: their values say nothing about alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_words(seed, site, group, BLOCK: tl.constexpr):
    """Two columns' bits a word, uint32 [R, BLOCK / 2]; see _philox.py for the order.

    seed: int64 scalar. site: int32 scalar. group: int64 [R], row * ceil(N / 8) + first column / 8.
    BLOCK: columns, a power of two of at least 8.
    """
    g = group[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    low = g.to(tl.uint32)
    high = (g >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, zero, (zero + site).to(tl.uint32), high, 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words, (group.shape[0], BLOCK // 2))


@triton.jit
def factor_of(words, threshold, scale, BLOCK: tl.constexpr):
    """What a tile's values are multiplied by, float32 [R, BLOCK]: 0 where dropped, else scale."""
    # Compared in the upper half of the word, where the even column's bits are moved and the odd
    # column's stand. A threshold of 65536 becomes 0, which drops nothing, but its scale is 0.
    limit = (threshold << 16).to(tl.uint32)
    even = tl.where((words << 16) >= limit, scale, 0.0)
    odd = tl.where(words >= limit, scale, 0.0)
    return tl.reshape(tl.join(even, odd), (words.shape[0], BLOCK))


@triton.jit
def dropout_factor(seed, site, group, threshold, scale, BLOCK: tl.constexpr):
    """`factor_of` the random words of a tile."""
    return factor_of(random_words(seed, site, group, BLOCK), threshold, scale, BLOCK)
