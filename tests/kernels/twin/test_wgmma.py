"""wgmma against device data, against its integer definition, and against its own laws."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.twin.convert import encode_f32
from fa3_kernels.twin.wgmma import TENSOR_FORMATS, Operand, operand, operand_b, wgmma
from fa3_kernels.twin.wgmma_exact import wgmma_exact
from tests.kernels import device_inputs as device

FORMATS = tuple(TENSOR_FORMATS)
CASES = [(f, family, long) for f in FORMATS for family in device.FAMILIES for long in (False, True)]


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: object) -> None:
    got, want = (np.ascontiguousarray(x).view(np.uint32) for x in (got, want))
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    wrong = np.argwhere(got != want)
    if len(wrong):
        i = tuple(wrong[0])
        pytest.fail(
            f"{what}: {len(wrong)} of {got.size} differ, first at {i}: {got[i]:#010x}, expected {want[i]:#010x}"
        )


def fast(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, fmt: str) -> np.ndarray:
    accumulator = None if c is None else np.ascontiguousarray(c).view(np.float32)
    return wgmma(operand(a, fmt), operand_b(b, fmt), accumulator)


@functools.cache
def golden_case(fmt: str, family: str, long: bool) -> tuple[device.Triple, str]:
    """Return the inputs of the corner (16, 64) of a device tile, and the name of its outputs."""
    k = 512 if long else TENSOR_FORMATS[fmt].k_step
    a, b, c = device.golden_tiles(fmt, family, k)
    name = device.DEVICE_NAMES[fmt]
    assert device.digest((a, b, c)) == device.stored_digest(f"{name}_{family}_{k}"), "inputs are not the device's"
    return (a[0, :16], b[0, :64], c[0, :16, :64]), f"{name}_S_{family}_{k}"


@pytest.mark.parametrize(("fmt", "family", "long"), CASES)
def test_wgmma_equals_the_device(fmt: str, family: str, long: bool) -> None:
    (a, b, c), outputs = golden_case(fmt, family, long)
    by_definition = wgmma_exact(a, b, c, fmt)
    assert device.is_of_the_device(outputs, by_definition), "the integer model is not the device's"
    assert_same_bits(fast(a, b, c, fmt), by_definition, (fmt, family))


def as_fp16_steps(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, fmt: str) -> np.ndarray:
    """FP8 on sm_90 without wgmma: per 32 k, an fp16 step over bytes {0, 1} of every four and one over {2, 3}."""
    half_a, half_b = (x.view(TENSOR_FORMATS[fmt].dtype).astype(np.float16) for x in (a, b))
    k = np.arange(a.shape[1])
    order = np.lexsort((k, k % 4 // 2, k // 32))
    return fast(half_a[:, order], half_b[:, order], c, "fp16")


def mma_sync_fp8(a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt: str) -> np.ndarray:
    """mma.sync m16n8k32: C is not in the chain but added in fp32 afterwards."""
    with np.errstate(all="ignore"):
        out = as_fp16_steps(a, b, None, fmt) + c.view(np.float32)
    out[np.isnan(out)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return out


MMA_SYNC = [(f, family) for f in ("e4m3", "e5m2") for family in device.FAMILIES if family != "overflow"]


@pytest.mark.parametrize(("fmt", "family"), MMA_SYNC)
def test_fp8_mma_sync_is_two_fp16_steps_and_an_addition(fmt: str, family: str) -> None:
    (a, b, c), _ = golden_case(fmt, family, False)
    assert device.is_of_the_device(f"{fmt}_mmasync_{family}_32", mma_sync_fp8(a, b, c, fmt))


def promoted_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt: str, interval: int) -> np.ndarray:
    """tl.dot with max_num_imprecise_acc: chains of ``interval`` k, each added in fp32; 0 avoids wgmma."""
    if interval == 0:
        return as_fp16_steps(a, b, c, fmt)
    left, right = operand(a, fmt), operand_b(b, fmt)
    acc = c.view(np.float32)
    for k in range(0, a.shape[1], interval):
        acc = acc + wgmma(left.columns(k, k + interval), right.k_slice(k, k + interval))
    return acc


@pytest.mark.parametrize("interval", [0, 32, 64, 128])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_promoted_fp8_dot_equals_the_device(fmt: str, interval: int) -> None:
    a, b, c = device.tiles(fmt, "outlier", 8, 64, 128, 512, 5555)
    got = np.stack([promoted_dot(a[tile], b[tile], c[tile], fmt, interval) for tile in range(2)])
    assert device.is_of_the_device(f"dot_{fmt}_{interval}", got)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[device.Triple, str]:
    """A recipe: format, family, seed and a few planted bit patterns, never element by element."""
    fmt = draw(st.sampled_from(FORMATS), label="format")
    family = draw(st.sampled_from([*device.FAMILIES, "tiny"]), label="family")
    step = TENSOR_FORMATS[fmt].k_step
    k = step * draw(st.integers(1, 4), label="steps")
    seed = draw(st.integers(0, 1 << 30), label="seed")
    m, n = draw(st.integers(1, 40), label="m"), draw(st.sampled_from([1, 3, 8, 64, 130]), label="n")
    if family == "tiny":
        return (tiny_tiles(fmt, m, n, k, seed)), fmt
    a, b, c = device.tiles(fmt, family, 2, m, n, k, seed)
    for x in (a, b, c):
        for value in draw(st.lists(st.sampled_from([0, 1, -1, 0x80000000, 0x80000001, 0x7F800000]), max_size=2)):
            x[seed % 2, seed % x.shape[1], -1] = value & ((1 << 8 * x.itemsize) - 1)
    return (a[seed % 2], b[seed % 2], c[seed % 2]), fmt


def tiny_tiles(fmt: str, m: int, n: int, k: int, seed: int) -> device.Triple:
    """Products around 2^-118..2^-169 (bf16), C zero of either sign, subnormal or barely normal, most products zero."""
    rng = device.generator(seed)
    bf16 = fmt == "bf16"
    scale_a, scale_b = (2.0**-60, 2.0 ** -(58 + seed % 50)) if bf16 else (2.0**-6, 2.0**-7)
    a, b = device.normal(rng, (m, k)) * scale_a, device.normal(rng, (n, k)) * scale_b
    a[rng.integers(0, 4, size=a.shape) > seed % 4] = 0
    c = rng.integers(0, 1 << 32, size=(m, n), dtype=np.uint64)
    c &= np.array([0, 0x80000000, 0x807FFFFF, 0x80FFFFFF], np.uint64)[rng.integers(0, 2 + seed % 3, size=c.shape)]
    f = TENSOR_FORMATS[fmt]
    return device.quantize(a, f), device.quantize(b, f), c.astype(np.uint32)


@given(matrices())
def test_the_fast_path_equals_the_integer_definition(case: tuple[device.Triple, str]) -> None:
    (a, b, c), fmt = case
    assert_same_bits(fast(a, b, c, fmt), wgmma_exact(a, b, c, fmt), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_operands_hold_the_value_of_every_code(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    codes = device.generator(0).permutation(f.magnitude_mask * 2 + 2).astype(f.bits_dtype).reshape(-1, 8)
    with np.errstate(invalid="ignore"):
        want = codes.view(f.dtype).astype(np.float32)
    prepared = operand(codes, fmt)
    finite = np.isfinite(want)
    assert_same_bits(prepared.value[finite], want[finite], fmt)
    nonzero = finite & (want != 0)
    exponent = np.maximum(np.frexp(want[nonzero])[1] - 1, 1 - f.bias)
    assert_same_bits(prepared.power[nonzero], np.ldexp(np.float32(1), exponent), fmt)
    assert not prepared.power[~nonzero].any()
    assert not prepared.value[~finite].any()
    assert (prepared.special == ~finite.all(1)).all()
    assert (prepared.least == np.where(nonzero, prepared.power, np.inf).min(1)).all()


def normal_case(fmt: str, m: int = 64, n: int = 48, k: int = 128) -> device.Triple:
    a, b, c = device.tiles(fmt, "outlier", 1, m, n, k, 12345)
    return a[0], b[0], c[0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_permutation_inside_a_step_changes_nothing_but_across_steps_it_does(fmt: str) -> None:
    a, b, c = normal_case(fmt)
    step = TENSOR_FORMATS[fmt].k_step
    inside = np.concatenate([k + device.generator(k).permutation(step) for k in range(0, 128, step)])
    across = np.roll(np.arange(128), step)
    want = fast(a, b, c, fmt)
    assert_same_bits(fast(a[:, inside], b[:, inside], c, fmt), want, fmt)
    assert (fast(a[:, across], b[:, across], c, fmt) != want).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_accumulator_equals_zeros_of_either_sign(fmt: str) -> None:
    a, b, c = normal_case(fmt)
    want = fast(a, b, None, fmt)
    assert_same_bits(fast(a, b, np.zeros_like(c), fmt), want, fmt)
    assert_same_bits(fast(a, b, np.full_like(c, 0x80000000), fmt), want, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_operands_pass_the_accumulator_truncated_to_its_width(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    _, b, c = normal_case(fmt)
    a = np.zeros((len(c), b.shape[1]), f.bits_dtype)
    assert_same_bits(fast(a, b, c, fmt), c & np.uint32(0xFFFFFFFF << (23 - f.out_bits) & 0xFFFFFFFF), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tile_of_prepared_operands_equals_a_prepared_tile(fmt: str) -> None:
    a, b, c = normal_case(fmt)
    b[5, 100] = TENSOR_FORMATS[fmt].magnitude_mask  # a NaN outside the k range
    a[20, 101] = TENSOR_FORMATS[fmt].magnitude_mask
    left, right = operand(a, fmt), operand_b(b, fmt)
    c_tile = np.ascontiguousarray(c[16:48, :40]).view(np.float32)
    for start, has_nan in ((32, False), (64, True)):
        ks = start, start + 64
        want = fast(a[16:48, slice(*ks)], b[:40, slice(*ks)], c[16:48, :40], fmt)
        for tile in (
            (left.rows(16, 48).columns(*ks), right.n_slice(0, 40).k_slice(*ks)),
            (left.columns(*ks).rows(16, 48), right.k_slice(*ks).n_slice(0, 40)),
        ):
            got = wgmma(*tile, c_tile)
            assert_same_bits(got, want, fmt)
            assert np.isnan(got).any() == has_nan


def test_nan_rows_and_columns_spread_and_nothing_else_does() -> None:
    a, b, c = normal_case("fp16")
    a[3, 7], b[11, 100] = 0x7FFF, 0xFE00
    clean = fast(*normal_case("fp16"), "fp16").view(np.uint32)
    got = fast(a, b, c, "fp16").view(np.uint32)
    hit = np.zeros(got.shape, bool)
    hit[3], hit[:, 11] = True, True
    assert (got[hit] == 0x7FFFFFFF).all()
    assert (got[~hit] == clean[~hit]).all()


# hand-derived: 16 ones and C; addends below 2^(e_max - 25) vanish, results are cut to 24 significant bits
@pytest.mark.parametrize(
    ("c", "want"),
    [
        (0.0, 16.0),
        (2.0**-20, 16 + 2.0**-19 * 0),  # 16 + 2^-20 needs 25 significant bits
        (2.0**-19, 16 + 2.0**-19),
        (-(2.0**-25), 16 - 2.0**-20),  # subtracted before the cut, so the truncation falls one step below 16
        (-(2.0**-26), 16.0),  # below the grid 2^-25 of e_max = 0
        (2.0**29, 2.0**29),  # grid 2^4: each product 1 vanishes on its own, 16 of them too
        (2.0**25, 2.0**25 + 16),
    ],
)
def test_alignment_and_truncation_of_fp16_sums(c: float, want: float) -> None:
    ones = np.ones((1, 16), np.float16)
    got = wgmma(operand(ones, "fp16"), operand_b(ones, "fp16"), np.full((1, 1), c, np.float32))
    assert got[0, 0] == np.float32(want)


def bf16_products(first: float, rest: float) -> tuple[np.ndarray, np.ndarray]:
    """One row and one column of bf16 whose first product is ``first`` * 2^-157 and the 15 others ``rest`` * 2^-157."""
    b = np.array([[first] + [rest] * 15]) * 2.0**-77
    return device.quantize(np.full((1, 16), 2.0**-80), TENSOR_FORMATS["bf16"]), device.quantize(
        b, TENSOR_FORMATS["bf16"]
    )


# Hand-derived from C = 0 counting as exponent -133 (measured on an H200), grid 2^-158: a sum of 255 * 2^-157 lacks
# 2^-157 of the smallest subnormal. 15 * 2^-158 is on the grid and fills it; 15 * 1.75 * 2^-159 is cut away.
# -132 would lose the first, -134 would keep half of the second.
@pytest.mark.parametrize("c", [0x00000000, 0x80000000])
@pytest.mark.parametrize(("rest", "want"), [(0.5, 1), (1.75 / 4, 0)])
def test_a_zero_accumulator_counts_as_exponent_minus_133(rest: float, want: int, c: int) -> None:
    a, b = bf16_products(255, rest)
    accumulator = np.full((1, 1), c, np.uint32)
    assert wgmma_exact(a, b, accumulator, "bf16")[0, 0] == want
    assert fast(a, b, accumulator, "bf16").view(np.uint32)[0, 0] == want


def test_products_whose_powers_underflow_still_count() -> None:
    a, b = bf16_products(3.875 * 32, 3.875 * 32)  # each 3.875 * 2^-152: below half a subnormal, together 7.75 of them
    assert fast(a, b, None, "bf16").view(np.uint32)[0, 0] == 16 * 3.875 * 2.0**-152 // 2.0**-149


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_operands_pass_a_subnormal_accumulator(fmt: str) -> None:
    f = TENSOR_FORMATS[fmt]
    zeros, c = np.zeros((1, f.k_step), f.bits_dtype), np.array([[0x807FFFFF]], np.uint32)
    kept = 0x807FFFFF & (0xFFFFFFFF << (23 - f.out_bits))
    assert fast(zeros, zeros, c, fmt).view(np.uint32)[0, 0] == kept


def test_fp8_accumulator_loses_ones_beyond_its_14_bits() -> None:
    ones = encode_f32(np.ones((1, 32 * 1024), np.float32), "e4m3")
    total = wgmma(operand(ones, "e4m3"), operand_b(ones, "e4m3"))[0, 0]
    assert total == 16384  # from 2^14 on the grid is 2 and each product 1 is cut away; the sum should be 32768


def test_a_hypothetical_accumulator_is_an_argument() -> None:
    a, b, c = normal_case("e4m3")
    wide = wgmma_exact(a, b, c, "e4m3", align_bits=25, out_bits=23)
    exact = (
        a.view(TENSOR_FORMATS["e4m3"].dtype).astype(np.float64)
        @ b.view(TENSOR_FORMATS["e4m3"].dtype).astype(np.float64).T
    )
    exact += c.view(np.float32)
    error_wide = np.abs(wide.view(np.float32) - exact).max()
    assert error_wide < np.abs(fast(a, b, c, "e4m3") - exact).max() / 100


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda a, b: wgmma(a.columns(0, 8), b.k_slice(0, 8)), "multiple of 16"),
        (lambda a, b: wgmma(a, b.k_slice(0, 16)), "must agree"),
        (lambda a, b: wgmma(a, operand_b(np.ones((3, 32), np.uint8), "e4m3")), "one format"),
        (lambda a, b: wgmma(a, b, np.zeros((1, 1), np.float32)), "c must be float32"),
        (lambda a, b: operand(np.ones((2, 16)), "fp16"), "operand must be 2-D float16"),
        (lambda a, b: operand(np.ones((2, 16)), "fp4"), "fmt must be one of"),
        (lambda a, b: wgmma_exact(a.bits, a.bits, np.zeros((2, 2), np.uint32), "fp16", align_bits=99), "1..40"),
    ],
)
def test_misuse_is_refused_with_the_rule(call, rule: str) -> None:
    ones = np.ones((2, 32), np.float16)
    with pytest.raises(ValueError, match=rule):
        call(operand(ones, "fp16"), operand_b(ones, "fp16"))


def test_operands_do_not_follow_later_edits_of_their_source() -> None:
    x = np.ones((2, 16), np.float16)
    prepared: Operand = operand(x, "fp16")
    x[:] = 7
    assert (prepared.bits == np.float16(1).view(np.uint16)).all()
