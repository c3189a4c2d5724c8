"""Gradients against the complex-step derivative of the forward, and their laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import AttentionGradients, attention_bwd, sinks_gradient
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm

STEP = 1e-60  # complex step: no cancellation, so no trade-off


def _inputs(problem: AttentionProblem, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, dout


def _gradients(problem: AttentionProblem, q, k, v, dout) -> AttentionGradients:
    return attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v))


def _complex_loss(problem: AttentionProblem, q, k, v, dout, dlse=None, sinks=None, bias=None) -> complex:
    """sum(out * dout) + sum(lse * dlse), dense and analytic in q, k, v, sinks and a bias."""
    loss = 0j
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        keys = np.arange(seq.seqlen_k)
        visible = (keys >= first[:, None]) & (keys < stop[:, None])
        for head in range(problem.nheads):
            q_h, dout_h = problem.rows_q(q, seq)[:, head], problem.rows_q(dout, seq)[:, head]
            k_h, v_h = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))
            s = problem.softmax_scale * (q_h @ k_h.T)
            s = problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s
            if bias is not None:
                own = np.broadcast_to(bias, (problem.batch, problem.nheads, *s.shape))[seq.index, head]
                p = np.where(visible & ~np.isneginf(own.real), np.exp(s + np.where(np.isneginf(own.real), 0, own)), 0)
            else:
                p = np.where(visible, np.exp(s), 0)
            row_sum = p.sum(axis=1) + (0 if sinks is None else np.exp(sinks[head]))
            p = p / np.where(row_sum == 0, 1, row_sum)[:, None]
            loss += np.sum((p @ v_h) * dout_h)
            if dlse is not None:
                seen = row_sum != 0
                loss += np.sum(np.log(row_sum[seen]) * problem.rows_lse(dlse, seq)[head][seen])
    return complex(loss)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    nheads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    rest = {
        "nheads": nheads_kv * group,
        "nheads_kv": nheads_kv,
        "head_dim": draw(st.sampled_from([2, 5])),
        "head_dim_v": draw(st.sampled_from([1, 4])),
        "causal": draw(st.booleans()),
        "window": draw(st.tuples(st.integers(-1, 5), st.integers(-1, 5))),
        "softcap": draw(st.sampled_from([0.0, 0.5, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 1.5])),
    }
    if draw(st.booleans()):
        lengths = [*draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=2)), (3, 4)]
        return AttentionProblem.varlen(tuple(a for a, _ in lengths), tuple(b for _, b in lengths), **rest)
    return AttentionProblem(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.integers(1, 6)),
        seqlen_k=draw(st.integers(0, 7)),
        **rest,
    )


def assert_derivatives(problem, gradients, values, directions, relative, **rest):
    """Each gradient, along its direction, is the complex-step derivative of the loss by its value."""
    for name, gradient in gradients.items():
        moved = values | {name: values[name] + 1j * STEP * directions[name]}
        want = _complex_loss(problem, **rest, **moved).imag / STEP
        got = float(np.sum(gradient * directions[name]))
        size = 1 + float(np.sum(np.abs(gradient * directions[name])))
        assert abs(got - want) <= relative * size, f"d{name}: got {got!r}, want {want!r} for {problem}"


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_gradients_equal_the_complex_step_derivative(problem, seed):
    q, k, v, dout = _inputs(problem, seed)
    gradients = dict(zip("qkv", _gradients(problem, q, k, v, dout), strict=True))
    directions = dict(zip("qkv", _inputs(problem, seed + 1), strict=False))
    assert_derivatives(problem, gradients, {"q": q, "k": k, "v": v}, directions, 1e-13, dout=dout)


@given(problem=problems(), seed=st.integers(0, 2**32), has_dlse=st.booleans())
def test_gradients_with_sinks_equal_the_complex_step_derivative(problem, seed, has_dlse):
    problem = replace(problem, sinks=True)
    rng = np.random.default_rng(seed)
    q, k, v, dout = _inputs(problem, seed)
    sinks = 3 * rng.standard_normal(problem.nheads)
    dlse = rng.standard_normal(problem.lse_shape) if has_dlse else None
    forward = attention(problem, q, k, v, sinks)
    gradients = dict(zip(("q", "k", "v"), attention_bwd(problem, q, k, v, dout, forward, dlse), strict=True))
    gradients["sinks"] = sinks_gradient(problem, sinks, dout, forward, dlse)
    directions = dict(zip(("q", "k", "v"), _inputs(problem, seed + 1), strict=False))
    directions["sinks"] = rng.standard_normal(problem.nheads)
    values = {"q": q, "k": k, "v": v, "sinks": sinks}
    assert_derivatives(problem, gradients, values, directions, 1e-12, dout=dout, dlse=dlse)


@given(
    problem=problems().filter(lambda problem: not problem.is_varlen and problem.seqlen_k),
    shared=st.sampled_from(["", "b", "h", "q", "k", "bh", "bhq", "hqk", "bhqk"]),
    hides=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gradients_with_a_bias_equal_the_complex_step_derivative(problem, shared, hides, seed):
    problem = replace(problem, term=ScoreTerm("bias_fp32", shared))
    rng = np.random.default_rng(seed)
    q, k, v, dout = _inputs(problem, seed)
    bias = 2 * rng.standard_normal(problem.term_shape)
    bias[rng.random(bias.shape) < 0.3 * hides] = -np.inf
    dlse = rng.standard_normal(problem.lse_shape)
    dbias = np.zeros(problem.term_shape)
    forward = attention(problem, q, k, v, bias)
    gradients = dict(zip("qkv", attention_bwd(problem, q, k, v, dout, forward, dlse, bias, dbias), strict=True))
    gradients["bias"] = dbias
    assert not dbias[np.isneginf(bias)].any()
    directions = dict(zip("qkv", _inputs(problem, seed + 1), strict=False))
    directions["bias"] = rng.standard_normal(problem.term_shape)
    values = {"q": q, "k": k, "v": v, "bias": bias}
    assert_derivatives(problem, gradients, values, directions, 1e-12, dout=dout, dlse=dlse)


def test_a_sink_of_minus_infinity_has_no_gradient():
    problem = AttentionProblem(1, 2, 1, 5, 3, 4, causal=True, sinks=True)
    q, k, v, dout = _inputs(problem, 0)
    sinks = np.array([-np.inf, 0.5])
    forward = attention(problem, q, k, v, sinks)
    got = sinks_gradient(problem, sinks, dout, forward, np.ones(problem.lse_shape))
    assert got[0] == 0
    assert got[1] != 0
    with pytest.raises(ValueError, match="sinks must be given where"):
        sinks_gradient(replace(problem, sinks=False), sinks, dout, forward)


@given(problem=problems(), seed=st.integers(0, 2**32), has_dout=st.booleans())
def test_gradients_of_the_lse_equal_the_complex_step_derivative(problem, seed, has_dout):
    q, k, v, dout = _inputs(problem, seed)
    dout, dlse = dout * has_dout, np.random.default_rng(seed).standard_normal(problem.lse_shape)
    gradients = attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v), dlse)
    directions = dict(zip(("q", "k", "v"), _inputs(problem, seed + 1), strict=False))
    for name, gradient in zip(("q", "k", "v"), gradients, strict=True):
        moved = {"q": q, "k": k, "v": v}
        moved[name] = moved[name] + 1j * STEP * directions[name]
        want = _complex_loss(problem, dout=dout, dlse=dlse, **moved).imag / STEP
        size = 1 + float(np.sum(np.abs(gradient * directions[name])))
        assert abs(float(np.sum(gradient * directions[name])) - want) <= 1e-13 * size, f"d{name} for {problem}"
    assert has_dout or not gradients.dv.any()


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_gradients_of_a_shared_kv_head_are_sums_over_its_query_heads(problem, seed):
    q, k, v, dout = _inputs(problem, seed)
    shared = _gradients(problem, q, k, v, dout)
    repeated_k, repeated_v = (np.repeat(x, problem.group, axis=-2) for x in (k, v))
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    single = AttentionProblem(**{**fields, "nheads_kv": problem.nheads})
    separate = _gradients(single, q, repeated_k, repeated_v, dout)
    np.testing.assert_allclose(shared.dq, separate.dq, rtol=0, atol=1e-13)
    for got, parts in ((shared.dk, separate.dk), (shared.dv, separate.dv)):
        heads = parts.reshape(*parts.shape[:-2], problem.nheads_kv, problem.group, parts.shape[-1])
        np.testing.assert_allclose(got, heads.sum(axis=-2), rtol=0, atol=1e-12)


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_gradients_are_linear_in_dout(problem, seed):
    q, k, v, dout = _inputs(problem, seed)
    other = _inputs(problem, seed + 1)[3]
    parts = [_gradients(problem, q, k, v, x) for x in (dout, other, dout - 2 * other)]
    for a, b, c in zip(*parts, strict=True):
        np.testing.assert_allclose(c, a - 2 * b, rtol=0, atol=1e-12)


@given(problem=problems(), seed=st.integers(0, 2**32))
def test_scores_gradient_sums_to_zero_over_keys(problem, seed):
    # a common shift of all keys changes no probability; a softcap breaks the symmetry
    if problem.softcap:
        return
    q, k, v, dout = _inputs(problem, seed)
    dq = _gradients(problem, q, k, v, dout).dq
    np.testing.assert_allclose(_gradients(problem, q, k + 1.0, v, dout).dq, dq, rtol=0, atol=1e-12)


@given(problem=problems(), seed=st.integers(0, 2**32), poison=st.sampled_from([np.nan, np.inf]))
def test_a_poisoned_key_reaches_only_rows_that_see_it_and_keys_those_rows_see(problem, seed, poison):
    q, k, v, dout = _inputs(problem, seed)
    seq = next((s for s in problem.sequences() if s.seqlen_k and s.seqlen_q), None)
    if seq is None:
        return
    clean = _gradients(problem, q, k, v, dout)
    key = int(np.random.default_rng(seed).integers(seq.seqlen_k))
    problem.rows_k(k, seq)[key], problem.rows_k(v, seq)[key] = poison, poison
    dirty = _gradients(problem, q, k, v, dout)
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
    sees = (first <= key) & (key < stop)
    touched = np.zeros(seq.seqlen_k, bool)
    for row in np.flatnonzero(sees):
        touched[first[row] : stop[row]] = True
    for got, want, rows, hit in (
        (dirty.dq, clean.dq, problem.rows_q, sees),
        (dirty.dk, clean.dk, problem.rows_k, touched),
        (dirty.dv, clean.dv, problem.rows_k, touched),
    ):
        np.testing.assert_allclose(rows(got, seq)[~hit], rows(want, seq)[~hit], rtol=0, atol=1e-12)


def test_empty_rows_have_zero_gradient_and_add_nothing():
    problem = AttentionProblem(1, 1, 1, 5, 2, 4, causal=True)  # rows 0, 1, 2 see no key
    q, k, v, dout = _inputs(problem, 0)
    clean = _gradients(problem, q, k, v, dout)
    q[:, :3], dout[:, :3] = np.nan, np.inf
    dlse = np.zeros(problem.lse_shape)
    dlse[..., :3] = np.nan
    dirty = attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v), dlse)
    assert np.all(dirty.dq[:, :3] == 0)
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)


def test_tiles_do_not_show_in_the_gradients():
    # 1100 rows make three tiles of rows: reversing rows and keys of a full problem moves the seams
    problem = AttentionProblem(1, 1, 1, 1100, 70, 4)
    q, k, v, dout = _inputs(problem, 5)
    plain = _gradients(problem, q, k, v, dout)
    mirrored = _gradients(problem, *(x[:, ::-1] for x in (q, k, v, dout)))
    for a, b in zip(plain, mirrored, strict=True):
        np.testing.assert_allclose(a, b[:, ::-1], rtol=0, atol=1e-12)


def test_array_of_the_wrong_shape_is_refused_by_name():
    problem = AttentionProblem(1, 1, 1, 3, 4, 8)
    q, k, v, dout = _inputs(problem, 0)
    with pytest.raises(ValueError, match="dout must have shape"):
        attention_bwd(problem, q, k, v, dout[:, :2], attention(problem, q, k, v))
