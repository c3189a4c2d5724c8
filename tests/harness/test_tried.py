"""What was tried: the sizes of calls that were compared, of every kernel alike, and what nobody asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import records
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import JudgeFamily, SearchLaw
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.cases import coverage, tried
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.twins import twin
from fa3verify.operations import FEATURES
from fa3verify.properties import find_law, run_law
from fa3verify.report.tables import what_was_tried
from tests.harness import third_party
from tests.harness.kernels import serving_kernels

PLAIN = AttentionProblem(1, 6, 2, 5, 40, 64)
PACKED = AttentionProblem.varlen((3, 9), (7, 700), nheads=4, nheads_kv=4, head_dim=192, head_dim_v=128, causal=True)


def collected(*problems: AttentionProblem) -> tried.SizesTried:
    found = tried.Tried()
    for problem in problems:
        found.add(problem)
    return found.noted()


def concluded(*problems: AttentionProblem, **facts) -> tried.SizesTried:
    given = {"features": FEATURES, "head_dims": None, "outputs": {}, "properties": (), "is_forward": True} | facts
    return tried.concluded(collected(*problems), **given)


def test_sizes_survive_json_and_add_up():
    both = tried.Tried()
    for problem in (PLAIN, PACKED):
        both.update(records.read(tried.SizesTried, json.loads(json.dumps(records.plain(collected(problem)))), "tried"))
    assert both.noted() == collected(PLAIN, PACKED)
    assert both.noted() == tried.SizesTried(
        calls=2,
        head_dim=(64, 192),
        head_dim_v=((64, 64), (192, 128)),
        group=(1, 3),
        nheads=(6,),
        sequences=(1, 2),
        seqlen_q=(9,),
        seqlen_k=(700,),
        features=("causal", "gqa", "head_dim_v", "varlen"),
    )


def test_a_property_notes_the_sizes_of_the_calls_that_it_compared():
    called = tried.Tried()
    sound = twin("fp16")

    def run(problem, operands, config):
        called.add(problem)
        return sound.code.run(problem, operands, config)

    outcome = run_law(find_law("sign_symmetry"), sound.altered(run=run), max_examples=5, seed=0)
    assert outcome.status == "pass"
    assert outcome.tried == called.noted()
    assert outcome.tried.calls > outcome.examples


def test_a_call_that_raises_is_credited_with_nothing():
    def run(problem, operands, config):
        raise ValueError("not this one")

    outcome = run_law(find_law("error_within_bound"), twin("fp16").altered(run=run), max_examples=3, seed=0)
    assert outcome.tried == collected()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "other head_dims, of which the kernel declares none"),
        ({"head_dims": (64, 128)}, "head_dim 128"),
        ({"outputs": {"lse": (53, 144)}}, "lse in 91 of 144 cases"),
        ({"outputs": {"lse": (0, 3)}}, "lse, which was not returned"),
        ({}, "windows"),
        ({}, "packed sequences"),
        ({}, "gradients"),
        ({}, "repeated runs"),
        ({}, "tensors that are not contiguous"),
    ],
)
def test_what_nobody_asked_is_not_tried(facts, words):
    assert words in concluded(PLAIN, **facts).not_tried


def test_what_ran_is_not_among_what_was_not_tried():
    ran = concluded(
        PLAIN, PACKED, head_dims=(64, 192), outputs={"lse": (2, 2)}, properties=tried.REPEATED[:1], is_forward=False
    )
    assert ran.not_tried == ("windows", "softcap", "tensors that are not contiguous")


def test_repeated_runs_are_those_of_a_property_that_compares_them():
    assert concluded(PLAIN, properties=tried.REPEATED).repeated_runs


def _strided(q, k, v, **given):
    """Refuse what is not contiguous."""
    if not all(x.flags.c_contiguous for x in (q, k, v)):
        raise ValueError("arrays must be contiguous")
    return serving_kernels.plain(q, k, v, **given)


@pytest.mark.parametrize(
    ("function", "features", "layout", "left"),
    [
        (serving_kernels.plain, ("causal", "gqa"), r"contiguous and viewed \(all arguments in \d+ ways, k .*\)", ""),
        (
            _strided,
            ("causal", "gqa"),
            r"contiguous and viewed \(all arguments in \d ways, k in \d, q in \d and v in \d\)",
            "",
        ),
        (serving_kernels.cached, ("causal", "gqa", "paged"), r".*k_cache in \d+, page_table in \d+.*", ""),
    ],
)
def test_layouts_that_are_told_are_those_of_arrays_that_a_kernel_was_given_and_did_not_refuse(
    function, features, layout, left
):
    """Strided tensors were said to be tried of caches, which had been contiguous in every call."""
    (kernel,) = array_kernel(function, name="k", dtypes=("bf16",), layout="bshd", features=features)
    law = run_law(find_law("views_are_read_by_their_strides"), kernel, max_examples=6, seed=0)
    assert law.status == "pass"
    given = {"features": FEATURES, "head_dims": None, "outputs": {}, "properties": [law.law], "is_forward": True}
    ran = tried.concluded(replace(law.tried, calls=1), **given)
    assert re.fullmatch(layout, ran.layout)
    assert f" {ran.layout} tensors; " in tried.line([ran])
    assert f" {ran.layout} tensors; " in tried.line([ran, ran])
    said = [f"{left} that are not contiguous"] if left else []
    assert [words for words in ran.not_tried if "contiguous" in words] == said


def test_the_line_says_what_every_kernel_ran():
    one, other = (concluded(*problems) for problems in ((PLAIN, PACKED), (PACKED,)))
    assert tried.line([one]) == (
        "tried head_dim 64, 192; V the same or 128; keys up to 700; groups 1, 3; sequences 1, 2; 2 calls; "
        "contiguous tensors; repeated runs not compared"
    )
    assert tried.line([one, other]) == (
        "tried of each kernel head_dim 192; V 128; keys up to 700; groups 1; sequences 2; at least 1 calls each; "
        "contiguous tensors; repeated runs not compared"
    )
    assert tried.line([one, None]) == tried.line([]) == ""  # nobody knows what a kernel of an older run was called with


@pytest.mark.parametrize(("dims", "credited"), [(None, []), ((64, 128), ["head_dim 64", "head_dim 128"])])
def test_a_kernel_that_declares_no_head_dims_is_credited_with_none(dims, credited):
    claimed = coverage.claims(replace(third_party.sound(), head_dims=dims), (), ())
    assert [name for name in claimed if name.startswith("head_dim ")] == credited


def test_a_summary_has_the_sizes_of_judged_cases_and_trials_and_the_report_shows_them():
    kernel = introduce("twin.fp16", "quick")
    family = JudgeFamily(kernel=kernel.name, family="normal", profile="quick", seed=0)
    law = SearchLaw(kernel=kernel.name, law="sign_symmetry", max_examples=2, seed=0)
    tasks: list[Task] = [family, law]
    outcomes = [Outcome(task, task.run()) for task in tasks]
    summary = summarize([kernel], outcomes, None, profile="quick", seed=0)
    (body,) = summary.kernels
    ran = tried.Tried()
    for case in summary.cases:
        ran.add(case.case.problem)
    searched = law.run()
    assert searched.tried
    ran.update(searched.tried)
    noted = replace(ran.noted(), repeated_runs=False, not_tried=body.tried.not_tried)
    assert body.tried == noted
    assert body.tried.seqlen_k == (509,)
    rows = {row["what"]: row["twin.fp16"] for row in what_was_tried(summary).rows}
    assert rows["keys of a sequence"] == "up to 509"
    assert "repeated runs" in rows["not tried"]
