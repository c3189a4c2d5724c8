"""The bounds' tensor core: equal to the device, to the twin and to two other models; ranges contain what they
promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fa3_kernels.twin.wgmma_exact import wgmma_exact
from fa3_reference.bounds.device import FP32_MAX, TENSOR_CORE, TensorCore
from fa3_reference.bounds.tensor_core import multiply, multiply_between
from fa3_reference.formats import FORMATS, Format, decode, encode
from tests.kernels import device_inputs as device
from tests.kernels.twin.test_wgmma import assert_same_bits, fast, golden_case, matrices
from tests.kernels.twin.test_wgmma_oracles import by_mmaemu, by_mmasim, case


def ordinal(bits: np.ndarray, fmt: Format) -> np.ndarray:
    """Map codes to int64 that are ordered like their values, neighbours 1 apart."""
    magnitude = bits.astype(np.int64) & (fmt.sign_mask - 1)
    return np.where(bits.astype(np.int64) & fmt.sign_mask, -magnitude, magnitude)


CORES = {**TENSOR_CORE, "e5m2": TensorCore(32, 13, 13, FORMATS["e5m2"])}
each_format = pytest.mark.parametrize("fmt", sorted(CORES))


def bits_of(triple: device.Triple, fmt: str) -> np.ndarray:
    """Result bits of a tile given by bits: A (m, k), B (n, k), C (m, n)."""
    a, b, c = triple
    values = (decode(x, FORMATS[fmt]) for x in (a, b))
    left, right = values
    return multiply(left, right.T, CORES[fmt], c.view(np.float32)).astype(np.float32).view(np.uint32)


def finite_part(triple: device.Triple, fmt: str) -> tuple[device.Triple, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The tile without rows and columns of NaN and Inf, C's NaN made 0; the indices kept, and where C was a number."""
    a, b, c = triple
    rows, columns = (np.isfinite(decode(x, FORMATS[fmt])).all(1).nonzero()[0] for x in (a, b))
    c = c[np.ix_(rows, columns)]
    number = ~np.isnan(c.view(np.float32))
    return (a[rows], b[columns], np.where(number, c, 0).astype(np.uint32)), (rows, columns), number


@pytest.mark.parametrize("long", [False, True], ids=["step", "chain"])
@pytest.mark.parametrize("family", sorted(device.FAMILIES))
@each_format
def test_multiply_equals_the_device(fmt: str, family: str, long: bool) -> None:
    triple, outputs = golden_case(fmt, family, long)
    want = wgmma_exact(*triple, fmt)
    assert device.is_of_the_device(outputs, want), "the integer model is not the device's"
    triple, kept, number = finite_part(triple, fmt)
    assert number.sum() > 100 or family == "special"
    assert_same_bits(bits_of(triple, fmt)[number], want[np.ix_(*kept)][number], (fmt, family))


@given(matrices())
@settings(max_examples=200)
def test_multiply_equals_the_twin(drawn: tuple[device.Triple, str]) -> None:
    triple, fmt = drawn
    triple, _, _ = finite_part(triple, fmt)
    got = bits_of(triple, fmt)
    assert_same_bits(got, wgmma_exact(*triple, fmt), (fmt, "integers"))
    assert_same_bits(got, fast(*triple, fmt), (fmt, "fast"))


recipes = given(st.sampled_from(["normal", "outlier", "cancel", "range"]), st.integers(0, 1 << 30))


@pytest.mark.optional
@each_format
@recipes
@settings(max_examples=10)
def test_multiply_equals_mmasim(fmt: str, family: str, seed: int) -> None:
    torch: Any = pytest.importorskip("torch")
    mmasim: Any = pytest.importorskip("mmasim.nv_ptx", reason="needs mmasim: install the extra 'oracles'")
    triple = case(fmt, family, 2 * CORES[fmt].k_step, seed)
    assert_same_bits(bits_of(triple, fmt), by_mmasim(torch, mmasim, *triple, fmt), (fmt, family, seed))


@pytest.mark.optional
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@recipes
@settings(max_examples=10)
def test_fp8_multiply_equals_mmaemu(fmt: str, family: str, seed: int) -> None:
    torch: Any = pytest.importorskip("torch")
    mmaemu: Any = pytest.importorskip("mmaemu.model.chain", reason="needs mmaemu: install the extra 'oracles'")
    triple = case(fmt, family, 64, seed)
    assert_same_bits(bits_of(triple, fmt), by_mmaemu(torch, mmaemu, *triple, fmt), (fmt, family, seed))


def test_a_subnormal_operand_counts_with_the_least_exponent_of_its_format():
    # 256 * 2^-9 counts as 2^(8 - 6): the grid is 2^(2 - 13), and 31 products 0.234375 * 2^-9 < 2^-11 are cut away
    p, v = np.array([[256.0] + 31 * [0.234375]]), np.full((32, 1), 2.0**-9)
    assert multiply(p, v, TENSOR_CORE["e4m3"]) == 0.5
    # V = 2^-6 is normal and counts the same: of 7.5 units of that grid 7 are left
    assert multiply(p, 8 * v, TENSOR_CORE["e4m3"]) == 4 + 31 * 7 * 2.0**-11


