"""Every term of the enclosure's operations and corners: each operation beside what it promises, and rows, keys and
factors at the end of what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.enclosure import (
    Interval,
    _accumulate,
    _exp2,
    _fma,
    _tanh,
    forward_enclosure,
)
from fa3_reference.bounds.model import KernelModel
from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands
from tests.reference.bounds.by_hand_enclosure import fma
from tests.reference.bounds.executions import forward_execution, number_of
from tests.reference.bounds.test_terms_enclosure import KEYS, TILE, assert_is_by_hand, drawn, model_of


def is_all(x: Interval) -> np.ndarray:
    """Where nothing is known."""
    return np.isneginf(x.low) & np.isposinf(x.high)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (1 + 2.0**-12, 1 + 2.0**-12, 0.0),
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-70),
        (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-70)),
        (1 + 2.0**-12, -1 - 2.0**-12, 2.0**-70),
        (1 + 2.0**-12, -1 - 2.0**-12, -(2.0**-70)),
        (1 + 2.0**-12, 1 + 3 * 2.0**-12, 2.0**-70),
        (1 + 2.0**-12, 1 + 3 * 2.0**-12, -(2.0**-70)),
        (1 + 2.0**-23, 1 + 2.0**-23, -1.0),
        (2.0**-75, 2.0**-75, 0.0),
        (2.0**-75, 2.0**-75, -(2.0**-149)),
        (2.0**-40, 2.0**-40, 1 + 2.0**-23),
        (2.0**127, 2.0, -np.inf),
    ],
)
def test_an_fma_is_rounded_once(a: float, b: float, c: float) -> None:
    with np.errstate(invalid="ignore"):
        found = _fma(*(np.array([x], np.float64) for x in (a, b, c))).item()
    assert found == fma(a, b, c)


def test_an_fma_rounds_ties_to_even_and_what_is_beside_them_to_the_nearer_number() -> None:
    """Of 1 + 2^-11 + 2^-24, and what 2^-70, which float64 loses, makes of it."""
    one = np.array([1 + 2.0**-12])
    for c, expected in ((0.0, 1 + 2.0**-11), (2.0**-70, 1 + 2.0**-11 + 2.0**-23), (-(2.0**-70), 1 + 2.0**-11)):
        assert _fma(one, one, np.array([c])).item() == expected
        assert _fma(one, -one, np.array([-c])).item() == -expected
    upper = np.array([1 + 3 * 2.0**-12])  # 1 + 2^-10 + 3 2^-24, of which the upper number is even
    tie = 1 + 2.0**-10 + 3 * 2.0**-24
    for c, expected in ((0.0, tie + 2.0**-24), (2.0**-70, tie + 2.0**-24), (-(2.0**-70), tie - 2.0**-24)):
        assert _fma(one, upper, np.array([c])).item() == expected


@pytest.mark.parametrize("x", [-0.3, 0.7, -100.25, 2.0**-30, -125.5])
def test_ex2_lies_within_its_measured_error(x: float) -> None:
    given = float(np.float32(x))
    ends = _exp2(Interval(np.array([given]), np.array([given])))
    exact = 2.0**given
    measured = 2.0**-22.7091  # the largest of all numbers
    assert ends.low.item() <= float(np.float32(exact * (1 - measured)))
    assert ends.high.item() >= float(np.float32(exact * (1 + measured)))
    assert ends.high.item() - ends.low.item() <= exact * (2 * 2.0**-22.70 + 2.0**-23)


def test_ex2_is_exact_at_0_and_may_be_nothing_below_the_normal_numbers() -> None:
    zero = np.zeros(1)
    assert [end.item() for end in _exp2(Interval(zero, zero))] == [1.0, 1.0]
    ends = _exp2(Interval(np.array([-126.5]), np.array([-126.5])))
    assert ends.low.item() == 0.0
    assert ends.high.item() >= 2.0**-126.5
    assert _exp2(Interval(np.array([-np.inf]), np.array([-125.0]))).low.item() == 0.0


class Drawn:
    """A generator that always draws one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.value)


def test_what_the_program_leaves_free_is_drawn_between_the_ends() -> None:
    x = Interval(np.array([2.0, -4.0, 1.0, 5.0]), np.array([6.0, -2.0, np.inf, 5.0]))
    for share, expected in ((0.0, (2.0, -4.0, 1.0, 5.0)), (0.25, (3.0, -3.5, 1.0, 5.0)), (0.75, (5.0, -2.5, 1.0, 5.0))):
        with np.errstate(invalid="ignore"):
            drawn_ends = number_of(x, cast(np.random.Generator, Drawn(share)))
        for end in drawn_ends:
            np.testing.assert_array_equal(end, expected)
    near = Interval(np.array([1 + 2.0**-30]), np.array([1 + 2.0**-29]))  # no binary32 number is between
    for end in number_of(near, cast(np.random.Generator, Drawn(0.5))):
        assert end.item() == near.low.item()


