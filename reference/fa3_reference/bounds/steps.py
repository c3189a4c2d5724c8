"""Worst-case errors of the steps a forward kernel is made of: scores, softcap, rounding to a format.

Pieces of :mod:`fa3_reference.bounds.forward`, which states the derivation. Everything is float64; ``OUTWARD`` covers
its own rounding.
"""

from __future__ import annotations

import math

import numpy as np

from fa3_reference.bounds.device import EX2_REL, RCP_REL, U_FP32, TensorCore
from fa3_reference.formats import Format

LN2 = float(np.log(2.0))
LOG2_E = 1.0 / LN2
OUTWARD = 1 + 2.0**-30  # float64 sums of <= 2^17 terms are off by less than 2^-35, relative to sums of absolute values


def gamma(steps: float, unit: float = U_FP32) -> float:
    """Relative error of ``steps`` roundings one after the other: steps unit / (1 - steps unit); 1 at most is
    meaningful."""
    return steps * unit / (1 - steps * unit) if steps * unit < 1 else math.inf


def log_error(relative: float) -> float:
    """Largest |ln(1 + e)| of |e| <= relative."""
    return -math.log1p(-relative)


def score_error(q: np.ndarray, k: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Exact products of rows, and the bound on the error of their wgmma chain.

    Parameters
    ----------
    q, k : float64 (rows, head_dim), (keys, head_dim)
        Values of the operand format.

    Returns
    -------
    s, ds : float64 (rows, keys)
        |wgmma - s| <= ds, as long as no partial sum overflows binary32.
    """
    s = np.zeros((q.shape[0], k.shape[0]))
    ds = np.zeros_like(s)
    q_exponent, k_exponent = _exponents(q, core).T.copy(), _exponents(k, core).T.copy()
    for start in range(0, q.shape[1], core.k_step):
        step = slice(start, start + core.k_step)
        c_high = np.maximum(_floor_log2(np.abs(s) + ds), np.int16(-126))  # as a subnormal C counts
        top, inexact = _step_exponents(q_exponent[step], k_exponent[step], c_high, core)
        product_top = top[0]
        unit = np.ldexp(core.align, top[1])
        lost = np.minimum(inexact * unit, np.abs(q[:, step]) @ np.abs(k[:, step]).T)
        c_low = _floor_log2(np.maximum(np.abs(s) - ds, 0.0))
        if start:  # C loses bits only where the largest product sets an alignment grid coarser than C's own last bit
            lost += np.where(
                product_top > c_low + core.align_bits - core.out_bits, np.ldexp(core.align, product_top), 0.0
            )
        s = s + q[:, step] @ k[:, step].T
        result = _floor_log2(np.abs(s) + ds + lost)
        # The sum is cut to the output's bits only where it outgrew the alignment grid; elsewhere the grid is coarser.
        carries = result > np.maximum(product_top, c_low) + core.out_bits - core.align_bits
        ds = (ds + lost + np.where(carries, np.ldexp(core.out, result), 0.0)) * OUTWARD + core.tiny
    return s, ds


_NO_EXPONENT = -4000  # exponent of zero; sums of two stay inside int16


def _exponents(x: np.ndarray, core: TensorCore) -> np.ndarray:
    """Exponent of each operand as the tensor core reads it, int16."""
    return np.where(x == 0, _NO_EXPONENT, np.maximum(np.frexp(x)[1] - 1, core.operand.min_exponent)).astype(np.int16)


def _floor_log2(x: np.ndarray) -> np.ndarray:
    """floor(log2 x) of finite x >= 0, int16."""
    return np.where(x > 0, np.frexp(x)[1] - 1, _NO_EXPONENT).astype(np.int16)


def _step_exponents(
    q: np.ndarray, k: np.ndarray, c: np.ndarray, core: TensorCore
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Largest product exponent, emax including C, and the number of products that may lose bits; each (rows, keys)."""
    top = np.full(c.shape, 2 * _NO_EXPONENT, np.int16)
    for i in range(q.shape[0]):
        np.maximum(top, q[i][:, None] + k[i][None, :], out=top)
    emax = np.maximum(top, c)
    floor = emax - np.int16(core.exact_binades)
    inexact = np.zeros(c.shape, np.int16)
    for i in range(q.shape[0]):
        exponent = q[i][:, None] + k[i][None, :]
        inexact += (exponent < floor) & (exponent > _NO_EXPONENT)
    return (top, emax), inexact


def softcap_error(x: np.ndarray, dx: np.ndarray, softcap: float, weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores c tanh(x / c) through ex2 and rcp: 1 - 2 / (2^(2x/c) + 1); ``weight`` of the error of its own
    operations."""
    c = softcap * LOG2_E
    tanh = np.tanh(x / c)
    carried = np.maximum(np.tanh((x + dx) / c) - tanh, tanh - np.tanh((x - dx) / c))
    own = weight * (EX2_REL / 2 + 2 * (U_FP32 + RCP_REL) + U_FP32) * (1 + 2.0**-20) + 2.0**-125
    return c * tanh, c * (carried + own + 2.0**-50)


def rounding_error(low: np.ndarray, high: np.ndarray, fmt: Format) -> np.ndarray:
    """Largest error of rounding any number of [low, high] (>= 0) to nearest."""
    _, exponent = np.frexp(high)
    least = 1 - fmt.bias - fmt.fraction_bits - 1
    half_ulp = np.ldexp(1.0, np.maximum(exponent - 2 - fmt.fraction_bits, least))
    half_ulp = np.where(high > 0, np.minimum(half_ulp, high), 0.0)
    down, up = (rounded(np.minimum(z, fmt.max_finite), fmt) for z in (low, high))
    inside = np.maximum(np.abs(low - down), np.abs(high - up))
    return np.where(high > fmt.max_finite, np.inf, np.where(down == up, np.minimum(inside, half_ulp), half_ulp))


def rounded(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Round to binary32 and then to a format, both to nearest: monotone, and what becomes of the binary32 numbers
    near x."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32).astype(fmt.dtype).astype(np.float64)


def rounded_error(exact: np.ndarray, error: np.ndarray, fmt: Format) -> np.ndarray:
    """Largest |round(y) - exact| of any |y - exact| <= error; inf where y may round to infinity."""
    up, down = rounded(exact + error, fmt), rounded(exact - error, fmt)
    return np.maximum(up - exact, exact - down)
