"""Worst-case errors of single steps of a kernel: products on the tensor core, softcap, rounding to a format.

The bounds of the forward and of gradients are put together from these pieces; reference/README.md derives them. The
errors of single instructions are in :mod:`fa3_reference.bounds.device`. Everything is evaluated in float64, and the
factor ``OUTWARD`` covers the rounding of that.
"""

from __future__ import annotations

import math

import numpy as np

from fa3_reference.bounds.compiled import compiled, inlined
from fa3_reference.bounds.device import EX2_REL, RCP_REL, U_FP32, TensorCore
from fa3_reference.formats import FORMATS, Format

LN2 = float(np.log(2.0))
LOG2_E = 1.0 / LN2
CANCELLED = 2.0**-40  # of sums of absolute values: what a difference of float64 sums is off by at most
OUTWARD = 1 + 2.0**-30  # float64 sums of <= 2^17 terms are off by less than 2^-35, relative to sums of absolute values
FLOAT64 = 2.0**-52  # error of one addition, in a sum of the truth's and in one of the bound's, 2^-53 each


def gamma(steps: float, unit: float = U_FP32) -> float:
    """Return the relative error of ``steps`` roundings one after the other, steps unit / (1 - steps unit).

    It is infinite where the steps may lose everything.
    """
    return steps * unit / (1 - steps * unit) if steps * unit < 1 else math.inf


def log_error(relative: float) -> float:
    """Return the largest |ln(1 + e)| of |e| <= relative, which is below 1."""
    return -math.log1p(-relative)


