"""Caches: what is moved comes back, what lies behind is nobody's, and only a rotation changes a value."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.config import default_config
from fa3_reference import prepare
from fa3_reference.attention import attention
from fa3_reference.cache import Cache, check_written, gathered, in_cache, rotary_tables, rotated, serve
from fa3_reference.problem import AttentionProblem

SIZES = {"nheads": 4, "nheads_kv": 2, "head_dim": 32, "dtype": "bf16"}


def _operands(problem: AttentionProblem, seed: int = 0):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]
    if problem.qv:
        arrays[1][..., -problem.head_dim_v :] = arrays[2]
    return prepare(problem, *arrays)[0]


@st.composite
def cached(draw: st.DrawFn) -> AttentionProblem:
    lengths = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=4))
    is_even = draw(st.booleans())
    queries = tuple(2 if is_even else n for n, _ in lengths)
    keys = tuple(n for _, n in lengths)
    pages = draw(st.sampled_from([0, 1, 5, 16]))
    new = tuple(draw(st.integers(0, n)) for n in keys) if draw(st.booleans()) else ()
    rows = {"indexed": draw(st.booleans())}
    if draw(st.booleans()):
        rows["leftpad"] = tuple(draw(st.integers(0, 21)) for _ in keys)
    behind = draw(st.sampled_from(["random", "nan"]))
    cache = Cache(pages, draw(st.integers(0, 3)), new, behind=behind, seed=draw(st.integers(0, 99)), **rows)
    dims = draw(st.sampled_from([{}, {"head_dim": 48, "head_dim_v": 32, "qv": True}]))
    return AttentionProblem.varlen(queries, keys, **SIZES | dims, causal=draw(st.booleans()), cache=cache)


@given(cached())
def test_keys_that_are_moved_to_a_cache_come_back(problem):
    operands = _operands(problem)
    k, v = gathered(problem, serve(problem, operands))
    np.testing.assert_array_equal(k, operands.k)
    np.testing.assert_array_equal(v, operands.v)


@given(cached())
def test_a_row_by_row_reader_of_the_call_finds_the_truth(problem):
    operands = _operands(problem)
    call = {
        name: x.astype(float) if x.dtype.kind == "V" or x.dtype.itemsize == 2 else x
        for name, x in serve(problem, operands).items()
    }
    want = attention(problem, *operands.dequantized(problem)).out
    group = problem.group
    done = 0
    for b, seq in enumerate(problem.sequences()):
        q = (
            call["q"][b]
            if "cu_seqlens_q" not in call
            else call["q"][call["cu_seqlens_q"][b] : call["cu_seqlens_q"][b + 1]]
        )
        pad = int(call["cache_leftpad"][b]) if "cache_leftpad" in call else 0
        news = call.get("cu_seqlens_k_new")
        keys, values = [], []
        for j in range(pad, int(call["cache_seqlens"][b])):
            if "page_table" in call:
                size = call["k_cache"].shape[1]
                row = call["cache_batch_idx"][b] if "cache_batch_idx" in call else b
                place = call["page_table"][row, j // size], j % size
            else:
                place = (call["cache_batch_idx"][b] if "cache_batch_idx" in call else b), j
            keys.append(call["k_cache"][place])
            values.append(call["v_cache"][place])
        if "k_new" in call:
            span = slice(news[b], news[b + 1]) if news is not None else b
            keys += list(call["k_new"][span])
            values += list(call["v_new"][span])
        assert len(keys) == seq.seqlen_k
        for i in range(seq.seqlen_q):
            for h in range(problem.nheads):
                s = np.array([k[h // group] @ q[i, h] for k in keys])
                if problem.qv:
                    qv = call["qv"][b] if "cu_seqlens_q" not in call else call["qv"][seq.q_start :]
                    s = s + np.array([v[h // group] @ qv[i, h] for v in values])
                if problem.causal:
                    s = s[: max(0, i + seq.seqlen_k - seq.seqlen_q + 1)]
                p = np.exp((s - s.max(initial=-1e300)) * problem.softmax_scale)
                out = sum((w * v[h // group] for w, v in zip(p, values, strict=False)), np.zeros(problem.head_dim_v))
                np.testing.assert_allclose(want[done, h], out / p.sum() if len(p) else out, atol=1e-12)
            done += 1


def test_equal_pages_are_one_page_and_lie_anywhere():
    problem = AttentionProblem.varlen((1, 1, 1), (40, 40, 33), **SIZES, cache=Cache(16, seed=3))
    operands = _operands(problem)
    for x in (operands.k, operands.v):
        x[40:72] = x[:32]  # the second sequence has the prefix of the first
    call = serve(problem, operands)
    table = call["page_table"]
    np.testing.assert_array_equal(table[0, :2], table[1, :2])
    assert table[0, 2] != table[1, 2]
    assert call["k_cache"].shape == (3 + 1 + 3 + 1, 16, 2, 32)
    assert sorted({*table[0, :3], *table[1, :3], *table[2, :3]}) != list(range(7)), "pages are shuffled"


def test_a_page_that_is_appended_to_is_shared_by_none():
    problem = AttentionProblem.varlen((1, 1), (20, 20), **SIZES, cache=Cache(16, new=(2, 2)))
    operands = _operands(problem)
    for x in (operands.k, operands.v):
        x[20:] = x[:20]
    table = serve(problem, operands)["page_table"]
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]


def test_pages_hold_keys_of_others_in_front_and_rows_of_a_table_that_are_nobodys():
    cache = Cache(16, 2, leftpad=(20, 0), indexed=True, behind="nan", seed=2)
    problem = AttentionProblem.varlen((1, 1), (20, 5), **SIZES, cache=cache)
    call = serve(problem, _operands(problem))
    assert call["page_table"].shape == (2 + 2, 3 + 2)
    row = call["page_table"][call["cache_batch_idx"][0]]
    held = np.isfinite(call["k_cache"].astype(float)).all(axis=(2, 3))
    assert held.sum() == 25, "a page in front is stored for nobody"
    assert [held[page].tolist() for page in row[1:3]] == [[False] * 4 + [True] * 12, [True] * 8 + [False] * 8]
    spare = [row[0], *row[3:], *call["page_table"][[b for b in range(4) if b not in call["cache_batch_idx"]]].ravel()]
    assert not held[spare].any()


def test_what_lies_behind_is_nan_where_that_is_asked():
    problem = AttentionProblem.varlen((1, 1), (5, 16), **SIZES, cache=Cache(16, behind="nan", new=(2, 0)))
    call = serve(problem, _operands(problem))
    finite = np.isfinite(call["k_cache"].astype(float)).all(axis=(2, 3)).sum()
    assert finite == 3 + 16
    np.testing.assert_array_equal(call["cache_seqlens"], [3, 16])


def _rotated_by_hand(x: np.ndarray, position: int, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    half = cos.shape[1]
    y = x.copy()
    for i in range(half):
        c, d = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        z = complex(x[c], x[d]) * complex(cos[position, i], sin[position, i])
        y[c], y[d] = z.real, z.imag
    return y


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pads", [(), (20, 3)])
def test_appended_keys_and_queries_are_rotated_by_their_places(interleaved, causal, pads):
    """As upstream does: seqlen_rotary of hopper/seqlen.h counts the keys of others in front."""
    cache = Cache(16, new=(3, 2), rotary_dim=16, interleaved=interleaved, leftpad=pads)
    problem = AttentionProblem.varlen((3, 2), (7, 2), **SIZES, causal=causal, cache=cache)
    operands = _operands(problem)
    cos, sin = (x.astype(float) for x in rotary_tables(problem))
    q, k = rotated(problem, operands.q, operands.k)
    for token, (start, step) in enumerate(((4, 0), (4, 1), (4, 2), (0, 0), (0, 1))):
        position = (start + step if causal else start) + (pads[token // 3] if pads else 0)
        for head in range(4):
            want = _rotated_by_hand(operands.q[token, head].astype(float), position, cos, sin, interleaved)
            np.testing.assert_allclose(q[token, head], want, atol=1e-15)
    for token, position in enumerate((None, None, None, None, 4, 5, 6, 0, 1)):
        x = operands.k[token, 1].astype(float)
        pad = pads[token // 7] if pads else 0
        want = x if position is None else _rotated_by_hand(x, position + pad, cos, sin, interleaved)
        np.testing.assert_allclose(k[token, 1], want, atol=1e-15)
    arrays = operands.dequantized(problem)
    plain = attention(replace(problem, cache=None), q, k, arrays[2])
    np.testing.assert_array_equal(attention(problem, *arrays).out, plain.out)


def test_a_batched_problem_is_packed_on_its_way_to_a_cache():
    problem = AttentionProblem(2, seqlen_q=3, seqlen_k=20, **SIZES)
    operands = _operands(problem)
    packed, moved = in_cache(problem, operands, Cache(8))
    assert packed.seqlens_k == (20, 20)
    call = serve(packed, moved)
    np.testing.assert_array_equal(call["q"], operands.q)
    np.testing.assert_array_equal(gathered(packed, call)[0].reshape(operands.k.shape), operands.k)
    assert in_cache(packed, moved, Cache())[0] is packed


def test_nan_among_the_values_that_are_appended_is_written_like_a_number():
    problem = AttentionProblem.varlen((2,), (20,), **SIZES, cache=Cache(8, new=(2,)))
    operands = _operands(problem)
    operands.v[-1] = np.nan
    call = serve(problem, operands)
    whole = serve(replace(problem, cache=Cache(8)), operands)
    check_written(problem, operands, call, (whole["k_cache"], whole["v_cache"]))
    with pytest.raises(RuntimeError, match="did not write"):
        check_written(problem, operands, call, (whole["k_cache"], call["v_cache"]))


ROTARY = Cache(8, new=(3,), rotary_dim=16)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cache", [Cache(8, new=(3,)), ROTARY], ids=["appended", "rotated"])
def test_an_appended_key_that_is_not_finite_hides_no_other_that_is_not_written(cache, special):
    problem = AttentionProblem.varlen((3,), (20,), **SIZES, cache=cache)
    operands = _operands(problem)
    operands.k[-1, 0, :2] = special
    call = serve(problem, operands)
    check_written(problem, operands, call, _left(problem, operands))
    for place, wrong in (((-2, 1, 3), 9), ((-1, 0, 0), 1), ((-1, 1, 5), np.nan)):
        with pytest.raises(RuntimeError, match="did not write"):
            check_written(problem, operands, call, _left(problem, operands, place, wrong))


@np.errstate(over="ignore", invalid="ignore")
def _left(problem, operands, place=(), value=None):
    """Return the cache that a call leaves which writes what it should, but for one number of K."""
    _, k = rotated(problem, operands.q, operands.k)
    written = replace(operands, k=k.astype(operands.k.dtype))
    if place:
        written.k[place] = value
    whole = serve(replace(problem, cache=replace(problem.cache, new=(), rotary_dim=0)), written)
    return whole["k_cache"], whole["v_cache"]


def test_a_rotated_key_that_its_format_cannot_hold_is_written_as_an_infinity():
    problem = AttentionProblem.varlen((3,), (20,), **SIZES | {"dtype": "fp16"}, cache=ROTARY)
    operands = _operands(problem)
    operands.k[...] = 60000
    left = _left(problem, operands)
    assert np.isinf(left[0].astype(float)).any()
    check_written(problem, operands, serve(problem, operands), left)
    place = tuple(np.argwhere(np.abs(rotated(problem, operands.q, operands.k)[1]) > 65520)[-1])
    for wrong in (1, np.nan, 60000):
        with pytest.raises(RuntimeError, match="did not write"):
            check_written(problem, operands, serve(problem, operands), _left(problem, operands, place, wrong))


def test_a_problem_with_a_cache_survives_json():
    cache = Cache(0, 2, (1, 0), leftpad=(0, 3), indexed=True, behind="nan", seed=5)
    problem = AttentionProblem.varlen((3, 1), (4, 7), **SIZES, cache=cache)
    assert AttentionProblem.from_json(json.loads(json.dumps(problem.to_json()))) == problem
    with pytest.raises(ValueError, match="wrong type"):
        AttentionProblem.from_json(problem.to_json() | {"cache": {"pages": 3}})


@pytest.mark.parametrize(
    ("cache", "word"),
    [
        ({"page_size": -1}, "page_size must be an integer >= 0, got -1"),
        ({"behind": "zero"}, "behind must be random or nan"),
        ({"rotary_dim": 8, "new": (1, 1)}, "rotary_dim must be a multiple of 16, got 8"),
        ({"rotary_dim": 16}, "needs keys that are appended"),
        ({"rotary_dim": 48, "new": (1, 1)}, "rotary_dim must be at most 32"),
        ({"new": (1,)}, "new must hold batch = 2 integers"),
        ({"new": (9, 1)}, "new must be at most seqlens_k"),
        ({"fp8": "block"}, "fp8 must be one of"),
        ({"fp8": "head", "new": (1, 1)}, "those of fp8 are not"),
        ({"indexed": 1}, "indexed must be a bool, got 1"),
    ],
)
def test_an_illegal_cache_is_refused_with_its_rule(cache, word):
    with pytest.raises(ValueError, match=word):
        AttentionProblem.varlen((1, 1), (4, 7), **SIZES, cache=Cache(**cache))


def test_a_batched_problem_has_no_cache_and_a_table_stays_inside():
    with pytest.raises(ValueError, match="a cache needs seqlens_q and seqlens_k"):
        AttentionProblem(2, seqlen_q=3, seqlen_k=20, **SIZES, cache=Cache())
    problem = AttentionProblem.varlen((1,), (40,), **SIZES, cache=Cache(16))
    call = serve(problem, _operands(problem))
    call["page_table"][0, 1] = 99
    with pytest.raises(ValueError, match=r"must lie in \[0, 4\)"):
        gathered(problem, call)
    for row in (-1, 1):
        with pytest.raises(ValueError, match=r"the row of sequence 0 must lie in \[0, 1\)"):
            gathered(problem, call | {"cache_batch_idx": np.array([row])})
    with pytest.raises(ValueError, match="nothing to gather"):
        gathered(replace(problem, cache=None), call)


def test_what_does_not_know_caches_refuses_them():
    problem = AttentionProblem.varlen((1,), (40,), **SIZES, cache=Cache(16))
    default_config(problem)
    with pytest.raises(ValueError, match=r"flash3 does not know paged$"):
        default_config(problem, family="flash3")
    padded = replace(problem, head_dim=128, head_dim_v=128, cache=Cache(16, leftpad=(3,), indexed=True))
    default_config(padded)
    default_config(replace(padded, cache=Cache(0, leftpad=(3,))), family="sglang")
    with pytest.raises(ValueError, match=r"sglang does not know leftpad in pages$"):
        default_config(padded, family="sglang")
