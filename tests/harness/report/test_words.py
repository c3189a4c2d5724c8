"""A verdict in words: what a release manager pastes says what the summary says."""

from __future__ import annotations

from fa3verify.report import build, words
from fa3verify.report.build import markdown_text
from tests.harness.report.fake_summary import read, summary


def test_the_sentence_says_verdict_kernels_effort_and_largest_error():
    made = summary(verdict="fail")
    text = words.sentence(read(made))
    assert text.startswith(f"fa3verify {made['version']}: FAIL, ")
    assert made["kernels"][0]["name"] in text
    assert f"{sum(k['cases'] for k in made['kernels']):,} cases" in text
    assert "\n" not in text


def test_a_pass_has_no_finding_and_hides_no_ratio_above_one():
    made = summary(verdict="pass")
    made["failures"] = []
    assert ": PASS, no finding in " in words.sentence(read(made))
    below = ((0.99999999, "below 1,"), (0.9995, "below 1,"), (0.9994, "0.999,"), (0.75, "0.750,"))
    for worst, said in (*below, (1.0, "1.00,"), (1.0004, "1.0004,"), ("Infinity", "inf,")):
        for kernel in made["kernels"]:
            kernel |= {"worst_ratio": worst, "worst_ratios": {"lse": None}}
        assert f"largest error / bound {said}" in words.sentence(read(made))
    for kernel in made["kernels"]:
        kernel |= {"worst_ratio": 0.5, "worst_ratios": {"lse": 7.5}}
    assert "largest error / bound 7.50," in words.sentence(read(made))


def test_every_kernel_and_every_cause_has_its_line_in_the_markdown():
    made = summary(verdict="fail")
    lines = build.render(read(made), "ab" * 32)[build.MARKDOWN].splitlines()
    for kernel in made["kernels"]:
        assert [line for line in lines if line.startswith(f"| {markdown_text(kernel['name'])} ")]
    for failure in made["failures"]:
        assert [line for line in lines if markdown_text(failure["message"]) in line]
