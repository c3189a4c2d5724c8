"""Every term of the steps that the bounds share: products, rounding and softcaps, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fa3_reference.bounds.device import EX2_REL, RCP_REL, TANH_REL, TENSOR_CORE, U_FP32
from fa3_reference.bounds.steps import (
    LOG2_E,
    binary32_error,
    gamma,
    grid,
    grouped_score_error,
    rounding_error,
    score_error,
    softcap_error,
)
from fa3_reference.formats import FORMATS, Format, encode
from tests.reference.bounds.by_hand import chain_error, grouped_error, tanh_error

DEPTHS = {"fp16": 40, "bf16": 40, "e4m3": 72}  # two steps of the tensor core and part of a third
ROWS, KEYS = 2, 6


def rows_of(kind: str, fmt: Format, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Q and of K whose sums meet one corner of the tensor core, as numbers of a format."""
    depth = DEPTHS[fmt.name]
    q, k = rng.standard_normal((ROWS, depth)), rng.standard_normal((KEYS, depth))
    step = TENSOR_CORE[fmt.name].k_step
    if kind == "few bits":  # of which no step loses any
        q, k = (np.sign(x) * 2.0 ** rng.integers(-2, 3, x.shape) for x in (q, k))
    elif kind in ("C is large", "C is small"):
        sign = 1 if kind == "C is large" else -1
        size = 3 if fmt.name == "e4m3" else 7
        k[:, :step] *= 2.0 ** (sign * size)
        k[:, step:] *= 2.0 ** (-sign * size)
    elif kind == "C is far away":  # products that are less, all together, than what one of them may be cut by
        q[:, :step] *= 2.0 ** (4 if fmt.name == "e4m3" else 6)
        k[:, :step] *= 2.0 ** (5 if fmt.name == "e4m3" else 8)
        k[:, step:] *= 2.0 ** (-6 if fmt.name == "e4m3" else -13)
    elif kind == "C cancels":
        q[:, step : 2 * step] = q[:, :step]
        k[:, step : 2 * step] = -k[:, :step]
        k[:, step] *= 1 + 2.0**-3
        k[:, 2 * step :] *= 2.0**-4
    elif kind == "subnormal":
        q *= 1.5 * fmt.min_normal
        reach = {"fp16": 13, "bf16": 40, "e4m3": 7}[fmt.name]  # an exponent that is none of its own counts
        k *= 2.0 ** rng.integers(-reach, reach, k.shape)
    elif kind == "tiny":  # products below binary32
        q *= 2.0**-65
        k *= 2.0 ** -rng.integers(58, 104, (KEYS, 1))
    elif kind == "zeros":
        q[:, step : 2 * step] = 0
        k[:, ::2] = 0
        k[0] = 0
        q[0, :2] = 0
        k[1] *= 2.0**-4
    return tuple(encode(x, fmt, "saturate").astype(np.float64) for x in (q, k))  # type: ignore[return-value]


KINDS = ("normal", "few bits", "C is large", "C is small", "C is far away", "C cancels", "subnormal", "zeros")


@pytest.mark.parametrize("dtype", DEPTHS)
def test_what_a_chain_of_steps_loses_is_what_its_formulas_make_by_hand(dtype: str) -> None:
    core = TENSOR_CORE[dtype]
    rng = np.random.default_rng(1)
    for kind in (*KINDS, *(["tiny"] if dtype == "bf16" else [])):
        q, k = rows_of(kind, FORMATS[dtype], rng)
        s, ds = score_error(q, k, core)
        np.testing.assert_allclose(s, q @ k.T, rtol=0, atol=1e-15 * np.max(np.abs(q) @ np.abs(k).T))
        expected = [[chain_error(a.tolist(), b.tolist(), core) for b in k] for a in q]
        np.testing.assert_allclose(ds, expected, rtol=1e-12, atol=0, err_msg=kind)