def score_error(q: np.ndarray, k: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact products of rows, and a bound of the error of their wgmma chain.

    Parameters
    ----------
    q, k : float64 (rows, head_dim), (keys, head_dim)
        Finite values of the operand format.
    core : TensorCore
        The operand format and what the tensor core keeps of it.

    Returns
    -------
    s, ds : float64 (rows, keys)
        |wgmma - s| <= ds, as long as no partial sum overflows binary32.
    """
    constants = core.k_step, core.align_bits, core.out_bits, core.tiny
    return _score_error(
        q,
        _exponents(q, core),
        _last_bits(q),
        *(np.ascontiguousarray(x.T) for x in (k, _exponents(k, core), _last_bits(k))),
        constants,
    )


def grouped_score_error(q: np.ndarray, k: np.ndarray, core: TensorCore, is_stored: bool = True) -> np.ndarray:
    """Bound the error of the products of rows by the tensor core where the order of the channels is not known.

    Parameters
    ----------
    q, k : float64 (rows, head_dim), (keys, head_dim)
        Finite values of the operand format.
    core : TensorCore
        The operand format and what the tensor core keeps of it.
    is_stored : bool
        Whether the tensor core reads q itself. Otherwise it reads q times some factor, rounded to the format.

    Returns
    -------
    float64 (rows, keys)
        The largest error for any groups of k_step / 2 channels or more, which are chained or promoted to binary32 after
        any number of groups.
    """
    exponent = _exponents(q, core)
    last = _last_bits(q)
    if not is_stored:  # a factor that is no power of two may double one number's power against another's
        exponent = exponent + 1
        last = np.full_like(last, _NO_EXPONENT)
    constants = core.k_step // 2, core.align_bits, core.out_bits
    columns = (np.ascontiguousarray(x.T) for x in (k, _exponents(k, core), _last_bits(k)))
    return _grouped_score_error(q, exponent.astype(np.int32), last, *columns, constants)


_NO_EXPONENT = -4000  # exponent of zero; its sum with any other stays below every sum of two others


def _exponents(x: np.ndarray, core: TensorCore) -> np.ndarray:
    """Exponent of each operand as the tensor core reads it."""
    exponent = np.maximum(np.frexp(x)[1] - 1, core.operand.min_exponent)
    return np.where(x == 0, _NO_EXPONENT, exponent).astype(np.int32)


def _last_bits(x: np.ndarray) -> np.ndarray:
    """Exponent of the lowest set bit of each number; that of zero is above every other."""
    return np.where(x == 0, -_NO_EXPONENT, np.frexp(last_bit(x))[1] - 1).astype(np.int32)


@compiled
def _score_error(q, q_exponent, q_last, k, k_exponent, k_last, constants):
    """Step 1 of the derivation for every row of q (rows, d) and column of k (d, keys).

    The exponents of the operands and of their last bits have the same shapes, int32. Returns s and ds (rows, keys).
    """
    k_step, align_bits, out_bits, tiny = constants
    rows = q.shape[0]
    depth = q.shape[1]
    keys = k.shape[1]
    s = np.zeros((rows, keys))
    ds = np.zeros((rows, keys))
    top, c_high, coarsest, last, inexact, grid = np.empty((6, keys), np.int32)
    size = np.empty(keys)
    for i in range(rows):
        grid[:] = -_NO_EXPONENT  # C is a multiple of 2^grid
        for start in range(0, depth, k_step):
            stop = min(start + k_step, depth)
            top[:] = 2 * _NO_EXPONENT
            last[:] = -_NO_EXPONENT
            inexact[:] = 0
            size[:] = 0.0
            for d in range(start, stop):
                if q[i, d] != 0:
                    for j in range(keys):
                        top[j] = max(top[j], q_exponent[i, d] + k_exponent[d, j])
            before = s[i].copy()
            for j in range(keys):
                c_high[j] = max(_floor_log2(abs(before[j]) + ds[i, j]), -126)  # as a subnormal C counts
                coarsest[j] = max(top[j], c_high[j]) - align_bits
            for d in range(start, stop):
                if q[i, d] != 0:
                    for j in range(keys):
                        bit = q_last[i, d] + k_last[d, j]
                        last[j] = min(last[j], bit)
                        inexact[j] += bit < coarsest[j]
                        product = q[i, d] * k[d, j]
                        s[i, j] += product
                        size[j] += abs(product)
            for j in range(keys):
                c_low = _floor_log2(abs(before[j]) - ds[i, j])
                lost = min(inexact[j] * math.ldexp(1.0, int(coarsest[j])), size[j])
                # C loses bits only where the largest product sets an alignment grid coarser than C's own last bit
                if top[j] - align_bits > grid[j]:
                    lost += math.ldexp(1.0, int(top[j] - align_bits))
                grid[j] = max(min(grid[j], last[j]), max(top[j], c_low) - align_bits)
                result = _floor_log2(abs(s[i, j]) + ds[i, j] + lost)
                # The sum is cut to the output's bits only where these end above the last bit of the sum.
                if result - out_bits > grid[j]:
                    lost += math.ldexp(1.0, int(result - out_bits))
                ds[i, j] = (ds[i, j] + lost) * OUTWARD + (tiny if grid[j] < -126 - out_bits else 0.0)
                grid[j] = max(grid[j], _floor_log2(abs(s[i, j]) - ds[i, j]) - out_bits)
    return s, ds


@compiled
def _grouped_score_error(q, q_exponent, q_last, k, k_exponent, k_last, constants):
    """Step 1 of the derivation for channels in any order; shapes as of :func:`_score_error`, and returns ds alone.

    Whatever the groups are, a partial sum that is cut toward zero stays between the sum of all negative products and
    the sum of all positive ones. So no grid is coarser than that of the larger of these two, or of the largest product.
    """
    group, align_bits, out_bits = constants
    rows = q.shape[0]
    depth = q.shape[1]
    keys = k.shape[1]
    groups = -(-depth // group)
    ds = np.zeros((rows, keys))
    positive = np.empty(keys)
    negative = np.empty(keys)
    top, coarse, inexact = np.empty((3, keys), np.int32)
    for i in range(rows):
        positive[:] = 0.0
        negative[:] = 0.0
        top[:] = 2 * _NO_EXPONENT
        inexact[:] = 0
        for d in range(depth):
            if q[i, d] != 0:
                for j in range(keys):
                    product = q[i, d] * k[d, j]
                    positive[j] += max(product, 0.0)
                    negative[j] -= min(product, 0.0)
                    top[j] = max(top[j], q_exponent[i, d] + k_exponent[d, j])
        for j in range(keys):
            largest = _floor_log2(max(positive[j], negative[j]) * OUTWARD)
            coarse[j] = max(top[j] - align_bits, max(largest, -126) - out_bits)
            top[j] = max(top[j], largest, -126)
        for d in range(depth):
            if q[i, d] != 0:
                for j in range(keys):
                    inexact[j] += q_last[i, d] + k_last[d, j] < coarse[j]
        for j in range(keys):
            # Where all products are multiples of the coarsest grid nothing is cut. Otherwise each group may cut its
            # products and C, then its sum, and once more where that sum is promoted.
            if inexact[j] > 0:
                fine = math.ldexp(1.0, int(top[j] - align_bits))
                lost = min(inexact[j] * fine, positive[j] + negative[j])
                ds[i, j] = (lost + groups * (fine + 2 * math.ldexp(1.0, int(coarse[j])))) * OUTWARD
    return ds


@inlined
def _floor_log2(x):
    """floor(log2 x) of finite x; for 0 and negative numbers one that is below every exponent."""
    return math.frexp(x)[1] - 1 if x > 0 else _NO_EXPONENT


def softcap_error(
    x: np.ndarray, dx: np.ndarray, softcap: float, tanh_error: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return capped scores c tanh(x / c) with c = softcap log2(e), and a bound of their error.

    ``x`` and ``dx`` are scores in log2 units and their error. tanh has the relative error ``tanh_error``; where that is
    0 it is computed by ex2 and rcp, as 1 - 2 / (2^(2 x / softcap) + 1).
    """
    c = softcap * LOG2_E
    tanh = np.tanh(x / c)
    carried = np.maximum(np.tanh((x + dx) / c) - tanh, tanh - np.tanh((x - dx) / c))
    inverse = np.minimum(1 - tanh + carried, 2.0)  # twice what rcp returns
    own = EX2_REL * np.minimum(0.5, inverse) + inverse * (U_FP32 + RCP_REL) + U_FP32 * (np.abs(tanh) + carried)
    if tanh_error:
        own = tanh_error * np.minimum(np.abs(tanh) + carried, 1.0)
    own = own * (1 + 2.0**-20)
    return c * tanh, c * (carried + own + 2.0**-50)  # of float64's tanh, and of what is flushed


def binary32_error(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the largest error of rounding a number of [low, high] to binary32.

    Where both ends round to the same number so does all between them; otherwise the error is half an ulp.
    """
    down = rounded(low, FORMATS["fp32"])
    up = rounded(high, FORMATS["fp32"])
    size = np.maximum(np.abs(low), np.abs(high))
    half_ulp = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 25, -150))
    known = np.maximum(np.abs(low - down), np.abs(high - up))
    return np.where(down == up, known, half_ulp)


def last_bit(x: np.ndarray) -> np.ndarray:
    """Return the largest power of two of which a float64 number is a multiple; inf for zero."""
    fraction, exponent = np.frexp(x)
    digits = np.ldexp(fraction, 53).astype(np.int64)
    return np.where(x == 0, np.inf, np.ldexp((digits & -digits).astype(np.float64), exponent - 53))


def grid(low: np.ndarray, high: np.ndarray, fmt: Format) -> np.ndarray:
    """Return a power of two of which every number between low and high (>= 0) is a multiple after rounding to ``fmt``;
    inf where all of them round to zero."""
    down = rounded(low, fmt)
    up = rounded(high, fmt)
    ulp = np.ldexp(1.0, np.maximum(np.frexp(down)[1] - 1, fmt.min_exponent) - fmt.fraction_bits)
    return np.where(down == up, last_bit(up), np.where(down > 0, ulp, fmt.min_subnormal))


def rounding_error(low: np.ndarray, high: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the largest error of rounding any number of [low, high] (>= 0) to nearest in ``fmt``; inf where it may
    overflow."""
    _, exponent = np.frexp(high)
    least = 1 - fmt.bias - fmt.fraction_bits - 1
    half_ulp = np.ldexp(1.0, np.maximum(exponent - 2 - fmt.fraction_bits, least))
    down = rounded(low, fmt)
    up = rounded(high, fmt)
    known = np.maximum(np.abs(low - down), np.abs(high - up))
    return np.where(high > fmt.max_finite, np.inf, np.where(down == up, known, half_ulp))


@np.errstate(over="ignore")
def rounded(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Round to binary32 and then to a format, both to nearest; float64. A kernel rounds binary32 numbers near x, and
    as this function never decreases, its values at two ends hold theirs in between."""
    return np.asarray(x).astype(np.float32).astype(fmt.dtype).astype(np.float64)


def rounded_error(exact: np.ndarray, error: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the largest |round(y) - exact| of any y with |y - exact| <= error; inf where y may round to infinity."""
    up = rounded(exact + error, fmt)
    down = rounded(exact - error, fmt)
    return np.maximum(up - exact, exact - down)


def stored_error(exact: np.ndarray, error: np.ndarray, out_dtype: str) -> np.ndarray:
    """Return :func:`rounded_error` of an output; one in binary32 does not have the last rounding."""
    return error if out_dtype == "fp32" else rounded_error(exact, error, FORMATS[out_dtype])
