"""The multi-function unit, one number at a time in Python integers: the definition that ``mufu`` must meet."""

from __future__ import annotations

from fa3_kernels.twin.mufu_tables import TABLES, TANH_BINADES

_NAN = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ONE = 0x3F800000
_SIGN = 0x80000000


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
