"""Ball arithmetic proves the error statement of the float64 truth, on easy and on hostile inputs."""

import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem
from tests.reference.dense_softmax import probabilities
from tests.reference.exact import exact_attention

U = 2.0**-53

# Small, but every option at least once, and each with rows that see all, some and no keys.
PROBLEMS = {
    "dense": AttentionProblem(1, 1, 1, 24, 33, 16),
    "wide": AttentionProblem(1, 1, 1, 8, 40, 128),
    "causal": AttentionProblem(2, 1, 1, 20, 13, 8, causal=True),
    "window": AttentionProblem(1, 1, 1, 21, 25, 8, window=(4, 2)),
    "gqa": AttentionProblem(1, 4, 2, 9, 17, 8, head_dim_v=5),
    "softcap": AttentionProblem(1, 1, 1, 12, 20, 16, softcap=5.0, causal=True),
    "scale": AttentionProblem(1, 1, 1, 12, 20, 16, softmax_scale=1.7),
    "sinks": AttentionProblem(1, 3, 1, 12, 20, 16, softcap=5.0, causal=True, sinks=True),
    "sinks_without_keys": AttentionProblem(1, 2, 1, 9, 5, 8, causal=True, sinks=True),
    "chunk": AttentionProblem(1, 1, 1, 17, 29, 8, attention_chunk=6),
    "absorbed": AttentionProblem(1, 2, 1, 3, 9, 576, head_dim_v=512, causal=True, qv=True, softmax_scale=1 / 24),
    "varlen": AttentionProblem.varlen((5, 0, 9), (7, 3, 0), nheads=2, nheads_kv=1, head_dim=8),
}
SINKS = {"normal": 0.7, "large_logits": 50.0, "cancelling_values": -3.0, "outliers": -1e4, "tiny": 0.0}
INPUTS = ("normal", "large_logits", "cancelling_values", "outliers", "tiny")


def _inputs(problem: AttentionProblem, kind: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
    if kind == "large_logits":
        q, k = 40 * q, 40 * k
    elif kind == "cancelling_values":
        v = 1e8 * np.sign(v) + v
    elif kind == "outliers":
        q[..., 0], k[..., 0] = 100.0, 100.0 + rng.standard_normal(k.shape[:-1])
    elif kind == "tiny":
        q, v = 1e-160 * q, 1e-300 * v
    if problem.qv:
        k[..., -problem.head_dim_v :] = v
    return (q, k, v, SINKS[kind] + np.arange(problem.nheads)) if problem.sinks else (q, k, v)


def stated_bound(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, *sinks: np.ndarray):
    """The error statement of fa3_reference.attention, from ingredients computed independently of it."""
    lse = attention(problem, q, k, v, *sinks).lse
    out_bound, lse_bound = np.zeros(problem.out_shape), U * np.abs(np.where(np.isneginf(lse), 0.0, lse))
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        for head in range(problem.nheads):
            keys, values = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))
            p = probabilities(problem, q, k, *sinks, seq=seq, head=head)
            for row in np.flatnonzero(stop > first):
                span = slice(first[row], stop[row])
                products = problem.softmax_scale * keys[span] * problem.rows_q(q, seq)[row, head]
                s = products.sum(axis=1)
                s = problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s
                s = np.append(s, [x[head] for x in sinks])
                units = (problem.head_dim + 8) * np.abs(products).sum(axis=1).max() + np.ptp(s) + s.size + 8
                problem.rows_q(out_bound, seq)[row, head] = 2 * U * units * (p[row, span] @ np.abs(values[span]))
                problem.rows_lse(lse_bound, seq)[head, row] = U * (units + abs(problem.rows_lse(lse, seq)[head, row]))
    return out_bound, lse_bound


def _finite_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|, with equal infinities (empty rows) at distance 0."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


