"""Hopper's tensor core as a definition in float64, for numbers and for ranges of numbers.

:func:`multiply` returns what a chain of wgmma steps computes. :func:`multiply_between` returns the two ends of what it
may compute where A and C are only known to lie in ranges. :mod:`fa3_reference.bounds.enclosure` runs a kernel's program
with both.

The twin of the kernels has a tensor core of its own, ``fa3_kernels.twin.wgmma``. There are two because a judge shares
no code with what it judges: this one was written from the description below alone, so that a mistake in the twin's
cannot hide itself by being made here as well.

One wgmma step adds up to ``k_step`` products to its accumulator C:

1. The power of an operand is 2^exponent; a subnormal operand has the power of its format's least normal number. The
   power of a nonzero product is the product of its operands' powers, and a zero product has none. The power of C is
   2^exponent and at least 2^-126, but 2^-133 where C is zero. ``top`` is the largest power of any product or of C.
2. Every product and C are cut toward zero to multiples of top * 2^-align_bits, and the results are added exactly.
3. The sum s is cut toward zero to a multiple of max(2^floor(log2 |s|), 2^-126) * 2^-out_bits. A sum beyond FP32_MAX
   becomes infinite, and a C that is infinite already stays what it is.

float64 computes this exactly: powers of products lie between 2^-266 and 2^254, a cut product is less than 2^(align_bits
+ 2) units, and at most 33 of them are added. Measured on an NVIDIA H200.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.compiled import compiled, inlined
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, TensorCore
from fa3_reference.rules import require

_ZERO_POWER = 2.0**-133  # the power of a zero accumulator, observable with bf16 only
_EXPONENT_BITS = 0x7FF0000000000000
_BLOCK = 256  # columns at a time: their state stays in the first-level cache


@inlined
def _power(x):
    """2^floor(log2 |x|) of a normal float64 number; 0 for 0."""
    return np.int64(np.float64(x).view(np.int64) & _EXPONENT_BITS).view(np.float64)


@inlined
def _accumulator_power(c):
    # step 1 of the module's description; c is finite
    return max(_power(c), FP32_MIN_NORMAL) if c != 0 else _ZERO_POWER


@inlined
def _result(total, c, out):
    """Step 3: cut the sum to a binary32 number; ``c`` is the accumulator that went in, ``out`` is 2^-out_bits."""
    unit = max(_power(total), FP32_MIN_NORMAL) * out
    cut = np.trunc(total / unit) * unit + 0.0  # a sum that is cut to zero is +0
    cut = cut if abs(cut) <= FP32_MAX else np.copysign(np.inf, cut)
    return cut if abs(c) <= FP32_MAX else c


@inlined
def _finite(c):
    # the finite number nearest to an end of C, which may be infinite
    return min(max(c, -FP32_MAX), FP32_MAX)


@compiled
def _moving_ends(x, y, least, most, align):
    """Bound the sum of terms that are cut to a grid which is not known.

    Term i lies between x[i] and y[i]. ``top``, which sets the grid of all terms, lies between ``least`` and ``most``.
    """
    # units per 1 of the finest and of the coarsest grid
    fine = 1 / (least * align)
    coarse = 1 / (most * align)
    low = high = 0.0
    for i in range(x.size):
        # a coarser grid leaves a smaller magnitude: that lowers a positive term and raises a negative one
        first = coarse if x[i] > 0 else fine
        last = fine if y[i] > 0 else coarse
        low += np.trunc(x[i] * first) / first
        high += np.trunc(y[i] * last) / last
    return low, high


@compiled
def _step(a, powers, b, b_power, c, align, out):
    """Run one wgmma step on one row of A: replace the ends of C, c (2, n), by the ends of its result.

    a (2, k) holds the ends of the row of A and ``powers`` (2, k) their powers; b and b_power (k, n) are the numbers of
    B, which are known, and their powers. ``align`` and ``out`` are 2^-align_bits and 2^-out_bits.
    """
    n = c.shape[1]
    ends = np.empty((2, n))
    top = np.empty((2, n))
    total = np.empty((2, n))
    # for the products that are the same at both ends: their largest power, and their sum in units of the grid
    common_top = np.zeros(n)
    common = np.zeros(n)
    scale = np.empty(n)
    for j in range(n):
        ends[0, j] = _finite(c[0, j])
        ends[1, j] = _finite(c[1, j])
        first = _accumulator_power(ends[0, j])
        last = _accumulator_power(ends[1, j])
        # a range of C that holds zero holds the power of a zero C, the least of all
        top[0, j] = min(first, last) if (ends[0, j] > 0) == (ends[1, j] >= 0) else _ZERO_POWER
        top[1, j] = max(first, last)
    for k in range(a.shape[1]):
        if powers[0, k] == powers[1, k]:
            # a zero has power 0: its products have none and add nothing
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
        if top[0, j] != top[1, j]:  # the grid is not known: bound the sum over all grids between the two
            for k in range(a.shape[1]):
                x[k] = min(a[0, k] * b[k, j], a[1, k] * b[k, j])
                y[k] = max(a[0, k] * b[k, j], a[1, k] * b[k, j])
            x[-1] = ends[0, j]
            y[-1] = ends[1, j]
            low, high = _moving_ends(x, y, top[0, j], top[1, j], align)
        c[0, j], c[1, j] = _result(low, c[0, j], out), _result(high, c[1, j], out)


@compiled
def _chain(a, powers, b, b_power, c, k_step, align, out):
    """Run the chain of steps for all m rows of A, k ascending: replace the ends c (2, m, n) by those of its result.

    a and powers are (2, m, k), b and b_power (k, n), as those of one row in :func:`_step`.
    """
    for i in range(a.shape[1]):
        for j in range(0, c.shape[2], _BLOCK):
            js = slice(j, j + _BLOCK)
            for k in range(0, a.shape[2], k_step):
                ks = slice(k, k + k_step)
                _step(a[:, i, ks], powers[:, i, ks], b[ks, js], b_power[ks, js], c[:, i, js], align, out)


@np.errstate(invalid="ignore")
def _operand(x: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of an operand and their powers (0 for zeros); ValueError for numbers outside its format."""
    x = np.ascontiguousarray(x, np.float64)
    power = np.maximum((x.view(np.int64) & _EXPONENT_BITS).view(np.float64), core.operand.min_normal)
    steps = x / (power * core.operand.epsilon)
    require(
        ((np.abs(x) <= core.operand.max_finite) & (steps == np.rint(steps))).all(),
        f"operands must be finite numbers of {core.operand.name}",
    )
    return x, np.where(x == 0, 0.0, power)


