"""Every report of the museum is planted, or said why not, and found by the task that the table names."""

from __future__ import annotations

from enum import StrEnum

import pytest

from fa3_kernels.faults.table import Rewrite
from fa3_reports.mutation import museum
from fa3_reports.mutation.examine import examine

# Planted faults of the twin, gradients and schedules have tests of their own.
AROUND = [exhibit for exhibit in museum.FORWARD if not isinstance(exhibit.plant, StrEnum)]
TRIED = [exhibit for exhibit in AROUND if exhibit.row in (3, 11, 32, 65)]  # the command runs all of them


def test_every_report_is_planted_or_outside():
    planted = {exhibit.row for exhibit in museum.exhibits()}
    assert planted | set(museum.OUTSIDE) == set(range(1, museum.REPORTS + 1))
    assert not planted & set(museum.OUTSIDE)


@pytest.mark.parametrize("exhibit", TRIED, ids=[f"{e.row} {e.what}" for e in TRIED])
def test_quick_finds_a_report_by_the_task_that_is_named(exhibit):
    plan = [(exhibit.kernel, exhibit.task)]
    found = examine(lambda _: museum.kernel_of_exhibit(exhibit, bits=False), plan, "quick", 0)
    assert found.found_by, found
    assert found.found_by != ("crash",), found


LINES = [exhibit for exhibit in AROUND if isinstance(exhibit.plant, Rewrite)]


@pytest.mark.parametrize("exhibit", LINES, ids=[f"{e.row} {e.what}" for e in LINES])
def test_what_is_planted_in_a_line_finds_that_line(exhibit):
    assert exhibit.plant.tree().body


def test_a_schedule_is_found_by_the_hazard_checker():
    exhibit = next(exhibit for exhibit in museum.schedules() if exhibit.row == 41)
    assert museum.show(exhibit).found_by == ("hazards",)
