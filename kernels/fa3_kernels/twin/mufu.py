"""The multi-function unit: ex2, lg2, rcp and rsqrt (.approx.ftz.f32) as Hopper computes them, vectorised.

A function is a table of quadratics over the leading fraction bits, summed in integers with one rounding
constant; the square is a truncated one. Tables and constants were fitted from an NVIDIA H200 by integer
feasibility (one solution in every segment) and checked there on all 2^32 inputs of each instruction without a
difference. The plain scalar definition is :mod:`mufu_exact`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fa3_kernels.twin.compiled import Backend, uses_numba
from fa3_kernels.twin.mufu_exact import TABLES
from fa3_kernels.twin.mufu_loops import ex2_loop, lg2_loop, rcp_loop, rsq_loop

_NAN, _INFINITY, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000


def _squares() -> np.ndarray:
    """The truncated square of every 17-bit number, int32: sum of x >> (18 - i) over set bits i, halved."""
    x = np.arange(1 << 17, dtype=np.int32)
    return sum((((x >> i) & 1) * (x >> (18 - i)) for i in range(1, 17)), start=np.zeros_like(x)) >> 1


_SQUARES = _squares()
_COEFFICIENTS = {name: np.array(table.rows, np.int64).T.copy() for name, table in TABLES.items()}


def _value(function: str, segment: np.ndarray, r: np.ndarray, square: np.ndarray) -> np.ndarray:
    """The quadratic of a segment, int64."""
    t, (c0, c1, c2) = TABLES[function], _COEFFICIENTS[function]
    return (
        (c0 << t.c0_shift)[segment] + c1[segment] * r + (c2 << t.c2_shift)[segment] * square + t.rounding
    ) >> t.shift


def _ex2_numpy(b: np.ndarray) -> np.ndarray:
    negative, shift = b >> 31, ((b >> 23) & 255) - 127
    fixed = (((b & 0x7FFFFF) | 0x800000) << np.clip(shift, 0, 7)) >> np.clip(-shift, 0, 31)
    fixed = (fixed ^ -negative) + (negative & ((fixed & 0x7FFFFF) == 0))
    i, r = (fixed >> 17) & 63, fixed & 0x1FFFF
    significand = _value("ex2", i, r, _SQUARES[r])
    exponent = (fixed >> 23) + 127
    out = ((exponent - 1) << 23) + significand
    out[(exponent > 254) | (shift >= 7)] = _INFINITY
    out[(exponent < 1) | ((shift >= 7) & (negative == 1))] = 0
    out[(b & 0x7FFFFFFF) > _INFINITY] = _NAN
    return out


def _rcp_numpy(b: np.ndarray) -> np.ndarray:
    sign, field, fraction = b & 0x80000000, (b >> 23) & 255, b & 0x7FFFFF
    i, r = fraction >> 16, fraction & 0xFFFF
    significand = _value("rcp", i, r, _SQUARES[r << 1])
    out = ((252 - field) << 23) + significand
    out[(field == 255) | (out < 1 << 23)] = 0
    out[field == 0] = _INFINITY
    return np.where((field == 255) & (fraction != 0), _NAN, sign | out)


def _lg2_numpy(b: np.ndarray) -> np.ndarray:
    field, fraction = (b >> 23) & 255, b & 0x7FFFFF
    i, r = fraction >> 17, fraction & 0x1FFFF
    total = _value("lg2", i, r, _SQUARES[r]) + ((field - 127) << 36)
    negative = total < 0
    total = np.where(negative, ~total, total)
    exponent = np.frexp(total.astype(np.float64))[1].astype(np.int64) - 1  # total < 2^44: exact
    significand = (total << np.clip(23 - exponent, 0, 40)) >> np.clip(exponent - 23, 0, 40)
    out = np.where(negative, 0x80000000, 0) + ((exponent - 36 + 126) << 23) + significand
    out[b == _ONE] = 0
    out[field == 255] = _INFINITY
    out[b >> 31 == 1] = _NAN
    out[field == 0] = 0xFF800000
    out[(b & 0x7FFFFFFF) > _INFINITY] = _NAN
    return out


def _rsq_numpy(b: np.ndarray) -> np.ndarray:
    field, fraction = (b >> 23) & 255, b & 0x7FFFFF
    half, odd = (field - 127) >> 1, (field - 127) & 1
    i, r = (odd << 6) | (fraction >> 17), fraction & 0x1FFFF
    out = ((125 - half) << 23) + _value("rsq", i, r, _SQUARES[r])
    out = np.where((fraction == 0) & (odd == 0), (127 - half) << 23, out)
    out[field == 255] = 0
    out[b >> 31 == 1] = _NAN
    out = np.where(field == 0, (b & 0x80000000) | _INFINITY, out)
    out[(b & 0x7FFFFFFF) > _INFINITY] = _NAN
    return out


def _apply(x: ArrayLike, loop: Callable[..., None], array: Callable[[np.ndarray], np.ndarray], backend: Backend):
    """Run one instruction over an array of any shape."""
    bits = np.array(x, np.float32, order="C").view(np.uint32)
    if not uses_numba(backend):
        return array(np.atleast_1d(bits).astype(np.int64)).astype(np.uint32).view(np.float32).reshape(bits.shape)
    out = np.empty(bits.size, np.int32)
    loop(bits.reshape(-1).view(np.int32), out)
    return out.view(np.float32).reshape(bits.shape)


def ex2(x: ArrayLike, *, backend: Backend = "numba") -> np.ndarray:
    """Return 2^x as ``ex2.approx.ftz.f32`` does.

    Parameters
    ----------
    x : float32, any shape

    Returns
    -------
    float32 like ``x``
        The hardware's bits. Relative error at most 2^-22.7; for negative non-integers the mean is 4.6e-8 low.
        NaN gives 0x7fffffff, +Inf and x >= 128 give +Inf, -Inf and results below 2^-126 give +0, and
        |x| < 2^-23 gives exactly 1.
    """
    return _apply(x, ex2_loop, _ex2_numpy, backend)


def rcp(x: ArrayLike, *, backend: Backend = "numba") -> np.ndarray:
    """Return 1 / x as ``rcp.approx.ftz.f32`` does.

    Parameters and error are those of :func:`ex2`, except: +-0 and subnormals give +-Inf, +-Inf and results
    below 2^-126 give +-0, NaN gives 0x7fffffff. The error is at most 1 ulp.
    """
    return _apply(x, rcp_loop, _rcp_numpy, backend)


def lg2(x: ArrayLike, *, backend: Backend = "numba") -> np.ndarray:
    """Return log2(x) as ``lg2.approx.ftz.f32`` does.

    +-0 and subnormals give -Inf, negative numbers, -Inf and NaN give 0x7fffffff, +Inf gives +Inf and 1 gives
    +0. The error is at most 2^-22 * max(1, |log2(x)|): near 1 the relative error is not bounded.
    """
    return _apply(x, lg2_loop, _lg2_numpy, backend)


def rsq(x: ArrayLike, *, backend: Backend = "numba") -> np.ndarray:
    """Return 1 / sqrt(x) as ``rsqrt.approx.ftz.f32`` does.

    +-0 and subnormals give +-Inf, negative numbers, -Inf and NaN give 0x7fffffff, +Inf gives +0.
    """
    return _apply(x, rsq_loop, _rsq_numpy, backend)
