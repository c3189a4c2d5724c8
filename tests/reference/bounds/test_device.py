"""The constants of the machine hold for every one of the 2^32 inputs of its instructions.

The README's command looks at one chunk of inputs in 97, at those of the worst input and at those where a rule changes;
nightly looks at all.

The bit-exact model, which agreed with an H200 on all inputs, computes; float64 judges. Its exp2 and log2 err by less
than an ulp, of which ``SLACK`` is more than enough; its products of two binary32 numbers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from fa3_kernels.twin import libdevice, mufu
from fa3_kernels.twin.convert import encode_f32
from fa3_kernels.twin.mufu_loops import rcp_bits
from fa3_reference.bounds.device import EX2_REL, FP32_MIN_NORMAL, LG2_ABS, LG2_REL, RCP_REL, TANH_REL
from fa3_reference.formats import FORMATS, Format, decode

SLACK = 2.0**-45
CHUNK = 1 << 20  # inputs at a time, which share their exponent
POSITIVE, NEGATIVE = range(0, 0x7F800000, CHUNK), range(0x80000000, 0xFF800000, CHUNK)
SIGNIFICANDS_LOG2 = np.log2(1 + np.arange(1 << 23) * 2.0**-23)

loop = numba.njit(nogil=True, error_model="numpy")


def floats(first: int) -> np.ndarray:
    """A chunk of binary32 numbers and the first of the next chunk (or Inf), away from zero."""
    return np.arange(first, first + CHUNK + 1, dtype=np.uint32).view(np.float32)


@pytest.fixture(params=[97, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
def step(request) -> int:
    """Return of how many chunks one is looked at."""
    return request.param


def some(chunks: range, step: int, *inputs: float) -> list[int]:
    """Return one chunk in ``step``, the last one, and those of the given inputs."""
    asked = {int(np.float32(x).view(np.uint32)) // CHUNK * CHUNK for x in inputs}
    return sorted({*chunks[::step], chunks[-1], *asked.intersection(chunks)})


def worst_of(chunks: Iterable[int], look: Callable[[int], tuple[float, float, int]]) -> tuple[float, float]:
    """The largest error and its input, by two threads; ``look`` also counts what breaks a law, where none may."""
    chunks = list(chunks)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(look, chunks))
    broken = [hex(first) for first, (_, _, wrong) in zip(chunks, found, strict=True) if wrong]
    assert not broken, f"{len(broken)} chunks of inputs break a law, first {broken[:3]}"
    return max((error, at) for error, at, _ in found)


@loop
def _ex2_chunk(x, y):
    worst, at, wrong = 0.0, 0, 0
    for i in range(x.size - 1):
        if abs(x[i]) < 2.0**-23:
            wrong += y[i] != 1
            error = abs(np.float64(x[i]))  # more than |2^x - 1|
        elif x[i] >= 128 or x[i] < -126:
            wrong += y[i] != (np.inf if x[i] > 0 else 0)
            error = 0.0
        else:
            exact = np.exp2(np.float64(x[i]))
            error = abs(y[i] / exact - 1)
            wrong += y[i] < FP32_MIN_NORMAL
            wrong += x[i] == np.rint(x[i]) and y[i] != exact
        wrong += (x[i] < 0 and y[i] > 1) or (x[i] > 0 and y[i] < 1)
        wrong += (y[i + 1] < y[i]) if x[i] > 0 else (y[i + 1] > y[i])
        if error > worst:
            worst, at = error, i
    return worst, np.float64(x[at]), wrong


@loop
def _rcp_chunk(x, y):
    worst, at, wrong = 0.0, 0, 0
    for i in range(x.size - 1):
        error = 0.0
        if abs(x[i]) < FP32_MIN_NORMAL:
            wrong += abs(y[i]) != np.inf
        elif abs(x[i]) > 1 / FP32_MIN_NORMAL:
            wrong += y[i] != 0
        else:
            error = abs(np.float64(x[i]) * np.float64(y[i]) - 1)
            wrong += abs(y[i]) < FP32_MIN_NORMAL
        wrong += np.signbit(x[i]) != np.signbit(y[i])
        wrong += abs(y[i + 1]) > abs(y[i])
        if error > worst:
            worst, at = error, i
    return worst, np.float64(x[at]), wrong


@loop
def _rcp_moved(first, stop):
    """Inputs of these fractions whose reciprocal is not that of the same fraction in [1, 2), moved by the exponent.

    A fraction's binades follow one another, in int32 alone: so the compiler looks a fraction up once for all of them.
    """
    wrong = 0
    for i in range(first, stop):
        fraction = np.int32(i & 0x7FFFFF)
        at_one = rcp_bits(np.int32(127 << 23 | fraction))
        for sign_and_field in range(np.int32(512)):
            number = np.int32(np.int32(sign_and_field << np.int32(23)) | fraction)
            magnitude = number & np.int32(0x7FFFFFFF)
            expected = np.int32(at_one + np.int32((np.int32(127) - (sign_and_field & np.int32(255))) << np.int32(23)))
            expected = np.int32(0) if magnitude > 253 << 23 else expected  # beyond 2^126
            expected = np.int32(0x7F800000) if magnitude < 1 << 23 else expected
            expected = np.int32(expected | (number & np.int32(-1 << 31)))
            expected = np.int32(0x7FFFFFFF) if magnitude > 0x7F800000 else expected
            wrong += rcp_bits(number) != expected
    return wrong


@loop
def _lg2_chunk(x, y, fraction_log2, exponent):
    worst, at, wrong = 0.0, 0, 0
    for i in range(x.size - 1):
        exact = fraction_log2[i] + exponent
        error = abs(y[i] - exact) - LG2_REL * abs(exact)
        wrong += (x[i] < 1 and y[i] >= 0) or (x[i] >= 1 and y[i] < 0)
        wrong += y[i + 1] < y[i]
        if error > worst:
            worst, at = error, i
    return worst, np.float64(x[at]), wrong


@loop
def _tanh_chunk(x, y):
    worst, at, wrong = 0.0, 0, 0
    for i in range(x.size - 1):
        if x[i] < 2.0**-8:
            wrong += y[i] != x[i]
            error = np.float64(x[i]) ** 2 / 3  # more than 1 - tanh(x) / x
        elif x[i] >= 8:
            wrong += y[i] != 1
            error = 2.0**-22  # more than 1 - tanh(8)
        else:
            error = abs(y[i] / np.tanh(np.float64(x[i])) - 1)
            wrong += y[i] > 1
        if error > worst:
            worst, at = error, i
    return worst, np.float64(x[at]), wrong


@loop
def _conversion_chunk(first_of_code, magnitude, codes, sign):
    code, wrong = np.searchsorted(first_of_code, magnitude, side="right") - 1, 0
    for i in range(codes.size - 1):
        while code + 1 < first_of_code.size and first_of_code[code + 1] <= magnitude + i:
            code += 1
        wrong += codes[i] != code | sign
    return wrong


def test_ex2_of_every_number(step):
    assert (mufu.ex2(np.float32([0.0, -0.0, np.inf, -np.inf])) == [1, 1, np.inf, 0]).all()

    def look(first: int) -> tuple[float, float, int]:
        x = floats(first)
        y, largest = mufu.ex2(x), abs(x[-2])
        if largest < 2.0**-23:
            return float(largest), float(x[-2]), int((y[:-1] != 1).sum())
        return _ex2_chunk(x, y)

    positive = some(POSITIVE, step, 2.0**-23, 1.0, float.fromhex("0x1.1000bap+0"), 128.0)
    negative = some(NEGATIVE, step, -(2.0**-23), -1.0, -126.0, -127.0)
    worst, at = max(worst_of(positive, look), worst_of(negative, look))
    assert worst + SLACK <= EX2_REL
    assert (np.log2(worst), at.hex()) == (pytest.approx(-22.7091, abs=1e-4), "0x1.1000ba0000000p+0")


def test_rcp_of_every_number(step):
    """Of every binade what [1, 2) has, to the bit; there, and in some of the others, by its error."""

    def look(first: int) -> tuple[float, float, int]:
        x = floats(first)
        return _rcp_chunk(x, mufu.rcp(x))

    def moved(first: int) -> tuple[float, float, int]:
        return 0.0, 0.0, _rcp_moved(first, first + (1 << 18))

    worst_of(range(0, 1 << 23, 1 << 18)[::step], moved)
    worst, at = worst_of(range(0x3F800000, 0x40000000, CHUNK), look)
    assert worst <= RCP_REL
    assert (np.log2(worst), at.hex()) == (pytest.approx(-23.2784, abs=1e-4), "0x1.d9fbfa0000000p+0")
    edges = (FP32_MIN_NORMAL, 1 / FP32_MIN_NORMAL)
    positive, negative = some(POSITIVE[:: 23 if step == 1 else 97], 1, *edges), some(NEGATIVE[:: 23 * step], 1)
    assert max(worst_of(positive, look), worst_of(negative, look))[0] <= worst


def test_lg2_of_every_number(step):
    assert mufu.lg2(np.float32(1)) == 0
    assert (mufu.lg2(np.float32([0.0, 2.0**-149, FP32_MIN_NORMAL - 2.0**-149])) == -np.inf).all()

    def look(first: int) -> tuple[float, float, int]:
        x, fraction = floats(first), first & 0x7FFFFF
        return _lg2_chunk(x, mufu.lg2(x), SIGNIFICANDS_LOG2[fraction : fraction + CHUNK], float((first >> 23) - 127))

    worst, at = worst_of(some(range(0x800000, 0x7F800000, CHUNK), step, float.fromhex("0x1.06fffep+0"), 0.9999), look)
    assert worst + SLACK <= LG2_ABS
    assert (np.log2(worst), at.hex()) == (pytest.approx(-22.6405, abs=1e-4), "0x1.06fffe0000000p+0")


def test_tanh_of_every_number_of_its_table_and_of_some_beyond(step):
    """Of either sign, as it is odd."""
    table = some(range(112 << 23, 131 << 23, CHUNK), step, float.fromhex("0x1.2e081ep-1"), 2.0**-8, 7.99, 8.0)
    assert (mufu.tanh(np.float32([0.0, np.inf, -np.inf])) == [0, 1, -1]).all()

    def look(first: int) -> tuple[float, float, int]:
        x = floats(first)
        y = mufu.tanh(x)
        worst, at, wrong = _tanh_chunk(x, y)
        return worst, at, wrong + int((mufu.tanh(-x) != -y).sum())

    worst, at = worst_of(some(range(0, 112 << 23, 32 * CHUNK), step), look)
    assert worst < 2.0**-20
    worst, at = max(worst_of(table, look), worst_of(some(range(131 << 23, 0x7F800000, 32 * CHUNK), step), look))
    assert worst + SLACK <= TANH_REL
    assert (np.log2(worst), at.hex()) == (pytest.approx(-16.4557, abs=1e-4), "0x1.2e081e0000000p-1")


def test_rcp_and_lg2_of_powers_of_two_are_exact():
    exponent = np.arange(-126, 127)
    powers = np.ldexp(1.0, exponent).astype(np.float32)
    assert (mufu.rcp(powers) == np.ldexp(1.0, -exponent)).all()
    assert (mufu.lg2(powers[exponent >= 0]) == exponent[exponent >= 0]).all()


def first_magnitudes(fmt: Format) -> np.ndarray:
    """Bits of the least binary32 magnitude that rounds to each code: from halfway on, where ties go to even codes.

    The last code is Inf, or the largest number in a format that saturates.
    """
    codes = np.arange(fmt.max_code + 1)
    values = decode(codes, fmt)
    middle = (values + np.append(values[1:], 2 * values[-1] - values[-2])) / 2
    assert (middle.astype(np.float32) == middle).all()
    bits = middle.astype(np.float32).view(np.uint32).astype(np.int64) + (codes % 2 == 0)
    return np.append(0, bits if fmt.has_inf else bits[:-1])


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3"])
def test_conversions_of_every_number_round_to_nearest_even(name, step):
    fmt = FORMATS[name]
    first_of_code = first_magnitudes(fmt)
    assert (encode_f32(floats(0x7F800001), name).view(fmt.bits_dtype) == fmt.sign_mask - 1).all()  # NaN
    beyond = encode_f32(np.float32([np.inf, -np.inf]), name).view(fmt.bits_dtype)
    assert (beyond == np.array([0, fmt.sign_mask]) + len(first_of_code) - 1).all()

    def look(first: int) -> tuple[float, float, int]:
        codes = encode_f32(floats(first), name).view(fmt.bits_dtype)
        return 0.0, 0.0, _conversion_chunk(first_of_code, first & 0x7FFFFFFF, codes, fmt.sign_mask * (first >> 31))

    largest = fmt.max_finite
    worst_of(some(POSITIVE, step, 1.0, largest), look)
    worst_of(some(NEGATIVE, step, -1.0, -largest), look)


def test_expf_of_a_combine_errs_by_no_more_than_is_charged():
    """Both exponentials beyond ex2's error, against the reciprocal that weights by lse do not take."""
    x = np.random.default_rng(0).uniform(-87, -60, 3_000_000).astype(np.float32)  # where it errs the most
    off = np.abs(libdevice.exp(x).astype(np.float64) / np.exp(x.astype(np.float64)) - 1).max()
    assert EX2_REL < off <= EX2_REL + RCP_REL / 2
