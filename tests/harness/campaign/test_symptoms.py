"""Symptoms: the gravest first, and what shows one thing stands once, however many rules saw it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fa3verify.campaign.findings import SEVERITIES, finding, severity, symptoms, why
from fa3verify.campaign.run import Finding

EXAMPLES = {
    "no result": finding("k", "law x", "ValueError: 3", crashed=True),
    "infinite error": finding(
        "k", "law x", "row 0: lse[0, 1]: got inf, expected -inf bit for bit; 1 of 1 values differ"
    ),
    "wrong values": finding("k", "law error_within_bound", "out[0]: got 2.5, expected 1.5, bound 0.1, ratio 10"),
    "broken property": finding("k", "law x", "out[0]: got 2.5, expected 1.5 bit for bit; 1 of 1 values differ"),
    "worse than the baseline": finding("k", "L2 rel_rmse_seen", "family peaky: observed 3, limit 2, baseline 2"),
}
MORE = {
    "no result": [finding("k", "loading", "SystemExit: 0"), finding("k", "family normal", "hang", crashed=True)],
    "infinite error": [
        finding("k", "L1 error / bound", "family faint: observed inf, limit 1"),
        finding("k", "L1 non-finite outputs", "family faint: observed 3, limit 0"),
        finding("k", "law error_within_bound", "out[0]: got nan, expected 1.5, bound 0.1, ratio inf"),
    ],
    "wrong values": [
        finding("k", "L1 lse error / bound", "family faint: observed 1.7, limit 1"),
        finding("k", "L0 bits that differ from the twin", "family faint: observed 3, limit 0"),
        finding(
            "k", "L1 outside the stated order, assuming the tensor-core model", "family faint: observed 3, limit 0"
        ),
    ],
}


def test_every_severity_has_an_example_and_a_meaning():
    assert list(EXAMPLES) == list(SEVERITIES)


@pytest.mark.parametrize("wanted", SEVERITIES)
def test_a_finding_is_as_grave_as_what_it_shows(wanted):
    for each in (EXAMPLES[wanted], *MORE.get(wanted, ())):
        assert severity(each) == wanted, each.what


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_the_gravest_come_first_in_whatever_order_they_were_found(order):
    found = [list(EXAMPLES.values())[i] for i in order]
    assert [each.severity for each in symptoms(found)] == list(SEVERITIES)


def test_infinite_errors_are_one_symptom_of_an_output_a_kind_and_a_kernel():
    lse = EXAMPLES["infinite error"], finding("k", "L1 lse error / bound", "family cover: observed inf, limit 1")
    out = MORE["infinite error"]
    (first, second) = symptoms([*lse, *out])
    assert first.first is lse[0]
    assert first.also == (("bound, lse error / bound", 1),)
    assert (second.first, sum(count for _, count in second.also)) == (out[2], 2)
    assert len(symptoms([lse[0], replace(lse[0], kernel="other")])) == 2


def test_a_rule_that_says_no_kind_stands_alone_where_it_could_belong_to_two():
    nan, rule = MORE["infinite error"][2], MORE["infinite error"][0]
    finite = finding("k", "law y", "out[0]: got 2.5, expected 0.0, bound 0.000e+00, ratio inf")
    assert severity(finite) == "infinite error"
    assert [len(symptoms(found)) for found in ([nan, rule], [finite, rule], [nan, finite], [nan, finite, rule])] == [
        1,
        1,
        2,
        3,
    ]


def test_findings_with_one_replay_file_are_one_symptom_at_its_gravest():
    wrong, infinite = MORE["wrong values"][2], MORE["infinite error"][0]
    found = [replace(each, replay="worst/a.json") for each in (wrong, infinite)]
    (only,) = symptoms(found)
    assert (only.severity, only.elsewhere) == (
        "infinite error",
        "bound, outside the stated order, assuming the tensor-core model",
    )
    assert len(symptoms([found[0], replace(found[1], replay="worst/b.json")])) == 2
    assert len(symptoms([found[0], replace(found[1], kernel="other")])) == 2


def test_others_are_one_for_each_cause_and_findings_without_a_cause_stand_alone():
    a, b = EXAMPLES["broken property"], finding("k", "law y", EXAMPLES["broken property"].message)
    assert [(each.first.what, each.elsewhere) for each in symptoms([a, b, a, a])] == [
        ("law x", "property x (2)"),
        ("law y", ""),
    ]
    old = [Finding("k", "w", str(i)) for i in range(3)]
    assert len(symptoms(old)) == 3


WORDS = [
    ("raises RuntimeError", finding("k", "law x", "RuntimeError: shape '[2, 1]' is invalid", crashed=True)),
    ("gives no result", finding("k", "family normal", "hang", crashed=True)),
    (
        "lse inf, not -inf",
        finding("k", "law x", "against float64: lse[0, 0]: got inf, expected -inf, bound 0, ratio inf"),
    ),
    ("out nan, not finite", finding("k", "law x", "out with V = 1 everywhere[0, 0]: got nan, expected 0.0, bound 0")),
    ("error infinite", finding("k", "L1 error / bound", "family cover: observed inf, limit 1")),
    ("lse error infinite", finding("k", "L1 lse error / bound", "family cover: observed inf, limit 1")),
    ("non-finite outputs", finding("k", "L1 non-finite outputs", "family cover: observed 960, limit 0")),
    ("beyond its bound", finding("k", "L1 error / bound", "family cover: observed 1.7, limit 1")),
    ("beyond its bound", finding("k", "law error_within_bound", "out[0]: got 2.5, expected 1.5, bound 0.1, ratio 10")),
    ("other bits", finding("k", "L0 bits that differ from the twin", "family faint: observed 3, limit 0")),
    (
        "outside stated order",
        finding("k", "L1 outside the stated order, assuming", "family faint: observed 3, limit 0"),
    ),
    (
        "broken: sign symmetry",
        finding("k", "law sign_symmetry", "out[0]: got 2.5, expected 1.5 bit for bit; 1 of 1 differ"),
    ),
    ("worse than the baseline", finding("k", "L2 rel_rmse_seen", "family peaky: observed 3, limit 2, baseline 2")),
]


@pytest.mark.parametrize(("words", "found"), WORDS, ids=[words for words, _ in WORDS])
def test_a_symptom_is_told_in_about_three_words(words, found):
    (symptom,) = symptoms([found])
    assert why(symptom) == words
    assert len(words.split()) <= 4
