"""The table of what changed between two campaigns."""

from __future__ import annotations

from dataclasses import replace

from fa3verify.campaign.findings import Finding
from fa3verify.judging.verdict import Part, What
from fa3verify.report import moved
from tests.harness.report.atlases import entry, made_of


def test_what_moved_is_all_that_changed_and_nothing_else():
    old = entry("a.fp16")
    first, second = old.families
    worse = replace(second, figures=second.figures | {"max_error": 0.04, "ratio_lse_max": 0.3})
    finding = Finding("a.fp16", What(Part.BOUND, "error / bound"), "observed 2", cause="L1 error / bound")
    new = replace(old, verdict="fail", families=(first, worse), loss=())
    before = made_of(old, entry("gone.fp16"))
    after = made_of(new, entry("came.fp16"), findings=(finding,))
    names = [(name, name) for name in ("a.fp16", "gone.fp16", "came.fp16")]
    rows = moved.moved(before, after, names).rows
    assert [tuple(row.values()) for row in rows] == [
        ("a.fp16", "", "verdict", "pass", "fail", "–"),
        ("a.fp16", "fa3_outliers", "max error", "0.0200", "0.0400", "2.00"),
        ("a.fp16", "fa3_outliers", "ratio lse max", "–", "0.300", "–"),
        ("a.fp16", "", "loss at 131072 keys", "0.573", "–", "–"),
        ("a.fp16", "", "finding, bound, error / bound", "–", "found", "–"),
        ("came.fp16", "", "kernel", "absent", "there", "–"),
        ("gone.fp16", "", "kernel", "there", "absent", "–"),
    ]
    assert not moved.moved(before, before, names[:2]).rows
