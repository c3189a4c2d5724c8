"""Matrices prepared for :func:`wgmma.wgmma`: a matrix is decoded once, and its tiles are then slices, as views."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3_kernels.twin.compiled import compiled
from fa3_kernels.twin.wgmma_exact import TensorFormat, tensor_format


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix (rows, k) prepared for the left side of :func:`wgmma`.

    ``value`` and ``power`` are float32 like ``bits``: the elements and their 2^exponent; both are 0 for
    zeros, Inf and NaN. ``special`` (rows,) marks rows that hold Inf or NaN; ``least`` (rows,) is a lower
    bound of the nonzero powers.
    """

    fmt: TensorFormat
    bits: np.ndarray
    value: np.ndarray
    power: np.ndarray
    special: np.ndarray
    least: np.ndarray

    def rows(self, start: int, stop: int) -> Operand:
        """Return the half-open range of rows, as views."""
        r = slice(start, stop)
        return Operand(self.fmt, self.bits[r], self.value[r], self.power[r], self.special[r], self.least[r])

    def columns(self, start: int, stop: int) -> Operand:
        """Return the half-open range of k, as views."""
        r = slice(start, stop)
        bits = self.bits[:, r]
        special = _has_special(bits, self.fmt, 1) if self.special.any() else self.special
        return Operand(self.fmt, bits, self.value[:, r], self.power[:, r], special, self.least)


@dataclass(frozen=True, slots=True)
class OperandB:
    """A matrix for the right side of :func:`wgmma`, stored (k, n); ``special`` and ``least`` are per column."""

    fmt: TensorFormat
    bits: np.ndarray
    value: np.ndarray
    power: np.ndarray
    special: np.ndarray
    least: np.ndarray

    def n_slice(self, start: int, stop: int) -> OperandB:
        """Return the half-open range of output columns, as views."""
        r = slice(start, stop)
        return OperandB(self.fmt, self.bits[:, r], self.value[:, r], self.power[:, r], self.special[r], self.least[r])

    def k_slice(self, start: int, stop: int) -> OperandB:
        """Return the half-open range of k, as views."""
        r = slice(start, stop)
        bits = self.bits[r]
        special = _has_special(bits, self.fmt, 0) if self.special.any() else self.special
        return OperandB(self.fmt, bits, self.value[r], self.power[r], special, self.least)


def _has_special(bits: np.ndarray, fmt: TensorFormat, axis: int) -> np.ndarray:
    """Tell which rows or columns of operand bits hold Inf or NaN; ``axis`` is the one that is reduced."""
    return np.any((bits & fmt.bits_dtype.type(fmt.magnitude_mask)) > fmt.max_finite, axis=axis)


@compiled
def _decode_loop(bits, layout, value, power, special, least):
    """Fill value, power (rows, k), special and least (rows,) from unsigned bits (rows, k)."""
    fraction_bits, bias, magnitude_mask, max_finite = layout
    power_bits = power.view(np.uint32)
    value_bits = value.view(np.uint32)
    up = np.uint32(23 - fraction_bits)
    rebias = np.uint32(127 - bias)
    tiny = np.float32(2.0 ** (1 - bias - fraction_bits)) if rebias > 0 else np.float32(0)  # bf16 needs none
    for i in range(bits.shape[0]):
        largest = np.uint32(0)
        lowest = np.uint32(0x7F800000)
        for k in range(bits.shape[1]):
            x = np.uint32(bits[i, k])
            magnitude = np.uint32(x & magnitude_mask)
            largest = max(largest, magnitude)
            magnitude = np.uint32(0) if magnitude > max_finite else magnitude
            field = np.uint32(magnitude >> np.uint32(fraction_bits))
            sign = np.uint32(0x80000000) if x > magnitude_mask else np.uint32(0)
            normal = np.uint32((magnitude << up) + (rebias << np.uint32(23)))
            value[i, k] = np.float32(np.int32(magnitude)) * tiny
            value_bits[i, k] = sign | (value_bits[i, k] if field == 0 and rebias > 0 else normal)
            p = np.uint32((max(field, np.uint32(1)) + rebias) << np.uint32(23))
            power_bits[i, k] = np.uint32(0) if magnitude == 0 else p
            lowest = min(lowest, np.uint32(0x7F800000) if magnitude == 0 else p)
        special[i] = largest > max_finite
        least[i] = np.uint32(lowest)


def _bits(x: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """Return the bits of an operand as a contiguous array; ValueError unless it is 2-D and of the format."""
    if x.ndim != 2 or x.dtype not in (fmt.dtype, fmt.bits_dtype):
        raise ValueError(f"a {fmt.name} operand must be 2-D {fmt.dtype} or {fmt.bits_dtype}, got {x.dtype} {x.shape}")
    return np.array(x.view(fmt.bits_dtype), order="C")


def operand(x: np.ndarray, fmt: str | TensorFormat) -> Operand:
    """Prepare a left operand.

    Parameters
    ----------
    x : (rows, k)
        float16, bfloat16, float8_e4m3fn or float8_e5m2 as ``fmt`` says, or unsigned bits of that width.
    fmt : str or TensorFormat
        "fp16", "bf16", "e4m3" or "e5m2".

    Returns
    -------
    Operand
        Exact; Inf, NaN, subnormals and signed zeros are kept.

    Raises
    ------
    ValueError
        If the dtype does not fit the format or ``x`` is not 2-D.
    """
    fmt = tensor_format(fmt)
    bits = _bits(x, fmt)
    value = np.empty(bits.shape, np.float32)
    power = np.empty(bits.shape, np.float32)
    special = np.empty(len(bits), np.bool_)
    least = np.empty(len(bits), np.uint32)
    layout = (fmt.fraction_bits, fmt.bias, fmt.magnitude_mask, fmt.max_finite)
    _decode_loop(bits, layout, value, power, special, least)
    return Operand(fmt, bits, value, power, special, least.view(np.float32))


def operand_b(x: np.ndarray, fmt: str | TensorFormat) -> OperandB:
    """Prepare a right operand given as (n, k), one row per output column; otherwise as :func:`operand`."""
    o = operand(x, fmt)
    bits, value, power = (np.ascontiguousarray(y.T) for y in (o.bits, o.value, o.power))
    return OperandB(o.fmt, bits, value, power, o.special, o.least)
