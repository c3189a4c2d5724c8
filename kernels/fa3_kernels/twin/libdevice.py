"""CUDA's expf, logf and log2f of binary32 numbers without fast mathematics: libdevice's sequences of instructions.

The twins of families that are built without fast mathematics use them. The sequences were read off PTX that nvcc and
Triton emit, and compared with outputs of FlashAttention-2's combine and of a Triton kernel recorded on Hopper, and with
float64.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.twin.float32 import fma
from fa3_kernels.twin.mufu import ex2

_LOG2_COEFFICIENTS = (
    0x3DC6B27F,
    0xBE2C7F30,
    0x3E2FCF2A,
    0xBE374E43,
    0x3E520BF4,
    0xBE763C8B,
    0x3E93BF99,
    0xBEB8AA49,
    0x3EF6384A,
    0xBF38AA3B,
)
_LOG_COEFFICIENTS = (
    0xBE055027,
    0x3E1039F6,
    0xBDF8CDCC,
    0x3E0F2955,
    0xBE2AD8B9,
    0x3E4CED0B,
    0xBE7FFF22,
    0x3EAAAA78,
    0xBF000000,
)


def _of_bits(bits: int) -> np.float32:
    """Return the float32 number of these bits."""
    return np.uint32(bits).view(np.float32)


def _reduced(x: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the exponents of normal numbers in units of 2^23, and their significands less 1.

    ``least`` has the bits of the smallest significand, by which the exponent is chosen.
    """
    bits = x.view(np.int32)
    exponent = (bits - np.int32(least)) & np.int32(-(1 << 23))
    return exponent, (bits - exponent).view(np.float32) - np.float32(1)


def _polynomial(u: np.ndarray, coefficients: tuple[int, ...]) -> np.ndarray:
    """Evaluate a polynomial by fma, from the highest coefficient on (Horner)."""
    total = np.full(u.shape, _of_bits(coefficients[0]), np.float32)
    for c in coefficients[1:]:
        total = fma(total, u, _of_bits(c))
    return total


def log2(x: np.ndarray) -> np.ndarray:
    """Return log2(x), float32 (n,), of normal numbers > 0, of inf and of NaN; of others the result has no meaning."""
    exponent, u = _reduced(x, 0x3F3504F3)
    tail = fma(u, np.float32(1.4426950408889634), u * (u * _polynomial(u, _LOG2_COEFFICIENTS)))
    found = exponent.astype(np.float32) * np.float32(2.0**-23) + tail
    return np.where(np.isfinite(x), found, x)


def log(x: np.ndarray) -> np.ndarray:
    """Return ln(x), float32 (n,), of normal numbers > 0; of others the result has no meaning."""
    exponent, u = _reduced(x, 0x3F2AAAAB)
    tail = fma(u * _polynomial(u, _LOG_COEFFICIENTS), u, u)
    return fma(exponent.astype(np.float32) * np.float32(2.0**-23), _of_bits(0x3F317218), tail)


def exp(x: np.ndarray) -> np.ndarray:
    """Return e^x, float32 like ``x``; exponent and rest are separated in units of the exponent field.

    -inf and results far below 2^-126 give 0, +inf gives +inf, NaN gives 0x7fffffff.
    """
    field = np.clip(fma(x, _of_bits(0x3BBB989D), np.float32(0.5)), np.float32(0), np.float32(1))  # cvt.sat: NaN is 0
    field = np.where(np.isnan(field), np.float32(0), field)
    exact = field.astype(np.float64) * 252.0 + float(_of_bits(0x4B400001))
    shifted = np.floor(exact).astype(np.float32)  # fma.rm: integers from 2^23 on
    whole = shifted + _of_bits(0xCB40007F)
    rest = fma(x, _of_bits(0x32A57060), fma(x, _of_bits(0x3FB8AA3B), -whole))
    scale = (shifted.view(np.int32) << np.int32(23)).view(np.float32)
    return ex2(rest) * scale
