"""No right kernel with a term of scores is beyond its bound: a search that tries to break this."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.score_term import ScoreTerm
from tests.quality import term_orders
from tests.quality.legal_orders import ORDERS, attend
from tests.quality.order_survey import Case, judged
from tests.quality.term_search import ISLANDS, searched

F = np.float32


@pytest.mark.parametrize(("dtype", "kind"), ISLANDS)
def test_no_term_that_is_bred_takes_a_legal_order_beyond_its_bound(dtype, kind):
    """48,000 problems by python -m tests.quality.term_search, of three seeds."""
    worst = searched(dtype, kind, 30)[0]
    assert 0.1 < worst.ratio <= 1, f"{worst.order}: {worst.ratio:.3g} at {worst.problem}"


@pytest.mark.parametrize("way", term_orders.WAYS)
@pytest.mark.parametrize("order", ["plain", "log2 units", "fused exponent", "fused exponent of scaled scores"])
def test_a_term_is_added_once_in_nats_in_every_way(order, way, monkeypatch):
    """Scores 1 and 2, with a bias of 1 and 0 both 2: the mean of V, and an lse of 2 + ln 2."""
    monkeypatch.setattr("tests.quality.legal_orders.WAYS", (way,))
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=0.25, term=ScoreTerm("bias_fp32"))
    q, k, v = (np.array(x, np.float16).reshape(1, -1, 1, 1) for x in ([2], [2, 4], [3, 5]))
    x = Operands(q, k, v, term=np.array([1, 0], F).reshape(1, 1, 1, 2))
    got = attend(ORDERS[order], problem, x, np.random.default_rng(0), "fp32")
    assert got.out.item() == pytest.approx(4, abs=1e-6)
    assert got.lse.item() == pytest.approx(2 + np.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", ["bias", "alibi"])
def test_a_term_in_too_few_bits_is_beyond_the_bound(kind):
    """What is added was rounded to fp16 first, beside scores in binary32."""
    problem = AttentionProblem(1, 1, 1, 4, 40, 8, dtype="fp32", term=ScoreTerm(kind))
    rng = np.random.default_rng(3)
    arrays = (rng.standard_normal(shape).astype(F) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    term = (4 * rng.random(problem.term_shape)).astype(F)
    x = Operands(*arrays, term=term)
    ratios = []
    for read in (term, term.astype(np.float16).astype(F)):
        got = attend(ORDERS["plain"], problem, replace(x, term=read), rng)
        ratios.append(judged(Case("", problem, x), {"plain": got})["plain"].best)
    assert 0 < ratios[0] <= 1 < ratios[1]
