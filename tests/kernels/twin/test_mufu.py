"""The multi-function unit: the compiled form, the scalar definition and the device agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from fa3_kernels.twin import mufu
from fa3_kernels.twin.mufu_tables import TABLES
from tests.kernels import device_inputs as device
from tests.kernels.twin import mufu_exact

Vector = Callable[[np.ndarray], np.ndarray]
# name, compiled, scalar definition, number of the instruction in mufu_samples.npz
FUNCTIONS: tuple[tuple[str, Vector, Callable[[int], int], int], ...] = (
    ("ex2", mufu.ex2, mufu_exact.ex2_exact, 0),
    ("rcp", mufu.rcp, mufu_exact.rcp_exact, 2),
    ("lg2", mufu.lg2, mufu_exact.lg2_exact, 4),
)
each_function = pytest.mark.parametrize(("name", "vector", "scalar", "op"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
# SHA-256, 16 digits, of what an H100 returned for all 2^23 numbers of each binade from 2^-15 to 2^4, int32
TANH = {
    112: "8f2270d0f0693595",
    113: "e6e05336e097c128",
    114: "0585707b801e3043",
    115: "8327b69c1d9f6dd9",
    116: "c69619dbd9960b77",
    117: "509cb984102e4f06",
    118: "72544dc6f334950e",
    119: "c4d5798237e10045",
    120: "8ba2d75063891918",
    121: "d13fb19862a1d8c1",
    122: "3dfb944668d90432",
    123: "8c8ba5242e0eeb52",
    124: "1031a8ba37a9208b",
    125: "2c577f5630b538a5",
    126: "f71a8ce9b5c6349f",
    127: "412dcb386a8e87e0",
    128: "129668b8dd7bb295",
    129: "3da84a36b155f272",
    130: "b7584839745397ca",
}


def samples() -> dict[str, np.ndarray]:
    with np.load(device.GOLDEN / "mufu_samples.npz") as stored:
        return dict(stored)


def assert_results(got: np.ndarray, want: np.ndarray, x: np.ndarray, what: object) -> None:
    got, x = got.view(np.uint32), x.view(np.uint32)
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        i = wrong[0]
        pytest.fail(f"{what}: {len(wrong)} of {got.size}; first f({x[i]:#010x}) = {got[i]:#010x}, want {want[i]:#010x}")


@each_function
def test_random_and_special_inputs_equal_the_device(name: str, vector: Vector, scalar, op: int) -> None:
    stored = samples()
    special = stored["sp_in"].view(np.float32)
    patterns, _ = device.mufu_inputs()
    of_patterns = vector(patterns)
    assert_results(vector(special), stored[f"sp_op{op}"], special, name)
    for x, want in ((special, stored[f"sp_op{op}"]), (patterns[:8192], of_patterns[:8192].view(np.uint32))):
        got = np.array([scalar(int(b)) for b in x.view(np.uint32)], np.uint32)
        assert_results(got, want, x, (name, "scalar definition"))
    assert device.is_of_the_device(f"rnd_op{op}", of_patterns)


def test_ex2_without_flush_equals_the_device() -> None:
    stored = samples()
    special = stored["sp_in"].view(np.float32)
    assert_results(mufu.ex2_gradual(special), stored["sp_op1"], special, "ex2 without .ftz")


def test_ex2_equals_the_device_over_softmax_exponents() -> None:
    _, ranged = device.mufu_inputs()
    assert device.is_of_the_device("rng_ex2", mufu.ex2(ranged))


def test_ex2_equals_the_device_on_all_of_1_to_2() -> None:
    x = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    assert device.is_of_the_device("ex2_1_2", mufu.ex2(x))


@pytest.mark.parametrize(("exponent", "digest"), TANH.items())
def test_tanh_equals_the_device_on_every_number_of_a_binade(exponent: int, digest: str) -> None:
    x = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(exponent << 23)).view(np.float32)
    y = mufu.tanh(x)
    assert hashlib.sha256(y.tobytes()).hexdigest()[:16] == digest
    assert (mufu.tanh(-x[::4099]) == -y[::4099]).all()


def test_tanh_equals_the_device_on_a_grid_of_all_numbers() -> None:
    with np.load(device.GOLDEN / "mufu_tanh.npz") as stored:
        x = stored["x"].view(np.float32)
    exact = np.array([mufu_exact.tanh_exact(int(b)) for b in x.view(np.uint32)], np.uint32)
    assert_results(mufu.tanh(x), exact, x, "tanh beside its definition")
    assert device.is_of_the_device("tanh", exact)


@given(bits=st.integers(0, (1 << 32) - 1))
@example(bits=0x3B7FFFFF)  # the last number whose tanh is itself
@example(bits=0x3F17040F)  # the largest relative error
@example(bits=0xC0FFFFFF)
@example(bits=0x41000000)
def test_the_compiled_tanh_equals_its_scalar_definition(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert_results(mufu.tanh(x), np.array([mufu_exact.tanh_exact(bits)], np.uint32), x, "tanh")


@each_function
@given(bits=st.integers(0, (1 << 32) - 1))
@example(bits=0x3F800000)
@example(bits=0x3F7FFFFF)
@example(bits=0x3F800001)
@example(bits=0x7E800000)  # reciprocal: smallest power of two whose result is subnormal is 2^127
@example(bits=0x7F000000)
@example(bits=0x3F000000)  # lg2: the one power of two whose table value is not lost in the sum
@example(bits=0xC2FC0000)  # ex2: -126, the last normal result
def test_the_compiled_form_equals_the_scalar_definition(name: str, vector: Vector, scalar, op: int, bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert_results(vector(x), np.array([scalar(bits)], np.uint32), x, name)


@each_function
def test_every_binade_equals_the_device(name: str, vector: Vector, scalar, op: int) -> None:
    x = device.mufu_binades()
    with np.load(device.GOLDEN / "mufu_binades.npz") as stored:
        want = stored[name]
    assert_results(vector(x.reshape(512, 9)).reshape(-1), want, x, name)
    assert_results(np.array([scalar(int(b)) for b in x.view(np.uint32)], np.uint32), want, x, (name, "definition"))


def test_squares_are_cut_below_the_exact_square() -> None:
    x = np.arange(1 << 17)
    squares = np.array([mufu_exact.square(int(v)) for v in x])
    assert (squares <= x * x >> 19).all()
    assert (squares < x * x >> 19).any()


# the unit's known accuracy (exhaustive on an H200): relative error of ex2 at most 2^-22.7
def test_accuracy_of_the_unit() -> None:
    x = np.linspace(-100, 100, 200_001).astype(np.float32)
    relative = mufu.ex2(x).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(relative).max() < 2.0**-22.7
    positive = np.geomspace(1e-30, 1e30, 100_001).astype(np.float32)
    wide = positive.astype(np.float64)
    assert np.abs(mufu.rcp(positive) * wide - 1).max() < 2.0**-23
    error = np.abs(mufu.lg2(positive) - np.log2(wide))
    assert (error <= 2.0**-22 * np.maximum(1, np.abs(np.log2(wide)))).all()


# the one's complement makes softmax weights low on average: 4.6e-8 on [-8, 0] on an H200
def test_ex2_of_negative_numbers_is_low_on_average() -> None:
    x = -8 * np.random.default_rng(1).random(1_000_000).astype(np.float32)
    mean = np.mean(mufu.ex2(x).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert -4.7e-8 < mean < -4.5e-8


def test_the_tables_are_the_fitted_ones() -> None:
    """A table off by one unit is invisible to most inputs, so its contents are pinned too."""
    text = repr([(n, t.rows, t.rounding, t.shift, t.c0_shift, t.c2_shift) for n, t in sorted(TABLES.items())])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "da31b2377e576a53"


def test_scalars_and_empty_arrays_keep_their_shape() -> None:
    assert mufu.ex2(np.float32(3)).shape == ()
    assert mufu.ex2(np.float32(3)) == 8
    assert mufu.ex2(np.zeros((0, 5), np.float32)).shape == (0, 5)
