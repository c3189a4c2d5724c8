"""Codes of a kernel that quantises inside: errors worked out by hand, and groups with NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.bounds import KernelModel, Quantises, forward_bound
from fa3_reference.bounds.enclosure import can_enclose
from fa3_reference.problem import AttentionProblem, Operands

PLAIN = KernelModel.any_order("fp16", "fp32", weights="running")
NEAR = pytest.approx


def bound_of(by: Quantises, q, k, v, **sizes):
    """The bound of one head with keys (keys, channels) and as many value channels."""
    arrays = [np.array(x, np.float16)[None, :, None] for x in (q, k, v)]
    rows, keys, dim = len(q), len(k), np.shape(q)[1]
    problem = AttentionProblem(1, 1, 1, rows, keys, dim, np.shape(v)[1], softmax_scale=1.0, **sizes)
    return forward_bound(problem, Operands(*arrays), replace(PLAIN, quantises=by))


@pytest.mark.parametrize(
    ("group", "errors"),
    [
        (("int8", "channel"), (3 / 254, 6 / 254)),  # half a code of the largest number, which is exact itself
        (("int8", 4), (8 / 254, 6 / 254)),
        (("int8", "tensor"), (8 / 254, 6 / 254)),
        (("int8", 1), (2 / 254, 0)),
        (("int4", "head"), (8 / 14, 6 / 14)),
        (("e4m3", "head"), (1.9 / 16, 0.9 / 16)),  # half an ulp of the number itself
    ],
)
def test_a_mean_of_values_is_off_by_the_mean_of_their_half_codes(group, errors):
    """Four keys weigh alike: 1, 0.3, 0.3, 0.3 in one channel, and 2, 0.3, 0.3, 0.3 in the other."""
    out = bound_of(Quantises(v=group), [[0.0]], [[0.0]] * 4, [[1, 2], [0.3, 0.3], [0.3, 0.3], [0.3, 0.3]]).out
    assert out.ravel() == NEAR(np.array(errors) / 4, rel=5e-3, abs=3e-4)


def test_scores_are_off_by_half_a_code_of_q_times_k():
    """q has codes 127 and 10.5 of 1 / 127, and k is (0, 3), which no code is taken of: 3 / 254 of lse of one key."""
    lse = bound_of(Quantises(q=("int8", 128)), [[1, 10.5 / 127]], [[0, 3]], [[1, 1]]).lse.item()
    assert lse == NEAR(3 / 254, rel=2e-3)


def test_numbers_of_the_largest_magnitude_are_exact():
    by = Quantises(q=("int8", "head"), k=("int8", "head"), v=("int8", "head"))
    ones = [[1, -1, 1, 1]] * 4
    assert bound_of(by, ones, ones, ones).lse.max() < 5e-4
    assert bound_of(by, ones, np.array(ones) * 0.9, ones).lse.max() < 5e-4
    assert bound_of(by, ones, np.array(ones) * [1, 0.9, 0.9, 0.9], ones).lse.max() > 0.9 * 3 / 254


def test_a_mean_of_k_that_is_taken_out_makes_the_codes_finer():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((8, 16)) for _ in range(3))
    far = k + 100
    as_it_is, smooth = (
        bound_of(Quantises(q=("int8", 8), k=("int8", 8), smooth_k=is_smooth), q / 8, far, v).out.max()
        for is_smooth in (False, True)
    )
    assert smooth < as_it_is / 5


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_is_promised_of_rows_that_see_a_group_with_nan_or_infinities(value):
    """The second of two blocks of two keys holds one; causal rows 0 and 1 see the first alone."""
    ones = np.ones((4, 2))
    special = ones.copy()
    special[3, 0] = value
    by = Quantises(k=("int8", 2), v=("int8", 2))
    of_key = bound_of(by, ones, special, ones, causal=True)
    assert np.isfinite(of_key.out[0, :2]).all()
    assert np.isinf(of_key.out[0, 2:]).all()
    assert np.isinf(of_key.lse[0, 0, 2:]).all()
    of_value = bound_of(by, ones, ones, special, causal=True)
    assert np.isinf(of_value.out[0, 2:]).all()
    assert np.isfinite(of_value.lse).all()
    of_query = bound_of(Quantises(q=("int8", 2)), special, ones, ones)
    assert np.isinf(of_query.out[0, 2:]).all()
    assert np.isfinite(of_query.out[0, :2]).all()


def test_a_group_of_zeros_has_no_error():
    zeros = np.zeros((3, 4))
    by = Quantises(q=("int8", 2), k=("e4m3", "channel"), v=("e4m3", "head"), p=("int8", 127))
    assert bound_of(by, zeros, zeros, zeros).out.max() < 1e-6


def test_an_integer_p_is_off_by_half_a_step_and_never_by_more_than_itself():
    """Two keys, of weight 1 and e^-6, which int8 makes 0: O moves by what the second key has."""
    by = Quantises(p=("int8", 127))
    out = bound_of(by, [[1.0]], [[0.0], [-6.0]], [[0.0], [1.0]]).out.item()
    assert np.exp(-6) / (1 + np.exp(-6)) <= out < 1.02 * np.exp(-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": ("int9", 128)}, "q must be a pair of int8, int4, e4m3"),
        ({"k": ("int8", 0)}, "k must be a pair"),
        ({"v": "e4m3"}, "v must be a pair"),
        ({"p": ("e4m3", "head")}, "p must be a pair of int8, int4, e4m3 and of a positive integer, got"),
        ({"smooth_k": True}, "smooth_k is of a kernel that quantises k"),
    ],
)
def test_what_is_no_format_or_group_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Quantises(**given)


def test_what_no_kernel_quantises_is_refused():
    by = Quantises(k=("int8", 64), smooth_k=True)
    with pytest.raises(ValueError, match="operands of e4m3 are codes"):
        KernelModel("e4m3", "bf16", quantises=by)
    with pytest.raises(ValueError, match="neither softcap nor sinks"):
        bound_of(by, [[1.0]], [[1.0]], [[1.0]], softcap=2.0)
    assert not can_enclose(KernelModel("fp16", "fp16", tile_m=64, tile_n=64, quantises=by))
