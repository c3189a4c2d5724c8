"""Conversions from binary32 to the operand formats, which the twin and the quantiser's twin round by.

The instructions are cvt.rn.f16.f32, cvt.rn.bf16.f32 and cvt.rn.satfinite.e4m3x2/e5m2x2.f32. Checked on an H200 for all
2^32 inputs of each without a difference.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fa3_kernels.twin.compiled import compiled
from fa3_kernels.twin.wgmma_exact import TensorFormat, tensor_format

Rounding = Literal["nearest_even", "toward_zero"]


def _overflow_bits(fmt: TensorFormat) -> tuple[int, int]:
    """Return what Inf and NaN become: 16-bit formats keep them, FP8 saturates (satfinite) and has one NaN, 0x7f."""
    if fmt.dtype.itemsize == 2:
        return fmt.max_finite + 1, 0x7FFF
    return fmt.max_finite, 0x7F


@compiled
def _encode_loop(bits, nearest, layout, out):
    """Fill unsigned ``out`` from binary32 ``bits`` (int32), both flat."""
    exponent_bits, fraction_bits, bias, max_finite, inf, nan = layout
    drop = np.int32(23 - fraction_bits)
    rebias = np.int32(127 - bias)
    largest = max_finite + 1 if nearest and inf > max_finite else max_finite  # nearest may round up to Inf
    ties = np.int32(1 if nearest else 0)
    for i in range(bits.size):
        b = np.int32(bits[i])
        magnitude = np.int32(b & 0x7FFFFFFF)
        below = np.int32(rebias + 1 - (magnitude >> 23))  # > 0: subnormal in the target; bf16 keeps its exponent
        subnormal = below > 0 and rebias > 0
        shift = np.int32(min(drop + below, 25)) if subnormal else drop
        x = np.int32((magnitude & 0x7FFFFF) | 0x800000) if subnormal else magnitude
        half = np.int32(ties * ((1 << (shift - 1)) - 1 + ((x >> shift) & 1)))
        code = np.int32((x + half) >> shift)
        code = code if subnormal else np.int32(code - (rebias << fraction_bits))
        code = min(code, np.int32(largest))
        code = np.int32(inf) if magnitude == 0x7F800000 else code
        sign = np.int32(1 if b < 0 else 0) << (exponent_bits + fraction_bits)
        out[i] = nan if magnitude > 0x7F800000 else code | sign


def encode_f32(x: np.ndarray, fmt: str | TensorFormat, *, rounding: Rounding = "nearest_even") -> np.ndarray:
    """Round binary32 numbers to an operand format as the conversion instructions do.

    Parameters
    ----------
    x : float32, any shape
    fmt : str or TensorFormat
        "fp16", "bf16", "e4m3" or "e5m2".
    rounding : {"nearest_even", "toward_zero"}
        The kernels use nearest_even; toward_zero is a fault to inject (finite overflow then stays at max
        finite).

    Returns
    -------
    float16, bfloat16, float8_e4m3fn or float8_e5m2 like ``x``
        The hardware's bits; subnormals are kept. 16-bit formats: overflow gives Inf, NaN gives 0x7fff. FP8:
        overflow and Inf give the largest finite value of that sign, NaN gives 0x7f.
    """
    if rounding not in ("nearest_even", "toward_zero"):
        raise ValueError(f"rounding must be 'nearest_even' or 'toward_zero', got {rounding!r}")
    fmt = tensor_format(fmt)
    nearest = rounding == "nearest_even"
    bits = np.array(x, np.float32, order="C").view(np.uint32)
    out = np.empty(bits.size, fmt.bits_dtype)
    layout = (fmt.exponent_bits, fmt.fraction_bits, fmt.bias, fmt.max_finite, *_overflow_bits(fmt))
    _encode_loop(bits.reshape(-1).view(np.int32), nearest, layout, out)
    return out.view(fmt.dtype).reshape(bits.shape)
