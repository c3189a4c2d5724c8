"""Hopper's tensor-core sum in integers: the definition, slow and plain.

:mod:`fa3_kernels.twin.wgmma` has the fast form that the twin uses; it asks this one for what it cannot do, and tests
compare the two.

One wgmma step adds the k_step products of an output element and its accumulator C in one fixed-point sum:

1. Significands (hidden bit included) are multiplied exactly; a product's exponent is e_a + e_b, not
   normalised.
2. e_max is the largest exponent among nonzero products and C. A nonzero subnormal C counts as -126, a zero C
   as -133.
3. Every addend is truncated toward zero to a multiple of 2^(e_max - align_bits), then all are added exactly.
4. The sum is truncated toward zero to out_bits fraction bits of binary32. Zero is +0, overflow is Inf.

A longer k is a chain of such steps in ascending order. Measured on an H200 (wgmma m64n64 and m64n256,
operands from shared memory and from registers, 105 million outputs without a difference); -133 is observable
with bf16 only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

CANONICAL_NAN = 0x7FFFFFFF  # measured on an H200: every NaN result has these bits
ZERO_C_EXPONENT = -133  # measured on an H200: a floor for bf16 sums below 2^-126
_INFINITY = 0x7F800000
_NO_PRODUCT = -100_000  # exponent of a zero product: below everything
_ROW_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """One operand format of wgmma and the accumulator that goes with it.

    ``align_bits`` is the number of fraction bits kept below the largest exponent, ``out_bits`` the fraction
    bits of a result; both measured on an H200. ``dataclasses.replace`` makes hypothetical accumulators.
    """

    name: str
    dtype: np.dtype
    exponent_bits: int
    fraction_bits: int
    bias: int
    has_inf: bool
    k_step: int
    align_bits: int
    out_bits: int

    @property
    def bits_dtype(self) -> np.dtype:
        return np.dtype(f"u{self.dtype.itemsize}")

    @property
    def magnitude_mask(self) -> int:
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1

    @property
    def max_finite(self) -> int:
        """Bits of the largest finite value."""
        top = ((1 << self.exponent_bits) - 1) << self.fraction_bits
        return top - 1 if self.has_inf else top + (1 << self.fraction_bits) - 2


TENSOR_FORMATS: dict[str, TensorFormat] = {
    "fp16": TensorFormat("fp16", np.dtype(np.float16), 5, 10, 15, True, 16, 25, 23),
    "bf16": TensorFormat("bf16", np.dtype(ml_dtypes.bfloat16), 8, 7, 127, True, 16, 25, 23),
    "e4m3": TensorFormat("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, 7, False, 32, 13, 13),
    "e5m2": TensorFormat("e5m2", np.dtype(ml_dtypes.float8_e5m2), 5, 2, 15, True, 32, 13, 13),
}


def tensor_format(fmt: str | TensorFormat) -> TensorFormat:
    """Return the format of that name, or the format itself; ValueError for an unknown name."""
    if isinstance(fmt, TensorFormat):
        return fmt
    if fmt not in TENSOR_FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(TENSOR_FORMATS)}, got {fmt!r}")
    return TENSOR_FORMATS[fmt]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Decoded numbers, int64 and bool (rows, k); a finite one is (-1)^negative * significand * 2^(exponent -
    fraction_bits).
    """

    significand: np.ndarray
    exponent: np.ndarray
    negative: np.ndarray
    is_inf: np.ndarray
    is_nan: np.ndarray


def _decode(bits: np.ndarray, exponent_bits: int, fraction_bits: int, bias: int, max_finite: int) -> _Decoded:
    """Decode bits; numbers above ``max_finite`` are Inf if their fraction is 0, else NaN."""
    bits = bits.astype(np.int64)
    magnitude = bits & ((1 << (exponent_bits + fraction_bits)) - 1)
    field = magnitude >> fraction_bits
    fraction = magnitude & ((1 << fraction_bits) - 1)
    top = ((1 << exponent_bits) - 1) << fraction_bits
    return _Decoded(
        significand=np.where(field > 0, fraction | (1 << fraction_bits), fraction),
        exponent=np.maximum(field, 1) - bias,
        negative=(bits >> (exponent_bits + fraction_bits)) == 1,
        is_inf=(magnitude == top) & (magnitude > max_finite),
        is_nan=(magnitude > max_finite) & (magnitude > top),
    )


def _decode_operand(bits: np.ndarray, fmt: TensorFormat) -> _Decoded:
    """Decode bits of an operand format."""
    d = _decode(bits, fmt.exponent_bits, fmt.fraction_bits, fmt.bias, fmt.max_finite)
    if not fmt.has_inf:  # e4m3: the one code above max_finite is NaN
        return replace(d, is_nan=(bits.astype(np.int64) & fmt.magnitude_mask) > fmt.max_finite)
    return d


def _take(d: _Decoded, index) -> _Decoded:
    """Return an indexed part of decoded numbers."""
    return _Decoded(*(getattr(d, name)[index] for name in d.__slots__))


