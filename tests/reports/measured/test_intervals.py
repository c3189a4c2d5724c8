"""The table of 90 % intervals is what published timings make it, and covers timings that it was not made from."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reports.measured import intervals
from fa3_reports.measured.intervals import Ratio
from fa3_simulator.held_out import DESCRIBED, TIMED, groups_of
from tests.reports.measured.published import published

# Tables whose predictions are published beside the timings: all timings of FlashAttention-4, and of schedules that are
# not launched.
WITH_PREDICTIONS = [folder for folder in intervals.FORWARD if (intervals.H200 / folder / "validation.csv").exists()]


@pytest.mark.parametrize("rows", [20, 39, 100])
def test_a_further_ratio_lies_between_the_bounds_of_others_in_nine_of_ten_cases(rows: int) -> None:
    drawn = np.random.default_rng(rows).lognormal(0, 0.05, (2000, rows + 1))
    inside = [low <= further <= high for *known, further in drawn for low, high in [intervals.bounds(known)]]
    assert 0.89 < np.mean(inside) < 0.925


def test_a_class_is_the_finest_with_enough_rows_and_a_campaign_that_is_left_out_makes_none() -> None:
    many = [Ratio("a", ["fine", "coarse"], 1 + i / 100) for i in range(20)]
    few = [Ratio("b", ["rare", "coarse"], 1.0), Ratio("c", ["rare", "coarse"], 2.0)]
    made = {known.group: known for known in intervals.table([*many, *few])}
    assert {group: known.rows for group, known in made.items()} == {"fine": 20, "coarse": 22}
    assert (made["fine"].low, made["fine"].high) == (1.0, 1.19)
    assert made["coarse"].high == 2.0
    fared = [*intervals.left_out([*many, *few])]
    assert [(each.campaign, each.group, each.is_covered) for each in fared] == [
        ("b", "coarse", True),
        ("c", "coarse", False),
    ]


def test_bounds_of_other_schedules_and_of_flash_attention_4_are_those_of_the_published_rows() -> None:
    rows = []
    for folder in WITH_PREDICTIONS:
        seen = {(row.kernel, row.problem, row.config): row for row in reversed(published(f"h200/{folder}"))}
        for row in seen.values():
            groups = groups_of(row.problem, row.config, row.predicted[0])
            if any(word in group for group in groups for word in ("other", "flash4")):
                rows.append(Ratio(folder, groups, row.predicted[0] / row.cycles))
    made = intervals.table(rows)
    assert len(made) == 7
    assert made == [known for known in TIMED if "other" in known.group or "flash4" in known.group]


@pytest.mark.nightly
def test_the_table_is_what_is_made_of_the_timings_and_covers_campaigns_that_are_left_out() -> None:
    rows = [*intervals.ratios()]
    assert intervals.table(rows) == [*TIMED, DESCRIBED]
    fared = [*intervals.left_out(rows)]
    assert len(fared) == 1597
    assert np.mean([each.is_covered for each in fared]) == pytest.approx(0.914, abs=0.005)


@pytest.mark.nightly
def test_timings_of_unlisted_that_are_launched_alike_today_are_covered() -> None:
    """No class is made from them."""
    fared = [*intervals.fared(intervals.judged(), TIMED)]
    assert len(fared) > 10
    assert np.mean([each.is_covered for each in fared]) > 0.8
