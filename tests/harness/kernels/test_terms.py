"""Kernels whose scores have a term: right ones pass every case of practice, and a case finds each mistake."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.score_term import BROADCAST, KINDS, VALUES, ScoreTerm
from fa3verify.campaign.cover import cover
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.campaign.questions import concerns
from fa3verify.cases import coverage, space
from fa3verify.cases.case import Case
from fa3verify.cases.practice import practice
from fa3verify.inputs.recipe import Recipe
from fa3verify.inputs.terms import draw_term, format_of
from fa3verify.judging.judgement import judge
from fa3verify.judging.verdict import Part, What
from fa3verify.kernels.arrays import Library
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import Policy, empty_rows
from fa3verify.kernels.record import Kernel
from fa3verify.known.cpu_kernels import TORCH_EXP_ERROR, rounded_scores
from tests.harness.kernels import term_kernels as kernels

pytestmark = pytest.mark.usefixtures("shared_references")  # a mistaken kernel is given what the right one was
MOST_SCORES = 12_000  # of a case here: batch * nheads * seqlen_q * seqlen_k

MISTAKES = (
    ("bias_fp32", "batch 0 for all"),
    ("bias_fp32", "head 0 for all"),
    ("bias_fp32", "heads broadcast along queries"),
    ("bias_fp32", "transposed"),
    ("bias_fp32", "first row for all"),
    ("bias_fp32", "rounded to 16 bits"),
    ("bias_fp32", "no minus infinity"),
    ("bias_fp32", "of queries from the top"),
    ("bias_fp32", "added before scaling"),
    ("bias_fp32", "scaled twice"),
    ("bias_fp32", "not in the maximum"),
    ("bias_fp32", "nan in empty rows"),
    ("bias_fp32", "lse without the term"),
    ("bias_fp32", "kept in 16 bits"),
    ("bias", "nats in base 2"),
    ("bias", "head 0 for all"),
    ("attn_mask", "inverted"),
    ("attn_mask", "ignored in the last tile"),
    ("attn_mask", "sequence 0's mask"),
    ("attn_mask", "garbage in empty rows"),
    ("attn_mask", "skips a tile that one row hides"),
    ("key_padding", "padding of queries"),
    ("key_padding", "padding counts keys"),
    ("alibi", "slopes of sequence 0"),
    ("alibi", "slopes of the group"),
    ("alibi", "alibi from the top left"),
    ("alibi", "alibi without abs"),
    ("alibi", "sign of the slope"),
    ("documents", "documents up to this one"),
    ("documents", "document of the tile's first key"),
    ("documents", "documents of sequence 0"),
)
ORDERS = {"skips a tile that one row hides": "tiles", "nats in base 2": "base 2"}


def kernel_of(function, *kinds: str, dtype: Dtype = "fp16", library: Library = "numpy", **facts: Any) -> Kernel:
    declared = {"head_dims": (64,), "name": "k", "features": ("causal", "gqa", *kinds)} | facts
    return array_kernel(function, dtypes=(dtype,), library=library, **declared)[0]


def cases(kernel: Kernel) -> list[Case]:
    """Return the small cases of practice of a quick campaign that have a term."""
    found = (case for case in practice(kernel, "quick", 0) if case.problem.term)
    sizes = ("batch", "nheads", "seqlen_q", "seqlen_k")
    return [case for case in found if math.prod(getattr(case.problem, size) for size in sizes) <= MOST_SCORES]


def worst(kernel: Kernel, asked: list[Case], most: float = np.inf) -> tuple[float, str]:
    """Return the largest error / bound of some cases, under the hypothesis that fits all of them best."""
    under: dict[str, float] = {}
    words = ""
    for case in asked:
        found = judge(kernel, case, unrounded=False)
        each = found.hypotheses or {"": found.measures}
        before = min(under.values(), default=0.0)
        for name, figures in each.items():
            under[name] = max(under.get(name, 0.0), *(figures.get(x, 0.0) for x in ("ratio_max", "ratio_lse_max")))
        words = case.describe() if min(under.values()) > before else words
        if min(under.values()) > most:
            break
    return min(under.values()), words


# Each order has a fourth of the cases, so that together they have all.
@pytest.mark.parametrize(
    ("part", "order", "dtype"),
    [
        (0, "nats", "fp16"),
        (1, "base 2", "bf16"),
        (2, "bias first", "fp16"),
        (3, "normalised", "bf16"),
        (0, "tiles", "fp16"),
    ],
)
def test_a_right_kernel_of_any_order_keeps_the_bound_in_every_term(part, order, dtype):
    kernel = kernel_of(functools.partial(kernels.attention, order=order), *KINDS, dtype=dtype)
    ratio, words = worst(kernel, cases(kernel)[part::4])
    assert 0.1 < ratio <= 1, words


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_a_mistake_with_a_term_is_found_in_practice(kind, mistake):
    order = ORDERS.get(mistake, "nats")
    kernel = kernel_of(functools.partial(kernels.attention, mistake=mistake, order=order), kind)
    assert not worst(kernel, cases(kernel), most=1)[0] <= 1


def any_order_of_torch(config) -> KernelModel:
    return replace(KernelModel.any_order(config.dtype, config.out_dtype), exp_error=TORCH_EXP_ERROR)


RIGHT = {
    "a number for minus infinity": (
        "bf16",
        kernels.masked_by_a_number,
        ("attn_mask", "key_padding"),
        {"policy": Policy(empty_out="mean", empty_lse="finite"), "min_seqlen": 1},
    ),
    "torch SDPA": ("bf16", kernels.torch_sdpa, KINDS, {"library": "torch", "order": any_order_of_torch}),
    "torch FlexAttention": ("fp16", kernels.torch_flex, ("bias_fp32", "alibi", "documents"), {"library": "torch"}),
    "T5, BLOOM": (
        "fp16",
        kernels.torch_eager,
        ("bias", "attn_mask", "key_padding", "documents"),
        {"library": "torch", "order": rounded_scores},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_public_kernel_with_terms_keeps_the_bound(name):
    pytest.importorskip("torch", reason="torch is not installed")
    dtype, function, kinds, facts = RIGHT[name]
    kernel = kernel_of(function, *kinds, dtype=dtype, **{"min_seqlen": 1} | facts)
    ratio, words = worst(kernel, cases(kernel)[:: len(kinds)])
    assert 0.1 < ratio <= 1, words


def test_every_broadcast_and_all_values_of_each_kind_are_asked_in_practice_and_in_the_cover():
    kernel = kernel_of(kernels.attention, *KINDS)
    asked = {case.problem.term for case in practice(kernel, "quick", 0)}
    for kind in KINDS:
        assert {term.values for term in asked if term and term.kind == kind} == set(VALUES[kind])
    for kind in BROADCAST:
        assert len({term.shared for term in asked if term and term.kind == kind}) == 16
    assert {term.shared for term in asked if term and term.kind == "alibi"} == {"", "b"}
    claimed = space.claimed(kernel)
    assert claimed["term"] == ("none", *KINDS)
    assert set(claimed["term_values"]) == {word for words in VALUES.values() for word in words}
    assert claimed["term_shared"] == ("none", "batch", "heads", "queries", "keys", "several")
    small = kernel_of(kernels.attention, "alibi")
    rows = cover(small, 2, 0)
    planned = coverage.pairs(point for point, _ in rows)
    assert coverage.pairs(point for point, case in rows if case) == planned


def test_every_second_shape_of_a_family_has_a_term_and_no_call_of_a_kernel_without_terms_has():
    quick = PROFILES["quick"]
    kernel = kernel_of(kernels.attention, *KINDS)
    terms = [case.problem.term for case in family_cases(kernel, "normal", quick, 0)]
    assert [term is not None for term in terms] == [False, True, False]
    families = ("normal", "peaky", "offset_v", "tiny", "all_ties", "positive")
    terms = [family_cases(kernel, family, quick, 0)[1].problem.term for family in families]
    assert len({term.kind for term in terms if term}) >= 4
    plain = kernel_of(kernels.attention)
    assert not any(
        case.problem.term for case in (*practice(plain, "quick", 0), *family_cases(plain, "normal", quick, 0))
    )
    assert "term" not in space.dimensions(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_values_are_of_the_format_and_the_shape_and_the_words_hold(kind):
    for values in VALUES[kind]:
        problem = AttentionProblem(2, 4, 2, 9, 20, 64, dtype="bf16", term=ScoreTerm(kind, values=values))
        q, k, _ = Recipe("normal").draw(problem)
        drawn = draw_term(problem, q, k, 3)
        assert drawn.shape == problem.term_shape
        np.testing.assert_array_equal(drawn.astype(format_of(problem)).astype(np.float64), drawn)
        case = Case("k", problem, Recipe("normal", seed=3))
        q, k, _, given = case.draw()[0]
        np.testing.assert_array_equal(given, draw_term(problem, q, k, 3))
        rows = empty_rows(problem, case.operands().term)
        assert bool(rows.any()) == (values == "none visible")


@pytest.mark.parametrize("shared", ["", "q", "k", "hk"])
def test_a_bias_that_cancels_scores_is_drawn_without_keys_too(shared):
    problem = AttentionProblem(1, 2, 2, 5, 0, 64, term=ScoreTerm("bias", shared, "cancelling"))
    q, k, _ = Recipe("normal").draw(problem)
    np.testing.assert_array_equal(draw_term(problem, q, k, 0), np.zeros(problem.term_shape))


def test_a_function_gets_the_terms_that_it_claims_by_name_and_none_where_a_call_has_none():
    seen = []

    def spy(q, k, v, *, softmax_scale, **given):
        seen.append({name: None if x is None else (x.dtype.name, x.shape) for name, x in given.items()})
        return kernels.attention(q, k, v, softmax_scale=softmax_scale, **given)

    kernel = kernel_of(spy, *KINDS, dtype="bf16", features=KINDS)
    wanted = {
        None: {},
        "bias": {"bias": ("bfloat16", (2, 1, 5, 9))},
        "bias_fp32": {"bias": ("float32", (2, 1, 5, 9))},
        "attn_mask": {"attn_mask": ("bool", (2, 1, 5, 9))},
        "key_padding": {"key_padding_mask": ("bool", (2, 9))},
        "alibi": {"alibi_slopes": ("float32", (2, 2))},
        "documents": {"document_ids_q": ("int32", (2, 5)), "document_ids_k": ("int32", (2, 9))},
    }
    for kind, given in wanted.items():
        term = None if kind is None else ScoreTerm(kind, "h" if kind in BROADCAST else "")
        problem = AttentionProblem(2, 2, 2, 5, 9, 64, dtype="bf16", term=term)
        judge(kernel, Case("k", problem, Recipe("normal")), unrounded=False)
        assert {name: x for name, x in seen[-1].items() if x} == given
        assert len(seen[-1]) == 6


def test_a_kernel_of_caches_takes_no_term():
    with pytest.raises(ValueError, match="a kernel of caches takes no term of scores, got alibi, bias"):
        array_kernel(kernels.attention, dtypes=("fp16",), features=("alibi", "bias", "paged"))


def test_a_row_that_its_term_leaves_without_a_key_follows_the_policy():
    """The mean of V is refused where nothing is declared, and explained by what could be declared."""
    kernel = kernel_of(kernels.masked_by_a_number, "attn_mask", min_seqlen=1)
    problem = AttentionProblem(1, 2, 2, 5, 9, 64, term=ScoreTerm("attn_mask", values="none visible"))
    case = Case("k", problem, Recipe("normal"))
    assert not judge(kernel, case).measures["ratio_max"] <= 1
    assert "empty_out" in concerns("forward", What(Part.FAMILY, "normal"), case.to_json())
    declared = replace(kernel, policy=Policy(empty_out="mean", empty_lse="finite"))
    assert judge(declared, case).measures["ratio_max"] <= 1


def test_slopes_of_packed_sequences_are_asked_and_those_of_another_sequence_are_found():
    right = kernel_of(kernels.packed, "alibi", "varlen")
    points = [{"term": "alibi", "layout": "packed", "batch": "3 or more", "term_shared": s} for s in ("none", "batch")]
    asked = [space.case_of(right, point | {"mask": mask}) for point in points for mask in ("none", "causal")]
    assert worst(right, asked)[0] <= 1
    wrong = kernel_of(functools.partial(kernels.packed, mistake="slopes"), "alibi", "varlen")
    assert not worst(wrong, asked)[0] <= 1
    assert worst(wrong, asked[2:])[0] <= 1  # where all sequences have the same ones
