"""Steps that both bounds share, one number at a time, from the formulas of reference/README.md.

Written for one pair of rows where the bounds have arrays: plain floats and lists, no numpy. The tests compare the two
to within a few 2^-53, so that a term of either that is missing, or half as large, is seen wherever it is more than
some 10^-12 of the whole.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fa3_reference.bounds.device import TensorCore
from fa3_reference.formats import Format

U = 2.0**-24  # of binary32, to nearest
LEAST = 2.0**-126  # what a build that flushes loses at most
LARGEST = (2 - 2.0**-23) * 2.0**127
LOG2_E = 1 / math.log(2)
FLOAT64_ROOM = 1 + 2.0**-30  # what the bounds allow for their own float64
EX2 = 2.0**-22.70
RCP = 2.0**-23.27


def g(count: float, unit: float = U) -> float:
    """g(n) of the notation: the relative error of n roundings in a row."""
    return count * unit / (1 - count * unit)


def nearest(x: float, fmt: Format) -> float:
    """Round x to binary32 and then to a format, to nearest even; infinite beyond the end."""
    with np.errstate(over="ignore"):
        return float(np.float32(x).astype(fmt.dtype))


def rounding_of_ends(exact: float, error: float, fmt: Format) -> float:
    """Error of a number once rounded, which was off by ``error``: the farther of its two ends, rounded."""
    return max(nearest(exact + error, fmt) - exact, exact - nearest(exact - error, fmt))


def power(x: float) -> int:
    """Exponent of a number that is not zero."""
    return math.frexp(abs(x))[1] - 1


def last_bit(x: float) -> int:
    """Exponent of the last bit that is set of a number that is not zero."""
    fraction = Fraction(x)
    digits = abs(fraction.numerator)
    return (digits & -digits).bit_length() - fraction.denominator.bit_length()


def operand_power(x: float, core: TensorCore) -> int:
    """Exponent of an operand as the tensor core reads it: of a subnormal one the least of its format."""
    return max(power(x), core.operand.min_exponent)


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def size_of_dot(a: list[float], b: list[float]) -> float:
    return sum(abs(x * y) for x, y in zip(a, b, strict=True))


def chain_error(a: list[float], b: list[float], core: TensorCore) -> float:
    """Step 1: what a chain of wgmma steps may lose of the product of two rows."""
    total = lost = 0.0
    grid = math.inf  # C is a multiple of 2^grid
    for start in range(0, len(a), core.k_step):
        stop = start + core.k_step
        pairs = [(x, y) for x, y in zip(a[start:stop], b[start:stop], strict=True) if x and y]
        top = max((operand_power(x, core) + operand_power(y, core) for x, y in pairs), default=-math.inf)
        most = max(power(abs(total) + lost), -126) if total or lost else -126
        least = abs(total) - lost
        cut = max(top, most) - core.align_bits
        inexact = sum(last_bit(x) + last_bit(y) < cut for x, y in pairs)
        step = min(inexact * 2.0**cut, sum(abs(x * y) for x, y in pairs))
        if top - core.align_bits > grid:
            step += 2.0 ** (top - core.align_bits)
        last = min((last_bit(x) + last_bit(y) for x, y in pairs), default=math.inf)
        known = max(top, power(least) if least > 0 else -math.inf)
        grid = max(min(grid, last), known - core.align_bits)
        total += sum(x * y for x, y in pairs)
        if abs(total) + lost + step > 0 and power(abs(total) + lost + step) - core.out_bits > grid:
            step += 2.0 ** (power(abs(total) + lost + step) - core.out_bits)
        tiny = (core.k_step + 1) * 2.0 ** -(126 + core.out_bits) if grid < -126 - core.out_bits else 0.0
        lost = (lost + step) * FLOAT64_ROOM + tiny
        if abs(total) - lost > 0:
            grid = max(grid, power(abs(total) - lost) - core.out_bits)
    return lost


def grouped_error(a: list[float], b: list[float], core: TensorCore, is_stored: bool = True) -> float:
    """Step 1 where the tensor core adds groups of half a step or more, of any channels."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    if not pairs:
        return 0.0
    more = 0 if is_stored else 1  # Q met a factor that is no power of two
    powers = [operand_power(x, core) + more + operand_power(y, core) for x, y in pairs]
    lasts = [last_bit(x) + last_bit(y) if is_stored else -math.inf for x, y in pairs]
    positive = sum(max(x * y, 0.0) for x, y in pairs)
    negative = sum(max(-x * y, 0.0) for x, y in pairs)
    largest = power(max(positive, negative) * FLOAT64_ROOM)
    coarse = max(max(powers) - core.align_bits, max(largest, -126) - core.out_bits)
    inexact = sum(last < coarse for last in lasts)
    if not inexact:
        return 0.0
    fine = 2.0 ** (max(max(powers), largest, -126) - core.align_bits)
    groups = -(-len(a) // (core.k_step // 2))
    return (min(inexact * fine, positive + negative) + groups * (fine + 2 * 2.0**coarse)) * FLOAT64_ROOM


def tanh_error(x: float, dx: float, unit: float, relative: float) -> float:
    """Step 1: error of tanh(x / unit) where x is off by dx, by a tanh of this relative error or by ex2 and rcp."""
    tanh = math.tanh(x / unit)
    carried = max(math.tanh((x + dx) / unit) - tanh, tanh - math.tanh((x - dx) / unit))
    twice_rcp = min(1 - tanh + carried, 2.0)
    own = EX2 * min(0.5, twice_rcp) + twice_rcp * (U + RCP) + U * (abs(tanh) + carried)
    if relative:
        own = relative * min(abs(tanh) + carried, 1.0)
    return carried + own * (1 + 2.0**-20) + 2.0**-50
