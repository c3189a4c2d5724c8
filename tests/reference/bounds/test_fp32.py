"""The bound of binary32 operands: its own terms by hand, what the truth itself errs by, and an ideal kernel."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.head import Head
from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.problem import AttentionProblem, BackwardOperands, Operands
from tests.reference.exact import exact_attention
from tests.reference.exact_bwd import exact_gradients

U = 2.0**-24
ACCUMULATORS: tuple[Literal["fp32", "tf32"], ...] = ("fp32", "tf32")
PROBLEM = AttentionProblem(1, 2, 1, 9, 33, 16, causal=True, dtype="fp32")
KINDS = (
    "normal",
    "huge scores",
    "cancelling scores",
    "cancelling values",
    "far scores",
    "equal keys",
    "tiny",
    "one key",
)


def operands_of(kind: str, problem: AttentionProblem = PROBLEM) -> Operands:
    rng = np.random.default_rng([54, KINDS.index(kind)])
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    match kind:
        case "huge scores":
            q, k = 300 * q, 300 * k
        case "cancelling scores":  # sums of products of 2^18 that leave numbers near 2^-2
            q, k = (np.round(x * 2.0**9) for x in (q, k))
            q[..., 1::2], k[..., 1::2] = -q[..., ::2], k[..., ::2] * (1 + 2.0**-20)
        case "cancelling values":
            v = 2.0**20 * np.sign(v) + v
        case "far scores":
            q[..., 0], k[..., 0] = 200, 400
        case "equal keys":
            k[:] = k[:, :1]
        case "tiny":
            q, v = q * 2.0**-120, v * 2.0**-126
        case "one key":
            k[:, 1:] -= 1e4 * np.sign(q[:, :1, :1])
    return Operands(*(x.astype(np.float32) for x in (q, k, v)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_errs_by_a_millionth_of_the_bound_at_most(kind: str) -> None:
    """Both are relative to the same sums of absolute values: float64 needs no help, however far scores cancel."""
    pytest.importorskip("flint")
    operands = operands_of(kind)
    arrays = operands.dequantized(PROBLEM)
    found, exact = attention(PROBLEM, *arrays), exact_attention(PROBLEM, *arrays, bits=400)
    for model in KernelModel.hypotheses("fp32", "fp32").values():
        bound = forward_bound(PROBLEM, operands, model)
        assert np.isfinite(bound.out).all()
        for name in ("out", "lse"):
            error = np.abs(getattr(found, name) - getattr(exact, name)) + getattr(exact, f"{name}_radius")
            assert (error <= 2.0**-20 * getattr(bound, name)).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_of_gradients_errs_by_a_millionth_of_the_bound_at_most(kind: str) -> None:
    pytest.importorskip("flint")
    operands = operands_of(kind)
    arrays = operands.dequantized(PROBLEM)
    dout = np.random.default_rng(7).standard_normal(PROBLEM.out_shape).astype(np.float32)
    out, lse = attention(PROBLEM, *arrays)
    given = BackwardOperands(
        operands.q, operands.k, operands.v, dout=dout, out=out.astype(np.float32), lse=lse.astype(np.float32)
    )
    found = attention_bwd(PROBLEM, *arrays, dout.astype(np.float64), attention(PROBLEM, *arrays))
    exact = exact_gradients(PROBLEM, *arrays, dout.astype(np.float64), bits=400)
    bound = backward_bound(PROBLEM, given, BackwardModel.any_order("fp32", "own"))
    for name in ("dq", "dk", "dv"):
        error = np.abs(getattr(found, name) - getattr(exact, name)) + getattr(exact, f"{name}_radius")
        limit = getattr(bound, name)
        judged = np.isfinite(limit) & (limit > 0)
        assert judged.mean() > 0.5
        assert (error[judged] <= 2.0**-20 * limit[judged]).all(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_an_ideal_kernel_that_rounds_once_keeps_every_bound(accumulator: Literal["fp32", "tf32"], kind: str) -> None:
    operands = operands_of(kind)
    truth = attention(PROBLEM, *operands.dequantized(PROBLEM))
    for model in KernelModel.hypotheses("fp32", "fp32", accumulator).values():
        bound = forward_bound(PROBLEM, operands, model)
        for name in ("out", "lse"):
            exact = getattr(truth, name)
            assert (np.abs(exact.astype(np.float32) - exact) <= getattr(bound, name)).all(), name


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_the_error_of_a_score_is_what_its_roundings_sum_to(accumulator: Literal["fp32", "tf32"]) -> None:
    """By hand: additions, four roundings of operands that may have met the scale, what vanishes, and tf32."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 4, dtype="fp32", softmax_scale=0.25)
    q, k = [1.0, -3.0, 0.5, 7.0], [2.0, 1.5, -4.0, 0.125]
    operands = Operands(*(np.array(x, np.float32).reshape(problem.q_shape) for x in (q, k, k)))
    (seq,) = problem.sequences()
    head = Head.of(problem, operands, seq, range(1))
    s, ds, noise = head._raw_scores(np.arange(1), slice(0, 1), KernelModel.any_order("fp32", "fp32", accumulator))
    size = 2.0 + 4.5 + 2.0 + 0.875
    assert s.item() == 2.0 - 4.5 - 2.0 + 0.875
    assert noise.item() == 2.0**-48 * size
    factors = (1 + 2.0**-10) ** 2 - 1 if accumulator == "tf32" else 0.0
    addition = 2.0**-22 if accumulator == "tf32" else 2.0**-23
    additions = 5 * addition / (1 - 5 * addition) * size + 4 * 2.0**-126 + noise.item()
    operands_lost = 4 * U / (1 - 4 * U) * (1 + factors) + factors
    vanished = 2.0**-126 / 0.25 * (sum(map(abs, q)) + sum(map(abs, k)))
    expected = additions * (1 + operands_lost) + operands_lost * size + vanished
    assert ds.item() == pytest.approx(expected * (1 + 2.0**-30), rel=1e-13)


