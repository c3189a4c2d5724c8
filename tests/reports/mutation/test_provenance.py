"""The keys of a campaign change with what is judged and with what judges; writing what is found changes none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fa3_kernels
import fa3_reference
import fa3_reports
import fa3_simulator
import fa3verify
from fa3_reports.evidence_keys import FORWARD, code_key, judge_key
from fa3_reports.mutation import campaign, provenance
from fa3_reports.mutation.automatic import Settings

PACKAGES = (fa3_kernels, fa3_reference, fa3_reports, fa3_simulator, fa3verify)
GRID = "fa3_reports.mutation.grid:examine_cell"
MUSEUM = "fa3_reports.mutation.museum:show"
JUDGED = "fa3_reports.mutation.museum:judged"
PLANTED = "fa3_reports.mutation.museum:exhibits"
FLASH3 = "fa3_kernels.plan.families.flash3:FAMILIES"
EDITS = [  # a file, what stands there, what is put there instead, and functions whose keys change and do not
    ("fa3verify/properties/trials.py", "MAX_SEQLEN = 300", "MAX_SEQLEN = 200", {JUDGED}, {GRID}),
    ("reference/fa3_reference/attention.py", "def attention(", "@print\ndef attention(", {GRID}, {PLANTED}),
    ("simulator/fa3_simulator/hazards.py", "def check(", "@print\ndef check(", {MUSEUM}, {JUDGED}),
    ("kernels/fa3_kernels/faults/faults.toml", "blocks.stop - 2", "blocks.stop - 3", {PLANTED}, {FLASH3}),
    ("kernels/fa3_kernels/plan/families/flash3.py", "FAMILIES = {", "FAMILIES = {**{}, ", {FLASH3}, {PLANTED}),
]
SILENT = (  # what writes pages, and what lists kernels of GPUs
    "fa3verify/known/gluon.py",
    "fa3verify/report/tables.py",
    "reports/fa3_reports/mutation/tables.py",
    "reports/fa3_reports/mutation/campaign.py",
    "reports/fa3_reports/device/page.py",
)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources whose names keys are of."""
    for package in PACKAGES:
        to = tmp_path / package.__name__.partition("_")[2] / package.__name__
        shutil.copytree(package.__path__[0], to, ignore=shutil.ignore_patterns("__pycache__", "data"))
    return tmp_path


@pytest.mark.parametrize(("file", "old", "new", "changed", "kept"), EDITS, ids=[x[0] for x in EDITS])
def test_a_key_changes_with_what_it_is_of(file, old, new, changed, kept, tree):
    path = tree / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    for place in changed | kept:
        assert (judge_key(*place.split(":"), tree) != judge_key(*place.split(":"))) == (place in changed)


def test_what_only_writes_a_page_changes_no_key(tree):
    for file in SILENT:
        (tree / file).write_text("raise ImportError\n")
    for place in (GRID, MUSEUM, "fa3_reports.mutation.automatic:_tasks"):
        assert judge_key(*place.split(":"), tree) == judge_key(*place.split(":"))


def test_every_kind_has_keys_of_functions_that_there_are():
    assert provenance.ROOTS.keys() == campaign.RUN.keys() == campaign.ASKED.keys()
    for kind in provenance.ROOTS:
        assert all(len(key) == 16 for key in provenance.keys(kind).values())
    assert judge_key(*FORWARD) != code_key(*FORWARD)  # the orders of the families are in it


def test_a_campaign_writes_what_it_was_asked_for_and_the_keys_that_it_began_with(monkeypatch, tmp_path):
    keys = iter([{"twin": "before"}, {"twin": "after"}])
    monkeypatch.setattr(provenance, "keys", lambda kind: next(keys))
    monkeypatch.setattr(campaign, "RUN", {"grid": lambda progress, settings: (0, "a page")})
    assert campaign.run(["grid"], print, Settings(tmp_path, rules="ours")) == (0, "a page")
    facts = json.loads((tmp_path / "grid_provenance.json").read_text())
    assert (facts["evidence_of"], facts["asked"], facts["keys"]) == ("grid", {"rules": "ours"}, {"twin": "before"})
    assert facts["versions"]["fa3verify"] == fa3verify.__version__
    assert provenance.changed("grid", facts["keys"]) == ["twin"]
