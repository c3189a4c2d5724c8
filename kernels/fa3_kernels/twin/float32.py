"""The fp32 pipe: fused multiply-add, maxima, and the row sums in the order of a wgmma accumulator fragment.

Additions and multiplications of numpy float32 arrays already round as the device's instructions without .ftz do, which
keep subnormal numbers; :func:`flushed` does what .ftz adds. This module has the operations that numpy lacks. NaN
results are 0x7fffffff (documented: PTX ISA, canonical NaN).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fa3_kernels.twin.compiled import compiled, inlined
from fa3_kernels.twin.mufu_loops import ex2_bits

_NAN = 0x7FFFFFFF
_CANONICAL = np.uint32(_NAN).view(np.float32)
_LOWEST_KEY = -(1 << 31)


@inlined
def fma_one(a, b, c):
    """One fma for compiled loops: rounding to odd in float64, then to nearest in binary32, rounds once."""
    product = np.float64(a) * np.float64(b)  # exact: 48 bits
    addend = np.float64(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact (TwoSum); NaN for Inf and NaN
    bits = np.float64(total).view(np.int64)
    away = np.int64(1) if (error > 0) == (total > 0) else np.int64(-1)
    inexact = (error > 0) | (error < 0)
    bits += away if inexact and (bits & 1) == 0 else np.int64(0)
    result = np.float32(np.int64(bits).view(np.float64))
    return result if result == result else _CANONICAL


@compiled
def _fma_loop(a, b, c, out):
    """Fill ``out`` with a * b + c, all flat."""
    for i in range(out.size):
        out[i] = fma_one(a[i], b[i], c[i])


@compiled
def _product_loop(a, b, out):
    """Add A B to ``out`` by fma, k ascending."""
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            x = a[i, k]
            for j in range(b.shape[1]):
                out[i, j] = fma_one(x, b[k, j], out[i, j])


@compiled
def _exp2_scaled_loop(s, c, minus, out):
    """Fill ``out``, bits of float32, with ex2(s * c - minus); c and minus are per row."""
    exponent = np.empty(s.shape[1], np.float32)
    exponent_bits = exponent.view(np.int32)
    for i in range(s.shape[0]):
        scale = c[i]
        offset = -minus[i]
        for j in range(s.shape[1]):
            exponent[j] = fma_one(s[i, j], scale, offset)
        for j in range(s.shape[1]):
            out[i, j] = ex2_bits(exponent_bits[j])


@compiled
def _thread_row_sums_loop(p, out):
    """Fill ``out`` (m, 4): each pair of columns is added first, then the pairs, j ascending."""
    for i in range(p.shape[0]):
        for q in range(4):
            out[i, q] = p[i, 2 * q] + p[i, 2 * q + 1]
        for j in range(8, p.shape[1], 8):
            for q in range(4):
                out[i, q] += p[i, j + 2 * q] + p[i, j + 2 * q + 1]


@compiled
def _serial_sums_loop(p, sums):
    """Add each thread's columns to ``sums`` (m, 4) one by one, all but the first column."""
    for i in range(p.shape[0]):
        t0 = sums[i, 0]
        t1 = sums[i, 1]
        t2 = sums[i, 2]
        t3 = sums[i, 3]
        t0 = t0 + p[i, 1]
        t1 = t1 + p[i, 3]
        t2 = t2 + p[i, 5]
        t3 = t3 + p[i, 7]
        for j in range(8, p.shape[1], 8):
            t0 = t0 + p[i, j]
            t1 = t1 + p[i, j + 2]
            t2 = t2 + p[i, j + 4]
            t3 = t3 + p[i, j + 6]
            t0 = t0 + p[i, j + 1]
            t1 = t1 + p[i, j + 3]
            t2 = t2 + p[i, j + 5]
            t3 = t3 + p[i, j + 7]
        sums[i, 0] = t0
        sums[i, 1] = t1
        sums[i, 2] = t2
        sums[i, 3] = t3


@compiled
def _flush_loop(bits, out):
    """Fill ``out`` with the bits, those of subnormal numbers replaced by a zero of their sign."""
    for i in range(bits.size):
        b = bits[i]
        out[i] = b & np.int32(-(1 << 31)) if (b & 0x7F800000) == 0 else b


@compiled
def _row_max_loop(bits, out):
    """Fill ``out`` with the bits of each row's maximum; bits are compared as integers in the order of the numbers."""
    for i in range(bits.shape[0]):
        largest = np.int32(_LOWEST_KEY)
        for j in range(bits.shape[1]):
            b = bits[i, j]
            key = np.int32(b ^ ((b >> 31) & 0x7FFFFFFF))  # in the order of the numbers, -0 below +0
            largest = max(largest, np.int32(_LOWEST_KEY) if (b & 0x7FFFFFFF) > 0x7F800000 else key)
        back = np.int32(largest ^ ((largest >> 31) & 0x7FFFFFFF))
        out[i] = np.int32(_NAN) if largest == _LOWEST_KEY else back