def test_an_execution_is_one_result() -> None:
    problem, x = drawn("bf16")
    model = model_of("bf16", "as it is")
    found = forward_execution(problem, x, model, np.random.default_rng(0))
    np.testing.assert_array_equal(found.out.low, found.out.high)
    np.testing.assert_allclose(found.lse.low, found.lse.high, rtol=1e-15)
    enclosed = forward_enclosure(problem, x, model)
    assert np.all((enclosed.out.low <= found.out.low) & (found.out.low <= enclosed.out.high))


def test_a_tanh_of_a_build_that_flushes_may_be_nothing_where_its_argument_is_subnormal() -> None:
    one = np.ones((1, 1))
    for keeps, low in ((True, 0.9 * 2.0**-130), (False, 0.0)):
        model = model_of("bf16", "as it is", tanh_error=TANH_REL, keeps_subnormals=keeps)
        s = np.array([[2.0**-130 * 1.5 / np.log(2)]])  # over a softcap of 1.5 in log2 units
        found = _tanh(s, Interval(one, one), 1.5, model)
        assert found.high.item() >= 2.0**-130
        assert (found.low.item() == 0) == (low == 0)
        assert found.low.item() >= low
        negative = _tanh(-s, Interval(one, one), 1.5, model)
        assert (negative.high.item() == 0) == (low == 0)


def test_a_factor_that_is_below_the_normal_numbers_is_the_least_of_them() -> None:
    """A scale of 2^-130 and scores near 2^126 make exponents near 1."""
    problem, x = drawn("bf16", softmax_scale=2.0**-130)
    q, k = ((a.astype(np.float64) * 2.0**62).astype(a.dtype) for a in (x.q, x.k))
    assert_is_by_hand(problem, replace(x, q=q, k=k), model_of("bf16", "as it is"))


