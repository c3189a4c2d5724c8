"""Strategies: what they may draw, that it fits together, and how small a counterexample they shrink to."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from fa3verify.inputs import activations
from fa3verify.inputs.recipe import FAMILIES, Recipe
from fa3verify.inputs.strategies import recipes
from tests.harness.inputs.drawn import Inputs, Limits, cases, problems, quant_schemes
from tests.sampling import sampled

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=2000)
FEW = settings(
    derandomize=True, database=None, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
PLAIN = Limits(
    dtypes=("bf16",),
    head_dims=(32,),
    max_seqlen=20,
    max_batch=2,
    max_nheads=2,
    varlen=False,
    causal=False,
    window=False,
    softcap=False,
    gqa=False,
    empty=False,
    scale=False,
)


def shrunk(law: Callable[[Inputs], bool], **options) -> Inputs:
    return find(cases(**options), law, settings=FIXED)


@given(problems(PLAIN))
@FEW
def test_limits_are_respected(problem):
    assert (problem.dtype, problem.head_dim, problem.group) == ("bf16", 32, 1)
    assert 1 <= problem.seqlen_q <= 20
    assert 1 <= problem.seqlen_k <= 20
    assert (problem.causal, problem.is_varlen, problem.softcap) == (False, False, 0.0)
    assert problem.window == (-1, -1)
    assert problem.softmax_scale == 1 / math.sqrt(32)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("varlen", lambda p: p.is_varlen),
        ("a sequence without keys", lambda p: p.is_varlen and 0 in p.seqlens_k and p.seqlen_k > 0),
        ("rows that see no key", lambda p: p.causal and 0 < p.seqlen_k < p.seqlen_q),
        ("a window", lambda p: p.window[0] > 0),
        ("grouped heads", lambda p: p.group > 1 and p.nheads_kv > 1),
        ("two tiles and one key", lambda p: p.seqlen_k == 257),
        ("softcap", lambda p: p.softcap > 0),
        ("e4m3", lambda p: p.dtype == "e4m3"),
    ],
)
def test_problems_reach(name, law):
    find(problems(), law, settings=FIXED)


@given(cases())
@FEW
def test_every_case_draws_and_survives_json(case: Inputs):
    q, k, v = case.recipe.draw(case.problem)
    assert (q.shape, k.shape, v.shape) == (case.problem.q_shape, case.problem.k_shape, case.problem.v_shape)
    assert Recipe.from_json(case.recipe.to_json()) == case.recipe
    assert (case.scheme is not None) == (case.problem.dtype == "e4m3")


@given(cases(Limits(max_seqlen=96, max_batch=1)))
@FEW
def test_every_case_can_be_prepared_for_a_kernel(case: Inputs):
    from fa3_reference.quantize import prepare

    operands = prepare(case.problem, *case.recipe.draw(case.problem), case.scheme).operands
    operands.check(case.problem)
    for x in (operands.q, operands.k, operands.v):
        assert np.all(np.isfinite(x.astype(np.float64))), case.recipe.describe()


def test_long_keys_shrink_to_the_first_key_past_the_tile():
    case = shrunk(lambda c: c.problem.seqlen_k > 64)
    problem = case.problem
    assert (problem.batch, problem.nheads, problem.seqlen_q, problem.seqlen_k, problem.head_dim) == (1, 1, 1, 65, 64)
    assert (problem.causal, problem.window, problem.softcap, problem.is_varlen) == (False, (-1, -1), 0.0, False)
    assert case.recipe == Recipe("normal")


def test_a_mask_shrinks_to_one_key_and_normal_values():
    case = shrunk(lambda c: c.problem.causal)
    assert (case.problem.seqlen_q, case.problem.seqlen_k, case.recipe) == (1, 1, Recipe("normal"))


def test_an_edit_shrinks_to_one_edit_at_the_origin():
    case = shrunk(lambda c: any(edit.kind == "needle" for edit in c.recipe.edits))
    assert case.recipe.describe().endswith("seed 0; needle q(batch=0, pos=0, head=0, source=0, value=20.0)")
    assert (case.recipe.distribution, case.problem.seqlen_k) == ("normal", 1)


def test_varlen_shrinks_to_lengths_of_one():
    case = shrunk(lambda c: c.problem.is_varlen and c.problem.batch > 1)
    assert (case.problem.seqlens_q, case.problem.seqlens_k) == ((1, 1), (1, 1))


def test_a_scheme_shrinks_to_plain_blocks():
    scheme = shrunk(lambda c: c.scheme is not None and c.scheme.granularity == "block").scheme
    assert scheme is not None
    assert (scheme.block_rows_k, scheme.power_of_two, scheme.hadamard_seed, scheme.k_mean) == (128, False, None, False)


def test_a_law_on_the_drawn_values_shrinks_to_a_small_case():
    case = shrunk(lambda c: c.problem.seqlen_k and np.abs(c.recipe.draw(c.problem)[1]).max() > 50)
    assert case.problem.seqlen_k == 1
    assert case.problem.nheads == 1
    assert len(case.recipe.edits) <= 1


@pytest.mark.parametrize("family", sampled(FAMILIES, FAMILIES[::5]), ids=lambda family: family.name)
def test_every_family_can_be_asked_for(family):
    recipe = find(recipes((family.name,)), lambda r: True, settings=FIXED)
    plain = family.recipe()
    if family.name == "activations":  # one of those that are stored is drawn, and the first is the plainest
        plain = Recipe("activations", {"name": activations.list_activations()[0].name})
    assert recipe == plain


@pytest.mark.nightly
def test_every_family_is_drawn():
    missing = {family.distribution for family in FAMILIES}

    def is_last(case):
        missing.discard(case.recipe.distribution)
        return not missing

    find(cases(), is_last, settings=settings(FIXED, phases=[Phase.generate]))


@given(quant_schemes(granularities=("block",), block_rows=(64,)))
@FEW
def test_scheme_choices_are_respected(scheme):
    assert (scheme.granularity, scheme.block_rows_q, scheme.block_rows_k, scheme.block_rows_v) == ("block", 64, 64, 64)


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="got 'odd'"):
        find(recipes(("odd",)), lambda r: True, settings=FIXED)