def _canonical(x: np.ndarray) -> np.ndarray:
    """Give every NaN of ``x`` the bits 0x7fffffff, in place."""
    x[np.isnan(x)] = _CANONICAL
    return x


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """Return a * b + c rounded once (fma.rn.f32).

    Parameters
    ----------
    a, b, c : float32, broadcast against each other

    Returns
    -------
    float32
        Correctly rounded, subnormal results included. Overflow gives Inf; NaN, 0 * Inf and Inf - Inf give
        0x7fffffff.
    """
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float32) for x in (a, b, c)))
    out = np.empty(a.shape, np.float32)
    _fma_loop(*(np.array(x, order="C").reshape(-1) for x in (a, b, c)), out.reshape(-1))
    return out


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
    """Return A B + C by fma one after the other, k ascending.

    Parameters
    ----------
    a : float32 (m, k)
    b : float32 (k, n)
    c : float32 (m, n), optional
        Zeros by default.

    Returns
    -------
    float32 (m, n)
        Each step rounded once; NaN, Inf and overflow as in :func:`fma`.
    """
    out = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else np.array(c, np.float32, order="C")
    _product_loop(*(np.array(x, np.float32, order="C") for x in (a, b)), out)
    return out


def fmax(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """Return the larger of two float32 arrays (max.f32): a NaN loses, -0 < +0, two NaN give 0x7fffffff."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    return row_max(np.stack([a.reshape(-1), b.reshape(-1)], 1)).reshape(a.shape)


def exp2_scaled(s: np.ndarray, c: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """Return ex2(fma(s, c, -minus)): the exponentials of one softmax tile.

    Parameters
    ----------
    s : float32 (m, n)
    c, minus : float32 (m,)
        Factor and offset of each row.

    Returns
    -------
    float32 (m, n)
        The hardware's bits; NaN, Inf and underflow as in :func:`fma` and :func:`mufu.ex2`.
    """
    out = np.empty(s.shape, np.int32)
    s, c, minus = (np.array(x, np.float32, order="C") for x in (s, c, minus))
    _exp2_scaled_loop(s, c, minus, out)
    return out.view(np.float32)


def row_max(s: np.ndarray) -> np.ndarray:
    """Return the maximum of each row of float32 (m, n), n >= 1, as a chain of max.f32.

    NaN is ignored, -0 < +0; a row of NaN only gives 0x7fffffff. The order of the chain does not matter.
    """
    bits = np.array(s, np.float32, order="C").view(np.int32)
    out = np.empty(len(bits), np.int32)
    _row_max_loop(bits, out)
    return out.view(np.float32)


def thread_row_sums(p: np.ndarray) -> np.ndarray:
    """Return each thread's sum of its columns of a wgmma accumulator fragment.

    Quad lane q owns columns 8 j + 2 q + {0, 1}. It adds each pair, then the pairs in ascending j, starting
    with the pair of j = 0 (no zero start).

    Parameters
    ----------
    p : float32 (m, n)
        n is a positive multiple of 8.

    Returns
    -------
    float32 (m, 4)
        Exact for this order: n / 8 * 2 - 1 rounded additions per lane. NaN gives 0x7fffffff.
    """
    m, n = p.shape
    if n % 8 or n == 0:
        raise ValueError(f"p must have a positive multiple of 8 columns, got {n}")
    out = np.empty((m, 4), np.float32)
    _thread_row_sums_loop(np.array(p, np.float32, order="C"), out)
    return _canonical(out)


def first_columns(p: np.ndarray) -> np.ndarray:
    """Return the first column of each thread of a quad, float32 (m, 4), of p float32 (m, n)."""
    return p[:, 0:8:2].copy()


def serial_row_sums(p: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return each thread's sum of its columns as :func:`thread_row_sums`, but one by one in ascending order.

    Parameters
    ----------
    p : float32 (m, n)
        n is a positive multiple of 8.
    start : float32 (m, 4)
        The first term of each thread: its first column (:func:`first_columns`), or that column added to an earlier sum.

    Returns
    -------
    float32 (m, 4)
        Exact for this order: n / 4 - 1 rounded additions per thread. NaN gives 0x7fffffff.
    """
    sums = np.array(start, np.float32, order="C")
    _serial_sums_loop(np.array(p, np.float32, order="C"), sums)
    return _canonical(sums)


def quad_sum(t: np.ndarray, *, far_first: bool = True) -> np.ndarray:
    """Return (t0 + t2) + (t1 + t3) of float32 (m, 4): shfl.xor 2, then 1; every lane gets the same bits.

    With ``far_first`` False shfl.xor 1 comes first: (t0 + t1) + (t2 + t3).
    """
    a, b = (2, 1) if far_first else (1, 2)
    with np.errstate(all="ignore"):
        return _canonical((t[:, 0] + t[:, a]) + (t[:, b] + t[:, 3]))


def flushed(x: np.ndarray) -> np.ndarray:
    """Return float32 ``x`` with subnormal numbers as zeros of their sign, as .ftz instructions read and write them.

    A build with -ftz=true flushes both of every addition, multiplication and fma.
    """
    out = np.empty(x.shape, np.int32)
    _flush_loop(np.array(x, np.float32, order="C").view(np.int32).reshape(-1), out.reshape(-1))
    return out.view(np.float32)
