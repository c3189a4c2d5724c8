"""Merging as an operation: what its parts are, what is true of them, and how a function is declared and called."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.merging import by_rows, merge, parts_of
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.campaign.questions import FindContract, concerns
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import Part, What
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.operations.merge import PARTS, Merge
from fa3verify.properties import find_law, run_law
from tests.quality import merge_kernels

RNG = np.random.default_rng(0)
PACKED = AttentionProblem.varlen((4, 0, 3), (9, 5, 1), nheads=2, nheads_kv=2, head_dim=16, causal=True)
MASKED = AttentionProblem(2, 2, 1, 7, 5, 8, causal=True)  # two rows see no key


def case_of(kernel: Kernel, problem: AttentionProblem, parts: int = 3, seed: int = 1) -> Case:
    own = replace(problem, dtype=kernel.dtype)
    return Case(kernel.name, own, Recipe("normal", seed=seed), changes=(("parts", parts),), operation="merge")


def merging(function: Any = merge_kernels.at_once, kind: Any = "parts", **facts: Any) -> Kernel:
    declared: Any = {"layout": "bshd", "merge": kind} | facts
    (kernel,) = array_kernel(function, name="mine", **declared)
    return kernel


def passed(kernel: Kernel, problem: AttentionProblem = MASKED) -> bool:
    return all(passes(kernel, judge(kernel, case_of(kernel, problem, parts)).measures) for parts in PARTS)


@pytest.mark.parametrize(
    "problem", [PACKED, MASKED, AttentionProblem(1, 1, 1, 3, 0, 8)], ids=["packed", "mask", "none"]
)
@pytest.mark.parametrize("count", PARTS)
def test_parts_of_attention_merge_to_the_whole(problem: AttentionProblem, count: int) -> None:
    q, k, v = (RNG.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    for got, want in zip(merge(*parts_of(problem, q, k, v, count)), attention(problem, q, k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_a_part_without_keys_has_no_weight_whatever_it_holds() -> None:
    outs, lses = RNG.standard_normal((3, 1, 4, 2, 8)), RNG.standard_normal((3, 1, 2, 4))
    lses[1, :, :, :2] = lses[:, :, :, 3] = -np.inf
    empty = np.broadcast_to(by_rows(np.isneginf(lses)), outs.shape)
    got = merge(np.where(empty, np.nan, outs), lses)
    assert not any(np.isnan(x).any() for x in got)
    np.testing.assert_array_equal(got.out[:, :2], merge(outs[::2], lses[::2]).out[:, :2])
    assert (got.out[:, 3] == 0).all()
    assert np.isneginf(got.lse[:, :, 3]).all()


def test_a_large_output_loses_its_weight_in_a_quick_campaign() -> None:
    kernel = merging(merge_kernels.pair, "pairs", out_dtype="fp32")
    lost = 0.0
    for case in family_cases(kernel, "normal", PROFILES["quick"], 0):
        outs, lses = case.operands().dequantized(case.problem)
        weights = by_rows(np.exp(lses - merge(outs, lses).lse))
        lost = max(lost, float(np.max(np.abs(outs) * (weights < 1e-8))))
    assert lost > 1000


def test_a_ring_begins_with_the_keys_of_a_rank_and_goes_back() -> None:
    operation, problem = Merge(), AttentionProblem(1, 1, 1, 2, 8, 8)
    orders = set()
    for seed in range(12):
        q, k, v, *_, turn = operation.draw(problem, Recipe("normal", seed=seed))
        plain = parts_of(problem, q, k, v, 4).out
        drawn = (q, k, v, np.zeros(64), np.ones(64), turn)
        prepared: Any = operation.prepare(replace(problem, dtype="fp32"), drawn, None, {"parts": 4})
        near = np.abs(prepared.operands.outs[:, None] - plain[None]).max(axis=(2, 3, 4, 5)) < 1e-5
        orders.add(tuple(near.argmax(axis=1).tolist()))
    assert orders <= {(0, 1, 2, 3), (0, 3, 2, 1), (1, 0, 3, 2), (2, 1, 0, 3), (3, 2, 1, 0)}
    assert len(orders) >= 4


@pytest.mark.parametrize("problem", [MASKED, replace(PACKED, causal=False)], ids=["batched", "packed"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_base_and_layout_of_lse_are_as_declared(problem: AttentionProblem, is_declared: bool) -> None:
    """The function of FlashInfer: results (tokens, heads, channels), base-2 lse (tokens, heads)."""

    def theirs(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        two, axes = merge_kernels.LN2, (-1, -2)
        a, b = (np.swapaxes(x, *axes) * two for x in (lse_a, lse_b))
        out, lse = merge_kernels.max_shifted(out_a, a, out_b, b)
        return out, np.swapaxes(lse, *axes) / two

    always: Any = {"always": ("varlen",)} if problem.is_varlen else {}
    declared: Any = {"lse_base": 2, "lse_layout": "sh"} if is_declared else {"lse_layout": "sh"}
    assert passed(merging(theirs, "pairs", **always, **declared), problem) == is_declared


def test_an_lse_of_a_forward_is_as_declared() -> None:
    def theirs(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> Any:
        problem = AttentionProblem(2, 2, 2, 7, 9, 8, softmax_scale=softmax_scale)
        out, lse = attention(problem, *(x.astype(float) for x in (q, k, v)))
        return out.astype(q.dtype), (lse.swapaxes(1, 2) / np.log(2)).astype(np.float32)

    problem = AttentionProblem(2, 2, 2, 7, 9, 8)
    for declared, is_right in (({"lse_base": 2, "lse_layout": "sh"}, True), ({"lse_layout": "sh"}, False)):
        facts: Any = declared
        (kernel,) = array_kernel(theirs, name="mine", layout="bshd", **facts)
        case = Case(kernel.name, problem, Recipe("normal"))
        assert passes(kernel, judge(kernel, case).measures) == is_right


def test_rows_without_a_part_are_asked_about_and_never_the_alignment_of_a_mask() -> None:
    kernel = merging(partial(merge_kernels.at_once, empty=0.0))
    case = case_of(kernel, MASKED)
    assert concerns("merge", What(Part.FAMILY, "normal"), case.to_json()) == {"empty_out", "empty_lse"}
    assert not passes(kernel, judge(kernel, case).measures)
    law = find_law("empty_rows_are_zero")
    for policy, is_kept in ((Policy(), False), (Policy(empty_out="nan"), True), (Policy(empty_out="mean"), False)):
        named = replace(kernel, policy=policy)
        assert (run_law(law, named, max_examples=4, seed=0, shrink_seconds=0).violation is None) == is_kept
    asked = FindContract(kernel=kernel.name, durable=False, failed=(("family normal", case.to_json()),), has_lse=True)
    assert asked._contract(kernel, kernel) == {"empty_out": ("nan", 0)}


def test_a_ring_that_skips_parts_without_keys_is_given_none() -> None:
    def lse_of(lse_a: np.ndarray, lse_b: np.ndarray) -> np.ndarray:
        return lse_a + np.logaddexp(np.float32(0), lse_b - lse_a)  # NaN where lse_a is -inf

    theirs = partial(merge_kernels.pair, lse_of=lse_of)
    law = find_law("error_within_bound")
    for facts, is_right in (({}, False), ({"features": (), "min_seqlen": 64}, True)):
        kernel = merging(theirs, "pairs", out_dtype="fp32", **facts)
        found = run_law(law, kernel, max_examples=12, seed=0, shrink_seconds=0).violation
        assert (found is None) == is_right


def test_the_only_part_of_all_is_a_merge_of_pairs() -> None:
    kernel = merging(merge_kernels.pair, "pairs", dtypes=("bf16",), out_dtype="fp32")
    judged = judge(kernel, case_of(kernel, MASKED, parts=1))
    assert judged.outputs["out"].dtype == np.float32
    assert judged.measures["ratio_max"] == 0


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"merge": "all"}, "merge must be among"),
        ({"merge": "parts", "dtypes": ("e4m3",)}, "parts that are merged are of fp16, bf16 or fp32"),
        ({"merge": "parts", "gradients": "own"}, "a function of gradients merges no parts"),
        ({"gradients": "own", "lse_base": 2}, "its lse is a natural logarithm"),
        ({"lse_base": 10}, "lse_base must be among e, 2"),
        ({"lse_layout": "bhs"}, "lse_layout must be among hs, sh"),
        ({"merge": "pairs", "features": ("gqa",)}, "feature must be among causal, unwritten, varlen"),
        ({"out_dtype": "fp32"}, "out_dtype must be among , fp16, bf16, got"),
    ],
)
def test_what_no_merge_is_is_refused(facts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        array_kernel(merge_kernels.at_once, **facts)


def test_a_merge_has_no_twin() -> None:
    with pytest.raises(ValueError, match="merge has no twin"):
        operations.find("merge").twin(MASKED, case_of(merging(), MASKED).operands(), None)
