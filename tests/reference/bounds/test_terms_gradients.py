"""Every term of the steps behind the bound of gradients: each step beside its formulas by hand, before a rounding to 16
bits hides what is small, and what is promised of corners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds import backward as steps_of_ds
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.device import FP32_MAX, TANH_REL
from fa3_reference.bounds.gradient_steps import (
    BackwardHead,
    Sum,
    added,
    kept,
    product,
    row_products,
    scaled,
    stored,
    weights,
)
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, Format
from fa3_reference.problem import AttentionProblem, BackwardOperands
from tests.reference.bounds.by_hand import FLOAT64_ROOM, LEAST, U, g
from tests.reference.bounds.by_hand_backward import (
    Pair,
    Rows,
    Total,
    differences,
    dot_error,
    kept_error,
    own_out_error,
    product_error,
    rounded_in_scale,
    row_of_weights,
    stored as stored_by_hand,
    with_ds,
)
from tests.reference.bounds.test_terms_backward import MODELS, drawn, heads_of, times

PLAIN = BackwardModel("bf16")


def head_of(problem: AttentionProblem, x: BackwardOperands, model: BackwardModel, index: int = 0) -> BackwardHead:
    seq = next(iter(problem.sequences()))
    return steps_of_ds.head_of(problem, x, steps_of_ds.returned_by(problem, x, model), seq, index)


def assert_steps_are_by_hand(problem: AttentionProblem, x: BackwardOperands, model: BackwardModel) -> None:
    """P, its ends and its slope, dP - D and its error, and dS, of the first head."""
    h = head_of(problem, x, model)
    rows: Rows = heads_of(problem, x, model)[0]
    with np.errstate(all="ignore"):
        p = weights(problem, h, model)
        t, dt = steps_of_ds._differences(h, p, model)
        ds, ds_error = steps_of_ds._ds(problem, p, t, dt, model)
    rtol = 2e-9 if model.forward == "own" else 1e-11  # of a P in binary32, which is off by 2^-24, and its float64
    for i in range(len(rows.q)):
        pairs = row_of_weights(rows, i, model)
        found = differences(rows, i, pairs, model)
        for j, (pair, (one, off)) in enumerate(zip(pairs, found, strict=True)):
            place = f"{model}, query {i}, key {j}"
            np.testing.assert_allclose(t[i, j], one, rtol=1e-13, err_msg=f"dP - D of {place}")
            np.testing.assert_allclose(dt[i, j], off, rtol=rtol, err_msg=f"error of dP - D of {place}")
            if pair:
                with_ds(rows, pair, one, off, model)
                assert_pair(p, (i, j), pair, problem.softcap, place)
                np.testing.assert_allclose(ds_error[i, j], pair.ds_off, rtol=2e-9, err_msg=f"error of dS of {place}")
                np.testing.assert_allclose(ds[i, j], pair.ds, rtol=1e-12, err_msg=f"dS of {place}")


def assert_pair(p: Any, at: tuple[int, int], pair: Pair, softcap: float, place: str) -> None:
    rtol = 1e-12 if softcap else 1e-14
    np.testing.assert_allclose(p.low[at], pair.low, rtol=rtol, err_msg=f"least P of {place}")
    np.testing.assert_allclose(p.high[at], pair.high, rtol=rtol, err_msg=f"largest P of {place}")
    np.testing.assert_allclose(p.stored_error[at], pair.p_off, rtol=2e-9, err_msg=f"error of P of {place}")
    if p.slope:
        np.testing.assert_allclose(p.slope.exact[at], pair.slope, rtol=1e-12, err_msg=f"slope of {place}")
        np.testing.assert_allclose(p.slope.error[at], pair.slope_off, rtol=2e-9, err_msg=f"error of slope of {place}")


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_differences_err_by_what_their_formulas_make_by_hand(name: str) -> None:
    for out in ("bf16", "fp32"):
        model = BackwardModel("bf16", **{"weights": out, **MODELS[name]})
        for softcap in (0.0, 1.5) if model.scores == "fp32" else (0.0,):
            problem, x = drawn("bf16", len(name) + 1, 1, softcap=softcap, softmax_scale=0.3)
            assert_steps_are_by_hand(problem, x, model)
            dlse = np.array([[[3.0, -0.5]]], np.float32)
            assert_steps_are_by_hand(replace(problem, causal=True), replace(x, dlse=dlse), model)


@pytest.mark.parametrize("size", [1.0, 2.0**8, 2.0**12])
def test_large_scores_below_a_large_softcap_err_by_what_their_formulas_make_by_hand(size: float) -> None:
    """Scores that saturate the tanh, scores of none of its slope, and 0."""
    problem, x = drawn("bf16", 4, 1, softcap=0.7 * size, softmax_scale=0.3)
    x = times(x, q=size)
    x.q[0, 0] *= np.array(30, x.q.dtype)
    x.k[0, 1] = 0
    lse = attention(problem, *(a.astype(np.float64) for a in (x.q, x.k, x.v))).lse.astype(np.float32)
    for facts in ({}, {"tanh_error": TANH_REL}, {"tanh_error": TANH_REL, "scales": "any"}):
        assert_steps_are_by_hand(problem, replace(x, lse=lse), BackwardModel("bf16", **facts))


@pytest.mark.parametrize(
    "small",
    [
        {"dout": 2.0**-107},
        {"v": 2.0**-107},
        {"out": 2.0**-107, "v": 2.0**-107},
        {"out": 2.0**-107, "dout": 2.0**-107},
    ],
)
def test_what_is_flushed_of_differences_counts_beside_small_ones(small: dict[str, float]) -> None:
    for softcap in (0.0, 1.5):
        problem, x = drawn("bf16", 7, 1, softcap=softcap, softmax_scale=0.3)
        for facts in (
            {},
            {"accumulator": "fp32"},
            {"dots": "weights", "weights": "fp32"},
            {"forward": "own"},
            {"forward": "own", "weights": "fp32"},
        ):
            assert_steps_are_by_hand(problem, times(x, **small), BackwardModel("bf16", **facts))


def test_what_is_flushed_of_a_capped_ds_counts_with_its_differences() -> None:
    """P near 2^-110 and dP - D of some 2^20, of which 2^-126 counts before P does."""
    problem, x = drawn("bf16", 7, 1, softcap=1.5, softmax_scale=0.3)
    x = times(replace(x, lse=x.lse + np.float32(80)), dout=2.0**20)
    for facts in ({}, {"dots": "weights"}):
        assert_steps_are_by_hand(problem, x, BackwardModel("bf16", weights="fp32", **facts))


def test_a_weight_that_is_exact_once_rounded_may_still_be_off_before() -> None:
    """P of 1/2 is a number of bf16, to which both of its ends round."""
    problem, x = drawn("bf16", 7, 1, softmax_scale=1.0)
    x = replace(times(x, q=0.0), lse=np.full_like(x.lse, np.log(2)))
    model = BackwardModel("bf16", ds_of="rounded")
    p = weights(problem, head_of(problem, x, model), model)
    assert np.all(p.stored_error < 2.0**-28)
    assert np.all(p.high - p.exact > 2.0**-26)
    assert_steps_are_by_hand(problem, x, model)


def test_an_own_d_is_off_by_its_weights_where_its_output_cancels() -> None:
    """V of 1 and -1, of which O is 0 and rounds to it: what dP errs by counts, and O has no part in it."""
    problem, x = drawn("bf16", 7, 1, 1, 2, softmax_scale=1.0)
    v = np.array([1.0, -1.0])[None, :, None, None] * np.ones(x.v.shape)
    x = replace(times(x, q=0.0), v=v.astype(x.v.dtype), dout=np.ones_like(x.dout))
    for accumulator in ("fp32", "either"):
        model = BackwardModel("bf16", forward="own", accumulator=accumulator)  # type: ignore[arg-type]
        assert_steps_are_by_hand(problem, x, model)
        rows = heads_of(problem, x, model)[0]
        pairs = row_of_weights(rows, 0, model)
        dps = [(3.0 * sign, product_error(rows.dout[0], rows.v[0], model)) for sign in (1, -1)]
        by_weights = dot_error(rows, 0, pairs, dps, replace(model, weights="fp32"))
        assert by_weights == dot_error(rows, 0, pairs, dps, model) > own_out_error(rows, 0, pairs, model)


def equal_keys() -> tuple[AttentionProblem, BackwardOperands]:
    """Two keys of half the weight each and a V of ones, of which O is 1."""
    problem, x = drawn("bf16", 7, 1, 1, 2, softmax_scale=1.0)
    lse = np.full_like(x.lse, np.log(2))
    return problem, replace(times(x, q=0.0), v=np.ones_like(x.v), out=np.ones_like(x.out), lse=lse)


def test_what_float64_loses_of_d_counts_where_next_to_nothing_else_is_lost() -> None:
    problem, x = equal_keys()
    assert_steps_are_by_hand(problem, x, BackwardModel("bf16", weights="fp32", dots="weights"))
    own = BackwardModel("bf16", weights="fp32", forward="own")
    h = head_of(problem, x, own)
    found = steps_of_ds._own_dots_error(h, weights(problem, h, own), own).item()
    rows = heads_of(problem, x, own)[0]
    np.testing.assert_allclose(found, own_out_error(rows, 0, row_of_weights(rows, 0, own), own), rtol=5e-9)


def test_a_score_that_cancels_may_have_any_slope_between_1_and_that_of_its_farther_end() -> None:
    """1024 1024 - 1023 1025 is 1, and may be -1 in binary32: of its tanh next to nothing is known."""
    problem, x = drawn("fp16", 7, 1, 1, 1, softcap=1.0, softmax_scale=1.0)
    x.q[0, 0, 0] = 1024, 1023
    x.k[0, 0, 0] = 1024, -1025
    model = BackwardModel("fp16", accumulator="fp32")
    slope = weights(problem, head_of(problem, x, model), model).slope
    assert slope is not None
    tanh = float(np.tanh(1.0))
    change = tanh**2  # to 0, which is more than to 1
    expected = (change + U + g(3) * (1 - tanh**2 + change) + 2.0**-50) * FLOAT64_ROOM
    np.testing.assert_allclose(slope.error, expected, rtol=1e-13)


def test_weights_of_an_own_forward_at_the_end_of_binary32_may_be_flushed() -> None:
    """The second of two keys has 2^-126 of the weight, or a little less: it may be nothing."""
    problem, x = drawn("bf16", 7, 1, 1, 2, softmax_scale=float(np.log(2)))
    for gap in (126.0, 126.5, 128.0):
        q, k = np.zeros(x.q.shape), np.zeros(x.k.shape)
        q[..., 0] = gap
        k[0, 0, 0, 0] = 1
        x = replace(x, q=q.astype(x.q.dtype), k=k.astype(x.k.dtype))
        model = BackwardModel("bf16", forward="own")
        assert_steps_are_by_hand(problem, x, model)
        assert weights(problem, head_of(problem, x, model), model).stored_error[0, 1] >= 2.0**-gap


def test_a_weight_of_nothing_may_differ_by_what_products_lose_in_float64() -> None:
    problem, x = drawn("bf16", 7, 1)
    far = replace(x, lse=np.full_like(x.lse, 1e5))
    h = head_of(problem, far, PLAIN)
    with np.errstate(all="ignore"):
        pairs = steps_of_ds.pairs_of(problem, h, PLAIN)
    assert np.all(pairs.p == 0)
    assert np.all(pairs.p_error == 2.0**-500)
    assert np.all(pairs.ds_error == 2.0**-500)


def test_a_slope_that_is_1_or_0_is_off_by_its_roundings_and_by_float64() -> None:
    """Scores of 0, and of 90 times the softcap, where the tanh is 1 and its square is rounded once."""
    problem, x = drawn("bf16", 7, 1, softcap=1.0, softmax_scale=1.0)
    x = times(x, q=0.0)
    model = replace(PLAIN, tanh_error=TANH_REL)
    slope = weights(problem, head_of(problem, x, model), model).slope
    assert slope is not None
    np.testing.assert_allclose(slope.error, (g(3) + 2.0**-50) * FLOAT64_ROOM, rtol=1e-14)
    big = replace(x, q=np.full_like(x.q, 8), k=np.full_like(x.k, 8))
    slope = weights(problem, head_of(problem, big, model), model).slope
    assert slope is not None
    tanh = TANH_REL * (1 + 2.0**-20) + 2.0**-50
    low = tanh * (2 - tanh)
    np.testing.assert_allclose(slope.error, (low + U + g(3) * low + 2.0**-50) * FLOAT64_ROOM, rtol=1e-11)


@pytest.mark.parametrize("accumulator", ["wgmma", "fp32", "either"])
def test_products_of_rows_are_known_to_what_float64_may_lose_of_the_truth(accumulator: Any) -> None:
    """Numbers of few bits, of which the tensor core loses none."""
    a, b = np.array([[1.0, 0.5, 3.0], [2.0**-64, 0, 0]]), np.array([[1.0, -1.0, 0.25], [2.0**-64, 0, 0], [0, 0, 0]])
    model = replace(PLAIN, accumulator=accumulator)
    s, ds = row_products(a, b, model)
    expected = [[product_error(x, y, model) for y in b.tolist()] for x in a.tolist()]
    np.testing.assert_array_equal(s, a @ b.T)
    np.testing.assert_allclose(ds, expected, rtol=1e-13, atol=0)


def test_nothing_is_known_of_products_beside_what_is_not_finite_or_may_overflow() -> None:
    a, b = np.ones((3, 2)), np.ones((4, 2))
    a[1, 0], b[2, 1], b[3, 0] = np.nan, np.inf, -np.inf
    is_bad = np.array([[False, False, True, True], [True] * 4, [False, False, True, True]])
    for x in row_products(a, b, PLAIN):
        np.testing.assert_array_equal(np.isnan(x), is_bad)
    half = np.full((1, 2), 2.0**62)
    for size, is_lost in ((1.0, False), (1.75, False), (2.0, True)):
        s, ds = row_products(half * size, half, PLAIN)  # a sum of 2^125 size
        assert (np.isnan(s).all(), np.isnan(ds).all()) == (is_lost, is_lost)


@pytest.mark.parametrize(("form", "scale"), [("fp16", 0.0), ("fp16", 0.25), ("fp16", 4.0), ("bf16", 0.3)])
def test_scores_that_are_kept_in_16_bits_err_by_what_their_formulas_make_by_hand(form: str, scale: float) -> None:
    fmt = FORMATS[form]
    for x, dx in ((0.0, 0.0), (1.0, 2.0**-10), (2.0**-20, 2.0**-30), (-100.0, 1.0)):
        _, found = kept(np.array([x]), np.array([dx]), form, scale)
        expected = kept_error(x, dx, fmt, 2 if scale else 1, 1 + 1 / scale if scale else 1.0)
        np.testing.assert_allclose(found.item(), expected, rtol=1e-13)
    for share, is_lost in ((-1.0, True), (1.0, True), (0.9, False), (0.3, False)):
        found = kept(np.array([share * fmt.max_finite]), np.array([0.0]), form, scale)[1]
        assert np.isnan(found).all() == (is_lost or share * scale > 1)


def test_weights_that_may_overflow_are_infinite() -> None:
    problem, x = drawn("bf16", 7, 1)
    model = PLAIN
    for power, is_lost in ((126.0, False), (128.2, True), (200.0, True)):
        given = replace(times(x, q=0.0), lse=np.full_like(x.lse, -power * np.log(2)))
        p = weights(problem, head_of(problem, given, model), model)
        assert np.isinf(p.high).all() == np.isinf(p.stored_error).all() == is_lost
        bound = backward_bound(problem, given, replace(model, out_dtype="fp32"))
        assert np.isinf(bound.dv).all() == np.isinf(bound.dq).all() == is_lost


def sum_of(exact: float, error: float, size: float) -> Sum:
    return Sum(*(np.array([x]) for x in (exact, error, size)))


def test_sums_that_may_overflow_are_infinite() -> None:
    half = FP32_MAX / 2
    fits, beyond = sum_of(0.9 * half, 0.0, 0.9 * half), sum_of(1.1 * half, 0.0, 1.1 * half)
    for x, is_lost in ((fits, False), (beyond, True)):
        assert np.isinf(added([x, x], PLAIN).error).all() == is_lost
        assert np.isinf(scaled(x, 2.0).error).all() == is_lost
        one = np.ones((1, 2))
        assert np.isinf(product(one, 0 * one, np.full((2, 1), x.exact.item()), PLAIN).error).all() == is_lost
    in_fp16 = replace(PLAIN, parts="fp16")
    for size, is_lost in ((3e4, False), (4e4, True)):
        assert np.isinf(added([sum_of(size, 0.0, size)] * 2, in_fp16).error).all() == is_lost
    assert stored(sum_of(1.0, np.nan, 1.0), PLAIN).item() == np.inf
    assert stored(sum_of(np.nan, 1.0, 1.0), PLAIN).item() == np.inf


def test_zeros_have_no_error_and_products_of_numbers_are_known_to_float64() -> None:
    w, x = np.array([[1.0, 0.5], [0.0, 0.0]]), np.array([[2.0, 0.0], [1.0, 0.0]])
    for accumulator in ("wgmma", "fp32", "either"):
        model = replace(PLAIN, accumulator=accumulator)  # type: ignore[arg-type]
        found = product(w, np.zeros(w.shape), x, model)
        np.testing.assert_array_equal(found.error[1], 0)
        np.testing.assert_array_equal(found.error[:, 1], 0)
        assert found.error[0, 0] > 0
    exact = replace(PLAIN, accumulator="fp32")
    count, size = 2, 2.5
    cut = g(count + 6, 2.0**-23) * size + 2 * count * LEAST
    own = size * count * 2.0**-52
    expected = (cut + own) * FLOAT64_ROOM
    np.testing.assert_allclose(product(w, np.zeros(w.shape), x, exact).error[0, 0], expected, rtol=1e-13)


def test_what_float64_may_lose_counts_before_the_last_rounding_and_after_it() -> None:
    """An error that ends 0.75 of its 2^-20 below where bf16 rounds up, through binary32, from 1 to 1 + 2^-7."""
    error = 2.0**-8 + 2.0**-24 - 0.75 * 2.0**-28
    for x, is_above in ((error, True), (error - 2.0**-28, False)):
        found = stored(sum_of(1.0, x, 0.0), PLAIN).item()
        np.testing.assert_allclose(found, stored_by_hand(Total(1.0, x, 0.0), PLAIN), rtol=1e-12)
        assert (found > 2.0**-7) == is_above


@pytest.mark.parametrize("fmt", [FORMATS["fp32"], FORMATS["fp16"]], ids=str)
def test_ds_that_is_rounded_in_its_scale_errs_by_what_its_formulas_make_by_hand(fmt: Format) -> None:
    for ds, error, scale in ((0.1, 1.0, 1.0), (0.1, 0.9, 0.3), (-0.3, 0.7, 8.0), (0.0, 3.0, 1.0), (2.0**-14, 0.0, 0.1)):
        found = steps_of_ds._rounded_after(scale, np.array([ds]), np.array([error]), fmt).item()
        np.testing.assert_allclose(found, rounded_in_scale(scale, ds, error, fmt), rtol=1e-13)


def test_nothing_is_promised_of_differences_beyond_binary32() -> None:
    """D of 2^129 beside small dP; a D of 2^125 is known."""
    problem, x = drawn("bf16", 7, 1)
    one = replace(x, dout=np.ones_like(x.dout), out=np.ones_like(x.out))
    for power, is_lost in ((61, False), (66, True)):
        given = times(one, dout=2.0**62, out=2.0**power, v=2.0**-62)
        h = head_of(problem, given, PLAIN)
        p = weights(problem, h, PLAIN)
        assert np.isinf(steps_of_ds._differences(h, p, PLAIN)[1]).all() == is_lost


def test_nothing_is_promised_of_a_capped_ds_that_meets_a_small_softcap_beyond_binary32() -> None:
    """A forward of its own may divide dS by a softcap of 2^-100 before it multiplies by it."""
    problem, x = drawn("bf16", 7, 1, softcap=2.0**-100, softmax_scale=2.0**-100)
    for power, is_lost in ((20, False), (40, True)):
        for forward in ("own", "given"):
            model = replace(PLAIN, forward=forward, out_dtype="fp32")  # type: ignore[arg-type]
            given = replace(times(x, dout=2.0**power, q=2.0**-10), lse=np.zeros_like(x.lse))
            bound = backward_bound(problem, given, model)
            assert np.isinf(bound.dq).all() == (is_lost and forward == "own")


def test_d_of_weights_is_unknown_where_a_hidden_key_is_not_finite() -> None:
    """P is 0 there, and 0 times NaN is NaN."""
    problem, x = drawn("bf16", 7, 1, causal=True)
    v = x.v.copy()
    v[0, 2] = np.nan  # of the last key, which the first of two queries does not see
    for forward, dots in (("given", "weights"), ("own", "out"), ("given", "out")):
        model = replace(PLAIN, forward=forward, dots=dots)  # type: ignore[arg-type]
        with np.errstate(all="ignore"):
            error = steps_of_ds.pairs_of(problem, head_of(problem, replace(x, v=v), model), model).ds_error
        assert np.isinf(error[0, :2]).all() == ((forward, dots) != ("given", "out"))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("name", ["k", "v"])
def test_ds_of_a_hidden_key_is_unknown_where_a_factor_of_it_is(name: str, softcap: float) -> None:
    """The last key is hidden from the first query: of its K the slope of a softcap knows, of its V dP."""
    problem, x = drawn("bf16", 7, 1, causal=True, softcap=softcap)
    broken = getattr(x, name).copy()
    broken[0, 2] = np.nan
    x = replace(x, **{name: broken})
    h = head_of(problem, x, PLAIN)
    with np.errstate(all="ignore"):
        error = steps_of_ds.pairs_of(problem, h, PLAIN).ds_error
    assert np.isinf(error[0, 2]) == (name == "v" or softcap > 0)
    assert np.isfinite(error[0, :2]).all()


def test_a_gradient_of_lse_of_a_row_that_sees_no_key_leaves_other_rows_as_they_are() -> None:
    problem, x = drawn("bf16", 11, 1, 3, 2, causal=True, softmax_scale=0.3)
    dlse = np.zeros(problem.lse_shape, np.float32)
    dlse[..., 0] = 1
    assert_steps_are_by_hand(problem, replace(x, dlse=dlse), PLAIN)


@pytest.mark.parametrize("lengths", [((2, 2), (3, 0)), ((0, 2), (3, 3))])
@pytest.mark.parametrize("forward", ["given", "own"])
def test_a_sequence_without_keys_or_queries_has_gradients_of_nothing(lengths: Any, forward: Any) -> None:
    problem = AttentionProblem.varlen(*lengths, nheads=1, nheads_kv=1, head_dim=2, dtype="bf16")
    rng = np.random.default_rng(0)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape, problem.out_shape)
    q, k, v, dout, out = (rng.standard_normal(shape).astype(FORMATS["bf16"].dtype) for shape in shapes)
    lse = np.zeros(problem.lse_shape, np.float32)
    for facts in ({}, {"tile_m": 1, "tile_n": 2}):
        model = replace(PLAIN, forward=forward, **facts)
        found = backward_bound(problem, BackwardOperands(q, k, v, dout=dout, out=out, lse=lse), model)
        assert all(np.isfinite(x).all() for x in found)
        empty = found.dq[-2:] if lengths[1][1] == 0 else np.concatenate([found.dk[:3], found.dv[:3]])
        assert not empty.any()
