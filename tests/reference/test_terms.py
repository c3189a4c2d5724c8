"""Terms of scores: the truth against torch's attention in float64, documents against packed sequences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.score_term import KINDS, VALUES, ScoreTerm
from fa3_reference.terms import added

PLAIN = AttentionProblem(2, 4, 2, 5, 9, 16)
BROADCASTS = ["".join(axes) for n in range(5) for axes in itertools.combinations("bhqk", n)]


def arrays_of(problem: AttentionProblem, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]


def by_torch(problem: AttentionProblem, arrays: list[np.ndarray], mask: np.ndarray, causal: bool = False) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q, k, v = (torch.tensor(x).transpose(1, 2) for x in arrays)
    if causal:
        seen = np.tri(problem.seqlen_q, problem.seqlen_k, problem.seqlen_k - problem.seqlen_q, dtype=bool)
        mask = np.where(seen, mask, -np.inf)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.tensor(mask), scale=problem.softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2).numpy()


@pytest.mark.optional
@pytest.mark.parametrize("shared", BROADCASTS)
@pytest.mark.parametrize("kind", ["bias", "attn_mask"])
def test_a_bias_and_a_mask_of_any_broadcast_agree_with_torch_in_float64(kind, shared):
    for causal in (False, True):
        problem = replace(PLAIN, causal=causal, term=ScoreTerm(kind, shared))
        arrays = arrays_of(problem)
        rng = np.random.default_rng(1)
        drawn = 5 * rng.standard_normal(problem.term_shape)
        drawn = np.where(rng.random(drawn.shape) < 0.2, -np.inf, drawn) if kind == "bias" else drawn > -3
        got = attention(problem, *arrays, drawn)
        as_bias = drawn if kind == "bias" else np.where(drawn, 0.0, -np.inf)
        want = by_torch(problem, arrays, np.broadcast_to(as_bias, (2, 4, 5, 9)), causal)
        empty = np.isneginf(got.lse).transpose(0, 2, 1)
        assert not got.out[empty].any()
        np.testing.assert_allclose(got.out[~empty], want[~empty], rtol=0, atol=1e-13)


@pytest.mark.optional
def test_padding_and_slopes_agree_with_the_bias_that_they_are():
    problem = replace(PLAIN, term=ScoreTerm("key_padding"))
    arrays = arrays_of(problem)
    counts = np.arange(9) < np.array([[4], [9]])
    want = by_torch(problem, arrays, np.broadcast_to(counts[:, None, None], (2, 4, 5, 9)))
    np.testing.assert_allclose(attention(problem, *arrays, counts).out, want, rtol=0, atol=1e-13)
    for shared, shape in (("b", (1, 4)), ("", (2, 4))):
        problem = replace(PLAIN, term=ScoreTerm("alibi", shared))
        slopes = np.random.default_rng(2).random(shape)
        far = np.array([[abs(i + 9 - 5 - j) for j in range(9)] for i in range(5)])
        mask = np.broadcast_to(-slopes[..., None, None] * far, (2, 4, 5, 9))
        got = attention(problem, *arrays, slopes[0] if shared else slopes)
        np.testing.assert_allclose(got.out, by_torch(problem, arrays, mask), rtol=0, atol=1e-13)


def test_documents_are_packed_sequences_apart():
    """Of one batch row: documents of 2, 3 and 1 queries with 4, 0 and 5 keys."""
    problem = AttentionProblem(1, 4, 2, 6, 9, 16, term=ScoreTerm("documents"))
    q, k, v = arrays_of(problem)
    ids = np.repeat([8, 3, 5, 8, 5], [2, 3, 1, 4, 5])[None]
    packed = AttentionProblem.varlen((2, 3, 1), (4, 0, 5), nheads=4, nheads_kv=2, head_dim=16)
    got = attention(problem, q, k, v, ids)
    want = attention(packed, q[0], k[0], v[0])
    np.testing.assert_allclose(got.out[0], want.out, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got.lse[0], want.lse, rtol=0, atol=1e-14)


def test_slopes_of_packed_sequences_count_from_each_ones_last_key():
    packed = AttentionProblem.varlen((2, 3), (4, 6), nheads=2, nheads_kv=2, head_dim=16, term=ScoreTerm("alibi", "b"))
    q, k, v = arrays_of(packed)
    slopes = np.array([0.5, 0.25])
    got = attention(packed, q, k, v, slopes)
    for rows, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 10))):
        alone = AttentionProblem(1, 2, 2, rows.stop - rows.start, keys.stop - keys.start, 16, term=packed.term)
        want = attention(alone, q[None, rows], k[None, keys], v[None, keys], slopes)
        np.testing.assert_array_equal(got.out[rows], want.out[0])


def test_a_hidden_key_is_hidden_whatever_its_score_and_a_row_without_one_is_empty():
    problem = AttentionProblem(1, 1, 1, 2, 2, 8, term=ScoreTerm("attn_mask", "bh"))
    q, k, v = arrays_of(problem)
    k[0, 1] = np.inf
    out, lse = attention(problem, q, k, v, np.array([[[[True, False], [False, False]]]]))
    np.testing.assert_array_equal(out[0, 0], v[0, 0])
    assert not out[0, 1].any()
    assert np.isneginf(lse[0, 0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_with_a_term_is_read_back_from_its_json_and_one_without_says_nothing_of_it(kind):
    problem = replace(PLAIN, term=ScoreTerm(kind, values=VALUES[kind][-1]))
    assert AttentionProblem.from_json(problem.to_json()) == problem
    assert problem.serving == {kind}
    assert "term" not in PLAIN.to_json()
    assert "term" not in repr(PLAIN)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "mask"}, "kind of a term must be one of bias, .*, got 'mask'"),
        ({"kind": "bias", "shared": "hb"}, "shared axes of bias must be of 'bhqk' in this order, got 'hb'"),
        ({"kind": "documents", "shared": "b"}, "shared axes of documents must be of '' in this order, got 'b'"),
        ({"kind": "alibi", "values": "lowest"}, "values of alibi must be one of plain, large, neutral, got 'lowest'"),
    ],
)
def test_a_wrong_term_is_refused_with_its_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        ScoreTerm(**fields)


def test_a_term_is_not_for_e4m3_or_a_cache_and_packed_for_slopes_alone():
    with pytest.raises(ValueError, match="not for e4m3 or a cache, got e4m3"):
        replace(PLAIN, dtype="e4m3", term=ScoreTerm("bias"))
    with pytest.raises(ValueError, match="of packed sequences only alibi is a term, got attn_mask"):
        AttentionProblem.varlen((2,), (3,), nheads=1, nheads_kv=1, head_dim=8, term=ScoreTerm("attn_mask"))
    with pytest.raises(ValueError, match=r"sinks must be given .*, and so must a term: it has term, got 0"):
        attention(replace(PLAIN, term=ScoreTerm("bias")), *arrays_of(PLAIN))
    with pytest.raises(ValueError, match=r"term must have shape \(2, 4, 5, 9\), got \(5, 9\)"):
        attention(replace(PLAIN, term=ScoreTerm("bias")), *arrays_of(PLAIN), np.zeros((5, 9)))


def bound_of(term: ScoreTerm, values: np.ndarray, model: KernelModel):
    problem = replace(PLAIN, term=term)
    q, k, v = (x.astype(np.float16) for x in arrays_of(problem))
    return forward_bound(problem, Operands(q, k, v, term=values), model)


def test_the_bound_grows_with_a_bias_is_that_of_none_at_zero_nearly_and_0_in_rows_without_a_key():
    model = KernelModel.any_order("fp16", "fp16")
    bias = np.zeros((1, 1, 1, 9), np.float32)
    term = ScoreTerm("bias_fp32", "bhq")
    none = bound_of(ScoreTerm("attn_mask", "bhqk"), np.ones((1, 1, 1, 1), bool), model)
    least, large = bound_of(term, bias, model), bound_of(term, bias + 1000, model)
    assert np.all(least.lse >= none.lse)
    assert np.all(least.lse <= 1.5 * none.lse)
    assert np.all(large.lse > least.lse + 1000 * 2.0**-24)
    assert np.all(large.lse < least.lse + 1000 * 2.0**-19)
    empty = bound_of(term, bias - np.inf, model)
    assert not empty.out.any()
    assert not empty.lse.any()


def test_the_bound_takes_a_formats_least_number_for_minus_infinity_beside_a_key_and_promises_nothing_without():
    model = KernelModel.any_order("fp16", "fp16")
    least = np.finfo(np.float32).min
    bias = np.array([0, least, 0, least, 0, 0, 0, 0, 0], np.float32).reshape(1, 1, 1, 9)
    term = ScoreTerm("bias_fp32", "bhq")
    for got, want in zip(
        bound_of(term, bias, model), bound_of(term, np.where(bias < 0, -np.inf, bias), model), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert np.isinf(bound_of(term, np.full_like(bias, least), model).out).all()


def test_scores_kept_in_16_bits_are_rounded_with_their_bias():
    term = ScoreTerm("bias_fp32", "bhq")
    bias = np.full((1, 1, 1, 9), 40, np.float32)
    kept = replace(KernelModel.any_order("fp16", "fp16"), scores="fp16")
    assert np.all(bound_of(term, bias, kept).lse > 40 * 2.0**-11)


def test_what_slopes_add_is_0_on_the_diagonal_of_the_last_query_and_key():
    problem = AttentionProblem(1, 1, 1, 3, 5, 8, term=ScoreTerm("alibi", "b"))
    (seq,) = problem.sequences()
    want = -0.5 * np.array([[2, 1, 0, 1, 2], [3, 2, 1, 0, 1], [4, 3, 2, 1, 0]])
    np.testing.assert_array_equal(added(problem, np.array([0.5]), seq, 0), want)
