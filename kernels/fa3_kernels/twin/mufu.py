"""The multi-function unit: ex2, lg2, rcp (.approx.ftz.f32) and tanh (.approx.f32) as Hopper computes them, vectorised.

A function is a table of quadratics over the leading fraction bits, summed in integers with one rounding constant; the
square is a truncated one. The tables are in :mod:`fa3_kernels.twin.mufu_tables`, the compiled loops in
:mod:`fa3_kernels.twin.mufu_loops`. Tables and constants were fitted from an NVIDIA H200 by integer feasibility (one
solution in every segment) and checked there on all 2^32 inputs of each instruction without a difference. Those of tanh,
whose binades have 1 to 16 segments each, were fitted likewise from all numbers of 19 binades of an H100. The plain
scalar definition, with which the tests compare, is ``tests/kernels/twin/mufu_exact.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fa3_kernels.twin.mufu_loops import ex2_loop, lg2_loop, rcp_loop, tanh_loop


def _apply(x: ArrayLike, loop: Callable[..., None]) -> np.ndarray:
    """Run one instruction over an array of any shape."""
    bits = np.array(x, np.float32, order="C").view(np.uint32)
    out = np.empty(bits.size, np.int32)
    loop(bits.reshape(-1).view(np.int32), out)
    return out.view(np.float32).reshape(bits.shape)


def ex2(x: ArrayLike) -> np.ndarray:
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
    return _apply(x, ex2_loop)


def ex2_gradual(x: ArrayLike) -> np.ndarray:
    """Return 2^x as ``ex2.approx.f32`` without .ftz does: results below 2^-126 are subnormal numbers.

    ptxas makes two multiplications around the instruction: ex2(x / 2)^2 below -126. Otherwise as :func:`ex2`.
    """
    x = np.asarray(x, np.float32)
    is_low = x < -126
    with np.errstate(invalid="ignore", over="ignore"):
        result = ex2(np.where(is_low, x * np.float32(0.5), x))
        return np.where(is_low, result * result, result)


def rcp(x: ArrayLike) -> np.ndarray:
    """Return 1 / x as ``rcp.approx.ftz.f32`` does.

    Parameters and error are those of :func:`ex2`, except: +-0 and subnormals give +-Inf, +-Inf and results
    below 2^-126 give +-0, NaN gives 0x7fffffff. The error is at most 1 ulp.
    """
    return _apply(x, rcp_loop)


def lg2(x: ArrayLike) -> np.ndarray:
    """Return log2(x) as ``lg2.approx.ftz.f32`` does.

    +-0 and subnormals give -Inf, negative numbers, -Inf and NaN give 0x7fffffff, +Inf gives +Inf and 1 gives
    +0. The error is at most 2^-22 * max(1, |log2(x)|): near 1 the relative error is not bounded.
    """
    return _apply(x, lg2_loop)


def tanh(x: ArrayLike) -> np.ndarray:
    """Return tanh(x) as ``tanh.approx.f32`` does.

    Odd. |x| < 2^-8 gives x, subnormal numbers included, |x| >= 8 and +-Inf give +-1, NaN gives 0x7fffffff. The largest
    relative error is 2^-16.46, at 0.59, the largest error 2^-16.93; from one segment to the next it may fall, by up to
    114 ulp.
    """
    return _apply(x, tanh_loop)
