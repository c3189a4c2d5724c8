"""Functions of scores and masks: the truth, what is hidden, and the bound beside a jump. No torch is needed here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference import mods
from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.score_term import ScoreTerm

PLAIN = AttentionProblem(2, 4, 2, 5, 9, 16)
FUNCTIONS = {
    "cap": lambda s, b, h, i, j: 3 * np.tanh(s / 3),
    "steep": lambda s, b, h, i, j: 4 * s,
    "places": lambda s, b, h, i, j: s + 100 * b + 10 * h + i - j / 3,
    "causal": lambda s, b, h, i, j: np.where(i >= j, s, -np.inf),
    "least": lambda s, b, h, i, j: np.where(i >= j, s, -1e308),
    "positive": lambda s, b, h, i, j: np.where(s > 0, s, -np.inf),
    "step": lambda s, b, h, i, j: np.where(s > 0, s + 1, s),
    "log": lambda s, b, h, i, j: np.log(s),
    "far": lambda b, h, i, j: (i + h) % 3 != j % 3,
    "none": lambda b, h, i, j: (i != 2) & (j >= 0),
}


@pytest.fixture(autouse=True)
def of_numpy(monkeypatch):
    def evaluate(function, b, heads, queries, keys, *scores):
        with np.errstate(all="ignore"):
            found = FUNCTIONS[function](*scores, b, heads[:, None], queries[:, None], keys)
        return np.broadcast_to(found, (len(queries), len(keys)))

    monkeypatch.setattr(mods, "_plugged", [evaluate])


def term(score: str = "", mask: str = "", ulp: float = 0.0) -> ScoreTerm:
    return ScoreTerm("mods", score_mod=score, mask_mod=mask, score_mod_ulp=ulp)


def arrays_of(problem: AttentionProblem, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]


def bound_of(problem: AttentionProblem, arrays: list[np.ndarray], model: KernelModel | None = None):
    q, k, v = (x.astype(np.float16) for x in arrays)
    operands = Operands(q, k, v, term=np.zeros(0, np.float32))
    return forward_bound(problem, operands, model or KernelModel.any_order("fp16", "fp16"))


@pytest.mark.parametrize(("score", "mask"), [("cap", "far"), ("places", ""), ("", "far"), ("steep", "none")])
def test_the_truth_is_a_softmax_of_what_the_functions_return(score, mask):
    problem = replace(PLAIN, term=term(score, mask))
    q, k, v = arrays_of(problem)
    out, lse = attention(problem, q, k, v, np.zeros(0))
    b, h, i, j = np.ogrid[:2, :4, :5, :9]
    s = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, axis=2)) / 4
    s = FUNCTIONS[score](s, b, h, i, j) if score else s
    s = np.where(FUNCTIONS[mask](b, h, i, j), s, -np.inf) if mask else s
    with np.errstate(all="ignore"):
        weights = np.exp(s)
        total = weights.sum(-1)
        expected = np.einsum("bhij,bjhd->bihd", np.nan_to_num(weights / total[..., None]), np.repeat(v, 2, axis=2))
        assert np.allclose(out, expected, atol=1e-12)
        assert np.allclose(lse, np.log(total), atol=1e-12)


def test_a_score_mod_that_hides_by_place_is_the_causal_mask():
    own = replace(PLAIN, term=term("causal"))
    masked = replace(PLAIN, causal=True, top_left=True)
    arrays = arrays_of(own)
    for got, expected in zip(attention(own, *arrays, np.zeros(0)), attention(masked, *arrays)):
        assert np.allclose(got, expected, atol=1e-14)
    assert np.isfinite(bound_of(own, arrays).out).all()


def test_a_row_of_which_every_key_is_hidden_is_a_row_without_a_key():
    problem = replace(PLAIN, term=term("cap", "none"))
    arrays = arrays_of(problem)
    out, lse = attention(problem, *arrays, np.zeros(0))
    bound = bound_of(problem, arrays)
    for x in (out, bound.out, bound.lse.swapaxes(1, 2)):
        assert (x[:, 2] == 0).all()
    assert np.isneginf(lse[:, :, 2]).all()
    assert np.isfinite(lse[:, :, [0, 1, 3, 4]]).all()


def test_a_key_that_a_score_mod_hides_by_its_score_weighs_nothing_and_a_row_of_them_is_not_promised():
    problem = replace(AttentionProblem(1, 1, 1, 2, 2, 1, softmax_scale=1.0), term=term("positive"))
    arrays = [np.array(x, float).reshape(1, 2, 1, 1) for x in ([1, -1], [2, 4], [3, 5])]
    out, _ = attention(problem, *arrays, np.zeros(0))
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1]).all()
    bound = bound_of(problem, arrays)
    assert np.isfinite(bound.out[0, 0]).all()
    assert np.isinf(bound.out[0, 1]).all()


def test_a_number_for_minus_infinity_weighs_nothing():
    arrays = arrays_of(PLAIN)
    least, hidden = (bound_of(replace(PLAIN, term=term(name)), arrays) for name in ("least", "causal"))
    assert np.array_equal(least.out, hidden.out)


def test_rows_of_which_a_score_mod_makes_a_nan_are_not_promised():
    problem = replace(PLAIN, term=term("log"))
    arrays = arrays_of(problem)
    out, _ = attention(problem, *arrays, np.zeros(0))
    assert np.isnan(out).any()
    assert np.isinf(bound_of(problem, arrays).out[np.isnan(out)]).all()


def test_a_score_whose_error_crosses_a_jump_may_land_on_either_side():
    """The first score is 0, as large products cancel, and 0 or 1 after the function; the second is 1 and 2."""
    problem = replace(AttentionProblem(1, 1, 1, 1, 2, 4, softmax_scale=1.0), term=term("step"))
    q = np.array([300, 0, -300, 1], float).reshape(1, 1, 1, 4)
    k = np.array([[300, 0, 300, 0], [0, 0, 0, 1]], float).reshape(1, 2, 1, 4)
    v = np.array([1, 0], float).reshape(1, 2, 1, 1) * np.ones((1, 1, 1, 4))
    below, above = (np.exp(s) / (np.exp(s) + np.exp(2)) for s in (0, 1))
    assert attention(problem, q, k, v, np.zeros(0)).out.max() == pytest.approx(below)
    assert above - below < bound_of(problem, [q, k, v]).out.min() < 2 * (above - below)
    apart = bound_of(problem, [q * [1, 1, 0.5, 1], k, v])
    assert apart.out.max() < 1e-3


def test_a_key_that_may_be_hidden_or_not_by_its_score_leaves_the_row_without_a_promise():
    """The first score is 0, as large products cancel: the function hides it, and shows it to a kernel that errs up."""
    problem = replace(AttentionProblem(1, 1, 1, 1, 2, 4, softmax_scale=1.0), term=term("positive"))
    q = np.array([300, 0, -300, 1], float).reshape(1, 1, 1, 4)
    k = np.array([[300, 0, 300, 0], [0, 0, 0, 1]], float).reshape(1, 2, 1, 4)
    for first in (0, 1):
        bound = bound_of(problem, [q, k[:, [first, 1 - first]], np.ones((1, 2, 1, 4))])
        assert np.isinf(bound.out).all()
        assert np.isinf(bound.lse).all()


def test_the_bound_of_lse_grows_with_the_slope_and_with_the_declared_ulp():
    arrays = arrays_of(PLAIN)
    fp32 = KernelModel.any_order("fp32", "fp32")
    problem = replace(PLAIN, dtype="fp32")
    q, k, v = (x.astype(np.float32) for x in arrays)
    operands = Operands(q, k, v, term=np.zeros(0, np.float32))
    plain, steep, declared = (
        forward_bound(replace(problem, term=of), operands, fp32).lse
        for of in (term("", "far"), term("steep", "far"), term("steep", "far", 1000.0))
    )
    assert (steep > 1.5 * plain).all()
    assert (declared > 3 * steep).all()


def test_a_problem_with_functions_is_read_back_from_its_json():
    problem = replace(PLAIN, term=term("cap", ulp=4.0))
    assert AttentionProblem.from_json(problem.to_json()) == problem
    assert problem.to_json()["term"] == {
        "kind": "mods", "shared": "", "values": "plain", "score_mod": "cap", "score_mod_ulp": 4.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "mods"}, "score_mod and mask_mod are those of mods, got ScoreTerm"),
        ({"kind": "alibi", "mask_mod": "m:f"}, "are those of mods, got ScoreTerm"),
        ({"kind": "mods", "score_mod": "m:f", "score_mod_ulp": -1}, "score_mod_ulp must be finite and >= 0, got -1"),
    ],
)
def test_wrong_functions_are_refused_with_their_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        ScoreTerm(**fields)


def test_functions_that_nobody_evaluates_are_refused(monkeypatch):
    monkeypatch.setattr(mods, "_plugged", [])
    with pytest.raises(ValueError, match="nothing is plugged that evaluates cap"):
        attention(replace(PLAIN, term=term("cap")), *arrays_of(PLAIN), np.zeros(0))