@np.errstate(over="ignore")
def _accumulators(c_low: np.ndarray | None, c_high: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    # both ends of C (2, m, n); an end of None is zeros
    c = np.zeros((2, *shape))
    for end, given in zip(c, (c_low, c_high), strict=True):
        if given is not None:
            end[...] = given
    require(
        (c.astype(np.float32) == c).all() and (c[0] <= c[1]).all(),
        "accumulators must be binary32 numbers without NaN, c_low <= c_high",
    )
    return c


def multiply(a: np.ndarray, b: np.ndarray, core: TensorCore, c: np.ndarray | None = None) -> np.ndarray:
    """Return A B + C as a chain of wgmma steps computes it, k ascending.

    Parameters
    ----------
    a, b : float64 (m, k), (k, n)
        Finite numbers of ``core.operand``. Where k is no multiple of ``k_step`` the missing products are zeros.
    core : TensorCore
        The operand format and what the tensor core keeps of it: a value of
        :data:`~fa3_reference.bounds.device.TENSOR_CORE`.
    c : (m, n), optional
        Binary32 numbers, infinities included; None is zeros.

    Returns
    -------
    float64 (m, n)
        The device's binary32 numbers, exactly. Overflow gives Inf, which stays; a zero is +0.

    Raises
    ------
    ValueError
        If an operand is no finite number of its format, C is no binary32 number, or A and B differ in k.
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
    b : float64 (k, n)
        Numbers of B, which are known.
    core : TensorCore
        As of :func:`multiply`.
    c_low, c_high : (m, n), optional
        Ends of C, both or neither; None is zeros.

    Returns
    -------
    least, greatest : float64 (m, n)
        Binary32 numbers (infinite where the result may overflow) between which the result of :func:`multiply` lies.
        Where all ends are equal both are that result.

    Raises
    ------
    ValueError
        As in :func:`multiply`, and where a lower end is above its upper end or a range of A holds negative numbers.

    Notes
    -----
    The proof is an induction over the steps. Before a step C lies between two binary32 numbers, and every product lies
    between the products of b with the two ends of a. The step has one grid, which ``top`` sets, the largest power.

    * Cutting toward zero to one grid is monotone, so is adding, so is the last cut to the grid of floating point. Where
      ``top`` is the same with every term at its least magnitude as with every term at its greatest, it is the same in
      between, and the two sums of ends enclose the sum. Each of the two is attained, with C and every a at the end that
      the sign of b selects.
    * Otherwise ``top`` lies between these two values. Grids of powers of two are nested, so that a coarser one never
      leaves a larger magnitude. A negative term is therefore least when it is cut to the finest of these grids, and a
      positive term when it is cut to the coarsest; they are greatest the other way round. A sum of terms on different
      grids may need more than float64's 53 bits and is then rounded. Rounding is monotone and the device's own sum
      needs none, so that the rounded sum stays on its side of the device's.
    * An infinite C stays infinite, and so does that end of the result. The finite numbers in such a range of C end at
      FP32_MAX, and the step is run with FP32_MAX in place of the infinite end.
    """
    (low, low_power), (high, high_power), (b, b_power) = (_operand(x, core) for x in (low, high, b))
    require(
        not (low.shape != high.shape or (low > high).any() or ((low < 0) & (low != high)).any()),
        "A must lie in ranges 0 <= low <= high, or low == high",
    )
    require(low.shape[1] == len(b), f"A and B must agree in k, got {low.shape[1]} and {len(b)}")
    c = _accumulators(c_low, c_high, (len(low), b.shape[1]))
    _chain(np.stack([low, high]), np.stack([low_power, high_power]), b, b_power, c, core.k_step, core.align, core.out)
    return c[0], c[1]
