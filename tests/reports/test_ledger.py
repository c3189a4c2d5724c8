"""The ledger: the least work is chosen, work that was cut off counts, and another twin starts again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3_reports import ledger, recordings
from fa3_reports.__main__ import main
from fa3_reports.ledger import Entry, extend, least_work
from fa3_reports.recordings import Recorded, Recording
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "reports/h100/recordings"


def launch(seqlen_q: int, seqlen_k: int, **more) -> Recorded:
    problem = AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 64, dtype="bf16", **more)
    return Recorded(Case("flash3.bf16", problem, Recipe("normal")), "00")


def compared(given: dict[str, Recording], place: int, keys: int) -> Entry:
    """A launch that was compared with its twin of today, without a difference."""
    one = given["x"].launches[place]
    return Entry("x", place, one.outputs, keys, *recordings.keys_of("flash3", one), 0)


@pytest.fixture(scope="module")
def shortest() -> Recording:
    recording = recordings.read(FOLDER / "cudnn.xz")
    launches = sorted((x for x in recording.launches if not recordings.refusal("cudnn", x)), key=recordings.cost)
    return replace(recording, launches=tuple(launches[:4]))


def test_the_least_work_that_reaches_the_outputs_is_chosen_and_a_tenth_of_it_has_many_keys():
    few, more, long = launch(1000, 100), launch(1000, 500), launch(200, 4096)
    given = {
        "x": Recording(
            "flash3", {}, (more, long, launch(200, 8192), few, launch(1000, 90, window=(9, 9), head_dim_v=32))
        )
    }
    names = [todo.launch for todo in least_work(given, few.outputs)]
    assert names == [long, few]
    assert [todo.launch for todo in least_work(given, few.outputs + long.outputs + 1)] == [long, few, more]
    done = [compared(given, 3, 100), compared(given, 1, 4096)]
    assert not least_work(given, few.outputs, done)
    for column in ("twin", "plan"):
        of_another_key = [entry._replace(**{column: "0" * 16}) for entry in done]
        assert [todo.launch for todo in least_work(given, few.outputs, of_another_key)] == [long, few]


def test_a_causal_launch_costs_what_its_mask_leaves():
    assert recordings.cost(launch(100, 100, causal=True)) == 100 * 101 // 2 * 128
    assert recordings.cost(launch(100, 100)) == 100 * 100 * 128


def test_a_ledger_goes_on_where_it_was_cut_off_and_says_what_differs(tmp_path, shortest):
    wrong = shortest.launches[3]
    wrong = replace(wrong, digests=wrong.digests._replace(lse=("0" * 16, *wrong.digests.lse[1:])))
    given = {"cudnn": replace(shortest, launches=(*shortest.launches[:3], wrong))}
    path, told = tmp_path / "ledger.csv", []
    assert extend(path, given, outputs=10**9, seconds=0, workers=1, tell=told.append) == []
    first = extend(path, given, outputs=shortest.launches[0].outputs, seconds=100, workers=1, tell=told.append)
    assert 1 <= len(first) < 4
    entries = extend(path, given, outputs=10**9, seconds=100, workers=1, tell=told.append)
    assert sorted(entry.launch for entry in entries) == [0, 1, 2, 3]
    assert [entry.differing for entry in sorted(entries, key=lambda x: x.launch)] == [0, 0, 0, 1]
    assert told == [f"DIFFERS {wrong.case.describe()}"]
    assert ledger.sums(entries)["cudnn"].outputs == sum(x.outputs for x in shortest.launches)


def test_a_damaged_ledger_is_refused_by_name(tmp_path):
    for text in ("a,b\n", ",".join(Entry._fields) + "\nflash3,x\n"):
        (tmp_path / "ledger.csv").write_text(text)
        with pytest.raises(ValueError, match=r"ledger\.csv is not a ledger"):
            ledger.read(tmp_path / "ledger.csv")


def test_the_command_fills_a_ledger_and_wants_both_of_its_options(tmp_path, shortest):
    recordings.write(tmp_path / "cudnn.xz", replace(shortest, launches=shortest.launches[:1]))
    given = ["recordings", str(tmp_path / "cudnn.xz"), "--outputs", "1"]
    assert CliRunner().invoke(main, given).exit_code == 2
    result = CliRunner().invoke(main, [*given, "--ledger", str(tmp_path / "ledger.csv"), "--workers", "1"])
    assert (result.exit_code, len(ledger.read(tmp_path / "ledger.csv"))) == (0, 1), result.output
    assert f"{shortest.launches[0].outputs:,} outputs, 0 differ" in result.output


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.name)
def test_committed_ledgers_name_recorded_launches_and_nothing_differs(path):
    entries = ledger.read(path)
    for name in {entry.recording for entry in entries}:
        launches = recordings.read(FOLDER / f"{name}.xz").launches
        mine = [entry for entry in entries if entry.recording == name]
        assert {entry.launch: entry.outputs for entry in mine}.items() <= dict(
            enumerate(x.outputs for x in launches)
        ).items()
    assert not [entry for entry in entries if entry.differing]


def test_launches_of_4096_keys_are_long_and_sums_are_by_recording():
    entries = [
        Entry("x", 0, 100, 4096, "", "", 1),
        Entry("x", 1, 30, 4095, "", "", 2),
        Entry("y", 0, 7, 9000, "", "", 0),
    ]
    assert ledger.sums(entries) == {"x": (2, 130, 100, 3), "y": (1, 7, 7, 0)}


def test_what_was_compared_is_taken_off_what_is_wanted():
    """Ten launches of 1000 x 64 outputs and ten long ones of a tenth; each of either kind costs as much."""
    launches = (*(launch(1000, 100 + i) for i in range(10)), *(launch(100, 4096 + i) for i in range(10)))
    given = {"x": Recording("flash3", {}, launches)}
    short, long = 64_000, 6_400

    def places(outputs: int, *done: int) -> list[int]:
        entries = [compared(given, i, 100 if i < 10 else 4096) for i in done]
        return [todo.place for todo in least_work(given, outputs, entries)]

    assert [x.outputs for x in launches] == [short] * 10 + [long] * 10
    assert places(short) == [10, 0]
    assert places(2 * short) == [10, 11, 0, 1]
    assert places(2 * short, 0) == [10, 11, 1]
    assert places(2 * short, 0, 10) == [11, 1]
    assert places(2 * short, 0, 10, 11) == [1]
    assert places(2 * short, 0, 1) == [10, 11]
    assert places(short + 1, 0, 10, 11) == []
