"""Compiled scalar forms of the multi-function unit, for loops of :mod:`mufu` and of whole softmax tiles.

:mod:`float32` inlines ``ex2_bits`` into its softmax loop. All arithmetic is on binary32 bits held in int32, written
without branches where the loop has to be vectorised.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.twin.compiled import compiled, inlined
from fa3_kernels.twin.mufu_tables import TABLES, TANH_BINADES, Table

_NAN = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ONE = 0x3F800000
_SIGN = -(1 << 31)


def _columns(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return C0, C1 and the shifted C2 of every segment, as int32 because gathers of int64 halve the speed."""
    c = np.array(table.rows, np.int32)
    return c[:, 0].copy(), c[:, 1].copy(), c[:, 2] << table.c2_shift


_EX2_C0, _EX2_C1, _EX2_C2 = _columns(TABLES["ex2"])
_LG2_C0, _LG2_C1, _LG2_C2 = _columns(TABLES["lg2"])
_RCP_C0, _RCP_C1, _RCP_C2 = _columns(TABLES["rcp"])
_TANH_C0, _TANH_C1, _TANH_C2 = _columns(TABLES["tanh"])
_TANH_FIRST, _TANH_INDEX_BITS, _TANH_UNIT = np.array([*TANH_BINADES.values()], np.int32).T.copy()
_TANH_LEAST = min(TANH_BINADES)
_TANH_MOST = max(TANH_BINADES)
_EX2_ROUNDING, _LG2_ROUNDING, _RCP_ROUNDING = (TABLES[f].rounding for f in ("ex2", "lg2", "rcp"))


@inlined
def _square(x):
    """Return the truncated square of an integer of 17 bits: partial products whose lowest bits are cut off, added
    up.
    """
    total = np.int32(0)
    for i in range(1, 17):
        total = np.int32(total + ((x >> np.int32(18 - i)) & np.int32(-((x >> np.int32(i)) & 1))))
    return np.int32(total >> 1)


@inlined
def ex2_bits(b):
    """Return one ex2, from and to binary32 bits as int32; for compiled loops."""
    negative = np.int32(b >> 31)  # 0 or -1
    magnitude = np.int32(b & 0x7FFFFFFF)
    shift = np.int32((magnitude >> 23) - 127)
    left = min(max(shift, np.int32(0)), np.int32(7))
    right = min(max(np.int32(-shift), np.int32(0)), np.int32(31))
    fixed = np.int32(np.int32(np.int32((b & 0x7FFFFF) | 0x800000) << left) >> right)  # 23 fraction bits
    fixed = np.int32((fixed ^ negative) - (negative if (fixed & 0x7FFFFF) == 0 else np.int32(0)))  # one's complement
    i = np.int32((fixed >> 17) & 63)
    r = np.int32(fixed & 0x1FFFF)
    curved = np.int64(np.int32(_EX2_C2[i] * _square(r)))
    total = (np.int64(_EX2_C0[i]) << 13) + np.int64(_EX2_C1[i]) * np.int64(r) + curved + _EX2_ROUNDING
    exponent = np.int32((fixed >> 23) + 127)
    out = np.int32(np.int32((exponent - 1) << 23) + np.int32(total >> 15))
    out = np.int32(_INFINITY) if (exponent > 254) | (shift >= 7) else out
    out = np.int32(0) if (exponent < 1) | ((shift >= 7) & (negative != 0)) else out
    return np.int32(_NAN) if magnitude > _INFINITY else out


@inlined
def rcp_bits(b):
    """Return one rcp, from and to binary32 bits as int32; for compiled loops."""
    sign = np.int32(b & _SIGN)
    field = np.int32((b >> 23) & 255)
    fraction = np.int32(b & 0x7FFFFF)
    i = fraction >> 16
    r = np.int32(fraction & 0xFFFF)
    curved = np.int64(np.int32(_RCP_C2[i] * _square(np.int32(r << 1))))
    total = (np.int64(_RCP_C0[i]) << 13) + np.int64(_RCP_C1[i]) * np.int64(r) + curved + _RCP_ROUNDING
    out = np.int32((np.int64(252 - field) << 23) + (total >> 15))
    out = np.int32(0) if (field == 255) | (field == 254) | (out < 1 << 23) else out
    out = np.int32(_INFINITY) if field == 0 else out
    return np.int32(_NAN) if (field == 255) & (fraction != 0) else np.int32(sign | out)


@inlined
def lg2_bits(b):
    """Return one lg2, from and to binary32 bits as int32; for compiled loops."""
    field = np.int32((b >> 23) & 255)
    fraction = np.int32(b & 0x7FFFFF)
    if (b & 0x7FFFFFFF) > _INFINITY:
        return np.int32(_NAN)
    if field == 0:
        return np.int32(_SIGN | _INFINITY)
    if b < 0:
        return np.int32(_NAN)
    if field == 255 or b == _ONE:
        return np.int32(_INFINITY if field == 255 else 0)
    i = fraction >> 17
    r = np.int32(fraction & 0x1FFFF)
    curved = np.int64(_LG2_C2[i]) * np.int64(_square(r))
    total = ((np.int64(_LG2_C0[i]) << 12) + np.int64(_LG2_C1[i]) * np.int64(r) + curved + _LG2_ROUNDING) >> 2
    total += np.int64(field - 127) << 36
    sign = np.int32(_SIGN) if total < 0 else np.int32(0)
    total = ~total if total < 0 else total
    exponent = 0
    while total >> (exponent + 1):
        exponent += 1
    significand = total >> (exponent - 23) if exponent >= 23 else total << (23 - exponent)
    return np.int32(sign | np.int32(((exponent - 36 + 126) << 23) + significand))


@inlined
def tanh_bits(b):
    """Return one tanh, from and to binary32 bits as int32; for compiled loops."""
    magnitude = np.int32(b & 0x7FFFFFFF)
    fraction = np.int32(b & 0x7FFFFF)
    field = magnitude >> 23
    k = min(max(field, _TANH_LEAST), _TANH_MOST) - _TANH_LEAST
    index_bits = _TANH_INDEX_BITS[k]
    i = _TANH_FIRST[k] + (fraction >> np.int32(23 - index_bits))
    r = np.int32((fraction >> np.int32(6 - index_bits)) & 0x1FFFF)
    curved = np.int64(_TANH_C2[i]) * np.int64(_square(r))
    total = np.float64((np.int64(_TANH_C0[i]) << 15) + np.int64(_TANH_C1[i]) * np.int64(r) + curved)  # exact
    cut = total.view(np.int64) >> 29  # exponent and 23 bits of the fraction
    out = np.int32(cut - (np.int64(1023 - 127 - _TANH_UNIT[k]) << 23))
    out = np.int32(_ONE) if field > _TANH_MOST else out
    out = magnitude if field < _TANH_LEAST else out
    return np.int32(_NAN) if magnitude > _INFINITY else np.int32((b & _SIGN) | out)


@compiled
def ex2_loop(bits, out):
    for i in range(bits.size):
        out[i] = ex2_bits(bits[i])


@compiled
def rcp_loop(bits, out):
    for i in range(bits.size):
        out[i] = rcp_bits(bits[i])


@compiled
def lg2_loop(bits, out):
    for i in range(bits.size):
        out[i] = lg2_bits(bits[i])


@compiled
def tanh_loop(bits, out):
    for i in range(bits.size):
        out[i] = tanh_bits(bits[i])
