"""Simulated beside 270 timings of an H200 in cycles, to which no constant was fitted; decisions up to 0021 saw them.

The bands say what its model reaches, so that a change of it shows; targets are in reports/notes/simulator.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fa3_reports.measured.timings import MeasuredRow
from fa3_reports.measured.validation import rankings
from tests.reports.measured.published import check_published, figures, published
from tests.sampling import sampled

FIRST = "h200/simulator/schedules_1k_4k_16k"
# Other lengths of the same schedules, what ships at lengths of its own, and what was read last of all, after the freeze
# of 0006.
UNSEEN = (
    ("h200/simulator/schedules_2k_8k_fp16", (), 63, 0.041),
    ("h200/speed/paper_grid", (512, 2048, 8192), 160, 0.035),
    ("h200/simulator/schedules_2k_8k_e4m3_d256", (), 96, 0.039),
)


@pytest.fixture(scope="module")
def compared() -> tuple[MeasuredRow, ...]:
    assert len(published(FIRST)) == 270
    return published(FIRST)


FOLDERS = (
    FIRST,
    *(one[0] for one in UNSEEN),
    "h200/simulator/schedules_chained",
    "h200/speed/decode",
    "h200/speed/flash4",
)


@pytest.mark.parametrize("folder", sampled(FOLDERS, FOLDERS[1:2] + FOLDERS[-3:]))
def test_the_simulator_says_today_what_is_published(folder) -> None:
    check_published(folder)


def errors(compared: Sequence[MeasuredRow]) -> np.ndarray:
    """Relative errors (rows, models): simulated, roofline, closed form."""
    return np.array([np.array(c.predicted) / c.cycles - 1 for c in compared])


def test_mean_error_is_what_the_note_says(compared) -> None:
    simulated, roofline, closed_form = np.abs(errors(compared)).mean(axis=0)
    assert simulated == pytest.approx(0.041, abs=0.001)
    assert simulated < closed_form * 0.26 < roofline * 0.16


@pytest.mark.parametrize(("kernels", "rows", "error"), [(("flash3", "flash3.dew"), 30, 0.042), (("gluon",), 24, 0.042)])
def test_what_is_in_use_in_16_bits_is_within_a_few_percent_on_average(compared, kernels, rows, error) -> None:
    chosen = [c for c in compared if c.kernel in kernels and c.config.dtype != "e4m3"]
    assert len(chosen) == rows
    assert np.abs(errors(chosen)[:, 0]).mean() < error


@pytest.mark.parametrize(("path", "seqlens", "rows", "error"), UNSEEN, ids=["second", "shipped", "third"])
def test_timings_that_no_model_had_seen_are_as_far_off(path, seqlens, rows, error) -> None:
    every = figures(path, seqlens)["groups"][-1]
    assert (every["group"], every["rows"]) == ("all", rows)
    assert every["models"]["simulated"]["mape"] == pytest.approx(error, abs=0.001)
    assert every["models"]["simulated"]["mape"] < 0.33 * every["models"]["closed form"]["mape"]


def test_decoding_with_packed_heads_keys_in_one_piece_or_in_parts_is_as_far_off() -> None:
    """Short launches, most of them simulated too fast."""
    every = figures("h200/speed/decode")["groups"][-1]
    assert every["rows"] == 27
    assert every["models"]["simulated"]["mape"] == pytest.approx(0.032, abs=0.001)
    assert every["models"]["simulated"]["mape"] < 0.33 * every["models"]["closed form"]["mape"]


def test_flash_attention_4_with_a_cta_for_every_tile_is_as_far_off() -> None:
    """24 rows, with FlashAttention-3's step and nothing changed; 12 of them, of other timings, had been read before."""
    groups = figures("h200/speed/flash4")["groups"]
    chosen = [g for g in groups if g["group"].startswith("flash4")]
    assert sum(g["rows"] for g in chosen) == 24
    assert np.average([g["models"]["simulated"]["mape"] for g in chosen]) == pytest.approx(0.022, abs=0.001)
    assert max(g["models"]["simulated"]["max"] for g in chosen) == pytest.approx(0.071, abs=0.001)


def test_the_roofline_is_a_lower_bound_of_the_hardware(compared) -> None:
    assert errors(compared)[:, 1].max() < 0


def test_the_best_of_three_costs_nothing_in_most_problems(compared) -> None:
    found = rankings(compared)
    assert len(found) == 36
    assert np.median([r.tau for r in found]) == pytest.approx(0.87, abs=0.01)
    assert np.median([r.regret[1] for r in found]) == 0