def _shift_right(magnitude: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return magnitude * 2^-by, truncated; a negative ``by`` shifts left."""
    return (magnitude << np.maximum(-by, 0)) >> np.clip(by, 0, 62)


def _pack(total: np.ndarray, e_max: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """Truncate total * 2^(e_max - align_bits) to binary32 with out_bits fraction bits; uint32."""
    magnitude = np.abs(total)
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)  # bit length; exact below 2^53
    exponent = e_max - fmt.align_bits + length - 1
    grid = np.maximum(exponent, -126) - fmt.out_bits
    kept = _shift_right(magnitude, grid - (e_max - fmt.align_bits)) << (23 - fmt.out_bits)
    bits = np.where(exponent < -126, kept, ((exponent + 126) << 23) + kept)
    bits = np.where(exponent > 127, _INFINITY, bits)
    bits = np.where(kept == 0, 0, bits | np.where(total < 0, 1 << 31, 0))  # a sum that truncates to zero is +0
    return bits.astype(np.uint32)


def _special(a: _Decoded, b: _Decoded, c: _Decoded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which outputs are NaN, which have a +Inf addend, which a -Inf addend; bool (rows, n)."""
    zero_a = a.significand == 0
    zero_b = b.significand == 0
    nan = a.is_nan | b.is_nan | (a.is_inf & zero_b) | (zero_a & b.is_inf)
    inf = a.is_inf | b.is_inf
    negative = a.negative ^ b.negative
    plus = (inf & ~negative).any(2) | (c.is_inf & ~c.negative)
    minus = (inf & negative).any(2) | (c.is_inf & c.negative)
    return nan.any(2) | c.is_nan | (plus & minus), plus, minus


def _step(a: _Decoded, b: _Decoded, c_bits: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """Run one instruction: a (rows, 1, k_step), b (1, n, k_step), c_bits and result uint32 (rows, n)."""
    c = _decode(c_bits, 8, 23, 127, _INFINITY - 1)
    product = a.significand * b.significand
    exponent = np.where(product == 0, _NO_PRODUCT, a.exponent + b.exponent)
    c_exponent = np.where(c.significand == 0, ZERO_C_EXPONENT, c.exponent)
    e_max = np.maximum(exponent.max(2), c_exponent)
    addend = _shift_right(product, e_max[..., None] - exponent + 2 * fmt.fraction_bits - fmt.align_bits)
    c_addend = _shift_right(c.significand, e_max - c_exponent + 23 - fmt.align_bits)
    total = np.where(a.negative ^ b.negative, -addend, addend).sum(2) + np.where(c.negative, -c_addend, c_addend)
    bits = _pack(total, e_max, fmt)
    if not any(x.any() for x in (a.is_nan, a.is_inf, b.is_nan, b.is_inf, c.is_nan, c.is_inf)):
        return bits
    nan, plus, minus = _special(a, b, c)
    bits = np.where(plus, _INFINITY, np.where(minus, _INFINITY | 1 << 31, bits))
    return np.where(nan, CANONICAL_NAN, bits).astype(np.uint32)


def wgmma_exact(
    a_bits: np.ndarray,
    b_bits: np.ndarray,
    c_bits: np.ndarray,
    fmt: str | TensorFormat,
    *,
    align_bits: int | None = None,
    out_bits: int | None = None,
    k_step: int | None = None,
) -> np.ndarray:
    """Return the bits of D = A B^T + C as a chain of wgmma steps gives them.

    Parameters
    ----------
    a_bits : unsigned (m, k)
        Bit patterns of the left operand, in ``fmt``.
    b_bits : unsigned (n, k)
        Bit patterns of the right operand, one row per output column.
    c_bits : uint32 (m, n)
        Binary32 bits of the accumulator; zeros are the hardware's scale-d = 0.
    fmt : str or TensorFormat
        "fp16", "bf16", "e4m3" or "e5m2".
    align_bits, out_bits, k_step : int, optional
        Replace the measured accumulator by a hypothetical one (align_bits <= 40, out_bits <= 23).

    Returns
    -------
    uint32 (m, n)
        Equal to the hardware, bit for bit. NaN operands, 0 * Inf and Inf - Inf give 0x7fffffff; another Inf
        addend gives that Inf; overflow gives Inf; subnormals are kept; a zero result is +0 even if all
        addends are -0.

    Raises
    ------
    ValueError
        If k is not a multiple of k_step or a hypothetical accumulator is out of range.
    """
    measured = tensor_format(fmt)
    fmt = replace(
        measured,
        align_bits=measured.align_bits if align_bits is None else align_bits,
        out_bits=measured.out_bits if out_bits is None else out_bits,
        k_step=measured.k_step if k_step is None else k_step,
    )
    (m, k), n = a_bits.shape, b_bits.shape[0]
    if k % fmt.k_step:
        raise ValueError(f"k must be a multiple of k_step = {fmt.k_step}, got {k}")
    if not (0 < fmt.align_bits <= 40 and 0 < fmt.out_bits <= 23):
        raise ValueError(f"align_bits must be 1..40 and out_bits 1..23, got {fmt.align_bits} and {fmt.out_bits}")
    a = _decode_operand(a_bits, fmt)
    b = _decode_operand(b_bits, fmt)
    d_bits = np.array(c_bits, np.uint32)
    block = max(1, _ROW_BLOCK_ELEMENTS // max(1, n * fmt.k_step))
    for i in range(0, m, block):
        for k0 in range(0, k, fmt.k_step):
            ks = slice(k0, k0 + fmt.k_step)
            a_step = _take(a, (slice(i, i + block), None, ks))
            d_bits[i : i + block] = _step(a_step, _take(b, (None, slice(None), ks)), d_bits[i : i + block], fmt)
    return d_bits