def test_a_product_of_values_in_tf32_is_off_by_both_factors() -> None:
    """One key: P is 1, and O is V but for the additions, the division and the two factors."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 4, dtype="fp32")
    one = np.ones(problem.v_shape, np.float32)
    bounds = {
        x: forward_bound(problem, Operands(one, one, one), KernelModel.any_order("fp32", "fp32", x)).out.max()
        for x in ACCUMULATORS
    }
    assert 2.0**-24 < bounds["fp32"] < 2.0**-18
    assert bounds["tf32"] - bounds["fp32"] == pytest.approx(2.0**-9 + 2.0**-20, rel=1e-2)


def test_weights_less_a_rounded_lse_are_charged_by_the_size_of_scores() -> None:
    """A part weighs exp(lse_i - lse), and lse of 2^16 ln 2 is rounded to 2^-8: O is off by as much, though P is not."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 1, dtype="fp32", softmax_scale=1.0)
    score = 2.0**16 * np.log(2.0)
    q, k, v = (np.full(problem.q_shape, x, np.float32) for x in (score, 1.0, 1.0))
    model = KernelModel.any_order("fp32", "fp32")
    far = forward_bound(problem, Operands(q, k, v), model).out.item()
    near = forward_bound(problem, Operands(q * 0, k, v), model).out.item()
    expected = np.expm1(np.log(2.0) * (6 * U + 2 * 2.0**-23) * 2.0**16)
    assert far - near == pytest.approx(expected, rel=1e-2)


def test_nothing_is_promised_where_an_operand_times_the_scale_may_overflow() -> None:
    problem = AttentionProblem(1, 1, 1, 1, 2, 2, dtype="fp32", softmax_scale=8.0)
    model = KernelModel.any_order("fp32", "fp32")
    for size, is_promised in ((2.0**120, True), (2.0**125, False)):
        q = np.full(problem.q_shape, size, np.float32)
        k, v = np.full(problem.k_shape, 2.0**-122, np.float32), np.ones(problem.v_shape, np.float32)
        assert np.isfinite(forward_bound(problem, Operands(q, k, v), model).out).all() == is_promised


def test_the_gradients_of_tf32_are_off_by_both_factors_of_their_products() -> None:
    """One pair: dV is dO, and its bound differs by the factors of one product."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 8, dtype="fp32")
    one = np.ones(problem.q_shape, np.float32)
    lse = np.full(problem.lse_shape, 8**0.5, np.float32)
    given = BackwardOperands(one, one, one, dout=one, out=one, lse=lse)
    bounds = {
        x: backward_bound(problem, given, BackwardModel.any_order("fp32", "own", x)).dv.max() for x in ACCUMULATORS
    }
    assert 2.0**-24 < bounds["fp32"] < 2.0**-16
    of_score = 8**0.5 * ((1 + 2.0**-10) ** 2 - 1)
    assert bounds["tf32"] - bounds["fp32"] > 2.0**-9
    assert bounds["tf32"] - bounds["fp32"] < 2.0**-9 + 3 * of_score
