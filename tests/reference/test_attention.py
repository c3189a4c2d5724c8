"""The float64 forward against the definition written out row by row, and its laws."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reference.attention import Attention, _rows, attention
from fa3_reference.problem import AttentionProblem
from tests.reference.dense_softmax import probabilities

U = 2.0**-53


def _inputs(problem: AttentionProblem, seed: int, sd: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (sd * rng.standard_normal(shape) for shape in shapes)
    return q, k, v


def _by_definition(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, *sinks) -> Attention:
    """One row at a time, straight from the equation and the visibility rule of the documentation."""
    out, lse = np.zeros(problem.out_shape), np.full(problem.lse_shape, -np.inf)
    scores = sinks[0] if sinks else np.full(problem.nheads, -np.inf)
    for seq in problem.sequences():
        for head in range(problem.nheads):
            keys = problem.rows_k(k, seq)[:, head // problem.group]
            values = problem.rows_k(v, seq)[:, head // problem.group]
            for i in range(seq.seqlen_q):
                diagonal = i + seq.seqlen_k - seq.seqlen_q
                left, right = problem.window
                seen = [
                    j
                    for j in range(seq.seqlen_k)
                    if (not problem.causal or j <= diagonal)
                    and (left < 0 or j >= diagonal - left)
                    and (right < 0 or j <= diagonal + right)
                    and (not problem.attention_chunk or diagonal - diagonal % problem.attention_chunk <= j)
                    and (
                        not problem.attention_chunk
                        or j // problem.attention_chunk * problem.attention_chunk <= diagonal
                    )
                ]
                if not seen:
                    problem.rows_lse(lse, seq)[head, i] = scores[head]
                    continue
                s = problem.softmax_scale * (keys[seen] @ problem.rows_q(q, seq)[i, head])
                s = problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s
                s = np.append(s, scores[head])  # a sink is a key with that score and V = 0
                weight = np.exp(s - s.max())
                problem.rows_q(out, seq)[i, head] = weight[:-1] @ values[seen] / weight.sum()
                problem.rows_lse(lse, seq)[head, i] = s.max() + np.log(weight.sum())
    return Attention(out, lse)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    nheads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    rest = {
        "nheads": nheads_kv * group,
        "nheads_kv": nheads_kv,
        "head_dim": draw(st.sampled_from([1, 3, 8])),
        "head_dim_v": draw(st.sampled_from([2, 8])),
        "causal": draw(st.booleans()),
        "window": draw(st.tuples(st.integers(-1, 6), st.integers(-1, 6))),
        "softcap": draw(st.sampled_from([0.0, 0.5, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.25, 2.0])),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=3))
        lengths.append((2, 3))
        return AttentionProblem.varlen(tuple(a for a, _ in lengths), tuple(b for _, b in lengths), **rest)
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "seqlen_q": draw(st.integers(1, 9)),
        "seqlen_k": draw(st.integers(0, 11)),
    }
    return AttentionProblem(**sizes, **rest)


@given(problem=problems(), seed=st.integers(0, 2**32), size=st.sampled_from([1.0, 30.0]), chunk=st.integers(0, 4))
def test_attention_with_sinks_and_chunks_equals_its_definition(problem, seed, size, chunk):
    problem = replace(problem, sinks=True, attention_chunk=chunk)
    q, k, v = _inputs(problem, seed)
    sinks = size * np.random.default_rng(seed).standard_normal(problem.nheads)
    sinks[0] = -np.inf
    got, want = attention(problem, q, k, v, sinks), _by_definition(problem, q, k, v, sinks)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.lse, want.lse, rtol=64 * U, atol=1e-12)


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_a_sink_of_minus_infinity_is_none(problem, seed):
    q, k, v = _inputs(problem, seed)
    want = attention(problem, q, k, v)
    got = attention(replace(problem, sinks=True), q, k, v, np.full(problem.nheads, -np.inf))
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


def test_sinks_are_given_where_the_problem_has_them_and_only_there():
    problem = AttentionProblem(1, 2, 1, 3, 4, 8)
    q, k, v = _inputs(problem, 0)
    for asked, given_sinks in ((problem, np.zeros(2)), (replace(problem, sinks=True), None)):
        with pytest.raises(ValueError, match="sinks must be given where the problem has them"):
            attention(asked, q, k, v, given_sinks)
    with pytest.raises(ValueError, match=r"sinks must have shape \(2,\), got \(1,\)"):
        attention(replace(problem, sinks=True), q, k, v, np.zeros(1))


def _visible_pairs(problem: AttentionProblem):
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        yield seq, first, stop


@given(problem=problems(), seed=st.integers(0, 2**32), sd=st.sampled_from([1.0, 8.0]))
def test_attention_equals_its_definition(problem, seed, sd):
    q, k, v = _inputs(problem, seed, sd)
    got, want = attention(problem, q, k, v), _by_definition(problem, q, k, v)
    tolerance = 64 * U * (1 + problem.head_dim * sd**2 * problem.softmax_scale * 16)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=tolerance * sd * 8)
    np.testing.assert_allclose(got.lse, want.lse, rtol=64 * U, atol=tolerance)


@given(problem=problems(), seed=st.integers(0, 2**32), poison=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_operands_that_a_row_does_not_see_do_not_matter(problem, seed, poison):
    rng = np.random.default_rng(seed)
    q, k, v = _inputs(problem, seed)
    want = attention(problem, q, k, v)
    sequences = [seq for seq, _, _ in _visible_pairs(problem) if seq.seqlen_k > 0]
    if not sequences:
        return
    seq = sequences[rng.integers(len(sequences))]
    key, head_kv = int(rng.integers(seq.seqlen_k)), int(rng.integers(problem.nheads_kv))
    problem.rows_k(k, seq)[key, head_kv] = poison
    problem.rows_k(v, seq)[key, head_kv] = poison
    got = attention(problem, q, k, v)
    blind = np.ones(problem.q_shape[:-1], bool)
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
    heads = np.arange(problem.nheads) // problem.group == head_kv
    problem.rows_q(blind, seq)[:] = ~(((first <= key) & (key < stop))[:, None] & heads)
    np.testing.assert_allclose(got.out[blind], want.out[blind], rtol=0, atol=1000 * U)
    assert not np.isfinite(got.out[~blind]).any()


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_rows_that_see_no_key_give_zero_and_minus_infinity(problem, seed):
    result = attention(problem, *_inputs(problem, seed))
    for seq, first, stop in _visible_pairs(problem):
        empty = stop <= first
        assert np.all(problem.rows_q(result.out, seq)[empty] == 0)
        np.testing.assert_array_equal(
            np.isneginf(problem.rows_lse(result.lse, seq)), np.tile(empty, (problem.nheads, 1))
        )


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_probabilities_are_a_distribution_over_visible_keys_that_reproduces_the_output(problem, seed):
    q, k, v = _inputs(problem, seed)
    out = attention(problem, q, k, v).out
    for seq, first, stop in _visible_pairs(problem):
        keys = np.arange(seq.seqlen_k)
        for head in range(problem.nheads):
            p = probabilities(problem, q, k, seq=seq, head=head)
            assert np.all(p[(keys < first[:, None]) | (keys >= stop[:, None])] == 0)
            np.testing.assert_allclose(p.sum(axis=1), stop > first, rtol=0, atol=32 * U)
            values = problem.rows_k(v, seq)[:, head // problem.group]
            np.testing.assert_allclose(p @ values, problem.rows_q(out, seq)[:, head], rtol=0, atol=256 * U)


@pytest.mark.parametrize("shift", [1e3, -1e3, 1e6])
def test_large_common_logits_shift_lse_and_leave_the_output(shift):
    problem = AttentionProblem(1, 1, 1, 4, 6, 4, softmax_scale=1.0)
    q, k, v = _inputs(problem, 0)
    q[..., 0] = 1.0
    before = attention(problem, q, k, v)
    k[..., 0] += shift
    after = attention(problem, q, k, v)
    np.testing.assert_allclose(after.out, before.out, atol=32 * U * abs(shift))
    np.testing.assert_allclose(after.lse - shift, before.lse, atol=32 * U * abs(shift))


def test_one_hot_softmax_returns_one_value_row_exactly():
    problem = AttentionProblem(1, 1, 1, 3, 3, 3, softmax_scale=1.0)
    v = np.arange(9.0).reshape(problem.v_shape)
    result = attention(problem, 1e3 * np.eye(3).reshape(problem.q_shape), 1e3 * np.eye(3).reshape(problem.k_shape), v)
    np.testing.assert_array_equal(result.out, v)
    np.testing.assert_array_equal(result.lse, np.full((1, 1, 3), 1e6))


def test_nan_and_infinity_inside_the_visible_range_follow_the_policy():
    problem = AttentionProblem(1, 1, 1, 1, 3, 1, softmax_scale=1.0)
    ones = np.ones((1, 1, 1, 1))

    def row(keys, values):
        result = attention(problem, ones, np.reshape(keys, problem.k_shape), np.reshape(values, problem.v_shape))
        return result.out.item(), result.lse.item()

    np.testing.assert_equal(row([0.0, np.nan, 0.0], [1.0, 1.0, 1.0]), (np.nan, np.nan))
    np.testing.assert_equal(row([0.0, np.inf, 0.0], [1.0, 1.0, 1.0]), (np.nan, np.nan))
    np.testing.assert_equal(row([0.0, -np.inf, -np.inf], [1.0, 2.0, 3.0]), (1.0, 0.0))
    np.testing.assert_equal(row([-np.inf] * 3, [1.0, 2.0, 3.0]), (np.nan, -np.inf))
    assert row([0.0, 0.0, 0.0], [1.0, -np.inf, 3.0])[0] == -np.inf
    assert np.isnan(row([0.0, -1e4, 0.0], [1.0, np.inf, 3.0])[0])  # the probability underflowed


def test_tiles_do_not_show_in_the_result():
    # 2100 keys and 1100 rows: three tiles of rows; causal and windowed spans start and stop inside tiles
    problem = AttentionProblem(1, 1, 1, 1100, 2100, 4, window=(700, 3))
    q, k, v = _inputs(problem, 3)
    full = attention(problem, q, k, v)
    (seq,) = problem.sequences()
    for row in (0, 511, 512, 1023, 1024, 1099):
        alone = _rows(problem, (q, k, v, np.array([-np.inf])), seq, 0, np.array([row]))
        np.testing.assert_allclose(alone.out[0], full.out[0, row, 0], rtol=0, atol=1e-14)


def test_memory_stays_bounded_for_long_sequences():
    problem = AttentionProblem(1, 1, 1, 1024, 65536, 8)
    q, k, v = _inputs(problem, 0)
    tracemalloc.start()
    attention(problem, q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6  # one score matrix of the whole head would take 537 MB


def test_operand_of_the_wrong_shape_is_refused_by_name():
    problem = AttentionProblem(1, 2, 1, 3, 4, 8)
    q, _, v = _inputs(problem, 0)
    with pytest.raises(ValueError, match=r"k must have shape \(1, 4, 1, 8\), got \(1, 3, 2, 8\)"):
        attention(problem, q, q, v)