SMALL = 2.0**-13  # the product of two of them is half of what a step with C or a product of 1 cuts to
BELOW = [(1, 1), (2 * SMALL, -2 * SMALL), (SMALL, -SMALL)]  # 1 - 0.625 2^-23, off by 0.75 2^-23
ABOVE = [(1, 1), (2 * SMALL, 2 * SMALL), (2 * SMALL, SMALL), (SMALL, SMALL)]  # 1 + 0.875 2^-23, off by 1.25 2^-23
STEPS: dict[str, tuple[list[tuple[float, float]], ...]] = {  # products of each step of 16 that are not 0
    # C is below 1 and may be 1: a product of 2^-26 is cut to multiples of 2^-25
    "C may be larger": (BELOW, [(0.125, 1), (SMALL, SMALL)]),
    # C may be below 1, so that the sum that cancels it may be a multiple of 2^-26 alone, which 1 then cuts
    "C may be smaller": (ABOVE, [(0.5, -1), (0.5, -1), (SMALL, SMALL)], [(1, 1)]),
    # C may be below 1 and a multiple of 2^-24 alone, which 4 then cuts
    "the sum may be smaller": (ABOVE, [(2, 2)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_known_of_c_is_less_than_its_exact_value(name: str) -> None:
    core = TENSOR_CORE["fp16"]
    padded = [pair for step in STEPS[name] for pair in (step + [(0.0, 0.0)] * 16)[:16]]
    a, b = ([pair[i] for pair in padded] for i in range(2))
    found = score_error(np.array([a], np.float64), np.array([b], np.float64), core)[1].item()
    np.testing.assert_allclose(found, chain_error(a, b, core), rtol=1e-13)


@pytest.mark.parametrize("dtype", DEPTHS)
def test_what_groups_of_any_channels_lose_is_what_their_formulas_make_by_hand(dtype: str) -> None:
    core = TENSOR_CORE[dtype]
    rng = np.random.default_rng(2)
    for kind in (*KINDS, *(["tiny"] if dtype == "bf16" else [])):
        q, k = rows_of(kind, FORMATS[dtype], rng)
        for is_stored in (True, False):
            expected = [[grouped_error(a.tolist(), b.tolist(), core, is_stored) for b in k] for a in q]
            found = grouped_score_error(q, k, core, is_stored)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0, err_msg=kind)


@pytest.mark.parametrize("tanh", [0.0, TANH_REL])
def test_a_softcap_errs_by_what_its_formulas_make_by_hand(tanh: float) -> None:
    """Scores of all sizes, known well and not at all: no tanh is beyond 1 and no reciprocal beyond 2."""
    cap = 1.5
    for x in (-30.0, -1.0, -1e-3, 0.0, 0.7, 4.0):
        for dx in (0.0, 1e-7, 0.5, 3.0, 50.0):
            y, dy = softcap_error(np.array([x]), np.array([dx]), cap, tanh)
            assert y.item() == cap * LOG2_E * np.tanh(x / (cap * LOG2_E))
            expected = cap * LOG2_E * tanh_error(x, dx, cap * LOG2_E, tanh)
            np.testing.assert_allclose(dy.item(), expected, rtol=1e-13, atol=1e-15 if x or dx else 0)
    unknown = softcap_error(np.array([-1.0]), np.array([1e3]), cap, tanh)[1].item() / (cap * LOG2_E)
    carried = math.tanh(1 / (cap * LOG2_E)) + 1
    own = tanh or EX2_REL / 2 + 2 * (U_FP32 + RCP_REL) + U_FP32 * (2 * carried - 1)
    np.testing.assert_allclose(unknown, carried + own * (1 + 2.0**-20) + 2.0**-50, rtol=1e-12)


def test_roundings_of_which_there_are_too_many_leave_nothing_known() -> None:
    assert gamma(1) == 2.0**-24 / (1 - 2.0**-24)
    assert gamma(2**24 - 1) == 2.0**24 - 1
    assert gamma(2**24) == gamma(2**25) == math.inf


ULP = 2.0**-23


@pytest.mark.parametrize(
    ("low", "high", "error"),
    [
        (1.0, 1.0, 0.0),
        (1 + ULP / 8, 1 + ULP / 4, ULP / 4),  # both round to 1
        (1 + ULP / 4, 1 + ULP, ULP / 2),
        (-4 + ULP / 4, 1.0, ULP),  # of the larger end, which is the lower one
        (-2.0, 4 - ULP, ULP),
        (2.0**-149, 2.0**-148, 2.0**-150),  # half of the least subnormal number
        (2.0**-151, 2.0**-151, 2.0**-151),
        (0.0, 0.0, 0.0),
    ],
)
def test_what_rounding_to_binary32_errs_is_known_where_both_ends_round_alike(
    low: float, high: float, error: float
) -> None:
    assert binary32_error(np.array([low]), np.array([high])).item() == error
    assert binary32_error(np.array([-high]), np.array([-low])).item() == error


@pytest.mark.parametrize(
    ("low", "high", "error"),
    [
        (1.0, 1.0, 0.0),
        (1.01, 1.02, 0.02),  # both round to 1
        (1.02, 1.125, 0.0625),  # half of 2^-3
        (1.0, 2.0, 0.125),
        (1.95, 1.97, 0.05),  # both round to 2
        (0.0, 0.0, 0.0),
        (0.0, 2.0**-12, 2.0**-12),  # all of it is flushed
        (0.0, 2.0**-9, 2.0**-10),  # half of the least subnormal number
        (2.0**-9, 2.0**-7, 2.0**-10),
        (420.0, 448.0, 16.0),
        (440.0, 449.0, np.inf),
        (1e3, 1e4, np.inf),
        (1.0, np.inf, np.inf),
    ],
)
def test_what_rounding_to_e4m3_errs_is_known_where_both_ends_round_alike(low: float, high: float, error: float) -> None:
    found = rounding_error(np.array([low]), np.array([high]), FORMATS["e4m3"]).item()
    np.testing.assert_allclose(found, error, rtol=1e-6 if low in (1.01, 1.95) else 0)


@pytest.mark.parametrize(
    ("low", "high", "power"),
    [
        (1.01, 1.02, 1.0),  # one number, 1
        (2.99, 3.01, 1.0),
        (1.0, 1.9, 2.0**-3),
        (3.0, 8.0, 2.0**-2),  # multiples of the least one's last bit
        (20.0, 400.0, 2.0),
        (2.0**-8, 0.9, 2.0**-9),  # subnormal numbers
        (2.0**-6, 2.0**-5, 2.0**-9),
        (0.0, 1.0, 2.0**-9),  # a format's least number
        (2.0**-12, 1.0, 2.0**-9),
        (0.0, 2.0**-12, np.inf),  # zero
    ],
)
def test_numbers_of_e4m3_between_two_ends_are_multiples_of_a_power_of_two(
    low: float, high: float, power: float
) -> None:
    assert grid(np.array([low]), np.array([high]), FORMATS["e4m3"]).item() == power


def test_a_sum_is_cut_to_the_bits_of_what_it_may_be_with_all_that_its_products_lost() -> None:
    """The sum is 0.113 below 512; six products of 2^-9 lose up to 2^-5 each, which takes it past 512.

    Half of that would not: above 512 a sum of e4m3 products is cut to 2^-4, which is not where the products are cut.
    """
    row = [448.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, *[2.0**-9] * 6]
    q, k = np.ones((1, 16)), np.array([row])
    s, ds = score_error(q, k, TENSOR_CORE["e4m3"])
    assert s.item() == 511.875 + 6 * 2.0**-9
    np.testing.assert_allclose(ds, (6 * 2.0**-5 + 2.0**-4) * (1 + 2.0**-30), rtol=1e-13)
