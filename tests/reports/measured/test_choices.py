"""The page of what ``tune`` chose is made of its data, and the data are of what ``tune`` chooses now."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa3_reports.measured import choices
from fa3_reports.measured.choices import TEN, Choice, csv_text, page, read, regret
from tests.sampling import sampled

FOLDER = Path(__file__).parents[3] / "reports" / "h200" / "simulator" / "tune"
NAN = float("nan")


def row(place: int, tile: str, measured: float, problem: int = 0) -> Choice:
    return Choice(problem, place, tile, "pingpong+overlap", "", 1, 100, measured)


def test_regret_is_over_the_fastest_that_was_timed() -> None:
    rows = [row(1, "128x128", 110.0), row(2, "128x64", 100.0), row(3, "128x32", NAN), row(0, "192x64", 130.0)]
    assert regret(rows) == (pytest.approx(0.1), pytest.approx(0.3))
    assert regret([row(1, "128x128", 5.0)])[0] == 0


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [row(1, "128x128", 110.0), row(2, "128x64", NAN, problem=9)]
    (tmp_path / "choices.csv").write_text(csv_text(rows))
    found = read(tmp_path / "choices.csv")
    assert found[0] == rows[0]
    assert found[1][:-1] == rows[1][:-1]
    assert found[1].measured != found[1].measured


def test_the_page_names_the_fastest_and_the_regret() -> None:
    text = page([row(1, "128x128", 110e3), row(2, "128x64", 100e3)])
    assert "| 128x128 pingpong+overlap | 110.0 | 0.1 | 128x64 pingpong+overlap | 10.0% | first five |" in text
    assert "Regret of 1 problems of 10: median 10.0%, worst 10.0%." in text


def test_the_committed_page_is_that_of_its_data() -> None:
    rows = read(FOLDER / "choices.csv")
    assert (FOLDER / "choices.md").read_text() == page(rows)
    assert {r.problem for r in rows} == set(range(10))


@pytest.mark.parametrize("number", sampled([3, 6], [6]))  # 16 bits and e4m3, with fewest schedules
def test_the_first_choice_that_was_timed_is_still_the_first(number: int) -> None:
    timed = next(r for r in read(FOLDER / "choices.csv") if (r.problem, r.place) == (number, 1))
    (_, first, cycles), *_ = choices.chosen(TEN[number], "h200")
    assert (f"{first.tile_m}x{first.tile_n}", round(cycles)) == (timed.tile, timed.simulated)
