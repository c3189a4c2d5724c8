"""Conversions to operand formats, against ml_dtypes, against the nearest code, and in every code."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.twin.convert import encode_f32
from fa3_kernels.twin.wgmma_exact import TENSOR_FORMATS

FORMATS = tuple(TENSOR_FORMATS)
# every upper half of a binary32 pattern, with lower halves at and beside each tie
LOW = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xF001, 0xFFFF], np.uint32)
SWEEP = ((np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)) | LOW).view(np.float32)


def library(x: np.ndarray, fmt: str) -> np.ndarray:
    """What ml_dtypes and numpy give, with the device's rules for overflow and NaN."""
    f = TENSOR_FORMATS[fmt]
    with np.errstate(all="ignore"):
        code = x.astype(f.dtype).view(f.bits_dtype)
    sign = np.signbit(x).astype(f.bits_dtype) << f.bits_dtype.type(f.exponent_bits + f.fraction_bits)
    if f.dtype.itemsize == 1:
        code = np.where((code & f.magnitude_mask) > f.max_finite, f.bits_dtype.type(f.max_finite) | sign, code)
    return np.where(np.isnan(x), f.bits_dtype.type(0x7FFF if f.dtype.itemsize == 2 else 0x7F), code)


@pytest.mark.parametrize("fmt", FORMATS)
def test_conversion_equals_the_library_with_device_overflow(fmt: str) -> None:
    got = encode_f32(SWEEP, fmt)
    f = TENSOR_FORMATS[fmt]
    assert got.dtype == f.dtype
    wrong = np.argwhere(got.view(f.bits_dtype) != library(SWEEP, fmt))
    assert not len(wrong), f"{len(wrong)} differ, first {SWEEP[tuple(wrong[0])]!r}"


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_conversion_is_to_the_nearest_code_and_ties_to_even(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    codes = np.arange(f.max_finite + 1, dtype=np.uint8)
    values = codes.view(f.dtype).astype(np.float64)
    ties = (values[:-1] + values[1:]) / 2
    for x, want in (
        (values, codes),
        (ties, codes[:-1] + (codes[:-1] & 1)),
        (np.nextafter(ties.astype(np.float32), np.float32(0)), codes[:-1]),
        (np.nextafter(ties.astype(np.float32), np.float32(np.inf)), codes[1:]),
    ):
        assert (encode_f32(x.astype(np.float32), fmt).view(np.uint8) == want).all()
        assert (encode_f32(-x.astype(np.float32), fmt).view(np.uint8) == want | 0x80).all()


# cvt.rn and cvt.rn.satfinite, observed on an H200
@pytest.mark.parametrize(
    ("fmt", "overflow", "infinity", "nan"),
    [
        ("fp16", 0x7C00, 0x7C00, 0x7FFF),
        ("bf16", 0x7F80, 0x7F80, 0x7FFF),
        ("e4m3", 0x7E, 0x7E, 0x7F),
        ("e5m2", 0x7B, 0x7B, 0x7F),
    ],
)
def test_overflow_infinity_and_nan(fmt: str, overflow: int, infinity: int, nan: int) -> None:
    x = np.array([np.finfo(np.float32).max, np.inf, np.nan, -np.nan], np.float32)
    f = TENSOR_FORMATS[fmt]
    for rounding, largest in (("nearest_even", overflow), ("toward_zero", f.max_finite)):
        got = encode_f32(x, fmt, rounding=rounding).view(f.bits_dtype)
        assert [hex(v) for v in got] == [hex(v) for v in (largest, infinity, nan, nan)], rounding


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_toward_zero_is_the_largest_code_not_above(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    finite = SWEEP[np.isfinite(SWEEP)]
    cut = encode_f32(finite, fmt, rounding="toward_zero")
    assert (np.signbit(cut) == np.signbit(finite)).all()
    value = np.abs(cut.astype(np.float64))
    assert (value <= np.abs(finite)).all()
    bits = cut.view(f.bits_dtype) & f.bits_dtype.type(f.magnitude_mask)
    up = np.minimum(bits + f.bits_dtype.type(1), f.max_finite).astype(f.bits_dtype).view(f.dtype).astype(np.float64)
    assert ((up > np.abs(finite)) | (bits == f.max_finite)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_survives_a_round_trip(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    codes = np.arange(f.max_finite + 1, dtype=f.bits_dtype)
    for rounding in ("nearest_even", "toward_zero"):
        back = encode_f32(codes.view(f.dtype).astype(np.float32), fmt, rounding=rounding)
        assert (back.view(f.bits_dtype) == codes).all()


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding must be"):
        encode_f32(np.ones(1, np.float32), "fp16", rounding="up")  # type: ignore[arg-type]
