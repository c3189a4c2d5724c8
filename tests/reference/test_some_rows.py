"""Truth and bound of some queries alone are those that all queries have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe

SIZES: dict[str, Any] = {"batch": 2, "nheads": 4, "nheads_kv": 2, "seqlen_q": 40, "seqlen_k": 30, "head_dim": 16}
ROWS = np.array([0, 3, 9, 10, 11, 12, 38, 39])
PROBLEMS = {
    "plain": AttentionProblem(**SIZES),
    "causal": AttentionProblem(**SIZES, causal=True),
    "window_sinks": AttentionProblem(**SIZES, window=(3, 1), sinks=True),
    "softcap": AttentionProblem(**SIZES, softcap=1.0),
    **{kind: AttentionProblem(**SIZES, causal=True, term=ScoreTerm(kind)) for kind in ("bias", "alibi", "documents")},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_queries_alone_have_the_truth_and_the_bound_of_all_queries(name: str) -> None:
    problem = PROBLEMS[name]
    operands = Case("twin.fp16", problem, Recipe("normal", {}, 4)).operands()
    exact = operands.dequantized(problem)
    whole, some = attention(problem, *exact), attention(problem, *exact, only=ROWS)
    np.testing.assert_allclose(some.out[:, ROWS], whole.out[:, ROWS], rtol=1e-12)  # a product of fewer rows
    np.testing.assert_allclose(some.lse[..., ROWS], whole.lse[..., ROWS], rtol=1e-12)
    assert not np.delete(some.out, ROWS, axis=1).any()
    for model in (KernelModel.any_order("fp16", "fp16"), KernelModel("fp16", "fp16", tile_m=16, tile_n=8)):
        of_all, of_some = forward_bound(problem, operands, model), forward_bound(problem, operands, model, ROWS)
        for got, want in zip(of_some, of_all, strict=True):
            axis = 1 if got.ndim == 4 else 2
            np.testing.assert_allclose(got.take(ROWS, axis), want.take(ROWS, axis), rtol=1e-9, atol=1e-30)
