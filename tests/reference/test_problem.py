"""Problem definition: every illegal value is refused by name, shapes and visibility follow FlashAttention-3."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.backward import backward_config
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_simulator.launch import check_launch

SMALL = {"batch": 2, "nheads": 4, "nheads_kv": 2, "seqlen_q": 3, "seqlen_k": 5, "head_dim": 64}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"nheads": 3}, "nheads must be a multiple of nheads_kv, got 3 and 2"),
        ({"head_dim": 577}, "head_dim must be at most 576"),
        ({"head_dim_v": 513}, "head_dim_v must be at most 512"),
        ({"sinks": 1}, "sinks must be a bool, got 1"),
        ({"attention_chunk": -1}, "attention_chunk must be an integer >= 0, got -1"),
        ({"qv": True}, "qv needs 16 bits and a head_dim of more than head_dim_v"),
        ({"head_dim": 0}, "head_dim must be a positive integer"),
        ({"batch": -1}, "batch"),
        ({"batch": True}, "batch"),
        ({"seqlen_q": 0}, "seqlen_q"),
        ({"dtype": "fp64"}, "dtype"),
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"softmax_scale": float("inf")}, "softmax_scale"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
        ({"seqlens_q": (3, 3)}, "together"),
    ],
)
def test_an_illegal_value_is_refused_with_its_rule(change, word):
    with pytest.raises(ValueError, match=word):
        AttentionProblem(**(SMALL | change))


@pytest.mark.parametrize(
    ("seqlens_q", "seqlens_k"),
    [((3, -1), (4, 4)), ((0, 0), (4, 4)), ((3, 4), (4,))],
    ids=["negative", "no query", "count"],
)
def test_illegal_lengths_are_refused(seqlens_q, seqlens_k):
    with pytest.raises(ValueError, match="seqlens"):
        AttentionProblem.varlen(seqlens_q, seqlens_k, nheads=1, nheads_kv=1, head_dim=64)


@given(
    *(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.booleans()),
    *(st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 4)),
)
def test_visible_keys_are_those_of_the_definition(seqlen_q, seqlen_k, top_left, causal, left, right, chunk):
    problem = AttentionProblem(
        *(1, 1, 1, seqlen_q, seqlen_k, 64),
        causal=causal,
        window=(left, right),
        top_left=top_left,
        attention_chunk=chunk,
    )
    first, stop = problem.visible_keys(np.arange(seqlen_q), seqlen_q, seqlen_k)
    for i in range(seqlen_q):
        diagonal = i if top_left else i + seqlen_k - seqlen_q
        seen = [
            j
            for j in range(seqlen_k)
            if (not causal or j <= diagonal)
            and (left < 0 or j >= diagonal - left)
            and (right < 0 or j <= diagonal + right)
            and (not chunk or j // chunk == diagonal // chunk)
        ]
        assert seen == list(range(first[i], stop[i]))


@pytest.mark.parametrize("change", [{"sinks": True}, {"attention_chunk": 2}, {"head_dim_v": 32, "qv": True}])
def test_what_does_not_know_a_field_of_serving_refuses_it(change):
    problem = AttentionProblem(**(SMALL | change))
    (name,) = change.keys() - {"head_dim_v"}
    asked_of_rows = () if name != "qv" else (lambda problem: check_launch(problem, "row"),)
    for asked in (
        lambda problem: default_config(problem, family="flash2"),
        lambda problem: traits_of("flash2").check_reproduced(problem),
        lambda problem: backward_config(problem, family="flash3.dew"),
        lambda problem: check_launch(problem, "key"),
        *asked_of_rows,
    ):
        asked(AttentionProblem(**SMALL))
        with pytest.raises(ValueError, match=f"does not know {name}$"):
            asked(problem)


@pytest.mark.parametrize("change", [{"head_dim_v": 32, "qv": True}])
def test_our_kernels_refuse_what_of_serving_they_do_not_know(change):
    for asked in (default_config, config_of, traits_of(OURS).check_reproduced):
        asked(AttentionProblem(**SMALL, sinks=True))
        with pytest.raises(ValueError, match="does not know"):
            asked(AttentionProblem(**(SMALL | change)))


def test_a_problem_survives_json():
    for problem in (
        AttentionProblem(**SMALL, causal=True, window=(3, -1), softcap=2.5),
        AttentionProblem.varlen((3, 0), (4, 7), nheads=2, nheads_kv=1, head_dim=80, dtype="e4m3"),
        AttentionProblem(1, 2, 1, 3, 4, 576, head_dim_v=512, sinks=True, attention_chunk=2, qv=True),
    ):
        assert AttentionProblem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@pytest.mark.parametrize("values", [[], {"batch": 1}, {**SMALL, "depth": 3}, {**SMALL, "batch": "two"}])
def test_a_foreign_problem_is_refused(values):
    with pytest.raises(ValueError, match=r"problem|batch"):
        AttentionProblem.from_json(values)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_descales_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match="finite and > 0"):
        Descale(np.full((1, 1, 1), value, np.float32))


def test_operands_that_do_not_fit_are_refused():
    problem = AttentionProblem(**SMALL, dtype="e4m3")
    e4m3 = ml_dtypes.float8_e4m3fn
    q, k, v = np.zeros(problem.q_shape, e4m3), np.zeros(problem.k_shape, e4m3), np.zeros(problem.v_shape, e4m3)
    Operands(q, k, v).check(problem)
    with pytest.raises(ValueError, match="q must have shape"):
        Operands(k, k, v).check(problem)
    with pytest.raises(ValueError, match="v must have dtype"):
        Operands(q, k, v.astype(np.float16)).check(problem)
    with pytest.raises(ValueError, match="k_descale must have shape"):
        Operands(q, k, v, k_descale=Descale(np.ones((2, 4, 1), np.float32))).check(problem)


def test_dequantising_applies_each_block_its_own_factor():
    problem = AttentionProblem(1, 1, 1, 1, 5, 2, dtype="e4m3")
    ones = np.ones((1, 5, 1, 2), ml_dtypes.float8_e4m3fn)
    descale = Descale(np.array([[[2.0, 0.5, 4.0]]], np.float32), block_rows=2)
    _, k, _ = Operands(ones[:, :1], ones, ones, k_descale=descale).dequantized(problem)
    assert k[0, :, 0, 0].tolist() == [2.0, 2.0, 0.5, 0.5, 4.0]
