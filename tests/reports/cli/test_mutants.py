"""Verb mutants: bad input ends in one line; what was missed decides the exit code."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fa3_reports.__main__ import main
from fa3_reports.mutation import campaign


def run(*arguments: object):
    return CliRunner().invoke(main, ["mutants", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("automatic", "--module", "nothing"), "unknown module"),
        (("automatic", "--kernel", "nothing"), "unknown kernel"),
    ],
)
def test_an_unknown_name_is_told_before_anything_runs(arguments, words, tmp_path):
    found = run(*arguments, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert words in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("missed", "code"), [(0, 0), (3, 1)])
def test_the_exit_code_says_whether_anything_was_missed(missed, code, monkeypatch, tmp_path):
    asked = []

    def made(progress, settings):
        asked.append((settings.profile, settings.bits, settings.rules))
        return missed, "a page"

    monkeypatch.setattr(campaign, "RUN", {"museum": made, "grid": made, "automatic": made})
    found = run("museum", "grid", "--no-bits", "--rules", "ours", "--out", tmp_path)
    assert (found.exit_code, found.stdout) == (code, "a page\na page\n")
    assert asked == [("quick", False, "ours")] * 2
