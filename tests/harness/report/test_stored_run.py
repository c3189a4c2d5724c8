"""What users read of a run is compared whole: terminal, Markdown, words and every section of the page."""

from __future__ import annotations

from tests.harness.report import stored_run


def test_a_run_and_one_that_passed_are_told_as_is_stored():
    stored = stored_run.TEXT.read_text(encoding="utf-8").splitlines()
    found = stored_run.both().splitlines()
    assert found == stored, "meant? then python -m tests.bless pages writes it"
