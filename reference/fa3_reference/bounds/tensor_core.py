"""Hopper's tensor core as a definition in float64, for numbers and for ranges of numbers.

One wgmma step adds up to ``k_step`` products and its accumulator C:

1. The power of an operand is 2^exponent, a subnormal operand's exponent being the least one of its format. The power of
   a nonzero product is the product of its operands' powers; that of C is 2^exponent, at least 2^-126, and 2^-133 where
   C is zero. ``top`` is the largest power.
2. Every product and C are cut toward zero to multiples of top * 2^-align_bits, and added exactly.
3. The sum s is cut toward zero to a multiple of max(2^floor(log2 |s|), 2^-126) * 2^-out_bits. Beyond FP32_MAX it is
   infinite, and an infinite C stays.

float64 computes this exactly: powers of products lie between 2^-266 and 2^254, a cut product is less than 2^(align_bits
+ 2) units, and at most 33 of them are added. Measured on an NVIDIA H200; written from that description alone.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.compiled import compiled, inlined
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, TensorCore

_ZERO_POWER = 2.0**-133  # the power of a zero accumulator, observable with bf16 only
_EXPONENT_BITS = 0x7FF0000000000000
_BLOCK = 256  # columns at a time: their state stays in the first-level cache


@inlined
def _power(x):
    """2^floor(log2 |x|) of a normal number; 0 for 0."""
    return np.int64(np.float64(x).view(np.int64) & _EXPONENT_BITS).view(np.float64)


@inlined
def _accumulator_power(c):
    return max(_power(c), FP32_MIN_NORMAL) if c != 0 else _ZERO_POWER


@inlined
def _result(total, c, out):
    """Cut the sum to a binary32 number; ``c`` is the accumulator that went in."""
    unit = max(_power(total), FP32_MIN_NORMAL) * out
    cut = np.trunc(total / unit) * unit + 0.0  # a sum that is cut to zero is +0
    cut = cut if abs(cut) <= FP32_MAX else np.copysign(np.inf, cut)
    return cut if abs(c) <= FP32_MAX else c


@inlined
def _finite(c):
    return min(max(c, -FP32_MAX), FP32_MAX)


@compiled
def _moving_ends(x, y, least, most, align):
    """Bounds of the sum of terms x_i <= t_i <= y_i, all cut to one grid between those of ``least`` and ``most``."""
    fine = 1 / (least * align)
    coarse = 1 / (most * align)
    low = high = 0.0
    for i in range(x.size):
        first = coarse if x[i] > 0 else fine
        last = fine if y[i] > 0 else coarse
        low += np.trunc(x[i] * first) / first
        high += np.trunc(y[i] * last) / last
    return low, high


@compiled
def _step(a, powers, b, b_power, c, align, out):
    """Replace the ends c (2, n) by those of one step; a and powers (2, k) hold the ends of A, b is (k, n)."""
    n = c.shape[1]
    ends = np.empty((2, n))
    top = np.empty((2, n))
    total = np.empty((2, n))
    # of products that are the same at both ends
    common_top = np.zeros(n)
    common = np.zeros(n)
    scale = np.empty(n)
    for j in range(n):
        ends[0, j] = _finite(c[0, j])
        ends[1, j] = _finite(c[1, j])
        first = _accumulator_power(ends[0, j])
        last = _accumulator_power(ends[1, j])
        top[0, j] = min(first, last) if (ends[0, j] > 0) == (ends[1, j] >= 0) else _ZERO_POWER
        top[1, j] = max(first, last)
    for k in range(a.shape[1]):
        if powers[0, k] == powers[1, k]:
            for j in range(n if powers[0, k] else 0):
                common_top[j] = max(common_top[j], powers[0, k] * b_power[k, j])
        else:
            for j in range(n):
                top[0, j] = max(top[0, j], powers[0, k] * b_power[k, j])
                top[1, j] = max(top[1, j], powers[1, k] * b_power[k, j])
    for j in range(n):
        top[0, j], top[1, j] = max(top[0, j], common_top[j]), max(top[1, j], common_top[j])
        scale[j] = 1 / (top[1, j] * align)
        total[0, j] = np.trunc(ends[0, j] * scale[j])
        total[1, j] = np.trunc(ends[1, j] * scale[j])
    for k in range(a.shape[1]):
        if a[0, k] == a[1, k]:
            for j in range(n if powers[0, k] else 0):
                common[j] += np.trunc(a[0, k] * b[k, j] * scale[j])
        else:
            for j in range(n):
                x = np.trunc(a[0, k] * b[k, j] * scale[j])
                y = np.trunc(a[1, k] * b[k, j] * scale[j])
                total[0, j] += min(x, y)
                total[1, j] += max(x, y)
    x = np.empty(a.shape[1] + 1)
    y = np.empty(a.shape[1] + 1)
    for j in range(n):
        low = (total[0, j] + common[j]) / scale[j]
        high = (total[1, j] + common[j]) / scale[j]
        if top[0, j] != top[1, j]:
            for k in range(a.shape[1]):
                x[k] = min(a[0, k] * b[k, j], a[1, k] * b[k, j])
                y[k] = max(a[0, k] * b[k, j], a[1, k] * b[k, j])
            x[-1] = ends[0, j]
            y[-1] = ends[1, j]
            low, high = _moving_ends(x, y, top[0, j], top[1, j], align)
        c[0, j], c[1, j] = _result(low, c[0, j], out), _result(high, c[1, j], out)


@compiled
def _chain(a, powers, b, b_power, c, k_step, align, out):
    """Replace the ends c (2, m, n) by those of the chain; a and powers are (2, m, k), b and b_power (k, n)."""
    for i in range(a.shape[1]):
        for j in range(0, c.shape[2], _BLOCK):
            js = slice(j, j + _BLOCK)
            for k in range(0, a.shape[2], k_step):
                ks = slice(k, k + k_step)
                _step(a[:, i, ks], powers[:, i, ks], b[ks, js], b_power[ks, js], c[:, i, js], align, out)


def _operand(x: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Values and powers (0 for zeros) of an operand."""
    x = np.ascontiguousarray(x, np.float64)
    power = np.maximum((x.view(np.int64) & _EXPONENT_BITS).view(np.float64), core.operand.min_normal)
    with np.errstate(invalid="ignore"):
        steps = x / (power * core.operand.epsilon)
    if not ((np.abs(x) <= core.operand.max_finite) & (steps == np.rint(steps))).all():
        raise ValueError(f"operands must be finite numbers of {core.operand.name}")
    return x, np.where(x == 0, 0.0, power)


