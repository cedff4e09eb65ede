"""Triton activations and their derivatives, made for accuracy and few instructions.

Each is computed in float32 from the pre-activation ``z``. Two constexprs choose the form:

``ACT``   "none" | "relu" | "gelu" | "gelu_tanh" | "silu" | "tanh" | "sigmoid"
``FAST``  the result is rounded to float16 or bfloat16: cheaper forms, whose relative error stays
          under 4e-5 (half an ulp of float16 is 2.4e-4). The H200 issues about 30 instructions a
          bfloat16 element in the time that a copy takes, and ``erf`` alone needs 26 of them.

Infinities and NaN come out as in eager: relu(NaN) is NaN, gelu(-inf) is -inf * 0 = NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_neg(x, FAST: tl.constexpr):
    """exp(x) for x <= 0, to 2 ulp unless FAST; NaN stays NaN."""
    if FAST:
        return tl.exp(x)
    else:
        # The hardware has 2^t only, and rounding t = x * log2(e) costs |x| * 2^-24 of relative
        # error: carry the product's tail. Clamped first: an infinite product's tail would be NaN.
        x = tl.where(x < -104.0, -104.0, x)
        t = x * 1.4426950408889634
        tail = tl.fma(x, 1.4426950216293335, -t) + x * 1.925963033500011e-8
        p = tl.exp2(t)
        return p + p * (tail * 0.6931471805599453)


@triton.jit
def sigmoid_parts(z, FAST: tl.constexpr):
    """(sigmoid(z), sigmoid(z) * (1 - sigmoid(z))), neither with cancellation or overflow."""
    e = exp_neg(-tl.abs(z), FAST)
    r = 1.0 / (1.0 + e)
    er = e * r
    return tl.where(z >= 0, r, er), er * r


@triton.jit
def gate_parts(z, FAST: tl.constexpr):
    """The same pair for z * sigmoid(z), whose derivative forgives an absolute error of 1e-7."""
    if FAST:
        s = 1.0 / (1.0 + tl.exp(-z))
        return s, s - s * s
    else:
        return sigmoid_parts(z, FAST)


@triton.jit
def tanh_exact(z, FAST: tl.constexpr):
    """tanh(z): (1 - e) / (1 + e) with e = exp(-2|z|), and an odd polynomial where 1 - e cancels."""
    e = exp_neg(-2.0 * tl.abs(z), FAST)
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(z < 0, -far, far)
    if FAST:
        y = tl.where(tl.abs(z) < 0.01, z, far)
    else:
        # The least maximum relative error on |z| <= 0.6 is 2.6e-9.
        u = z * z
        p = -0.00590586056932807
        p = p * u + 0.020805377513170242
        p = p * u - 0.05378668010234833
        p = p * u + 0.13331958651542664
        p = p * u - 0.33333298563957214
        y = tl.where(tl.abs(z) < 0.6, z + z * u * p, far)
    return y


@triton.jit
def tanh_slope(z, FAST: tl.constexpr):
    """1 - tanh(z)^2 = 4e / (1 + e)^2 with e = exp(-2|z|): exact in the tails too."""
    e = exp_neg(-2.0 * tl.abs(z), FAST)
    r = 1.0 / (1.0 + e)
    return 4.0 * e * r * r


@triton.jit
def normal_parts(z, FAST: tl.constexpr):
    """(cumulative probability, density) of the standard normal distribution at z."""
    if FAST:
        # P(Z > |z|) = exp(-z^2 / 2) * t * poly(t), t = 1 / (1 + 0.3 |z|): Hastings' form,
        # fitted for the least maximum relative error on 0 <= |z| <= 13.5, which is 7.6e-6.
        # The density shares the exp.
        e = tl.exp2(-0.7213475204444817 * z * z)
        t = 1.0 / (1.0 + 0.3 * tl.abs(z))
        p = -0.07750777155160904
        p = p * t + 0.21727052330970764
        p = p * t - 0.01835738494992256
        p = p * t + 0.14495593309402466
        p = p * t + 0.11355021595954895
        p = p * t + 0.1200922504067421
        tail = e * t * p
        probability = tl.where(z < 0, tail, 1.0 - tail)
    else:
        e = exp_neg(-0.5 * z * z, FAST)
        probability = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
    return probability, e * 0.3989422804014327


@triton.jit
def activate(z, ACT: tl.constexpr, FAST: tl.constexpr):
    """The activation of z."""
    if ACT == "relu":
        y = tl.where(z <= 0, 0.0, z)  # not maximum(): it drops NaN
    elif ACT == "gelu":
        probability, _ = normal_parts(z, FAST)
        y = z * probability
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u), u = sqrt(2 / pi) * (z + 0.044715 z^3)
        s, _ = gate_parts(z * (1.5957691216057308 + 0.07135481627260025 * (z * z)), FAST)
        y = z * s
    elif ACT == "silu":
        s, _ = gate_parts(z, FAST)
        y = z * s
    elif ACT == "tanh":
        y = tanh_exact(z, FAST)
    elif ACT == "sigmoid":
        y, _ = sigmoid_parts(z, FAST)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        y = z
    return y


@triton.jit
def activate_grad(dy, z, ACT: tl.constexpr, FAST: tl.constexpr):
    """The activation's derivative at z, times dy."""
    if ACT == "relu":
        dz = tl.where(z <= 0, 0.0, dy)  # eager's rule: the gradient passes at NaN, not at 0
    elif ACT == "gelu":
        probability, density = normal_parts(z, FAST)
        dz = dy * (probability + z * density)
    elif ACT == "gelu_tanh":
        z2 = z * z
        s, slope = gate_parts(z * (1.5957691216057308 + 0.07135481627260025 * z2), FAST)
        dz = dy * (s + z * slope * (1.5957691216057308 + 0.21406444881780076 * z2))
    elif ACT == "silu":
        s, slope = gate_parts(z, FAST)
        dz = dy * (s + z * slope)
    elif ACT == "tanh":
        dz = dy * tanh_slope(z, FAST)
    elif ACT == "sigmoid":
        _, slope = sigmoid_parts(z, FAST)
        dz = dy * slope
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        dz = dy
    return dz
