"""The fp32 pipe: single rounding, maxima, fragment sums and the fused softmax primitive."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from fa3_kernels.twin import float32, mufu

bits32 = st.integers(0, (1 << 32) - 1)
NAN = 0x7FFFFFFF


def from_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def round_once(exact: Fraction) -> float:
    """Nearest binary32, ties to even, by exact rational arithmetic; Inf on overflow."""
    if exact == 0:
        return 0.0
    exponent = -149
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    grid = Fraction(2) ** exponent
    rounded = round(exact / grid) * grid  # Fraction rounds half to even
    return float(rounded) if abs(rounded) < Fraction(2) ** 128 else float(np.inf if rounded > 0 else -np.inf)


@given(bits32, bits32, bits32)
@example(0x00000001, 0x3F000000, 0x00000001)  # 1.5 ulp of the smallest subnormal: a tie
@example(0x3F800001, 0x3F800001, 0x33800000)  # the product alone would round up, then again
@example(0x7F7FFFFF, 0x3F800001, 0x00000000)
@example(0x3F800000, 0x3F800001, 0x33000000)  # addend just at half an ulp
@example(0x80000000, 0x3F800000, 0x00000000)
@example(0x39800B24, 0x397FE9BA, 0x3F800000)  # just above a tie, and odd in float64
def test_fma_rounds_once(a: int, b: int, c: int) -> None:
    x = from_bits(a, b, c)
    got = float32.fma(*(x[i : i + 1] for i in range(3))).view(np.uint32)[0]
    if np.isfinite(x).all():
        p, q, r = (Fraction(float(v)) for v in x)
        want = np.float32(round_once(p * q + r))
        if want != 0:
            assert got == want.view(np.uint32)
        else:
            assert got & NAN == 0
    else:
        wide = x.astype(np.float64)
        with np.errstate(all="ignore"):
            want = np.float32(wide[0] * wide[1] + wide[2])
        assert got == (NAN if np.isnan(want) else want.view(np.uint32))


def test_fma_on_a_million_near_ties_equals_the_wide_result() -> None:
    rng = np.random.default_rng(5)
    a, b = ((rng.integers(0, 1 << 24, 1 << 18)).astype(np.float32) for _ in range(2))
    c = np.ldexp(rng.integers(-(1 << 24), 1 << 24, 1 << 18).astype(np.float32), rng.integers(0, 24, 1 << 18))
    exact = a.astype(np.float64).astype(np.longdouble) * b + c  # at most 49 bits: exact
    want = exact.astype(np.float32).view(np.uint32)
    assert (float32.fma(a, b, c).view(np.uint32) == want).all()


@given(st.integers(2049, 4095), st.integers(4097, 8191), st.integers(-100, -30), st.integers(-60, 60), st.booleans())
def test_fma_of_a_tie_and_a_tiny_addend_does_not_round_twice(a: int, b: int, c: int, shift: int, below: bool) -> None:
    a, b = a | 1, b | 1  # a 25-bit odd product from 2^24 up lies half-way between two binary32 numbers
    x = np.array([a, b * 2.0**shift, (-1 if below else 1) * 2.0 ** max(c + shift, -140)], np.float32)
    want = np.float32(round_once(Fraction(float(x[0])) * Fraction(float(x[1])) + Fraction(float(x[2]))))
    assert float32.fma(*x) == want


def test_fma_nan_is_canonical_and_arguments_broadcast() -> None:
    inf, one = np.float32(np.inf), np.ones((3, 1), np.float32)
    for case in ((inf, np.float32(0), one), (inf, one, -inf), (from_bits(0xFFC12345), one, one)):
        assert (float32.fma(*case).view(np.uint32) == NAN).all()
    out = float32.fma(one, np.arange(4, dtype=np.float32), np.float32(2))
    assert (out == np.arange(4) + 2).all()
    assert out.shape == (3, 4)
    assert float32.fma(np.float32(2), np.float32(3), np.float32(1)).shape == ()


def test_row_max_ignores_nan_and_orders_zeros() -> None:
    nan = np.nan
    s = np.array(
        [[nan, -1, nan], [-0.0, -0.0, -3], [-0.0, 0.0, -3], [nan] * 3, [-np.inf, nan, -np.inf], [1, np.inf, 2]]
    )
    got = float32.row_max(s.astype(np.float32)).view(np.uint32)
    assert [hex(v) for v in got] == ["0xbf800000", "0x80000000", "0x0", hex(NAN), "0xff800000", "0x7f800000"]


@given(st.lists(bits32, min_size=1, max_size=12), st.integers(0, 1 << 20))
def test_row_max_is_a_chain_of_fmax_in_any_order(bits: list[int], seed: int) -> None:
    s = from_bits(*bits)
    numbers = sorted((x for x in s if not np.isnan(x)), key=lambda x: (x, not np.signbit(x)))
    want = np.array(numbers[-1:] or from_bits(NAN), np.float32)
    assert float32.row_max(s[None]).tobytes() == want.tobytes()
    chain = from_bits(NAN)
    for x in np.random.default_rng(seed).permutation(s):
        chain = float32.fmax(chain, x)
    assert chain.tobytes() == want.tobytes()


def loop_thread_sums(p: np.ndarray) -> np.ndarray:
    """The definition in scalar steps."""
    out = np.zeros((len(p), 4), np.float32)
    for i, row in enumerate(p):
        for q in range(4):
            total = None
            for j in range(0, len(row), 8):
                pair = np.float32(row[j + 2 * q] + row[j + 2 * q + 1])
                total = pair if total is None else np.float32(total + pair)
            out[i, q] = total
    return out


@given(st.integers(1, 12), st.integers(0, 1 << 30))
def test_thread_sums_follow_the_fragment_order(groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = np.exp2(rng.uniform(-20, 8, (5, 8 * groups))).astype(np.float32) * rng.choice([-1, 1, 1], (5, 8 * groups))
    p = p.astype(np.float32)
    want = loop_thread_sums(p)
    assert float32.thread_row_sums(p).tobytes() == want.tobytes()
    quad = float32.quad_sum(want)
    assert quad.tobytes() == ((want[:, 0] + want[:, 2]) + (want[:, 1] + want[:, 3])).tobytes()


def test_thread_sums_keep_negative_zero_and_spread_one_nan_to_one_lane() -> None:
    p = np.full((2, 16), -0.0, np.float32)
    p[1, 10] = -np.nan
    got = float32.thread_row_sums(p).view(np.uint32)
    assert (got[0] == 0x80000000).all()
    assert [hex(v) for v in got[1]] == ["0x80000000", hex(NAN), "0x80000000", "0x80000000"]
    assert float32.quad_sum(got.view(np.float32)).view(np.uint32)[1] == NAN


def test_a_row_of_a_fragment_is_a_multiple_of_8() -> None:
    for width in (0, 12):
        with pytest.raises(ValueError, match="multiple of 8"):
            float32.thread_row_sums(np.zeros((2, width), np.float32))


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([0.18033688, 1e-30, 3e38, 0.0]),
    st.sampled_from([0.0, 50.0, np.inf, -np.inf]),
)
def test_exp2_scaled_is_ex2_of_one_fma(seed: int, c: float, minus: float) -> None:
    rng = np.random.default_rng(seed)
    s = (rng.standard_normal((7, 19)) * 2.0 ** rng.integers(-3, 8)).astype(np.float32)
    s[rng.random(s.shape) < 0.1] = -np.inf
    s[rng.random(s.shape) < 0.02] = np.nan
    scale, offset = np.full(7, c, np.float32), np.linspace(-1, 1, 7).astype(np.float32) + np.float32(minus)
    want = mufu.ex2(float32.fma(s, scale[:, None], -offset[:, None]))
    assert float32.exp2_scaled(s, scale, offset).tobytes() == want.tobytes()