def _accumulators(c_low: np.ndarray | None, c_high: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    c = np.zeros((2, *shape))
    for end, given in zip(c, (c_low, c_high), strict=True):
        if given is not None:
            end[...] = given
    with np.errstate(over="ignore"):
        if not (c.astype(np.float32) == c).all() or not (c[0] <= c[1]).all():
            raise ValueError("accumulators must be binary32 numbers without NaN, c_low <= c_high")
    return c


def multiply(a: np.ndarray, b: np.ndarray, core: TensorCore, c: np.ndarray | None = None) -> np.ndarray:
    """Return A B + C as a chain of wgmma steps computes it, k ascending.

    Parameters
    ----------
    a, b : float64 (m, k), (k, n)
        Finite numbers of ``core.operand``. Where k is no multiple of ``k_step`` the missing products are zeros.
    core : TensorCore
    c : (m, n), optional
        Binary32 numbers, infinities included; None is zeros.

    Returns
    -------
    float64 (m, n)
        The device's binary32 numbers, exactly. Overflow gives Inf, which stays; a zero is +0.

    Raises
    ------
    ValueError
        If an operand is no finite number of its format, or C no binary32 number.
    """
    return multiply_between(a, a, b, core, c, c)[0]


def multiply_between(
    low: np.ndarray,
    high: np.ndarray,
    b: np.ndarray,
    core: TensorCore,
    c_low: np.ndarray | None = None,
    c_high: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Enclose A B + C for every A of the operand format and every binary32 C inside their ranges.

    Parameters
    ----------
    low, high : float64 (m, k)
        Ends of A, 0 <= low <= high, or equal numbers of either sign.
    c_low, c_high : (m, n), optional
        Ends of C, both or neither.

    Returns
    -------
    least, greatest : float64 (m, n)
        Binary32 numbers (infinite where the result may overflow) between which :func:`multiply` lies, and which are
        its result where all ends are equal.

    Raises
    ------
    ValueError
        As in :func:`multiply`, and for ends that are no range.

    Notes
    -----
    Induction over the steps: let C lie between two binary32 numbers, and every product between the products of b with
    the two ends of a. A step of the chain has one grid, set by ``top``, the largest power.

    * Cutting toward zero to one grid is monotone, so is adding, so is the last cut to the grid of floating point. Where
      ``top`` is the same at the least and at the greatest magnitude of every term, it is the same between, and the two
      sums of ends enclose the sum: each is attained where C and every a are at the end that the sign of b selects.
    * Otherwise ``top`` lies between these two. Grids of powers of two are nested, so that a coarser one never leaves a
      larger magnitude. A term is therefore least when cut to the finest of these grids if it is negative, to the
      coarsest if it is positive, and greatest the other way round. Such terms may need more than float64's 53 bits in
      a sum; but rounding is monotone and the device's own sum is exact, so that theirs stays on its side of it.
    * An infinite C stays, and is larger than every finite result of its side. What is finite in its range ends at
      FP32_MAX.
    """
    (low, low_power), (high, high_power), (b, b_power) = (_operand(x, core) for x in (low, high, b))
    if low.shape != high.shape or (low > high).any() or ((low < 0) & (low != high)).any():
        raise ValueError("A must lie in ranges 0 <= low <= high, or low == high")
    if low.shape[1] != len(b):
        raise ValueError(f"A and B must agree in k, got {low.shape[1]} and {len(b)}")
    c = _accumulators(c_low, c_high, (len(low), b.shape[1]))
    _chain(np.stack([low, high]), np.stack([low_power, high_power]), b, b_power, c, core.k_step, core.align, core.out)
    return c[0], c[1]