def test_nothing_is_known_of_keys_whose_factors_differ_within_a_block() -> None:
    problem, x = drawn("e4m3")
    model = model_of("e4m3", "as it is")
    for name in ("k_descale", "v_descale"):
        one_each, finer = np.ones((1, 1, 3)), np.ones((1, 1, 5))
        finer[..., 1] = 2
        for values, rows in ((one_each, TILE), (finer, TILE // 2)):
            given = replace(x, **{name: Descale(values.astype(np.float32), rows)})
            found = forward_enclosure(problem, given, model)
            assert is_all(found.out).all() == is_all(found.lse).all() == (rows < TILE)


def test_scores_below_0_meet_the_other_end_of_the_factor() -> None:
    for seed in range(4):
        problem, x = drawn("bf16", seed)
        q, k = (np.abs(a.astype(np.float64)).astype(a.dtype) for a in (x.q, x.k))
        for name in ("unscaled maxima", "a scale in binary32"):
            for sign in (1, -1):
                given = replace(x, q=q, k=(sign * k.astype(np.float64)).astype(k.dtype))
                assert_is_by_hand(problem, given, model_of("bf16", name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_beyond_the_end_of_their_format_saturate_or_are_unknown(dtype: str) -> None:
    """A tanh of a softcap that large errs by many powers of two: e4m3 ends at 448, a P of fp16 may be infinite."""
    model = model_of(dtype, "as it is", tanh_error=TANH_REL)
    if dtype == "e4m3":
        assert_is_by_hand(*drawn(dtype, spread=200.0, softcap=2.0**22, softmax_scale=100.0), model)
    else:
        found = forward_enclosure(*drawn(dtype, spread=800.0, softcap=2.0**24, softmax_scale=800.0), model)
        assert is_all(found.out).all() == is_all(found.lse).all() == (dtype == "fp16")


def masked(dtype: str, num_splits: int = 1, keys: int = KEYS, **rest: Any) -> tuple[AttentionProblem, Operands, Any]:
    """Queries of which the first sees fewer keys than the last; blocks and whole splits are hidden from it."""
    problem = AttentionProblem(1, 1, 1, 20, keys, 3, 2, dtype=dtype, softmax_scale=0.6, causal=True, **rest)  # type: ignore[arg-type]
    rng = np.random.default_rng(2)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    stored = (rng.standard_normal(shape).astype(FORMATS[dtype].dtype) for shape in shapes)
    model = KernelModel(dtype, "fp32", 64, TILE, num_splits=num_splits)  # type: ignore[arg-type]
    return problem, Operands(*stored), model


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("value", [None, np.nan, np.inf])
def test_rows_that_see_no_key_are_exactly_nothing_and_others_hold_the_truth(num_splits: int, value: Any) -> None:
    """The first three rows see none; a NaN in the last key is seen by the last row, in its V by every tile."""
    problem, x, model = masked("bf16", num_splits)
    k = x.k.copy()
    if value is not None:
        k[0, -1, 0, 1] = value
    found = forward_enclosure(problem, replace(x, k=k), model)
    truth = attention(problem, *(a.astype(np.float64) for a in (x.q, x.k, x.v)))
    for end in found.out:
        np.testing.assert_array_equal(end[0, :3], 0)
    for end in found.lse:
        np.testing.assert_array_equal(end[0, 0, :3], -np.inf)
    for ends, exact in ((found.out, truth.out[0, 3:-1]), (found.lse, truth.lse[0, 0, 3:-1])):
        low, high = (end[0, 3:-1] if end.ndim == 4 else end[0, 0, 3:-1] for end in ends)
        assert np.all((low <= exact + 0.02) & (exact - 0.02 <= high))
        assert np.all(high - low < 0.1)
    for ends in found:
        low, high = (end[0, -1] if end.ndim == 4 else end[0, 0, -1] for end in ends)
        assert np.all(np.isneginf(low) & np.isposinf(high)) == (value is not None)


def test_blocks_that_a_row_does_not_see_change_nothing() -> None:
    """Rows of a causal problem beside the same rows in front of the keys that they see alone."""
    problem, x, model = masked("bf16")
    found = forward_enclosure(problem, x, model)
    for row, keys in ((3 + 7, TILE), (3 + 2, 3), (19, KEYS)):
        alone = AttentionProblem(1, 1, 1, 1, keys, 3, 2, dtype="bf16", softmax_scale=0.6)
        own = forward_enclosure(alone, Operands(x.q[:, row : row + 1], x.k[:, :keys], x.v[:, :keys]), model)
        for a, b in zip(found.out, own.out, strict=True):
            np.testing.assert_array_equal(a[0, row], b[0, 0])
        for a, b in zip(found.lse, own.lse, strict=True):
            np.testing.assert_allclose(a[0, 0, row], b[0, 0, 0], rtol=1e-15)


def test_a_softcap_below_binary32_leaves_hidden_keys_hidden() -> None:
    """Its factor is no less than 2^-126: a 0 times -inf would be NaN."""
    problem, x, model = masked("bf16", softcap=2.0**-155)
    found = forward_enclosure(problem, x, replace(model, tanh_error=TANH_REL))
    assert all(np.isfinite(end[:, 3:]).all() for end in found.out)


def test_nothing_is_known_of_outputs_that_may_overflow() -> None:
    """V of 448 with a descale of 2^119 is 1.75 2^127, with one of 2^119.2 more than binary32 has."""
    problem, x = drawn("e4m3")
    for power, is_lost in ((119.0, False), (119.2, True)):
        v = np.full(x.v.shape, 448.0).astype(x.v.dtype)
        given = replace(x, v=v, v_descale=Descale(np.full((1, 1, 3), 2.0**power, np.float32), TILE))
        found = forward_enclosure(problem, given, model_of("e4m3", "as it is"))
        assert is_all(found.out).all() == is_lost
        assert np.isfinite(found.out.high).all() == (not is_lost)


def test_nothing_is_known_of_a_channel_beside_an_infinite_v() -> None:
    problem, x = drawn("bf16")
    beside = x.v.copy()
    beside[0, 3, 0, 1] = np.inf
    found = forward_enclosure(problem, replace(x, v=beside), model_of("bf16", "as it is"))
    np.testing.assert_array_equal(is_all(found.out).ravel(), [False, True])


def test_an_accumulator_of_which_nothing_is_known_stays_unknown() -> None:
    """0 times infinity: a factor of 0 meets an end that overflowed."""
    one = np.ones((1, 1))
    model = model_of("bf16", "as it is")
    ends = Interval(np.full((1, 1), -np.inf), np.full((1, 1), np.inf))
    for interval in (0, 1):
        with np.errstate(invalid="ignore"):
            given = replace(model, promotion_interval=interval)
            found = _accumulate(ends, Interval(one, one), Interval(0 * one, one), one, given)
        assert is_all(found).all()


@pytest.mark.parametrize("factor", [2.0**-105, 2.0**100])
def test_what_is_flushed_of_an_output_counts_with_the_descale_of_v(factor: float) -> None:
    """Outputs near 2^-105, and outputs of 0 whose descale is 2^100."""
    problem, x = drawn("e4m3", 4)
    v = x.v if factor < 1 else np.zeros_like(x.v)
    given = replace(x, v=v, v_descale=Descale(np.full((1, 1, 3), factor, np.float32), TILE))
    for name in ("as it is", "builds that flush"):
        assert_is_by_hand(problem, given, model_of("e4m3", name))
