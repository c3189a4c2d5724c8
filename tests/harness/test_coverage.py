"""Coverage: every class is claimed, tried or named, and shapes are adapted to a kernel, never past it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.config import default_config
from fa3_reference.problem import AttentionProblem
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.cases import coverage, space
from fa3verify.inputs.recipe import FAMILIES
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.kernels.sizes import Sizes, gathered, read, written
from fa3verify.kernels.twins import twin
from fa3verify.operations.operation import FEATURES, needed_features
from fa3verify.properties import find_law, run_law
from tests.harness import third_party

HARD = AttentionProblem.varlen(
    (3, 0, 200), (5, 0, 131), nheads=4, nheads_kv=2, head_dim=96, head_dim_v=32, causal=True, window=(7, 0), softcap=2.0
)


def kernel(features=FEATURES, **sizes) -> Kernel:
    return Kernel("k", "fp16", Functions(third_party.run, default_config), frozenset(features), **gathered(sizes))


@given(
    features=st.sets(st.sampled_from(sorted(FEATURES))),
    head_dims=st.sampled_from((None, (64,), (128, 64), (256,))),
    multiple=st.sampled_from((1, 8, 128)),
    least=st.sampled_from((0, 1, 17, 300)),
)
def test_an_adapted_problem_is_taken_and_keeps_what_the_kernel_claims(features, head_dims, multiple, least):
    narrow = kernel(features, head_dims=head_dims, seqlen_multiple=multiple, min_seqlen=least)
    problem = coverage.adapted(narrow, HARD)
    assert narrow.refusal(problem) is None
    assert needed_features(problem) == features & needed_features(HARD)
    assert problem.batch == HARD.batch
    if head_dims is None:
        assert problem.head_dim == 96


PLAIN = AttentionProblem(3, nheads=12, nheads_kv=2, seqlen_q=70, seqlen_k=300, head_dim=64, softmax_scale=0.3)
COUNTS = ("max_seqlen_q", "max_seqlen_k", "max_batch", "max_nheads", "max_group")


@given(
    limits=st.dictionaries(st.sampled_from(COUNTS), st.integers(1, 400)),
    multiples=st.dictionaries(st.sampled_from(("seqlen_q_multiple", "seqlen_k_multiple")), st.sampled_from((1, 8, 64))),
    always=st.sets(st.sampled_from(("causal", "varlen", "softcap", "sinks"))),
    equal=st.booleans(),
    within=st.booleans(),
    scale=st.sampled_from((None, "default", 0.125, (0.5, 1.0))),
    problem=st.sampled_from((HARD, PLAIN)),
)
def test_a_problem_fitted_to_declared_sizes_has_them(limits, multiples, always, equal, within, scale, problem):
    lengths = {"equal_lengths": equal, "queries_within_keys": within}
    taken = Sizes(always=tuple(sorted(always)), softmax_scale=scale, **lengths, **limits, **multiples)
    try:
        fitted = taken.fitted(problem)
    except ValueError:  # fewer queries than a multiple of them
        assert min(limits.get("max_seqlen_q", 64), limits.get("max_seqlen_k", 64)) < 64
        return
    assert (
        taken.misfit(fitted) is None or equal or within
    )  # at once equal, few and whole tiles of two sizes may be nothing
    assert (taken.misfit(problem) is None) == (fitted == problem)
    assert {name: read(name, written(value)) for name, value in taken.said.items()} == taken.said


def test_what_declared_sizes_leave_out_is_not_claimed():
    def lost(**declared):
        return set(coverage.claims(kernel(), (), ())) - set(coverage.claims(kernel(**declared), (), ()))

    assert {"mask none", "mask window left"} <= lost(always=("causal",))
    assert "queries a tile" in lost(max_seqlen_q=1)
    assert "batch 2" not in lost(max_seqlen_q=1)
    assert lost(softmax_scale="default") == {"scale tiny", "scale other", "scale above 1"}
    assert lost(max_batch=1) == {"batch 2", "batch 3 or more", "layout packed, some empty"}
    assert "keys none" in lost(equal_lengths=True)


def test_a_pair_of_head_dims_is_asked_of_k_and_v_at_once():
    (declared,) = array_kernel(lambda q, k, v, *, softmax_scale: q, features=(), head_dims=(64, (192, 128)))
    problems = [space.case_of(declared, {"head_dim": d}).problem for d in ("64", "192")]
    assert [(p.head_dim, p.head_dim_v) for p in problems] == [(64, 64), (192, 128)]


def test_a_problem_that_is_taken_stays_itself():
    assert coverage.adapted(kernel(), HARD) is HARD
    scaled = replace(HARD, softmax_scale=0.3)
    assert coverage.adapted(kernel(head_dims=(64,)), scaled).softmax_scale == 0.3
    assert coverage.adapted(kernel(head_dims=(64,)), HARD).softmax_scale == 64**-0.5


def test_the_campaign_of_our_twins_is_what_it_was():
    for template in FAMILIES[:3]:
        for dtype in ("fp16", "bf16"):
            problems = [case.problem for case in family_cases(twin(dtype), template.name, PROFILES["release"], 0)]
            shapes = [replace(problem, dtype=dtype) for problem in PROFILES["release"].shapes]
            assert problems == [p for p in shapes for _ in range(PROFILES["release"].seeds)]


def test_sizes_are_claimed_by_those_who_take_them():
    def keys(**declared):
        return {name for name in coverage.claims(kernel(**declared), (), ()) if name.startswith("keys")}

    assert len(keys()) == 9
    assert keys(min_seqlen=1) == keys() - {"keys none"}
    assert keys(seqlen_multiple=128, min_seqlen=128) == {"keys a tile", "keys several tiles", "keys long"}


def test_too_little_of_one_kind_is_inconclusive_however_much_of_the_others_ran():
    claimed = ["feature a", "feature b", *(f"family {n}" for n in range(50))]
    enough = coverage.judged(claimed, claimed, None)
    assert (enough.share, enough.not_tried, enough.inconclusive) == (1.0, (), None)
    little = coverage.judged(claimed, claimed[1:], "b is refused")
    assert (little.least, little.share, little.not_tried) == ("feature", 0.5, ("feature a",))
    words = little.inconclusive
    assert words is not None
    assert words.startswith("1 of 2 claimed classes of kind feature ran, 75% are required; not tried: a")
    assert words.endswith("the kernel refuses: b is refused")
    assert coverage.judged([], [], None).inconclusive is not None


def test_a_law_that_no_trial_fits_is_not_tried_and_no_finding():
    refusing = kernel().altered(configure=third_party.picky().code.configure)
    outcome = run_law(find_law("repeated_run_is_identical"), refusing, max_examples=3, seed=0)
    assert (outcome.status, outcome.examples, outcome.violation) == ("not_tried", 0, None)


def test_a_law_never_leads_a_kernel_to_a_size_that_it_does_not_take():
    tiled = third_party.in_whole_tiles()
    for name in ("causal_row_equals_truncated_problem", "split_keys_merge_by_lse", "varlen_equals_separate_calls"):
        outcome = run_law(find_law(name), tiled, max_examples=8, seed=0, shrink_seconds=0)
        assert outcome.violation is None, (name, outcome.violation)
    assert run_law(find_law("causal_row_equals_truncated_problem"), tiled, max_examples=4, seed=0).status == "not_tried"


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_classes_of_a_law_are_those_of_its_trials(dtype):
    outcome = run_law(find_law("grouped_heads_equal_repeated_heads"), twin(dtype), max_examples=4, seed=0)
    assert outcome.classes & {"group 2 to 4", "group 5 or more"}
    assert "group 1" not in outcome.classes


def test_pairs_that_met_are_counted_among_those_that_can():
    feasible = [{"a": "1", "b": "1"}, {"a": "2", "b": "2"}]
    tried = [{"a": "1", "b": "1"}, {"a": "1", "b": "2"}]
    found = coverage.paired(feasible, tried)
    assert (found.feasible, found.tried) == (2, 1)
    assert found.by_dimensions == (coverage.PairsOfTwo(("a", "b"), 2, 1),)
