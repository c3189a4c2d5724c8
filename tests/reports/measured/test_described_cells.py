"""Kernels that were described before they were timed are as far off as the note says."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reports.measured.described_cells import SECOND, cells


@pytest.mark.nightly
def test_described_kernels_that_nobody_had_timed_are_a_seventh_off_and_rather_too_fast() -> None:
    errors = np.array([cell.error for cell in cells()])
    assert len(errors) == 18
    assert 0.12 < np.median(np.abs(errors)) < 0.17
    assert np.mean(errors < 0) > 0.7  # what their instructions wait for each other is not in the descriptions


@pytest.mark.nightly
def test_six_more_are_a_fifth_too_fast_although_they_say_what_instructions_wait_for_each_other() -> None:
    errors = np.array([cell.error for cell in cells(SECOND)])
    assert len(errors) == 18
    assert 0.16 < np.median(np.abs(errors)) < 0.22
    assert np.mean(errors < 0) > 0.9
