"""The quantisation bound must hold always, and the prediction must be right on average."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reference.attention import attention
from fa3_reference.bounds.quantisation import EPS_E4M3, predict_error, quantization_bound
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, condition, quantize_qkv

PROBLEMS = {
    "dense": AttentionProblem(1, 2, 1, 12, 17, 8, head_dim_v=4, dtype="e4m3"),
    "causal": AttentionProblem(2, 2, 2, 9, 6, 8, causal=True, dtype="e4m3"),
    "window_softcap": AttentionProblem(1, 1, 1, 11, 14, 8, window=(3, 1), softcap=2.0, dtype="e4m3"),
    "varlen": AttentionProblem.varlen((5, 0, 9), (7, 3, 0), nheads=2, nheads_kv=1, head_dim=8, dtype="e4m3"),
}


SINKS = AttentionProblem(1, 2, 1, 12, 17, 8, causal=True, dtype="e4m3", sinks=True)


def _inputs(problem: AttentionProblem, seed: int, sd: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (sd * rng.standard_normal(s) for s in shapes)
    return q, k, v


def _changes(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(before == after, 0.0, np.abs(after - before))


@given(
    name=st.sampled_from([*sorted(PROBLEMS), "sinks"]),
    seed=st.integers(0, 2**32),
    log2_size=st.integers(-60, 3),
    sd=st.sampled_from([0.1, 1.0, 10.0]),
    corner=st.booleans(),
    v_offset=st.sampled_from([0.0, 1e8]),
)
def test_bound_holds_for_every_perturbation_inside_its_box(name, seed, log2_size, sd, corner, v_offset):
    problem = PROBLEMS.get(name, SINKS)
    q, k, v = _inputs(problem, seed, sd)
    arrays = (q, k, v + v_offset)
    rng = np.random.default_rng(seed + 1)
    boxes = [2.0**log2_size * np.abs(x) for x in arrays]
    moves = [rng.uniform(-1, 1, x.shape) for x in arrays]
    moved = [x + (np.sign(m) if corner else m) * box for x, m, box in zip(arrays, moves, boxes, strict=True)]
    sinks = [rng.standard_normal(problem.nheads) * 4] if problem.sinks else []
    before, after = attention(problem, *arrays, *sinks), attention(problem, *moved, *sinks)
    boxes = [
        np.abs(a - b) if not corner else box * (1 + 2**-50) + 2**-52 * np.abs(a)
        for a, b, box in zip(arrays, moved, boxes)
    ]
    bound = quantization_bound(problem, *arrays, *boxes, *sinks)
    assert np.all(_changes(before.out, after.out) <= bound.out)
    assert np.all(_changes(before.lse, after.lse) <= bound.lse)


@given(
    name=st.sampled_from(sorted(PROBLEMS)),
    seed=st.integers(0, 2**32),
    hadamard=st.none() | st.integers(0, 99),
)
def test_bound_holds_for_real_quantisation(name, seed, hadamard):
    problem = PROBLEMS[name]
    q, k, v = _inputs(problem, seed)
    scheme = QuantScheme("head", hadamard_seed=hadamard)
    exact = (*condition(problem, q, k, scheme)[:2], v)
    seen = quantize_qkv(problem, q, k, v, scheme).operands.dequantized(problem)
    bound = quantization_bound(problem, *exact, *(np.abs(a - b) for a, b in zip(exact, seen, strict=True)))
    before, after = attention(problem, *exact), attention(problem, *seen)
    assert np.all(_changes(before.out, after.out) <= bound.out)
    assert np.all(_changes(before.lse, after.lse) <= bound.lse)


def test_bound_is_attained_to_first_order():
    # two keys, one channel: k moves by +-d, the score gap by 2 d, so dO = P0 P1 |v0 - v1| 2 d, and dLSE = d
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0, dtype="e4m3")
    one = np.ones(problem.q_shape)
    k, v = np.zeros(problem.k_shape), np.array([1.0, -1.0]).reshape(problem.v_shape)
    zero, d = np.zeros(problem.v_shape), 1e-4
    bound = quantization_bound(problem, one, k, v, 0 * one, np.full(problem.k_shape, d), zero)
    assert bound.out.item() == pytest.approx(0.5 * 0.5 * 2 * 2 * d, rel=1e-3)
    assert bound.lse.item() == pytest.approx(d, rel=1e-3)
    assert quantization_bound(problem, one, k, v, 0 * one, zero, zero + d).out.item() == pytest.approx(d, rel=1e-3)


def test_bound_covers_a_value_error_on_a_key_that_gains_weight():
    # P = (0.01, 0.99) with scores moved by +-0.5 apart: the first weight becomes 0.0267, more than 0.01 e^0.5
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0, dtype="e4m3")
    one, v = np.ones(problem.q_shape), np.zeros(problem.v_shape)
    k, dk = (np.array(x).reshape(problem.k_shape) for x in ([0.0, np.log(99)], [0.5, -0.5]))
    dv = np.array([1.0, 0.0]).reshape(problem.v_shape)
    bound = quantization_bound(problem, one, k, v, 0 * one, np.abs(dk), dv).out.item()
    moved = attention(problem, one, k + dk, v + dv).out.item()
    assert moved <= bound <= 1.03 * moved


def test_bound_never_exceeds_the_spread_of_the_values():
    problem = PROBLEMS["dense"]
    q, k, v = _inputs(problem, 0, 30.0)
    bound = quantization_bound(problem, q, k, v, np.abs(q), np.abs(k), 0 * v)
    assert np.all(bound.out <= (v.max() - v.min()) * (1 + 1e-9))
    assert np.all(np.isfinite(bound.lse))


def test_bound_without_perturbation_is_rounding_only_and_empty_rows_have_none():
    problem = PROBLEMS["varlen"]
    q, k, v = _inputs(problem, 1)
    bound = quantization_bound(problem, q, k, v, 0 * q, 0 * k, 0 * v)
    assert bound.out.max() < 1e-12
    assert np.all(bound.out[5:] == 0)  # the last sequence has no keys
    assert np.all(bound.lse[:, 5:] == 0)


def test_negative_perturbation_is_refused_by_name():
    problem = PROBLEMS["dense"]
    q, k, v = _inputs(problem, 1)
    with pytest.raises(ValueError, match=r"dk must be >= 0 everywhere, got -1\.0"):
        quantization_bound(problem, q, k, v, 0 * q, 0 * k - 1.0, 0 * v)
    with pytest.raises(ValueError, match="dv must have shape"):
        quantization_bound(problem, q, k, v, 0 * q, 0 * k, 0 * q)


def test_relative_error_of_e4m3_is_that_of_a_log_uniform_significand():
    x = 2.0 ** np.random.default_rng(0).uniform(0, 6, 200_000)
    from fa3_reference.formats import FORMATS, round_to

    measured = np.sqrt(np.mean((round_to(x, FORMATS["e4m3"], "ieee") / x - 1) ** 2))
    assert measured == pytest.approx(EPS_E4M3, rel=0.01)
    assert pytest.approx(0.0265, rel=0.01) == EPS_E4M3


# The band of the docstring, on heads where the softmax is neither flat nor saturated.
@pytest.mark.parametrize("hadamard", [None, 3])
@pytest.mark.parametrize("softcap", [0.0, 1.0])
@pytest.mark.parametrize("channel_outliers", [1.0, 8.0])
def test_prediction_is_within_its_band(hadamard, softcap, channel_outliers):
    problem = AttentionProblem(2, 2, 1, 96, 160, 32, causal=True, softcap=softcap, dtype="e4m3")
    q, k, v = _inputs(problem, 0)
    q[..., :2] /= channel_outliers
    k[..., :2] *= channel_outliers
    scheme = QuantScheme("head", hadamard_seed=hadamard)
    seen = quantize_qkv(problem, q, k, v, scheme).operands.dequantized(problem)
    error = attention(problem, *seen).out - attention(problem, q, k, v).out
    measured = np.sqrt(np.mean(error**2, axis=(1, 3)))
    ratio = measured / predict_error(problem, q, k, v, scheme).total
    assert np.all((ratio > 0.75) & (ratio < 1.35)), f"measured / predicted = {ratio}"


@pytest.mark.parametrize("only", ["q", "k", "v"])
def test_prediction_of_each_source_is_right_alone(only):
    problem = AttentionProblem(1, 2, 2, 96, 128, 32, dtype="e4m3")
    exact = dict(zip("qkv", _inputs(problem, 4), strict=True))
    exact["v"] += 2.0  # so that v_j - O_i is far from v_j
    scheme = QuantScheme("head")
    seen = quantize_qkv(problem, exact["q"], exact["k"], exact["v"], scheme).operands.dequantized(problem)
    mixed = {**exact, only: dict(zip("qkv", seen, strict=True))[only]}
    error = attention(problem, **mixed).out - attention(problem, **exact).out
    measured = np.sqrt(np.mean(error**2, axis=(1, 3)))
    predicted = getattr(predict_error(problem, **exact, scheme=scheme), f"from_{only}")
    np.testing.assert_allclose(measured / predicted, 1.0, atol=0.25)


def test_keys_that_a_mask_hides_add_nothing_to_the_bound():
    """However far a hidden key may move: the last of three keys, for the first two rows."""
    problem = AttentionProblem(1, 1, 1, 3, 3, 2, head_dim_v=2, causal=True, dtype="e4m3")
    arrays = [np.linspace(-1, 1, 6).reshape(1, 3, 1, 2) for _ in range(3)]
    small = [np.full((1, 3, 1, 2), 1e-3) for _ in range(3)]
    far = [x.copy() for x in small]
    far[1][0, 2] = 1e6
    far[2][0, 2] = 1e6
    near, wide = (quantization_bound(problem, *arrays, *moves) for moves in (small, far))
    assert np.array_equal(near.out[0, :2], wide.out[0, :2])
    assert np.array_equal(near.lse[0, 0, :2], wide.lse[0, 0, :2])
    assert (wide.out[0, 2] > 1e5).all()
    assert near.lse[0, 0, 0] < 0.01


def test_without_a_perturbation_the_bound_is_that_of_rounding_alone():
    """Two equal scores of 6 and values of 1 and -1: u (9 spread + range + n + 8) twice in each, four times behind."""
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0, dtype="e4m3")
    q, k, v = (np.array(x).reshape(1, -1, 1, 1) for x in ([2.0], [3.0, 3.0], [1.0, -1.0]))
    found = quantization_bound(problem, q, k, v, *(np.zeros_like(x) for x in (q, k, v)))
    slack = 2.0**-53 * ((1 + 8) * 6.0 + np.log(2) + 2 + 8)
    assert found.out.item() == pytest.approx((2 + 4) * slack, rel=1e-6, abs=0)
    assert found.lse.item() == pytest.approx((2 + 4) * slack + 2**-50 * (6 + np.log(2)), rel=0.02, abs=0)