# Hand-derived with a zero C of exponent -133, so a grid of 2^-158: 255 * 2^-157 lacks 2^-157 of the smallest subnormal.
# 15 * 2^-158 are on the grid and fill it; 15 * 1.75 * 2^-159 are cut away.
@pytest.mark.parametrize(("rest", "want"), [(0.5, 2.0**-149), (1.75 / 4, 0.0)])
def test_a_zero_accumulator_counts_as_exponent_minus_133(rest: float, want: float) -> None:
    b = np.array([255.0] + 15 * [rest])[:, None] * 2.0**-77
    for c in (0.0, -0.0):
        got = multiply(np.full((1, 16), 2.0**-80), b, TENSOR_CORE["bf16"], np.full((1, 1), c))
        assert got == want
        assert not np.signbit(got)


def test_an_overflow_is_infinite_and_stays() -> None:
    core, ones = TENSOR_CORE["bf16"], np.ones((32, 1))
    a = np.zeros((1, 32))
    a[0, 0], a[0, 16] = 2.0**127, -(2.0**127)
    assert multiply(a, ones, core, np.array([[2.0**127]])) == np.inf
    assert multiply(a[:, 16:], ones[16:], core, np.array([[2.0**127]])) == 0
    assert multiply(a, ones, core, np.array([[-np.inf]])) == -np.inf
    low, high = multiply_between(a, a, ones, core, np.array([[0.0]]), np.array([[2.0**127]]))
    assert (low[0, 0], high[0, 0]) == (0, np.inf)


