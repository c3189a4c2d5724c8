"""Calls whose outputs name addresses: the truth has them, and whoever reads another place has not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3verify.properties.addressed_calls import addressed_gradients
from fa3verify.properties.addresses import Addressed, addressed

HEADS = {"nheads": 4, "nheads_kv": 2, "head_dim": 64}
PLAIN = AttentionProblem(2, seqlen_q=30, seqlen_k=190, **HEADS)
MASKED = (
    replace(PLAIN, causal=True),
    replace(PLAIN, seqlen_q=300, causal=True),  # rows without a key
    replace(PLAIN, window=(20, 3)),
    AttentionProblem.varlen((3, 0, 5), (9, 0, 700), causal=True, **HEADS),
)
FORWARDS = (
    PLAIN,
    *MASKED,
    replace(PLAIN, seqlen_k=9000, dtype="bf16"),
    replace(PLAIN, seqlen_k=9000, dtype="e4m3"),
    replace(PLAIN, head_dim=96, head_dim_v=40, sinks=True),
    replace(PLAIN, attention_chunk=50),
    AttentionProblem.varlen(
        (3, 2, 5), (9, 30, 700), causal=True, cache=Cache(16, new=(2, 3, 5), rotary_dim=64), **HEADS
    ),
    AttentionProblem.varlen((2, 2), (9, 30), cache=Cache(16, fp8="head"), **HEADS),
)


def _forward(call: Addressed, **changes: np.ndarray) -> dict[str, np.ndarray]:
    problem = call.problem
    found = attention(problem, *replace(call.operands, **changes).dequantized(problem))
    return {"out": found.out, "lse": found.lse}


def _gradients(call: Addressed, **changes: np.ndarray) -> dict[str, np.ndarray]:
    problem, o = call.problem, replace(call.operands, **changes)
    q, k, v, dout = (x.astype(np.float64) for x in (o.q, o.k, o.v, o.dout))
    found = attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v), o.dlse)
    return {name: getattr(found, name) for name in ("dq", "dk", "dv")}


@pytest.mark.parametrize("problem", FORWARDS)
@pytest.mark.parametrize("alike", ["", "batch", "heads", "queries"])
def test_the_truth_names_the_addresses(problem, alike):
    call = addressed(problem, seed=3, alike=alike)
    assert call.violation("the truth", _forward(call)) is None


@pytest.mark.parametrize("problem", [PLAIN, *MASKED, replace(PLAIN, head_dim=96, dtype="bf16")])
@pytest.mark.parametrize("given", [{}, {"alike": "dout"}, {"of_lse": True}])
def test_the_gradients_of_the_truth_name_the_addresses(problem, given):
    call = addressed_gradients(problem, seed=3, **given)
    assert call.violation("the truth", _gradients(call)) is None


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_place_that_is_read_for_another_shows_in_outputs_and_gradients(name, axis):
    """Of a batch, a head or a token, the last is read as the one in front of it."""
    for call, run in ((addressed(PLAIN), _forward), (addressed_gradients(PLAIN), _gradients)):
        x = np.moveaxis(getattr(call.operands, name).copy(), axis, 0)
        x[-1] = x[-2]
        assert call.violation("wrong", run(call, **{name: np.moveaxis(x, 0, axis)})) is not None


def test_a_row_checks_hundreds_of_keys_where_they_are_many():
    """A key of 2,000 that is read for its neighbour is seen by 60 rows, but for those that attend to an end."""
    problem = replace(PLAIN, batch=1, seqlen_k=2000)
    call = addressed(problem)
    seen = 0
    for key in np.random.default_rng(0).permutation(problem.seqlen_k)[:40]:
        v = call.operands.v.copy()
        v[:, key] = v[:, key - 1]
        seen += call.violation("wrong", _forward(call, v=v)) is not None
    assert seen >= 34


def test_what_is_the_same_can_be_expanded():
    for alike, name, axis in (("batch", "k", 0), ("heads", "v", 2), ("queries", "q", 2)):
        x = getattr(addressed(PLAIN, alike=alike).operands, name)
        assert np.array_equal(x, np.repeat(np.take(x, [0], axis), x.shape[axis], axis))
    assert (addressed_gradients(PLAIN, alike="dout").operands.dout == 1).all()