@pytest.fixture(autouse=True)
def _needs_flint():
    pytest.importorskip("flint", reason="python-flint is in the extra 'test'")


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_float64_attention_is_within_its_stated_error(name, kind):
    problem = PROBLEMS[name]
    inputs = _inputs(problem, kind)
    truth, got = exact_attention(problem, *inputs), attention(problem, *inputs)
    out_bound, lse_bound = stated_bound(problem, *inputs)
    out_error = _finite_difference(got.out, truth.out) + truth.out_radius
    lse_error = _finite_difference(got.lse, truth.lse) + truth.lse_radius
    assert np.all(out_error <= out_bound + 2.0**-1074), (
        f"worst ratio {np.max(out_error / np.maximum(out_bound, 1e-320))}"
    )
    assert np.all(lse_error <= lse_bound), f"worst ratio {np.max(lse_error / np.maximum(lse_bound, 1e-320))}"


def test_stated_error_is_within_reach():
    # a bound that is thousands of times too large would prove nothing
    problem = PROBLEMS["dense"]
    q, k, v = _inputs(problem, "normal")
    out_error = np.abs(attention(problem, q, k, v).out - exact_attention(problem, q, k, v).out)
    assert np.max(out_error / stated_bound(problem, q, k, v)[0]) > 1e-3


@pytest.mark.parametrize("name", PROBLEMS)
def test_radius_is_about_half_an_ulp_and_encloses_a_more_precise_result(name):
    problem = PROBLEMS[name]
    inputs = _inputs(problem, "normal")
    coarse, fine = exact_attention(problem, *inputs, bits=96), exact_attention(problem, *inputs, bits=320)
    assert np.all(_finite_difference(coarse.out, fine.out) <= coarse.out_radius + fine.out_radius)
    assert np.all(fine.out_radius <= 1.001 * U * np.abs(fine.out))
    assert np.all(fine.lse_radius <= 1.001 * U * np.abs(np.where(np.isneginf(fine.lse), 0.0, fine.lse)))


@pytest.mark.parametrize("softcap", [False, True])
def test_two_keys_give_the_logistic_function_of_decimal_arithmetic(softcap):
    # scores 0 and x = 1, or x = tanh 1, values 0 and 1: out = 1 / (1 + exp -x), lse = log(1 + exp x)
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0, softcap=float(softcap))
    pair = np.array([0.0, 1.0]).reshape(problem.k_shape)
    truth = exact_attention(problem, np.ones(problem.q_shape), pair, pair)
    with localcontext(prec=50):
        e_squared = Decimal(2).exp()
        x = (e_squared - 1) / (e_squared + 1) if softcap else Decimal(1)
        want_out, want_lse = 1 / (1 + (-x).exp()), (1 + x.exp()).ln()
        for got, radius, want in ((truth.out, truth.out_radius, want_out), (truth.lse, truth.lse_radius, want_lse)):
            assert got.item() == float(want)
            assert abs(Decimal(got.item()) - want) <= Decimal(radius.item())


def test_equal_scores_average_the_values_exactly():
    problem = AttentionProblem(1, 1, 1, 1, 4, 2)
    v = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).reshape(problem.v_shape)
    truth = exact_attention(problem, np.zeros(problem.q_shape), np.ones(problem.k_shape), v)
    np.testing.assert_array_equal(truth.out.ravel(), [4.0, 5.0])
    assert abs(truth.lse.item() - np.log(4.0)) <= 2 * truth.lse_radius.item() + 2**-53
    assert np.all(truth.out_radius < 1e-40)


@pytest.mark.parametrize(("bits", "value", "message"), [(32, 1.0, "bits must be"), (160, np.inf, "q must be finite")])
def test_unusable_request_is_refused(bits, value, message):
    problem = AttentionProblem(1, 1, 1, 1, 2, 2)
    q, k, v = np.full(problem.q_shape, value), np.ones(problem.k_shape), np.ones(problem.v_shape)
    with pytest.raises(ValueError, match=message):
        exact_attention(problem, q, k, v, bits=bits)


def test_missing_flint_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    problem = AttentionProblem(1, 1, 1, 1, 2, 2)
    ones = np.ones
    with pytest.raises(ImportError, match="extra 'test'"):
        exact_attention(problem, ones(problem.q_shape), ones(problem.k_shape), ones(problem.v_shape))
