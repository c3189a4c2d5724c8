"""What a kernel refuses is asked as a rule of sizes if it takes every call that fits the rule, else it is no result."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import Case, Kernel, Recipe, find_kernel
from fa3verify.campaign import plan, refusals
from fa3verify.campaign.introduction import Only
from fa3verify.cases import probing
from fa3verify.cases.space import case_of, terms
from fa3verify.commands import verify
from fa3verify.judging.judgement import passes
from fa3verify.kernels.names import KernelName, declaring
from fa3verify.properties import run_law
from fa3verify.properties.terms import TERM_LAWS

KERNELS = Path(__file__).with_name("refusals.py")
ASKED = Only(properties=("error_within_bound", "key_order*"), limit=4)
RIGHT = {
    "always_causal": {"always": "causal"},
    "self_attention": {"equal_lengths": "true"},
    "cached_queries": {"queries_within_keys": "true"},
    "one_query": {"max_seqlen_q": "1"},
    "default_scale": {"softmax_scale": "default"},
    "one_sequence": {"max_batch": "1"},
    "no_groups": {"features": "causal"},
    "not_causal": {"features": "gqa"},
    "few_keys": {"max_seqlen_k": "300"},
    "groups_of_four": {"max_group": "4"},
    "tiles_of_queries": {"seqlen_q_multiple": "64"},
    "tiles_of_keys": {"seqlen_k_multiple": "32"},
    "tiles": {"seqlen_multiple": "16"},
    "causal_self_attention": {"equal_lengths": "true", "always": "causal"},
    "some_keys": {"min_seqlen": "1"},
    "causal_windows": {"combinations": "window with causal"},
    "no_windows": {"features": "causal"},
    "slopes_by_head": {"slopes_by_head": "true"},
    "finite_biases": {"finite_biases": "true"},
}
WRONG = ("dislikes_outliers", "odd_products", "refuses_all")


def found(name: str) -> dict[str, str]:
    """The rule for what a kernel refuses among one call of each class."""
    kernel = find_kernel(f"{KERNELS}:{name}")
    problems = refusals.of_classes(kernel)
    refused = [problem for problem in problems if probing.refuses(kernel, problem)] or problems[:1]
    return {field: value for field, (value, _) in refusals.rule(kernel, refused, time.monotonic() + 60).items()}


@pytest.mark.parametrize("name", RIGHT)
def test_a_rule_explains_what_a_right_kernel_refuses(name):
    assert found(name) == RIGHT[name]
    narrowed = declaring(find_kernel(f"{KERNELS}:{name}"), RIGHT[name])
    assert not any(probing.refuses(narrowed, problem) for problem in refusals.of_classes(narrowed))


@pytest.mark.parametrize("name", WRONG)
def test_no_rule_explains_what_depends_on_values_or_fits_no_size(name):
    assert found(name) == {}


@pytest.fixture
def campaign(in_this_process, tmp_path, monkeypatch):
    def run(name: str, only: Only = ASKED):
        monkeypatch.setattr(plan, "run_law", partial(run_law, shrink_seconds=0.2))
        return verify.run(
            verify.Settings((f"{KERNELS}:{name}",), "quick", 1, tmp_path, only=only), lambda total, outcome: None
        )

    return run


@pytest.mark.parametrize("name", ["one_query"])
def test_a_campaign_asks_for_the_sizes_that_a_right_kernel_refuses(campaign, name):
    run = campaign(name)
    (kernel,) = run.kernels
    assert (run.verdict, run.exit_code, run.failures) == ("question", 6, ())
    assert KernelName.parse(kernel.name).contract == RIGHT[name]
    assert {each.seen.raised for each in run.questions} <= {"ValueError", "NotImplementedError"}


@pytest.mark.parametrize("name", ["always_causal_and_wrong", "one_query_and_a_key_less", "declared_too_wide"])
def test_a_wrong_kernel_fails_whatever_it_refuses(campaign, name):
    run = campaign(name)
    assert (run.verdict, run.exit_code) == ("fail", 1)
    assert {each.raised for each in run.failures} == {None}


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_that_no_rule_explains_is_no_result(campaign, name):
    run = campaign(name, replace(ASKED, families=("outliers*",), properties=(*ASKED.properties, "special*")))
    assert run.verdict == "fail"
    assert not run.questions


def test_a_rule_names_two_features_that_are_refused_together():
    kernel = find_kernel(f"{KERNELS}:no_window_of_softcaps")
    problem = AttentionProblem(2, 1, 1, 40, 50, 64, window=(7, 3), softcap=4.0)
    rule = refusals.rule(kernel, [problem], time.monotonic() + 60)
    assert {field: value for field, (value, _) in rule.items()} == {"combinations": "softcap without window"}


@pytest.mark.parametrize(("rule", "wrong"), [("slopes_by_head", "other_slopes"), ("finite_biases", "other_biases")])
def test_a_kernel_that_declares_which_terms_it_takes_is_judged_by_these_and_gets_no_others(rule, wrong):
    found = {name: statuses(declaring(find_kernel(f"{KERNELS}:{name}"), {rule: "true"})) for name in (rule, wrong)}
    assert "fail" not in found[rule]
    assert found[rule].count("pass") > 3
    assert "fail" in found[wrong]


def statuses(kernel: Kernel) -> list[str]:
    """What the properties of terms say of a kernel, and a case of each kind of term and values that it takes."""
    laws = [law for law in TERM_LAWS if law.applies(kernel)]
    taken = {kernel.fitted(replace(case_of(kernel, {}).problem, nheads=2, nheads_kv=2, term=x)) for x in terms(kernel)}
    cases = [Case(kernel.name, problem, Recipe("normal")) for problem in taken]
    judged = ["pass" if passes(kernel, x.measures) else "fail" for x in plan.judge_cases(kernel, "normal", cases)]
    return judged + [run_law(law, kernel, max_examples=20, seed=0, shrink_seconds=0).status for law in laws]
