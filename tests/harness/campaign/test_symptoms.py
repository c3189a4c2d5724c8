"""Symptoms: the gravest first, and what shows one thing stands once, however many rules saw it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from fa3_reports.atlas.tables import why
from fa3verify.campaign.findings import SEVERITIES, Finding, finding, severity, symptoms, with_clause
from fa3verify.judging import gate
from fa3verify.judging.verdict import Part, Seen, What
from fa3verify.text import Failure

LAW = What(Part.LAW, "x")
WITHIN = What(Part.LAW, "error_within_bound")
BOUND = What(Part.BOUND, "error / bound")
LSE = What(Part.BOUND, "lse error / bound")
OUTSIDE = What(Part.BOUND, gate.OUTSIDE)
BITS = What(Part.BITS, gate.OTHER_BITS)
MOVED = What(Part.BASELINE, "rel_rmse_seen")
TWICE = Seen("out", "finite", "finite", 10.0)  # a value of ten times its bound
OTHER = Seen("out", "finite", "finite")  # a value of other bits


def shown(what: What, seen: Seen | None = None) -> Finding:
    """Return a finding that nothing but its type tells: its message is the same for all."""
    return finding("k", what, "m", seen=seen)


def failed(what: What, message: str = "m", raised: str = "") -> Finding:
    return finding("k", what, Failure(message, raised))


EXAMPLES = {
    "no result": failed(LAW, "ValueError: 3", "ValueError"),
    "infinite error": shown(LAW, Seen("lse", "inf", "-inf")),
    "wrong values": shown(WITHIN, TWICE),
    "broken property": shown(LAW, OTHER),
    "worse than the baseline": shown(MOVED),
}
MORE = {
    "no result": [failed(What(Part.LOADING)), failed(What(Part.FAMILY, "normal")), failed(What(Part.OUTPUT, "lse"))],
    "infinite error": [
        shown(BOUND, Seen("out", ratio=math.inf)),
        shown(What(Part.BOUND, gate.NON_FINITE), Seen("out", ratio=math.inf)),
        shown(WITHIN, Seen("out", "nan", "finite", math.inf)),
        shown(MOVED, Seen("out", ratio=math.inf)),
    ],
    "wrong values": [shown(LSE, Seen("lse", ratio=1.7)), shown(BITS), shown(OUTSIDE)],
    "broken property": [shown(What(Part.LAW, "errors_have_no_bias"), Seen("out", ratio=3.0)), shown(LAW)],
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
    lse = EXAMPLES["infinite error"], shown(LSE, Seen("lse", ratio=math.inf))
    out = MORE["infinite error"][:3]
    (first, second) = symptoms([*lse, *out])
    assert first.first is lse[0]
    assert first.also == (("bound, lse error / bound", 1),)
    assert (second.first, sum(count for _, count in second.also)) == (out[2], 2)
    assert len(symptoms([lse[0], replace(lse[0], kernel="other")])) == 2


def test_a_rule_that_says_no_kind_stands_alone_where_it_could_belong_to_two():
    nan, rule = MORE["infinite error"][2], MORE["infinite error"][0]
    finite = shown(What(Part.LAW, "y"), Seen("out", "finite", "finite", math.inf))
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
    a, b = EXAMPLES["broken property"], shown(What(Part.LAW, "y"), OTHER)
    assert [(str(each.first.what), each.elsewhere) for each in symptoms([a, b, a, a])] == [
        ("law x", "property x (2)"),
        ("law y", ""),
    ]
    old = [Finding("k", LAW, str(i)) for i in range(3)]
    assert len(symptoms(old)) == 3


WORDS = [
    ("raises RuntimeError", failed(LAW, "RuntimeError: shape '[2, 1]' is invalid", "RuntimeError")),
    ("gives no result", failed(What(Part.FAMILY, "normal"), "hang")),
    ("lse inf, not -inf", shown(LAW, Seen("lse", "inf", "-inf", math.inf))),
    ("out nan, not finite", shown(LAW, Seen("out", "nan", "finite", math.inf))),
    ("error infinite", shown(BOUND, Seen("out", ratio=math.inf))),
    ("lse error infinite", shown(LSE, Seen("lse", ratio=math.inf))),
    ("q descale error infinite", shown(LAW, Seen("q_descale", ratio=math.inf))),
    ("non-finite outputs", shown(What(Part.BOUND, gate.NON_FINITE), Seen("out", ratio=math.inf))),
    ("beyond its bound", shown(BOUND, Seen("out", ratio=1.7))),
    ("beyond its bound", shown(WITHIN, TWICE)),
    ("other bits", shown(BITS)),
    ("outside stated order", shown(OUTSIDE)),
    ("broken: sign symmetry", shown(What(Part.LAW, "sign_symmetry"), OTHER)),
    ("worse than the baseline", shown(MOVED)),
]


@pytest.mark.parametrize(("words", "found"), WORDS, ids=[words for words, _ in WORDS])
def test_a_symptom_is_told_in_about_three_words(words, found):
    (symptom,) = symptoms([found])
    assert why(symptom) == words
    assert len(words.split()) <= 4


WORDS_OF_OURS = "ValueError: out[0]: got nan, expected 1.0, ratio inf; observed inf; non-finite; quantisation"


@pytest.mark.parametrize("wanted", SEVERITIES)
def test_no_word_of_a_message_moves_a_finding(wanted):
    for each in (EXAMPLES[wanted], *MORE.get(wanted, ())):
        other = replace(each, message=WORDS_OF_OURS)
        assert severity(other) == wanted
        assert why(symptoms([other])[0]) == why(symptoms([each])[0])
        assert with_clause(other, "forward").clause == with_clause(each, "forward").clause


@pytest.mark.parametrize("what", [LAW, BOUND, BITS, What(Part.GIVEN_UP), What(Part.OUTPUT, "lse"), What(Part.LOADING)])
def test_files_have_what_a_finding_is_about_in_one_text(what):
    assert What.from_json(str(what)) == what
    with pytest.raises(ValueError, match="what must begin with one of L0, L1, L2, law"):
        What.from_json(f"of {what}")
