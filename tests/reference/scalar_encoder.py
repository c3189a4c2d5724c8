"""The slow twin of the encoder: one number at a time, by bisection among exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

from fa3_reference.formats import Format, Overflow, magnitude_of, overflow_code


def encode_scalar(x: float, fmt: Format, overflow: Overflow) -> int:
    """Round one float64 to a code, as :func:`fa3_reference.formats.encode_bits` does."""
    too_large = overflow_code(fmt, overflow)
    if math.isnan(x):
        return fmt.nan_code
    sign = fmt.sign_mask if math.copysign(1.0, x) < 0 else 0
    code = fmt.max_code + 1 if math.isinf(x) else _nearest_code(abs(Fraction(x)), fmt)
    code = too_large if code > fmt.max_code else code
    return code if code == fmt.nan_code else sign | code


def _nearest_code(magnitude: Fraction, fmt: Format) -> int:
    # beyond the top: max_code + 1 stands for everything larger
    low = 0
    high = fmt.max_code + 1
    if magnitude >= magnitude_of(high, fmt):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if magnitude_of(middle, fmt) <= magnitude else (low, middle)
    below = magnitude - magnitude_of(low, fmt)
    above = magnitude_of(high, fmt) - magnitude
    if below < above:
        return low
    return high if above < below else low + low % 2
