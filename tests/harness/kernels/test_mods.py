"""Kernels with a score_mod or a mask_mod built in: right ones pass in practice, and a case finds each mistake."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from fa3verify.cases.case import Case
from fa3verify.cases.practice import practice
from fa3verify.kernels.functions import declared_kernels
from fa3verify.kernels.record import Kernel
from tests.harness.kernels.test_terms import worst

pytest.importorskip("torch")
from tests.harness.kernels import mod_kernels as kernels

pytestmark = [pytest.mark.optional, pytest.mark.usefixtures("shared_references")]
MOST_SCORES = 12_000  # of a case here: batch * nheads * seqlen_q * seqlen_k

MISTAKES = (
    ("softcap", None, "before the scale"),
    ("relative", None, "kv_idx off by one in a later tile"),
    ("alibi", None, "kv head"),
    (None, "sliding", "hidden scores are -1000"),
    ("alibi", None, "in bf16"),
    ("softcap", None, "in bf16"),
    ("tempered", None, "batch 0 for all"),
    (None, "document", "batch 0 for all"),
    ("relative", None, "q_idx of the tile"),
    (None, "sliding", "kv_idx of the tile"),
    ("alibi", None, "q_idx from the last key"),
    ("alibi_of_numbers", None, "q_idx and kv_idx exchanged"),
    ("softcap", None, "of the negative score"),
    ("alibi", None, "not in a later tile of keys"),
    ("softcap", None, "twice"),
    ("softcap", "document", "hidden before the score_mod"),
    (None, "blocks", "mask forgotten in the last tile"),
    (None, "window", "mask inverted in a row"),
)
RIGHT = (
    ("alibi", None, {}),
    ("alibi_of_numbers", None, {"in_log2": True}),
    ("softcap", "sliding", {}),
    ("relative", None, {}),
    ("tempered", "document", {"in_log2": True}),
    ("squared", None, {}),
    ("causal_score", None, {}),
    (None, "window", {}),
    ("stepped", None, {}),
)


def kernel_of(score: str | None, mask: str | None, function: Any = None, dtype: str = "fp16", **facts: Any) -> Kernel:
    """A kernel that is told apart from others by what it declares, and not by its name."""
    mods = {"score_mod": score and getattr(kernels, score), "mask_mod": mask and getattr(kernels, mask)}
    steps = {name: facts.pop(name) for name in ("mistake", "in_log2") if name in facts}
    called = function or functools.partial(kernels.attention, **mods, **steps)
    limits = {"max_seqlen_q": 200, "max_seqlen_k": 2048, "max_batch": 8, "max_nheads": 16}
    declared = {
        "library": "torch",
        "dtypes": (dtype,),
        "name": "k",
        "head_dims": (64,),
        "features": ("gqa",),
        **limits,
        **mods,
    } | facts
    return declared_kernels(called, declared)[0]


def cases(kernel: Kernel) -> list[Case]:
    """Return the small cases of practice of a quick campaign."""
    sizes = ("batch", "nheads", "seqlen_q", "seqlen_k")
    found = practice(kernel, "quick", 0)
    return [case for case in found if math.prod(getattr(case.problem, size) for size in sizes) <= MOST_SCORES]


@pytest.mark.parametrize(("turn", "right"), list(enumerate(RIGHT)))
def test_a_right_kernel_keeps_the_bound_in_every_case(turn, right):
    score, mask, steps = right
    kernel = kernel_of(score, mask, dtype=("fp16", "bf16", "fp32")[turn % 3], **steps)
    ratio, words = worst(kernel, cases(kernel))
    assert 0.01 < ratio <= 1, words


@pytest.mark.parametrize(("score", "mask"), [("alibi", None), ("softcap", "document"), ("chained", "sliding")])
def test_flex_attention_is_given_the_functions_and_keeps_the_bound(score, mask):
    kernel = kernel_of(score, mask, kernels.flex, like="flex", dtype="bf16")
    asked = [case for case in cases(kernel) if case.problem.seqlen_k][::3]
    ratio, words = worst(kernel, asked)
    assert 0.1 < ratio <= 1, words


def test_a_function_of_fewer_bits_than_declared_is_wrong_and_right_where_they_are_declared():
    """As tanh.approx, whose relative error is 2^-11."""
    kernel = kernel_of("softcap", None, mistake="of approximate bits", dtype="fp32")
    asked = cases(kernel)[:4]
    assert worst(kernel, asked, most=1)[0] > 1
    declared = kernel_of("softcap", None, mistake="of approximate bits", dtype="fp32", score_mod_ulp=2.0**12)
    assert worst(declared, cases(declared)[:4])[0] <= 1


@pytest.mark.parametrize(("score", "mask", "mistake"), MISTAKES)
def test_a_mistake_is_found_in_practice(score, mask, mistake):
    kernel = kernel_of(score, mask, mistake=mistake)
    assert not worst(kernel, cases(kernel), most=1)[0] <= 1
