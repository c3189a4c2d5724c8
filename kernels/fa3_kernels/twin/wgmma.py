"""Hopper's wgmma, bit for bit and fast: the integer definition of :mod:`wgmma_exact` in float32 and int32 arithmetic.

All products of the twin are made here, of operands that :mod:`wgmma_operands` prepares.

For one output and one k step let M be the largest power of two 2^(e_a + e_b) of a nonzero product, or that of
C. Then every addend times 2^align_bits / M fits an int32, a float-to-int conversion is the hardware's
truncation, and the int32 sum is the hardware's fixed-point sum. That is exact while 2^-100 <= M < 2^127. Rows
that leave this range or meet Inf are computed again by the integer definition; rows and columns with a NaN are
filled with NaN.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.twin.compiled import compiled, inlined
from fa3_kernels.twin.wgmma_exact import CANONICAL_NAN, TENSOR_FORMATS, TensorFormat, wgmma_exact
from fa3_kernels.twin.wgmma_operands import Operand, OperandB, operand, operand_b

__all__ = ["TENSOR_FORMATS", "Operand", "OperandB", "TensorFormat", "operand", "operand_b", "wgmma"]

_COLUMN_BLOCK = 256  # columns of one pass over k; their state stays in the first-level cache
# binary32 bits of 2^-100 and 2^127
_LOWEST = 27 << 23
_HIGHEST = 254 << 23


@inlined
def _raise_to_largest_power(top, a_power, b_power, where, k0, k1):
    """Raise top[j] to the largest power of the products of row i and column n0 + j over k0 <= k < k1.

    Rows of B are sliced first: an index that is a sum might be negative to numba, and each element be gathered.
    """
    i, n0, width = where
    n1 = n0 + width
    for k in range(k0, k1, 8):
        p0 = a_power[i, k]
        p1 = a_power[i, k + 1]
        p2 = a_power[i, k + 2]
        p3 = a_power[i, k + 3]
        p4 = a_power[i, k + 4]
        p5 = a_power[i, k + 5]
        p6 = a_power[i, k + 6]
        p7 = a_power[i, k + 7]
        b0 = b_power[k, n0:n1]
        b1 = b_power[k + 1, n0:n1]
        b2 = b_power[k + 2, n0:n1]
        b3 = b_power[k + 3, n0:n1]
        b4 = b_power[k + 4, n0:n1]
        b5 = b_power[k + 5, n0:n1]
        b6 = b_power[k + 6, n0:n1]
        b7 = b_power[k + 7, n0:n1]
        for j in range(width):
            t = max(top[j], p0 * b0[j])
            t = max(t, p1 * b1[j])
            t = max(t, p2 * b2[j])
            t = max(t, p3 * b3[j])
            t = max(t, p4 * b4[j])
            t = max(t, p5 * b5[j])
            t = max(t, p6 * b6[j])
            top[j] = max(t, p7 * b7[j])


@inlined
def _sum_truncated(total, scale, a_value, b_value, where, k0, k1):
    """Add to total[j] the products of row i and column n0 + j, k0 <= k < k1, times scale[j], truncated."""
    i, n0, width = where
    n1 = n0 + width
    for k in range(k0, k1, 8):
        v0 = a_value[i, k]
        v1 = a_value[i, k + 1]
        v2 = a_value[i, k + 2]
        v3 = a_value[i, k + 3]
        v4 = a_value[i, k + 4]
        v5 = a_value[i, k + 5]
        v6 = a_value[i, k + 6]
        v7 = a_value[i, k + 7]
        b0 = b_value[k, n0:n1]
        b1 = b_value[k + 1, n0:n1]
        b2 = b_value[k + 2, n0:n1]
        b3 = b_value[k + 3, n0:n1]
        b4 = b_value[k + 4, n0:n1]
        b5 = b_value[k + 5, n0:n1]
        b6 = b_value[k + 6, n0:n1]
        b7 = b_value[k + 7, n0:n1]
        for j in range(width):
            z = scale[j]
            s = total[j]
            s = np.int32(s + np.int32((v0 * b0[j]) * z))
            s = np.int32(s + np.int32((v1 * b1[j]) * z))
            s = np.int32(s + np.int32((v2 * b2[j]) * z))
            s = np.int32(s + np.int32((v3 * b3[j]) * z))
            s = np.int32(s + np.int32((v4 * b4[j]) * z))
            s = np.int32(s + np.int32((v5 * b5[j]) * z))
            s = np.int32(s + np.int32((v6 * b6[j]) * z))
            total[j] = np.int32(s + np.int32((v7 * b7[j]) * z))


@compiled
def _chain_loop(a, b, least, d, outside, accumulator):
    """Add A (m, k) times B (k, n) to D (m, n) in place; ``outside`` (m,) marks rows beyond the exact range.

    ``a`` and ``b`` are pairs (value, power); ``accumulator`` is (k_step, align_bits, out_bits).
    ``least`` (m,) is a lower bound of a nonzero product's power: below 2^-149 one could vanish unseen.
    """
    (a_value, a_power), (b_value, b_power), (k_step, align_bits, out_bits) = a, b, accumulator
    top = np.empty(_COLUMN_BLOCK, np.float32)
    scale = np.empty(_COLUMN_BLOCK, np.float32)
    acc = np.empty(_COLUMN_BLOCK, np.float32)
    total = np.empty(_COLUMN_BLOCK, np.int32)
    wide = np.empty(_COLUMN_BLOCK, np.float64)
    top_bits = top.view(np.int32)
    scale_bits = scale.view(np.int32)
    acc_bits = acc.view(np.int32)
    wide_bits = wide.view(np.int64)
    keep = np.int64(-1) << np.int64(52 - out_bits)
    for i in range(d.shape[0]):
        beyond = 0
        may_vanish = np.int32(least[i] < 2.0**-149)
        for n0 in range(0, d.shape[1], _COLUMN_BLOCK):
            width = min(_COLUMN_BLOCK, d.shape[1] - n0)
            row = d[i, n0 : n0 + width]
            for j in range(width):
                acc[j] = row[j]
            for k0 in range(0, a_value.shape[1], k_step):
                for j in range(width):
                    top_bits[j] = acc_bits[j] & 0x7F800000  # the power of C; 0 for zero and subnormals
                _raise_to_largest_power(top, a_power, b_power, (i, n0, width), k0, k0 + k_step)
                for j in range(width):
                    t = top_bits[j]
                    unseen = ((acc_bits[j] & 0x7FFFFFFF) != 0) | (may_vanish != 0)
                    beyond |= ((t > 0) & (t < _LOWEST)) | (t >= _HIGHEST) | ((t == 0) & unseen)
                    scale_bits[j] = ((254 + align_bits) << 23) - max(t, np.int32(_LOWEST))
                    total[j] = 0
                _sum_truncated(total, scale, a_value, b_value, (i, n0, width), k0, k0 + k_step)
                for j in range(width):
                    c = np.float64(np.int32(acc[j] * scale[j]))
                    wide[j] = (np.float64(total[j]) + c) / np.float64(scale[j])
                for j in range(width):
                    wide_bits[j] &= keep
                for j in range(width):
                    acc[j] = np.float32(wide[j])
            for j in range(width):
                row[j] = acc[j]
        outside[i] = beyond != 0


def _has_nan(bits: np.ndarray, fmt: TensorFormat, axis: int) -> np.ndarray:
    """Tell which rows or columns of operand bits hold a NaN; ``axis`` is the one that is reduced."""
    infinity = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits if fmt.has_inf else -1
    magnitude = bits & fmt.bits_dtype.type(fmt.magnitude_mask)
    return ((magnitude > fmt.max_finite) & (magnitude != infinity)).any(axis)


def _redo(a: Operand, b: OperandB, c: np.ndarray | None, d: np.ndarray, outside: np.ndarray) -> None:
    """Overwrite in D what the fast loop cannot do: fill NaN rows and columns, and compute the rest by the
    definition.
    """
    nan_rows = np.zeros_like(a.special)
    nan_columns = np.zeros_like(b.special)
    nan_rows[a.special] = _has_nan(a.bits[a.special], a.fmt, 1)
    nan_columns[b.special] = _has_nan(b.bits[:, b.special], b.fmt, 0)
    rows = (outside | a.special) & ~nan_rows
    columns = b.special & ~nan_columns

    def exact(index_a, index_b):
        where = np.ix_(index_a, index_b)
        c_bits = np.zeros((index_a.sum(), index_b.sum()), np.uint32) if c is None else c[where].view(np.uint32)
        d[where] = wgmma_exact(a.bits[index_a], b.bits.T[index_b], c_bits, a.fmt).view(np.float32)

    if rows.any():
        exact(rows, ~nan_columns)
    if columns.any():
        exact(~rows & ~nan_rows, columns)
    d.view(np.uint32)[nan_rows[:, None] | nan_columns] = CANONICAL_NAN


def wgmma(a: Operand, b: OperandB, c: np.ndarray | None = None) -> np.ndarray:
    """Return D = A B + C as a chain of wgmma instructions computes it, k ascending.

    Parameters
    ----------
    a : Operand (m, k)
    b : OperandB (k, n)
        k is a multiple of the format's k_step (16, or 32 for FP8).
    c : float32 (m, n), optional
        Accumulator; None is the hardware's scale-d = 0 and equals zeros.

    Returns
    -------
    float32 (m, n)
        The hardware's bits, for all inputs; NaN, Inf, overflow and zeros as in
        :func:`wgmma_exact.wgmma_exact`.

    Raises
    ------
    ValueError
        If formats or shapes do not fit each other.
    """
    fmt, (m, k), n = a.fmt, a.bits.shape, b.bits.shape[1]
    if fmt != b.fmt:
        raise ValueError(f"both operands must have one format, got {fmt.name} and {b.fmt.name}")
    if b.bits.shape[0] != k or k % fmt.k_step:
        raise ValueError(f"k must agree and be a multiple of {fmt.k_step}, got {k} and {b.bits.shape[0]}")
    if c is not None and (c.shape != (m, n) or c.dtype != np.float32):
        raise ValueError(f"c must be float32 {(m, n)}, got {c.dtype} {c.shape}")
    if fmt.k_step % 8 or fmt.k_step << (fmt.align_bits + 2) > 1 << 31:
        raise ValueError(f"k_step {fmt.k_step} with align_bits {fmt.align_bits} exceeds int32: use wgmma_exact")
    d = np.zeros((m, n), np.float32) if c is None else np.array(c, order="C")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        least = a.least * np.float64(b.least.min(initial=np.inf))
        outside = np.empty(m, np.bool_)
        pairs = [(np.ascontiguousarray(x.value), np.ascontiguousarray(x.power)) for x in (a, b)]
        _chain_loop(*pairs, least, d, outside, (fmt.k_step, fmt.align_bits, fmt.out_bits))
    if outside.any() or a.special.any() or b.special.any():
        _redo(a, b, c, d, outside)
    return d
