"""Number formats as data, and one correctly rounded conversion into each of them.

A finite code with exponent field E and fraction field F of f bits is worth (F + 2^f [E > 0]) * 2^(max(E, 1) - bias -
f), so that magnitudes are ordered like their codes: that is why rounding may carry into the exponent, and why
ULPs can be counted. Tests hold :func:`encode_bits` to a slow twin, a bisection in exact rationals. Descales, which FP8
operands need as well, are in :mod:`fa3_reference.quantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import ml_dtypes
import numpy as np

Overflow = Literal["ieee", "saturate"]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format with subnormals and signed zero.

    In a format without infinities (e4m3) the magnitude of all ones is the one NaN, and the other codes of the top
    exponent are numbers. ``dtype`` is the numpy dtype that stores values, ``bits_dtype`` the unsigned one for codes.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    bias: int
    has_inf: bool
    dtype: np.dtype[Any]
    bits_dtype: np.dtype[Any]

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def sign_mask(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """Magnitude code of the largest finite number."""
        return self.inf_code - 1 if self.has_inf else self.sign_mask - 2

    @property
    def inf_code(self) -> int:
        """First magnitude code of the top exponent: +Inf where the format has one."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def nan_code(self) -> int:
        """The NaN that conversions produce: positive and quiet."""
        return self.inf_code | (1 << (self.fraction_bits - 1)) if self.has_inf else self.sign_mask - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_finite(self) -> float:
        return float(magnitude_of(self.max_code, self))

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        return math.ldexp(1.0, self.min_exponent - self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """Spacing of the numbers in [1, 2)."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range."""
        return self.epsilon / 2


def _format(name: str, exponent_bits: int, fraction_bits: int, has_inf: bool, dtype: Any) -> Format:
    storage = np.dtype(dtype)
    bias = (1 << (exponent_bits - 1)) - 1
    bits_dtype = np.dtype(f"uint{8 * storage.itemsize}")
    return Format(name, exponent_bits, fraction_bits, bias, has_inf, storage, bits_dtype)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _format("fp32", 8, 23, True, np.float32),
        _format("fp16", 5, 10, True, np.float16),
        _format("bf16", 8, 7, True, ml_dtypes.bfloat16),
        _format("e4m3", 4, 3, False, ml_dtypes.float8_e4m3fn),
        _format("e5m2", 5, 2, True, ml_dtypes.float8_e5m2),
    )
}
BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values()}  # of the arrays that store it


def overflow_code(fmt: Format, overflow: Overflow) -> int:
    """Return the magnitude code that numbers too large for a format get, infinities included.

    ValueError for an unknown mode.
    """
    if overflow not in ("ieee", "saturate"):
        raise ValueError(f"overflow must be 'ieee' or 'saturate', got {overflow!r}")
    if overflow == "saturate":
        return fmt.max_code
    return fmt.inf_code if fmt.has_inf else fmt.nan_code


