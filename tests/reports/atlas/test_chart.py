"""The first screen of an atlas and what stands below it: bits lost, findings as cards, twins beside their kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fa3_reports.atlas import chart
from fa3_reports.atlas.tables import Judged
from fa3verify.campaign.findings import Finding
from fa3verify.judging.verdict import What
from fa3verify.known import registry
from tests.harness.report.atlases import entry, made_of, stored
from tests.reports.atlas.test_page import pages


def losing(
    name: str,
    lost: dict[str, float | None],
    figures: dict[str, float] | None = None,
    *,
    findings: tuple[Finding, ...] = (),
    version: str = "1.0",
    **changes,
) -> Judged:
    """A kernel that loses some bits on each family, and has these figures on all of them."""
    made = entry(name, families=tuple(lost), **changes)
    rows = tuple(
        replace(row, figures=row.figures | {"bits_lost": lost[row.family]} | (figures or {})) for row in made.families
    )
    kernel = replace(made, families=rows)
    named = tuple(replace(each, kernel=name) for each in findings)
    return Judged(name, kernel, made_of(kernel, findings=named, version=version), ".", "CPU")


def drawn(*rows: Judged) -> chart.Chart:
    return chart.chart({"Forward, fp16": rows}, chart.pairs(rows))


def test_a_kernel_that_rounds_once_loses_no_bits_and_stands_first():
    made = drawn(losing("a.fp16", {"normal": 2.5, "huge": 1.5}), losing("b.fp16", {"normal": 0.0, "huge": 0.0}))
    (best, other) = made.groups["Forward, fp16"]
    assert (best.name, best.mean, [(cell.text, cell.state) for cell in best.cells]) == (
        "b",
        0,
        [("0", "q0")] * 2,
    )
    assert (other.name, other.mean, [cell.state for cell in other.cells]) == ("a", 2, ["q4", "q3"])


@pytest.mark.parametrize(
    ("lost", "figures", "text", "state"),
    [
        (0.1, {}, "0.1", "q1"),
        (9.0, {}, "9.0", "q5"),
        (math.inf, {}, "∞", "bad"),
        (0.0, {"nonfinite": 1}, "∞", "bad"),  # of a case that is not ranked
        (0.0, {"ratio_max": 1.5}, "0", "q0 wrong"),
        (0.0, {"ratio_lse_max": math.inf}, "0", "q0 wrong"),  # of an output that has no bits here
        (None, {}, "·", "unknown"),
        (None, {"ratio_max": math.inf}, "·", "unknown wrong"),
        (None, {"nonfinite": 1}, "∞", "bad"),
    ],
)
def test_what_is_infinite_wrong_or_not_ranked_has_its_own_mark(lost, figures, text, state):
    (line,) = drawn(losing("a.fp16", {"normal": lost}, figures)).groups["Forward, fp16"]
    (cell,) = line.cells
    assert (cell.text, cell.state) == (text, state)


def test_a_family_that_a_kernel_was_not_judged_on_is_empty_and_the_kernel_has_no_mean():
    made = drawn(losing("a.fp16", {"normal": 1.0, "huge": 1.0}), losing("b.fp16", {"normal": 0.1}))
    (ranked, other) = made.groups["Forward, fp16"]
    assert (ranked.name, ranked.mean) == ("a", 1.0)
    assert (other.mean, other.cells[1].text, other.cells[1].state) == (None, "", "none")


def test_the_sentence_says_what_stands_out_of_the_data():
    rows = (
        losing("a.fp16", {"normal": 0.25, "tiny": 4.0}),
        losing("b.fp16", {"normal": 0.5, "tiny": 6.0}),
        losing("c.fp16", {"normal": math.inf, "tiny": 5.0}),
    )
    assert drawn(*rows).sentence == (
        "3 kernels on 2 kinds of inputs, in bits lost; the median loss is 4.0 in forward fp16; the hardest inputs "
        "are tiny (5.0 at the median) and normal (0.4 at the median); the largest finite loss is that of b.fp16 on "
        "tiny, 6.0; NaN or infinity where the exact output is finite came out of 1 kernel (c.fp16; on normal)."
    )
    assert drawn(losing("a.fp16", {"normal": None})).sentence == (
        "1 kernel on 1 kind of inputs, in bits lost; 1 kernel without a figure (judged before there was one, or a "
        "quantiser)."
    )


def test_the_page_opens_with_the_sentence_and_the_chart_and_findings_follow_before_any_other_table(tmp_path):
    finding = found("L1 error / bound", "observed 2", "worst/a.json")
    kernels = entry("a.fp16", verdict="fail"), entry("b.fp16")
    html, text = pages(tmp_path, stored(tmp_path, *kernels, findings=(replace(finding, kernel="a.fp16"),)))
    places = [html.index(words) for words in ('class="said"', 'class="scroll chart"', 'class="card"', 'class="dense"')]
    assert places == sorted(places)
    assert "2 kernels on 2 kinds of inputs, in bits lost" in text
    assert "<details open" not in html  # tables are folded


def found(what: str, message: str, replay: str | None = None) -> Finding:
    return Finding("", What.from_json(what), message, "case 1", what, replay)


INFINITE = found("law empty_rows", "lse: got inf, expected -inf,", "worst/x.json")
OTHER = found("L1 error / bound", "observed 2")


def test_what_one_page_explains_is_one_card_and_no_finding_is_lost():
    known = chart.Known("p.md", ("*",), ("property empty_rows*",), "by design")
    rows = [losing(name, {"normal": 0.0}, findings=(INFINITE, OTHER)) for name in ("twin.flash3.fp16", "flash3.fp16")]
    cards = chart.cards(rows, [known])
    assert [(card.title, card.known is None, len(card.found)) for card in cards] == [
        ("twin.flash3.fp16: beyond its bound", True, 1),
        ("flash3.fp16: beyond its bound", True, 1),
        ("by design", False, 2),
    ]
    assert cards[-1].lead.row.label == "flash3.fp16"  # the kernel, not its model
    assert cards[-1].lead.replay == "worst/x.json"
    assert sum(len(card.found) for card in cards) == 4


def test_every_twin_of_a_known_kernel_is_found_by_its_name():
    declared = {name: kernel.twin.name for name, kernel in registry.discover().items() if kernel.twin}
    assert len(declared) > 10
    assert {name: chart.twin_of(name) for name in declared} == declared


@pytest.mark.parametrize(
    ("kernel", "mark", "words"),
    [
        ({}, "=", "kernel pass, twin pass; bits unlike the twin's: 0 of 4\u202f096"),
        ({"figures": {"bits_differing": 3}}, "≠", "kernel pass, twin pass; bits unlike the twin's: 3 of 4\u202f096"),
        ({"figures": {"bits_differing": None}}, "~", "kernel pass, twin pass; bits unlike the twin's: not compared"),
        ({"verdict": "fail"}, "≠", "kernel fail, twin pass; bits unlike the twin's: 0 of 4\u202f096"),
    ],
)
def test_a_twin_and_its_kernel_agree_or_their_verdicts_and_bits_are_said(kernel, mark, words):
    rows = [losing("flash3.fp16", {"normal": 0.0}, **kernel), losing("twin.flash3.fp16", {"normal": 0.0})]
    (made,) = chart.pairs(rows)
    assert (made.mark, made.words) == (mark, words)


def test_a_twin_has_no_line_of_its_own_where_its_kernel_has_one(tmp_path):
    html, text = pages(tmp_path, stored(tmp_path, entry("gluon.fp16"), entry("twin.fp16"), entry("twin.bf16")))
    shown = html[html.index('class="scroll chart"') : html.index("</table>")]
    assert '>gluon</a> <i class="twin">=</i>' in shown
    assert shown.count('<th scope="row">') == 2  # gluon.fp16, and the twin whose kernel was not judged
    assert "The same verdict and every bit alike: gluon.fp16." in text