@each_format
def test_missing_products_are_zeros(fmt: str) -> None:
    core = CORES[fmt]
    a, b = (decode(x[0], core.operand) for x in device.tiles(fmt, "outlier", 1, 8, 8, 2 * core.k_step, 3)[:2])
    a[:, -5:] = 0
    assert (multiply(a[:, :-5], b.T[:-5], core) == multiply(a, b.T, core)).all()


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda x, core: multiply(x + 2.0**-11, x, core), "numbers of fp16"),
        (lambda x, core: multiply(x, 1e5 * x, core), "numbers of fp16"),
        (lambda x, core: multiply(x * np.nan, x, core), "numbers of fp16"),
        (lambda x, core: multiply(x * np.inf, x, core), "numbers of fp16"),
        (lambda x, core: multiply(x[:, :1], x, core), "agree in k"),
        (lambda x, core: multiply(x, x, core, x + 2.0**-30), "binary32"),
        (lambda x, core: multiply(x, x, core, x * np.nan), "binary32"),
        (lambda x, core: multiply_between(x, 0 * x, x, core), "low <= high"),
        (lambda x, core: multiply_between(-x, x, x, core), "low <= high"),
        (lambda x, core: multiply_between(x, x, x, core, x, -x), "c_low <= c_high"),
    ],
)
def test_misuse_is_refused_with_the_rule(call, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        call(np.ones((2, 2)), TENSOR_CORE["fp16"])


def moved(x: np.ndarray, by: np.ndarray, core: TensorCore) -> np.ndarray:
    """The numbers ``by`` places further on among the finite numbers of the operand format."""
    fmt = core.operand
    place = np.clip(ordinal(encode(x, fmt, "saturate").view(fmt.bits_dtype), fmt) + by, -fmt.max_code, fmt.max_code)
    return decode(np.where(place < 0, fmt.sign_mask - place, place), fmt)


def moved_c(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return moved(x, by, replace(TENSOR_CORE["fp16"], operand=FORMATS["fp32"]))


RANGES = ("neighbours", "binades", "from zero", "subnormal")
C_RANGES = ("none", "neighbours", "binades", "through zero", "tiny", "huge")
M, N = 3, 12


def ranges_of_a(kind: str, core: TensorCore, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    fmt, shape = core.operand, (M, k)
    x = np.abs(encode(rng.standard_normal(shape) * np.exp2(rng.integers(-6, 3, shape)), fmt, "saturate").astype(float))
    if kind == "neighbours":
        return x, moved(x, rng.integers(0, 2, shape) * (rng.random(shape) < 0.2), core)
    if kind == "binades":  # across a power of two, from the last number below it
        power = np.exp2(np.floor(np.log2(np.maximum(x, 2.0**-6))))
        return moved(power, -rng.integers(0, 3, shape), core), moved(power, rng.integers(0, 3, shape), core)
    if kind == "from zero":
        return np.where(rng.random(shape) < 0.5, x, 0.0), x
    tiny = rng.integers(0, 1 << fmt.fraction_bits, shape) * fmt.min_subnormal
    return tiny, np.where(rng.random(shape) < 0.3, moved(tiny, rng.integers(0, 4, shape), core), tiny)


def ranges_of_c(kind: str, scale: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = (M, N)
    c = (rng.standard_normal(shape) * scale).astype(np.float32).astype(float)
    if kind == "none":
        return c, c
    if kind == "neighbours":
        return c, moved_c(c, rng.integers(0, 1 << rng.integers(1, 20), shape))
    if kind == "binades":
        power = np.copysign(np.exp2(np.floor(np.log2(np.abs(c) + 2.0**-100))), c)
        return moved_c(power, -rng.integers(0, 9, shape)), moved_c(power, rng.integers(0, 9, shape))
    if kind == "through zero":
        return -np.abs(c), np.abs(c[::-1])
    if kind == "tiny":
        return moved_c(0 * c, -rng.integers(0, 1 << 24, shape)), moved_c(0 * c, rng.integers(0, 1 << 24, shape))
    high = rng.choice([FP32_MAX, np.inf, 2.0**127], shape)
    return np.where(rng.random(shape) < 0.2, -high, 0.0), high


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[np.ndarray, ...], TensorCore, np.random.Generator]:
    """Ends of A, B, ends of C, the core, and a generator for what lies inside."""
    fmt = draw(st.sampled_from(sorted(CORES)), label="format")
    core, rng = CORES[fmt], np.random.default_rng(draw(st.integers(0, 1 << 30), label="seed"))
    k = draw(st.sampled_from([1, core.k_step, 2 * core.k_step + 3]), label="k")
    low, high = ranges_of_a(draw(st.sampled_from(RANGES), label="A"), core, k, rng)
    family = draw(st.sampled_from(["normal", "outlier", "range", "subnorm", "zeros"]), label="B")
    b = decode(device.tiles(fmt, family, 2, 1, N, k, draw(st.integers(0, 99)))[1][1].T, core.operand)
    scale = float(np.exp2(draw(st.sampled_from([-20, 0, 10]), label="log2 of C")))
    return (low, high, b, *ranges_of_c(draw(st.sampled_from(C_RANGES), label="C"), scale, rng)), core, rng


def inside(low: np.ndarray, high: np.ndarray, fmt, rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of a format in ranges, (count, *shape): ends half of the time, else uniform among the numbers between."""
    places = (ordinal(encode(x, fmt, "ieee").view(fmt.bits_dtype), fmt) for x in (low, high))
    first, last = places
    place = rng.integers(first, last + 1, (count, *low.shape))
    which = rng.integers(0, 4, place.shape)
    place = np.where(which == 0, first, np.where(which == 1, last, place))
    return decode(np.where(place < 0, fmt.sign_mask - place, place), fmt)


COUNT = 40


@given(intervals())
@settings(max_examples=500)
def test_ranges_contain_the_result_of_every_member(drawn) -> None:
    (low, high, b, c_low, c_high), core, rng = drawn
    least, greatest = multiply_between(low, high, b, core, c_low, c_high)
    a = inside(low, high, core.operand, rng, COUNT)
    c = inside(c_low, c_high, FORMATS["fp32"], rng, COUNT)
    for j in range(N):  # the corners that the signs of a column select
        a[2 * j : 2 * j + 2] = np.where(b[:, j] > 0, low, high), np.where(b[:, j] > 0, high, low)
        c[2 * j], c[2 * j + 1] = c_low, c_high
    got = multiply(a.reshape(-1, a.shape[-1]), b, core, c.reshape(-1, N)).reshape(c.shape)
    assert (least <= got).all()
    assert (got <= greatest).all()


@given(intervals())
def test_ranges_of_one_member_are_its_result(drawn) -> None:
    (low, _, b, c_low, _), core, _ = drawn
    least, greatest = multiply_between(low, low, b, core, c_low, c_low)
    want = multiply(low, b, core, c_low)
    assert (least == want).all()
    assert (greatest == want).all()


def softmax_ranges(core: TensorCore, keys: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights of which some lie between two neighbours (2 %, or 30 % in fp16 and bf16), and values."""
    rng, fmt = np.random.default_rng(seed), core.operand
    p = encode(np.exp2(-np.abs(rng.standard_normal((32, keys)) * 3)), fmt, "saturate").astype(float)
    share = 0.02 if fmt.fraction_bits == 3 else 0.3
    v = encode(rng.standard_normal((keys, 64)), fmt, "saturate").astype(float)
    return p, np.minimum(moved(p, (rng.random(p.shape) < share).astype(int), core), 1.0), v


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3"])
def test_ranges_of_softmax_weights_are_as_narrow_as_their_corners(fmt: str) -> None:
    core = TENSOR_CORE[fmt]
    low, high, v = softmax_ranges(core, 128, 1)
    least, greatest = multiply_between(low, high, v, core)
    attained = np.empty_like(least), np.empty_like(greatest)
    for j, column in enumerate(v.T):
        corners = np.where(column > 0, low, high), np.where(column > 0, high, low)
        for end, corner in zip(attained, corners, strict=True):
            end[:, j] = multiply(corner, v[:, j : j + 1], core)[:, 0]
    assert (least <= attained[0]).all()
    assert (attained[1] <= greatest).all()
    assert (least == attained[0]).mean() > 0.9
    assert (greatest - least).sum() < 1.01 * (attained[1] - attained[0]).sum()
