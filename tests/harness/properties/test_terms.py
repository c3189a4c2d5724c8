"""Laws about terms of scores: right kernels obey them, and each law finds mistakes by itself."""

from __future__ import annotations

import functools

import pytest

from fa3_reference.score_term import KINDS
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.properties import find_law, run_law
from fa3verify.properties.terms import TERM_LAWS
from tests.harness.kernels import term_kernels as kernels


def kernel_of(function=kernels.attention, kinds=KINDS, **facts) -> Kernel:
    given = {"head_dims": (64,), "name": "k", "features": ("causal", "gqa", *kinds)} | facts
    return array_kernel(function, dtypes=("fp16",), **given)[0]


def status(law: str, kernel: Kernel, max_examples: int = 6) -> str:
    return run_law(find_law(law), kernel, max_examples=max_examples, seed=0, shrink_seconds=0.2).status


@pytest.mark.parametrize("law", [law.name for law in TERM_LAWS if "forward" in law.operations])
@pytest.mark.parametrize("order", ["nats", "base 2", "tiles"])
def test_a_right_kernel_obeys_the_laws_of_terms(order, law):
    assert status(law, kernel_of(functools.partial(kernels.attention, order=order))) == "pass"


@pytest.mark.parametrize(
    ("law", "mistake"),
    [
        ("a_term_that_adds_nothing_is_none", "inverted"),
        ("a_term_that_adds_nothing_is_none", "scaled twice"),
        ("a_constant_bias_moves_lse_alone", "lse without the term"),
        ("a_constant_bias_moves_lse_alone", "added before scaling"),
        ("a_constant_bias_moves_lse_alone", "nats in base 2"),
        ("terms_that_say_the_same_agree", "sequence 0's mask"),
        ("terms_that_say_the_same_agree", "ignored in the last tile"),
        ("terms_that_say_the_same_agree", "padding of queries"),
        ("terms_that_say_the_same_agree", "alibi from the top left"),
        ("terms_that_say_the_same_agree", "sign of the slope"),
        ("documents_are_sequences_apart", "documents up to this one"),
        ("documents_are_sequences_apart", "document of the tile's first key"),
        ("keys_that_a_term_hides_never_matter", "hidden scores are -1000"),
        ("rows_that_a_term_empties_are_zero", "garbage in empty rows"),
        ("rows_that_a_term_empties_are_zero", "nan in empty rows"),
    ],
)
def test_a_mistake_of_terms_breaks_its_law_without_bits(law, mistake):
    order = "base 2" if "base 2" in mistake else "nats"
    assert status(law, kernel_of(functools.partial(kernels.attention, mistake=mistake, order=order)), 12) == "fail"


def test_rows_that_a_mask_empties_are_what_the_kernel_declares():
    law = "rows_that_a_term_empties_are_zero"
    facts = {"kinds": ("attn_mask", "key_padding"), "min_seqlen": 1}
    assert status(law, kernel_of(kernels.masked_by_a_number, **facts)) == "fail"
    declared = Policy(empty_out="mean", empty_lse="finite")
    assert status(law, kernel_of(kernels.masked_by_a_number, policy=declared, **facts)) == "pass"
    assert status(law, kernel_of(policy=declared)) == "fail"  # its zeros are not the mean that it declares


def test_the_mean_of_a_mask_and_nan_of_an_added_bias_are_one_contract():
    law = "rows_that_a_term_empties_are_zero"
    facts = {"kinds": ("bias", "attn_mask"), "min_seqlen": 1}
    assert status(law, kernel_of(kernels.biased_and_masked_by_a_number, **facts)) == "fail"
    declared = Policy(empty_out="mean")
    assert status(law, kernel_of(kernels.biased_and_masked_by_a_number, policy=declared, **facts)) == "pass"
    mistaken = functools.partial(kernels.attention, mistake="nan in empty rows")  # of masks too
    assert status(law, kernel_of(mistaken, policy=declared, **facts), 12) == "fail"


def test_the_laws_of_terms_are_asked_of_kernels_that_take_what_they_need():
    applied = {
        kinds: {law.name for law in TERM_LAWS if law.applies(kernel_of(kinds=kinds))}
        for kinds in (
            (),
            ("alibi",),
            ("alibi", "bias"),
            ("alibi", "bias_fp32"),
            ("attn_mask",),
            ("documents", "attn_mask"),
        )
    }
    assert applied[()] == set()
    assert applied[("alibi",)] == {"a_term_that_adds_nothing_is_none"}
    assert "terms_that_say_the_same_agree" not in applied[("alibi", "bias")]
    assert "terms_that_say_the_same_agree" in applied[("alibi", "bias_fp32")]
    assert applied[("attn_mask",)] == {
        "a_term_that_adds_nothing_is_none",
        "keys_that_a_term_hides_never_matter",
        "rows_that_a_term_empties_are_zero",
    }
    assert {"documents_are_sequences_apart", "terms_that_say_the_same_agree"} < applied["documents", "attn_mask"]
