"""Quantised operands: what a descale covers, how far values may move, and what must not change at all."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import (
    QuantScheme,
    condition,
    descales_of,
    prepare,
    quantize_qkv,
    round_operands,
)
from fa3_reference.scales import ROUNDINGS

GRANULARITIES = ("tensor", "head", "query_head", "block", "row")
PROBLEMS = {
    "batched": AttentionProblem(2, 4, 2, 9, 13, 8, head_dim_v=6, dtype="e4m3", causal=True),
    "varlen": AttentionProblem.varlen((5, 0, 9), (7, 11, 0), nheads=2, nheads_kv=1, head_dim=8, dtype="e4m3"),
    "no_keys": AttentionProblem(1, 1, 1, 3, 0, 8, dtype="e4m3"),
}


def _inputs(problem: AttentionProblem, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (rng.standard_normal(s) * np.exp(2 * rng.standard_normal((*s[:-1], 1))) for s in shapes)
    return q, k, v


schemes = st.builds(
    QuantScheme,
    granularity=st.sampled_from(GRANULARITIES),
    block_rows_q=st.integers(1, 20),
    block_rows_k=st.integers(1, 20),
    block_rows_v=st.integers(1, 20),
    power_of_two=st.booleans(),
    hadamard_seed=st.none() | st.integers(0, 2**40),
    k_mean=st.booleans(),
)


def _row_descales(problem: AttentionProblem, operands: Operands) -> dict[str, np.ndarray]:
    """Each operand's descale of every element: what dequantising ones would give."""
    ones = {
        name: np.ones_like(getattr(operands, name).astype(np.float32)).astype(FORMATS["e4m3"].dtype) for name in "qkv"
    }
    values = Operands(ones["q"], ones["k"], ones["v"], operands.q_descale, operands.k_descale, operands.v_descale)
    return dict(zip("qkv", values.dequantized(problem), strict=True))


def _descales(operands: Operands) -> list[np.ndarray]:
    return [x.values for x in (operands.q_descale, operands.k_descale, operands.v_descale) if x is not None]


def test_a_tensor_has_one_scale_for_its_whole_layer_batch_and_heads_included():
    problem = PROBLEMS["batched"]
    arrays = _inputs(problem)
    for values, x in zip(_descales(prepare(problem, *arrays, QuantScheme("tensor")).operands), arrays, strict=True):
        assert values.shape[0] == 2
        assert set(values.ravel()) == {descales_of(np.abs(x).max())[()]}


def test_query_heads_have_scales_of_their_own_as_if_each_had_its_own_keys():
    """With K and V repeated for every query head a scale per kv head is one per query head."""
    problem = PROBLEMS["batched"]
    q, k, v = _inputs(problem)
    each = _descales(prepare(problem, q, k, v, QuantScheme("query_head")).operands)
    shared = _descales(prepare(problem, q, k, v, QuantScheme("head")).operands)
    wide = dataclasses.replace(problem, nheads_kv=problem.nheads)
    repeated = [np.repeat(x, problem.group, axis=2) for x in (k, v)]
    assert np.array_equal(each[0], _descales(prepare(wide, q, *repeated, QuantScheme("head")).operands)[0])
    assert np.unique(each[0]).size == problem.batch * problem.nheads
    assert all(np.array_equal(a, b) for a, b in zip(each[1:], shared[1:], strict=True))


def test_scales_by_kv_head_are_refused_where_query_heads_have_their_own():
    problem = PROBLEMS["batched"]
    for granularity in ("tensor", "head"):
        q_descale = prepare(problem, *_inputs(problem), QuantScheme(granularity)).operands.q_descale
        assert np.array_equal(np.repeat(q_descale.by_kv_head(2), 2, axis=1), q_descale.values[..., 0])
    for granularity in ("query_head", "row"):
        q_descale = prepare(problem, *_inputs(problem), QuantScheme(granularity)).operands.q_descale
        with pytest.raises(ValueError, match=r"one for each \(sequence, kv head\)"):
            q_descale.by_kv_head(2)


