"""Conversions: every code, every midpoint and its neighbours, against three independent implementations."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from fa3_reference.formats import (
    FORMATS,
    Format,
    Overflow,
    decode,
    encode,
    encode_bits,
    round_to,
    ulp,
)
from tests.reference.scalar_encoder import encode_scalar

NARROW = ("e4m3", "e5m2")  # few enough codes to sweep the slow oracles
SIXTEEN = ("fp16", "bf16")
OVERFLOWS = ("ieee", "saturate")


def _all_codes(fmt: Format) -> np.ndarray:
    return np.arange(1 << fmt.bits, dtype=np.int64).astype(fmt.bits_dtype)


def _finite_magnitudes(fmt: Format) -> np.ndarray:
    return decode(np.arange(fmt.max_code + 1), fmt)


def _probes(fmt: Format) -> np.ndarray:
    """Every value and midpoint, the overflow threshold, each +- one float64 step, both signs, specials."""
    values = _finite_magnitudes(fmt)
    values = np.append(values, values[-1] + (values[-1] - values[-2]))  # what would follow the largest
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2])
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, 0.0)])
    rest = np.array([np.inf, np.nan, 1e300, np.finfo(np.float64).max, 5e-324, 1e-300])
    both = np.concatenate([near, rest])
    return np.concatenate([both, -both])


def _encode_by_scalar(x: np.ndarray, fmt: Format, overflow: Overflow) -> np.ndarray:
    return np.array([encode_scalar(float(v), fmt, overflow) for v in x])


@pytest.mark.parametrize(
    ("name", "max_finite", "min_normal", "min_subnormal", "unit_roundoff"),
    [
        ("fp32", (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-24),
        ("fp16", 65504.0, 2.0**-14, 2.0**-24, 2.0**-11),
        ("bf16", (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-8),
        ("e4m3", 448.0, 2.0**-6, 2.0**-9, 2.0**-4),
        ("e5m2", 57344.0, 2.0**-14, 2.0**-16, 2.0**-3),
    ],
)
def test_format_constants_are_those_of_the_standards(name, max_finite, min_normal, min_subnormal, unit_roundoff):
    fmt = FORMATS[name]
    assert (fmt.max_finite, fmt.min_normal, fmt.min_subnormal) == (max_finite, min_normal, min_subnormal)
    assert (fmt.unit_roundoff, fmt.epsilon) == (unit_roundoff, 2 * unit_roundoff)
    info = ml_dtypes.finfo(fmt.dtype)
    assert (float(info.max), float(info.smallest_subnormal)) == (max_finite, min_subnormal)


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_a_decoded_code_returns_the_code(name):
    fmt = FORMATS[name]
    codes = _all_codes(fmt) if fmt.bits <= 16 else np.arange(0, 1 << 32, 65521).astype(fmt.bits_dtype)
    values = decode(codes, fmt)
    nan = np.isnan(values)
    np.testing.assert_array_equal(encode_bits(values, fmt, "ieee")[~nan], codes[~nan])
    assert set(encode_bits(values, fmt, "ieee")[nan].tolist()) <= {fmt.nan_code}


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("name", NARROW)
def test_array_and_scalar_encoders_agree_on_every_midpoint(name, overflow):
    fmt = FORMATS[name]
    x = _probes(fmt)
    got, want = encode_bits(x, fmt, overflow), _encode_by_scalar(x, fmt, overflow)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{name} {overflow}: x={x[wrong][:5]}, got {got[wrong][:5]}, want {want[wrong][:5]}"


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("encoder", [encode_bits, _encode_by_scalar])
@pytest.mark.parametrize("name", NARROW)
def test_encoders_agree_with_gfloat_on_every_midpoint(name, encoder, overflow):
    gfloat = pytest.importorskip("gfloat", reason="gfloat is in the extra 'test'")
    formats = pytest.importorskip("gfloat.formats")
    theirs = {"e4m3": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2}[name]
    fmt = FORMATS[name]
    x = _probes(fmt)
    got = decode(encoder(x, fmt, overflow), fmt)
    want = np.array([gfloat.round_float(theirs, float(v), sat=overflow == "saturate") for v in x])
    if overflow == "saturate":  # gfloat keeps Inf where the format has one; cvt.satfinite clamps it
        want[np.isinf(x)] = np.sign(x[np.isinf(x)]) * fmt.max_finite
    np.testing.assert_array_equal(got, want)
    zeros = got == 0
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(x[zeros]))


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_ieee_encoding_agrees_with_numpy_on_midpoints(name):
    # numpy casts float64 to float16 and float32 with one rounding
    fmt = FORMATS[name]
    magnitudes = np.arange(fmt.max_code + 1) if fmt.bits == 16 else np.arange(0, fmt.max_code, 104729)
    low, high = decode(magnitudes, fmt), decode(np.minimum(magnitudes + 1, fmt.max_code), fmt)
    middle = (low + high) / 2
    x = np.concatenate([low, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 65519.999, 65520.0, 1e39, -1e39]])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(encode_bits(x, fmt, "ieee"), x.astype(fmt.dtype).view(fmt.bits_dtype))


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2"])
def test_ieee_encoding_agrees_with_ml_dtypes_from_float32(name):
    # from float32, ml_dtypes rounds once: its double rounding needs float64 inputs
    fmt = FORMATS[name]
    values = _finite_magnitudes(fmt)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    x = np.concatenate([values.astype(np.float32), middle, up, down, np.float32([np.inf, 465, 1e30])])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(fmt.dtype).astype(np.float64)
    np.testing.assert_array_equal(round_to(x, fmt, "ieee"), want)


def test_float64_rounds_once_not_through_float32():
    # 1 + 2^-4 is the midpoint of 1 and 1.125; float32 drops the 2^-40 that decides, and the tie goes to 1
    assert round_to(np.array([1 + 2**-4 + 2**-40]), FORMATS["e4m3"], "ieee")[0] == 1.125


@pytest.mark.parametrize(
    ("name", "x", "ieee", "saturated"),
    [
        ("e4m3", 464.0, 448.0, 448.0),  # tie between 448 and the 480 that is not there: even is 448
        ("e4m3", 464.0000001, np.nan, 448.0),
        ("e4m3", -np.inf, np.nan, -448.0),
        ("e5m2", 61439.9, 57344.0, 57344.0),
        ("e5m2", 61440.0, np.inf, 57344.0),
        ("fp16", 65519.99, 65504.0, 65504.0),
        ("fp16", -65520.0, -np.inf, -65504.0),
        ("bf16", 1e300, np.inf, (2 - 2**-7) * 2.0**127),
        ("e4m3", np.nan, np.nan, np.nan),
    ],
)
def test_overflow_follows_its_policy(name, x, ieee, saturated):
    for overflow, want in (("ieee", ieee), ("saturate", saturated)):
        got = round_to(np.array([x]), FORMATS[name], overflow)[0]
        np.testing.assert_equal(got, want, err_msg=f"{name} {x} {overflow}")


@given(
    x=st.floats(allow_nan=True, width=64),
    name=st.sampled_from(sorted(FORMATS)),
    overflow=st.sampled_from(OVERFLOWS),
)
@example(x=5e-324, name="fp32", overflow="ieee")
@example(x=-0.0, name="fp32", overflow="ieee")
def test_array_encoder_equals_scalar_encoder(x, name, overflow):
    fmt = FORMATS[name]
    got = int(encode_bits(np.array(x), fmt, overflow))
    want = encode_scalar(x, fmt, overflow)
    assert got == want, f"{name} {overflow} x={x!r}: got {got:#x}, want {want:#x}"


@pytest.mark.parametrize("name", [*NARROW, *SIXTEEN])
def test_rounding_error_is_at_most_half_an_ulp(name):
    fmt = FORMATS[name]
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.uniform(-1, 1, 20_000), rng.integers(fmt.min_exponent - 6, fmt.min_exponent + 20, 20_000))
    x = x[np.abs(x) <= fmt.max_finite]
    assert np.all(np.abs(round_to(x, fmt, "ieee") - x) <= ulp(x, fmt) / 2)


@pytest.mark.parametrize("name", [*NARROW, *SIXTEEN])
def test_ulp_is_the_gap_to_the_next_number(name):
    fmt = FORMATS[name]
    values = _finite_magnitudes(fmt)
    np.testing.assert_array_equal(ulp(-values[:-1], fmt), np.diff(values))
    np.testing.assert_equal(
        ulp(np.array([values[-1], 1e300, np.inf, np.nan]), fmt),
        [values[-1] - values[-2], values[-1] - values[-2], np.nan, np.nan],
    )


def test_encode_keeps_the_shape_and_makes_the_storage_dtype():
    x = np.zeros((2, 0, 3)), np.array(1.5), np.ones((4, 6))[:, ::2]
    for fmt in FORMATS.values():
        for part in x:
            got = encode(part, fmt, "ieee")
            assert (got.shape, got.dtype) == (part.shape, fmt.dtype)
            np.testing.assert_array_equal(got.astype(np.float64), part)


@pytest.mark.parametrize("encoder", [encode_bits, encode_scalar])
def test_an_unknown_mode_is_refused_by_both_encoders(encoder):
    with pytest.raises(ValueError, match="overflow must be 'ieee' or 'saturate', got 'wrap'"):
        encoder(1.0, FORMATS["fp16"], "wrap")
