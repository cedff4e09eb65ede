"""Triton helpers that several families use: random bits, activations and their derivatives.

Values are float32 throughout: load, cast, compute, cast at the store. The plain-torch twins are
``_philox.random_bits`` and ``_activations``. A kernel that takes ``site`` and ``threshold`` lists
them under ``do_not_specialize``: their values say nothing about alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, site, group, BLOCK: tl.constexpr):
    """The 16 random bits of a tile, uint32 [R, BLOCK]; see _philox.py for the order.

    seed: int64 scalar. site: int32 scalar. group: int64 [R], row * ceil(N / 8) + first column / 8.
    BLOCK: columns, a power of two of at least 8.
    """
    g = group[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    low = g.to(tl.uint32)
    high = (g >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, high, (zero + site).to(tl.uint32), zero, 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (group.shape[0], BLOCK))


@triton.jit
def dropout_factor(seed, site, group, threshold, scale, BLOCK: tl.constexpr):
    """What a tile's values are multiplied by, float32 [R, BLOCK]: 0 where dropped, else scale."""
    bits = random_bits(seed, site, group, BLOCK).to(tl.int32)
    return tl.where(bits >= threshold, scale, 0.0)


@triton.jit
def tanh(z):
    """tanh in float32, exact to about 2e-7 relative; no libdevice, which interpreters lack."""
    e = tl.exp(-2.0 * tl.abs(z))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(z < 0, -large, large)
    # Near 0 the difference 1 - e cancels; the series is exact to 5e-8 below 0.3.
    s = z * z
    series = -17.0 / 315.0 + s * (62.0 / 2835.0)
    series = z + z * s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * series))
    return tl.where(tl.abs(z) < 0.3, series, large)


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation of z, by name."""
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z)  # not maximum, which would drop NaN
    elif ACT == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return 0.5 * z * (1.0 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif ACT == "silu":
        return z / (1.0 + tl.exp(-z))
    elif ACT == "tanh":
        return tanh(z)
    elif ACT == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        return z


@triton.jit
def derivative(z, ACT: tl.constexpr):
    """The derivative of the activation at z, by name."""
    if ACT == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    elif ACT == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    elif ACT == "gelu_tanh":
        t = tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * z * z)
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope
    elif ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        return s * (1.0 + z * (1.0 - s))
    elif ACT == "tanh":
        t = tanh(z)
        return 1.0 - t * t
    elif ACT == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-z))
        return s * (1.0 - s)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        return tl.full(z.shape, 1.0, tl.float32)
