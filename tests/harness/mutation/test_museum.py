"""Every report of the museum is planted, or said why not, and found by the task that the table names."""

from __future__ import annotations

from enum import StrEnum

import pytest

from fa3verify.mutation import museum
from fa3verify.mutation.examine import examine

# Planted faults of the twin, gradients and schedules have tests of their own.
AROUND = [exhibit for exhibit in museum.FORWARD if not isinstance(exhibit.plant, StrEnum)]


def test_every_report_is_planted_or_outside():
    planted = {exhibit.row for exhibit in museum.exhibits()}
    assert planted | set(museum.OUTSIDE) == set(range(1, museum.REPORTS + 1))
    assert not planted & set(museum.OUTSIDE)


@pytest.mark.parametrize("exhibit", AROUND, ids=[f"{e.row} {e.what}" for e in AROUND])
def test_quick_finds_a_report_by_the_task_that_is_named(exhibit):
    plan = [(exhibit.kernel, exhibit.task)]
    found = examine(lambda _: museum.candidate_of(exhibit, bits=exhibit.bits_alone), plan, "quick", 0)
    if exhibit.bits_alone:
        assert found.bits == exhibit.task, found
    else:
        assert found.found_by, found
        assert found.found_by != ("crash",), found
