"""Conversions into number formats by bisection among exact rationals: the slow twin of
:func:`fa3_reference.formats.encode_bits`.
"""

from __future__ import annotations

import math
from fractions import Fraction

from fa3_reference.formats import Format, Overflow, Rounding, _check_modes, _magnitude, _overflow_codes


def encode_scalar(x: float, fmt: Format, overflow: Overflow, rounding: Rounding = "nearest_even") -> int:
    """Round one float64 to a code by bisection among exact rationals, as :func:`encode_bits` does."""
    _check_modes(overflow, rounding)
    if math.isnan(x):
        return fmt.nan_code
    too_large, infinite = _overflow_codes(fmt, overflow, rounding)
    sign = fmt.sign_mask if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        code = infinite
    else:
        code = _nearest_code(abs(Fraction(x)), fmt, rounding)
        code = too_large if code > fmt.max_code else code
    return code if code == fmt.nan_code else sign | code


def _nearest_code(magnitude: Fraction, fmt: Format, rounding: Rounding) -> int:
    # beyond the top: max_code + 1 stands for everything larger
    low = 0
    high = fmt.max_code + 1
    if magnitude >= _magnitude(high, fmt):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _magnitude(middle, fmt) <= magnitude else (low, middle)
    below = magnitude - _magnitude(low, fmt)
    above = _magnitude(high, fmt) - magnitude
    if rounding == "toward_zero" or below < above:
        return low
    return high if above < below else low + low % 2
