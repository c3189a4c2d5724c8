"""The multi-function unit, one number at a time in Python integers: the definition that :mod:`mufu` must
meet.

Every function is sig = (C0 << c0_shift + C1 * r + (C2 << c2_shift) * square(r) + rounding) >> shift with
[C0, C1, C2] from a table indexed by leading fraction bits and r the bits below them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_NAN = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ONE = 0x3F800000
_SIGN = 0x80000000


@dataclass(frozen=True, slots=True)
class Table:
    """Quadratics of one function: rows (C0, C1, C2) and the fixed-point constants they share."""

    rows: tuple[tuple[int, int, int], ...]
    rounding: int
    shift: int
    c0_shift: int
    c2_shift: int

    def value(self, segment: int, r: int, square: int) -> int:
        c0, c1, c2 = self.rows[segment]
        return ((c0 << self.c0_shift) + c1 * r + (c2 << self.c2_shift) * square + self.rounding) >> self.shift


def _load() -> dict[str, Table]:
    stored = json.loads(Path(__file__).with_name("mufu_tables.json").read_text())
    return {
        name: Table(tuple((a, b, c) for a, b, c in t["table"]), t["rc"], t["shift"], t["c0_shift"], t["c2_shift"])
        for name, t in stored.items()
    }


# fitted from the results of an NVIDIA H200, tanh from an H100's; each then agreed on all inputs
TABLES: dict[str, Table] = _load()


# Of tanh, by exponent field: first segment, leading fraction bits that tell segments apart, exponent of a sum's unit.
TANH_BINADES = {
    119: (0, 0, -41),
    120: (1, 0, -40),
    121: (2, 0, -39),
    122: (3, 1, -39),
    123: (5, 1, -38),
    124: (7, 2, -38),
    125: (11, 2, -37),
    126: (15, 2, -36),
    127: (19, 3, -37),
    128: (27, 4, -39),
    129: (43, 3, -37),
}


def square(x: int) -> int:
    """Return the unit's truncated square of a 17-bit number, about x^2 / 2^19: every partial product is cut
    off.

    >>> square(0x1FFFF), 0x1FFFF**2 >> 19
    (32759, 32767)
    """
    return sum(x >> (18 - i) for i in range(17) if x >> i & 1) >> 1


def _split(bits: int) -> tuple[int, int, int]:
    return bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF


def ex2_exact(bits: int) -> int:
    """Return the binary32 bits of ex2.approx.ftz.f32 for binary32 bits."""
    negative, field, fraction = _split(bits)
    if field == 255 and fraction:
        return _NAN
    if field >= 127 + 7:
        return 0 if negative else _INFINITY
    significand = fraction | 1 << 23
    fixed = significand << (field - 127) if field >= 127 else significand >> (127 - field)
    if field == 0:
        fixed = 0
    whole = fixed >> 23
    part = fixed & 0x7FFFFF
    if negative:
        whole, part = (-whole - 1, part ^ 0x7FFFFF) if part else (-whole, 0)
    if whole + 127 < 1:
        return 0
    r = part & 0x1FFFF
    return (whole + 126 << 23) + TABLES["ex2"].value(part >> 17, r, square(r))


def rcp_exact(bits: int) -> int:
    """Return the binary32 bits of rcp.approx.ftz.f32."""
    negative, field, fraction = _split(bits)
    sign = negative << 31
    if field == 255:
        return _NAN if fraction else sign
    if field == 0:
        return sign | _INFINITY
    r = fraction & 0xFFFF
    out = (252 - field << 23) + TABLES["rcp"].value(fraction >> 16, r, square(r << 1))
    return sign | (out if out >= 1 << 23 else 0)


def lg2_exact(bits: int) -> int:
    """Return the binary32 bits of lg2.approx.ftz.f32."""
    negative, field, fraction = _split(bits)
    if field == 255 and fraction:
        return _NAN
    if field == 0:
        return _SIGN | _INFINITY
    if negative:
        return _NAN
    if field == 255:
        return _INFINITY
    if bits == _ONE:
        return 0
    r = fraction & 0x1FFFF
    total = TABLES["lg2"].value(fraction >> 17, r, square(r))
    total += field - 127 << 36
    sign, total = (_SIGN, ~total) if total < 0 else (0, total)
    exponent = total.bit_length() - 1
    significand = total >> exponent - 23 if exponent >= 23 else total << 23 - exponent
    return sign | (exponent - 36 + 126 << 23) + significand


def tanh_exact(bits: int) -> int:
    """Return the binary32 bits of tanh.approx.f32: x below 2^-8, 1 from 8 on, between them a sum cut to 24 bits."""
    negative, field, fraction = _split(bits)
    if field == 255 and fraction:
        return _NAN
    sign = negative << 31
    if field < min(TANH_BINADES):
        return bits
    if field > max(TANH_BINADES):
        return sign | _ONE
    first, index_bits, unit = TANH_BINADES[field]
    r = fraction >> 6 - index_bits & 0x1FFFF
    total = TABLES["tanh"].value(first + (fraction >> 23 - index_bits), r, square(r))
    exponent = total.bit_length() - 1
    return sign | (exponent + unit + 126 << 23) + (total >> exponent - 23)