def _binade(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the exponent of the binade that sets the spacing of ``fmt`` at finite x, int64."""
    exponent = (x.view(np.int64) >> 52) & 0x7FF
    exponent -= 1023
    return np.maximum(exponent, fmt.min_exponent, out=exponent)


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    """Return 2.0 ** exponent for exponents of normal float64 numbers; exact."""
    return ((exponent + 1023) << 52).view(np.float64)


def _magnitude_codes(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Round finite |x| to magnitude codes, int64, as if the exponent had no upper limit."""
    exponent = _binade(x, fmt)
    significand = np.rint(np.abs(x) / _power_of_two(exponent - fmt.fraction_bits))  # the division is exact
    return ((exponent - fmt.min_exponent) << fmt.fraction_bits) + significand.astype(np.int64)


def encode_bits(x: np.ndarray, fmt: Format, overflow: Overflow) -> np.ndarray:
    """Round float64 values to codes of a format, with a single rounding.

    Parameters
    ----------
    x : float64 array
        Narrower float types convert exactly first.
    fmt : Format
        One of :data:`FORMATS`.
    overflow : {"ieee", "saturate"}
        ``"ieee"``: what rounds beyond ``max_finite`` becomes Inf, or NaN in a format without Inf.
        ``"saturate"``: it becomes ``max_finite`` with its sign, infinite inputs included (PTX
        ``cvt.satfinite``).

    Returns
    -------
    unsigned integer array like ``x``
        Correctly rounded, subnormals included. NaN becomes ``fmt.nan_code``; zeros and underflows keep their
        sign.

    Raises
    ------
    ValueError
        If ``overflow`` is unknown.

    >>> encode_bits(np.array([448.0, 464.0, 465.0, -0.0]), FORMATS["e4m3"], "ieee")
    array([126, 126, 127, 128], dtype=uint8)
    """
    too_large = overflow_code(fmt, overflow)
    shape = np.shape(x)
    x = np.ascontiguousarray(x, np.float64).reshape(-1)
    finite = np.isfinite(x)
    everywhere_finite = bool(finite.all())
    codes = _magnitude_codes(x if everywhere_finite else np.where(finite, x, 0.0), fmt)
    codes[codes > fmt.max_code] = too_large
    if not everywhere_finite:
        codes[np.isinf(x)] = too_large
    np.bitwise_or(codes, fmt.sign_mask, out=codes, where=np.signbit(x))
    if not everywhere_finite or too_large == fmt.nan_code:
        codes[np.isnan(x) | ((codes & ~fmt.sign_mask) == fmt.nan_code)] = fmt.nan_code
    return codes.astype(fmt.bits_dtype).reshape(shape)


def encode(x: np.ndarray, fmt: Format, overflow: Overflow) -> np.ndarray:
    """Round float64 values to an array of ``fmt.dtype``; see :func:`encode_bits` for every special value.

    One that goes through float32 rounds twice, as :func:`narrowed` does:

    >>> x = np.array([1 + 2**-4 + 2**-40])
    >>> float(encode(x, FORMATS["e4m3"], "ieee")[0]), float(narrowed(x, FORMATS["e4m3"])[0])
    (1.125, 1.0)
    """
    return encode_bits(x, fmt, overflow).view(fmt.dtype)


def narrowed(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Round float64 values to float16, or by way of float32 to a type of ml_dtypes: a seed's draws stay what they were.

    What ``astype`` makes of float64 depends on the version of ml_dtypes: before 0.7 it was this, and it is one rounding
    since. Inputs that are recorded by their seed were drawn before.
    """
    return x.astype(np.float16 if fmt.dtype == np.float16 else np.float32).astype(fmt.dtype)


@np.errstate(invalid="ignore")
def decode(bits: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the float64 values of codes (any integer dtype); exact, NaN and Inf included."""
    return np.asarray(bits).astype(fmt.bits_dtype).view(fmt.dtype).astype(np.float64)


def round_to(x: np.ndarray, fmt: Format, overflow: Overflow) -> np.ndarray:
    """Round float64 values to the nearest value of a format, returned as float64; see :func:`encode_bits`."""
    return encode(x, fmt, overflow).astype(np.float64)


def ulp(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the spacing of the numbers of a format at |x|, float64; exact.

    The spacing is that of the binade which holds |x| and never less than ``min_subnormal``. Beyond
    ``max_finite`` it is the spacing at ``max_finite``; at Inf and NaN it is NaN.

    >>> ulp(np.array([1.0, 0.0, 1e9]), FORMATS["e4m3"])
    array([1.250000e-01, 1.953125e-03, 3.200000e+01])
    """
    shape = np.shape(x)
    x = np.ascontiguousarray(x, np.float64).reshape(-1)
    finite = np.isfinite(x)
    exponent = _binade(np.where(finite, np.clip(x, -fmt.max_finite, fmt.max_finite), 0.0), fmt)
    return np.where(finite, _power_of_two(exponent - fmt.fraction_bits), np.nan).reshape(shape)


def magnitude_of(code: int, fmt: Format) -> Fraction:
    """Return the value of a magnitude code by the module's formula, which reads the top exponent as numbers too."""
    exponent = code >> fmt.fraction_bits
    fraction = code & ((1 << fmt.fraction_bits) - 1)
    significand = fraction + (1 << fmt.fraction_bits if exponent > 0 else 0)
    return significand * Fraction(2) ** (max(exponent, 1) - fmt.bias - fmt.fraction_bits)
