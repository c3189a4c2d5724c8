"""No right kernel with a score_mod is beyond its bound: a search that tries to break this, and where it does break."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from tests.quality import mod_search
from tests.quality.mod_search import ISLANDS, measured, plugged, searched
from tests.quality.order_survey import Individual

F = np.float32


@pytest.mark.parametrize(("dtype", "mod"), ISLANDS)
def test_no_function_that_is_bred_takes_a_legal_order_beyond_its_bound(dtype, mod):
    """21,000 problems, of two seeds, by python -m tests.quality.mod_search."""
    worst = searched(dtype, mod, 30)[0]
    assert 0.05 < worst.ratio <= 1, f"{worst.order}: {worst.ratio:.3g} at {worst.problem}"


def one_of(mod: str, ulp: float = 4) -> Individual:
    term = ScoreTerm("mods", score_mod=mod, score_mod_ulp=ulp)
    problem = AttentionProblem(1, 1, 1, 4, 40, 8, dtype="fp32", softmax_scale=1.0, term=term)
    rng = np.random.default_rng(3)
    arrays = tuple(rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    return Individual("plain", problem, arrays, 1.0, 7)


def worst(one: Individual) -> float:
    with np.errstate(all="ignore"), plugged():
        return max(measured(replace(one, seed=seed)).ratio for seed in range(8))


@pytest.mark.parametrize("mod", ["tanh", "exponential"])
def test_a_function_that_is_off_by_more_ulp_than_declared_is_beyond_the_bound(mod, monkeypatch):
    assert 0 < worst(one_of(mod)) <= 1
    monkeypatch.setattr(mod_search, "ULP", 2000)
    assert worst(one_of(mod)) > 1
    assert worst(one_of(mod, 2000)) <= 1


def test_a_function_that_oscillates_within_the_error_of_a_score_may_be_beyond_the_bound(monkeypatch):
    """The assumption that is printed is needed: scores of thousands are off by 1e-4, which is 100 radians of this."""
    monkeypatch.setitem(mod_search.MODS, "wave", lambda s, i, j, off: np.sin(s * F(1e6)))
    one = one_of("wave")
    steep = replace(one, arrays=(one.arrays[0] * 40, one.arrays[1][:, :1] * 40, one.arrays[2][:, :1]))
    assert worst(replace(steep, problem=replace(one.problem, seqlen_k=1))) > 1