@given(name=st.sampled_from(sorted(PROBLEMS)), scheme=schemes, seed=st.integers(0, 2**32))
def test_dequantised_operands_are_within_half_an_ulp_of_the_conditioned_inputs(name, scheme, seed):
    problem = PROBLEMS[name]
    q, k, v = _inputs(problem, seed)
    operands = quantize_qkv(problem, q, k, v, scheme).operands
    operands.check(problem)
    conditioned = condition(problem, q, k, scheme)
    descales = _row_descales(problem, operands)
    for which, x, got in zip("qkv", (conditioned.q, conditioned.k, v), operands.dequantized(problem), strict=True):
        allowed = np.maximum(2**-4 * np.abs(x), 2**-10 * descales[which])
        assert np.all(np.abs(got - x) <= allowed * (1 + 2**-20)), f"{which} of {problem} under {scheme}"


@given(name=st.sampled_from(sorted(PROBLEMS)), scheme=schemes, seed=st.integers(0, 2**32))
def test_conditioning_leaves_attention_unchanged_but_for_the_lse_shift(name, scheme, seed):
    problem = PROBLEMS[name]
    q, k, v = _inputs(problem, seed)
    q, k = np.clip(q, -5, 5), np.clip(k, -5, 5)
    before = attention(problem, q, k, v)
    conditioned = condition(problem, q, k, scheme)
    after = attention(problem, conditioned.q, conditioned.k, v)
    shift = 0.0 if conditioned.lse_shift is None else conditioned.lse_shift
    np.testing.assert_allclose(after.out, before.out, rtol=0, atol=1e-11 * (1 + np.abs(v).max(initial=0.0)))
    np.testing.assert_allclose(after.lse + shift, before.lse, rtol=0, atol=1e-11)
    assert (conditioned.lse_shift is not None) == scheme.k_mean


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_descale_is_amax_over_448_of_exactly_what_it_covers(granularity):
    problem = PROBLEMS["batched"]
    q, k, v = _inputs(problem)
    scheme = QuantScheme(granularity, block_rows_q=4, block_rows_k=5, block_rows_v=13)
    operands = quantize_qkv(problem, q, k, v, scheme).operands
    assert operands.q_descale is not None
    assert operands.k_descale is not None
    for batch in range(2):
        for head in range(4):
            covered = {
                "tensor": [q],
                "head": [q[batch, :, 2 * (head // 2) : 2 * (head // 2) + 2]],
                "query_head": [q[batch, :, head]],
                "block": [q[batch, 0:4, head], q[batch, 4:8, head], q[batch, 8:9, head]],
                "row": list(q[batch, :, head]),
            }[granularity]
            want = [np.float32(np.abs(x).max() / 448) for x in covered]
            np.testing.assert_array_equal(operands.q_descale.values[batch, head], want)
    heads = {"tensor": np.full((2, 2), np.abs(k).max()), "head": np.abs(k).max(axis=(1, 3))}
    if granularity in heads:
        np.testing.assert_array_equal(operands.k_descale.values[:, :, 0], (heads[granularity] / 448).astype(np.float32))


@given(amax=st.floats(0, 1e40), k=st.integers(-100, 100))
def test_power_of_two_descale_is_the_smallest_that_does_not_saturate(amax, k):
    for x in (amax, 448 * 2.0**k):
        descale = float(descales_of(np.array([x]), "power_of_two")[0])
        assert np.frexp(descale)[0] == 0.5
        if x > 448 * 2.0**-126:
            assert descale / 2 * 448 < x <= descale * 448


def test_power_of_two_scaling_of_representable_values_is_exact():
    problem = AttentionProblem(1, 1, 1, 2, 4, 8, dtype="e4m3")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-8, 9, s) * 2.0**-5 for s in (problem.q_shape, problem.k_shape, problem.v_shape)]
    quantized = quantize_qkv(problem, *arrays, QuantScheme("tensor", power_of_two=True))
    for got, want in zip(quantized.operands.dequantized(problem), arrays, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("amax", "descale"),
    [(0.0, 1.0), (448.0, 1.0), (896.0, 2.0), (5e-324, 2.0**-126), (1e-40, 2.0**-126)],
)
def test_descale_of_zero_tiny_and_round_amax(amax, descale):
    for rounding in ROUNDINGS:
        assert descales_of(np.array([amax]), rounding)[0] == descale


def test_descale_beyond_float32_is_refused():
    with pytest.raises(ValueError, match=r"largest float32, got max\|x\| = 1e\+300"):
        descales_of(np.array([1.0, 1e300]))


def test_largest_element_becomes_448():
    problem = PROBLEMS["batched"]
    q, k, v = _inputs(problem)
    for granularity in GRANULARITIES:
        operands = quantize_qkv(problem, q, k, v, QuantScheme(granularity)).operands
        for x in (operands.q, operands.k, operands.v):
            assert np.abs(x.astype(np.float64)).max() == 448


def test_k_mean_removes_a_common_offset_of_all_keys():
    problem = PROBLEMS["varlen"]
    q, k, v = _inputs(problem)
    scheme = QuantScheme("head", k_mean=True)
    plain = quantize_qkv(problem, q, k, v, scheme)
    moved = quantize_qkv(problem, q, k + 64.0, v, scheme)
    assert plain.lse_shift is not None
    assert moved.lse_shift is not None
    np.testing.assert_allclose(
        moved.operands.dequantized(problem)[1],
        plain.operands.dequantized(problem)[1],
        atol=2**-4 * np.abs(k).max(),
    )
    shift = problem.softmax_scale * 64.0 * q.sum(axis=-1).T
    has_keys = np.repeat(np.array(problem.seqlens_k) > 0, problem.seqlens_q)
    np.testing.assert_allclose(moved.lse_shift - plain.lse_shift, shift * has_keys, rtol=0, atol=1e-9)


def test_k_mean_with_softcap_is_refused():
    problem = AttentionProblem(1, 1, 1, 2, 2, 8, dtype="e4m3", softcap=30.0)
    with pytest.raises(ValueError, match=r"k_mean needs softcap = 0.*got 30\.0"):
        quantize_qkv(problem, *_inputs(problem), QuantScheme(k_mean=True))


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_operand_is_refused_by_name(operand, value):
    problem = PROBLEMS["batched"]
    arrays = _inputs(problem)
    arrays[operand].flat[5] = value
    with pytest.raises(ValueError, match=f"{'qkv'[operand]} must be finite"):
        quantize_qkv(problem, *arrays, QuantScheme())


def test_scheme_for_16_bit_problem_is_refused():
    problem = AttentionProblem(1, 1, 1, 2, 2, 8, dtype="bf16")
    with pytest.raises(ValueError, match="needs dtype e4m3, got bf16"):
        prepare(problem, *_inputs(problem), QuantScheme())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_prepare_without_a_scheme_rounds_once_to_the_dtype(dtype):
    problem = AttentionProblem(1, 2, 1, 3, 4, 8, dtype=dtype)
    arrays = _inputs(problem)
    arrays[1].flat[0] = 1e6
    operands, lse_shift = prepare(problem, *arrays)
    operands.check(problem)
    assert lse_shift is None
    assert operands.k_descale is None
    for got, x in zip((operands.q, operands.k, operands.v), arrays, strict=True):
        np.testing.assert_array_equal(got.astype(float), encode(x, FORMATS[dtype], "ieee").astype(float))
    np.testing.assert_equal(operands.k.astype(float).flat[0], {"fp16": np.inf, "bf16": 999424.0, "e4m3": np.nan}[dtype])


def test_operand_of_the_wrong_shape_is_refused_by_name():
    problem = PROBLEMS["batched"]
    q, k, v = _inputs(problem)
    for function in (round_operands, prepare):
        with pytest.raises(ValueError, match="v must have shape"):
            function(problem, q, k, k)
    with pytest.raises(ValueError, match="v must have shape"):
        quantize_qkv(problem, q, k, v[:1], QuantScheme())


@given(scheme=schemes)
def test_scheme_survives_json(scheme):
    assert QuantScheme.from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be a JSON object, got list"),
        ({"granularity": "channel"}, "granularity must be one of tensor, head, query_head, block, row, got 'channel'"),
        ({"granularity": ["head"]}, "granularity must be one of"),
        ({"grain": "head", "x": 1}, "has no field 'grain', 'x'"),
        ({"block_rows_k": 0}, "block_rows_k must be a positive integer, got 0"),
        ({"block_rows_v": True}, "block_rows_v must be a positive integer, got True"),
        ({"block_rows_q": 1.0}, "block_rows_q must be a positive integer"),
        ({"power_of_two": 1}, "power_of_two must be true or false, got 1"),
        ({"hadamard_seed": -1}, "hadamard_seed must be an integer >= 0 or null, got -1"),
        ({"hadamard_seed": "0"}, "hadamard_seed must be"),
        ({"k_mean": None}, "k_mean must be true or false"),
    ],
)
def test_malformed_scheme_is_refused_in_one_line(data, message):
    with pytest.raises(ValueError, match=message) as caught:
        QuantScheme.from_json(data)
    assert "\n" not in str(caught.value)
