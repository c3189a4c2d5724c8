"""Bounds of what a quantiser stores: codes by their rounding intervals, all else against arithmetic in binary32."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reference.bounds.quantizer import distance_to_codes, stored_values
from fa3_reference.formats import FORMATS, decode, encode, encode_bits
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, quantize_qkv

E4M3 = FORMATS["e4m3"]
CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
PROBLEM = AttentionProblem(2, 4, 2, 33, 70, 64, 32, dtype="e4m3")


def draw(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (PROBLEM.q_shape, PROBLEM.k_shape, PROBLEM.v_shape)
    q, k, v = (rng.standard_normal(shape).astype(np.float16).astype(np.float64) for shape in shapes)
    return q, k + 3, v


def test_every_code_is_at_no_distance_from_itself_and_from_its_ties():
    values = decode(CODES, E4M3).astype(np.float64)
    assert not distance_to_codes(values, values).any()
    ordered = np.unique(values)
    middles = (ordered[1:] + ordered[:-1]) / 2
    assert not distance_to_codes(ordered[1:], middles).any()
    assert not distance_to_codes(ordered[:-1], middles).any()


def test_a_neighbouring_code_is_as_far_as_the_tie():
    ordered = np.unique(decode(CODES, E4M3).astype(np.float64))
    half = np.diff(ordered) / 2
    np.testing.assert_array_equal(distance_to_codes(ordered[1:], ordered[:-1]), half)
    np.testing.assert_array_equal(distance_to_codes(ordered[:-1], ordered[1:]), half)


def test_only_correct_roundings_are_at_no_distance():
    x = np.random.default_rng(0).uniform(-500, 500, 4000)
    rounded = encode(x, E4M3, "saturate").astype(np.float64)
    assert not distance_to_codes(rounded, x).any()
    codes = encode_bits(x, E4M3, "saturate")
    truncated = decode(codes - (np.abs(rounded) > np.abs(x)), E4M3)
    np.testing.assert_array_equal(distance_to_codes(truncated, x) > 0, truncated != rounded)
    assert (distance_to_codes(-rounded, x) > 0).all()
    assert np.isnan(distance_to_codes(np.array([np.nan]), np.array([1.0]))).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("k_mean", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_the_reference_lies_within_the_bounds(granularity, seed, k_mean, power_of_two):
    scheme = QuantScheme(granularity, 32, 64, 32, power_of_two, seed, k_mean)
    arrays = draw()
    stored = quantize_qkv(PROBLEM, *arrays, scheme).operands
    found = {f"{name}_descale": getattr(stored, f"{name}_descale").values for name in "qkv"}
    exact, bound = stored_values(PROBLEM, arrays, scheme, tuple(found.values()), 20)
    for name in "qkv":
        codes = getattr(stored, name).astype(np.float64)
        assert (distance_to_codes(codes, exact[name]) <= bound[name]).all()
        assert (bound[name] <= 2e-5 * 448).all()
    for name, descale in found.items():
        assert (np.abs(descale - exact[name]) <= bound[name]).all()
    assert (bound["k_mean"] > 0).all() == k_mean
    assert (bound["lse_correction"] > 0).all() == k_mean


def test_sums_in_binary32_in_any_order_lie_within_the_bounds():
    scheme, (q, k, v) = QuantScheme("head", k_mean=True, hadamard_seed=1), draw()
    ones = tuple(np.ones((2, heads, 1)) for heads in (4, 2, 2))
    exact, bound = stored_values(PROBLEM, (q, k, v), scheme, ones, PROBLEM.seqlen_k - 1)
    for order in (slice(None), slice(None, None, -1)):
        total = np.zeros((2, 2, 64), np.float32)
        for row in k.astype(np.float32)[:, order].transpose(1, 0, 2, 3):
            total = total + row
        mean = total / np.float32(PROBLEM.seqlen_k)
        assert (np.abs(mean - exact["k_mean"]) <= bound["k_mean"]).all()


def test_a_block_that_may_cancel_to_nothing_may_have_descale_1():
    k = np.full(PROBLEM.k_shape, 0.1)
    k[..., 0] = 1 / 3
    scheme = QuantScheme("head", k_mean=True)
    ones = tuple(np.ones((2, heads, 1)) for heads in (4, 2, 2))
    exact, bound = stored_values(PROBLEM, (draw()[0], k, draw()[2]), scheme, ones, 20)
    assert (np.abs(1.0 - exact["k_descale"]) <= bound["k_descale"]).all()
    assert (np.abs(1e-8 - exact["k_descale"]) <= bound["k_descale"]).all()
