"""The benchmark's bookkeeping: medians, pauses, what has no speed, cells, records that go on. No GPU, no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reports.bench import cells, results, sustained, tables
from fa3_reports.bench.results import SampleFigures
from fa3_reports.bench.sustained import Times, burst
from fa3verify.timed.timing import LAUNCHES, LaunchTime, Pace, measure, sm_mhz

CELL = cells.Cell("paper", "fp16", 2, 512, 512, 4, 4, 128, False)
SOUND = SampleFigures(1000, 0, 1e-4, 0.0)
SCHEDULE = results.Switches(128, 128, True, True, True, 0)


class FakeTimed:
    """Takes scripted milliseconds and notes every call in one shared log."""

    timed_by = "script"

    def __init__(self, name: str, milliseconds: list[float], log: list) -> None:
        self.name, self.milliseconds, self.log = name, iter(milliseconds), log

    def __call__(self, i: int) -> None:
        """Return no output."""

    def time(self, launches: int, probe=lambda: None, repeats: int = 1) -> LaunchTime:
        self.log.append((self.name, launches) if repeats == 1 else (self.name, launches, repeats))
        probe()
        return LaunchTime(next(self.milliseconds), 1700.0)


def test_bursts_are_interleaved_and_each_waits_for_the_chip_to_cool():
    log: list = []
    runs = {name: FakeTimed(name, [4.0, 4.0, 5.0, 9.0], log) for name in "ab"}
    asked: list[str] = []
    times = measure(runs, Pace(3, 0.25), asked.append, lambda s: log.append(("pause", s)))
    assert log[:2] == [("a", LAUNCHES), ("b", LAUNCHES)]  # how many launches a burst has
    assert log[2:] == [("pause", 0.25), ("a", LAUNCHES), ("pause", 0.25), ("b", LAUNCHES)] * 3
    assert times["a"] == [LaunchTime(ms, 1700.0) for ms in (4.0, 5.0, 9.0)]
    assert asked == ["a", "b"] * 3  # during each burst
    log.clear()
    measure({"a": FakeTimed("a", [0.5] * 3, log)}, Pace(2, 0.25), sleep=lambda s: log.append(round(s, 6)))
    assert log[1:] == [0.25, ("a", LAUNCHES), 0.05, ("a", LAUNCHES)]  # 1.5 ms are 3 % of 50 ms


def test_a_burst_of_a_short_kernel_lasts_a_millisecond():
    log: list = []
    pauses: list[float] = []
    measure({"a": FakeTimed("a", [0.03] * 4, log)}, Pace(2, 0.25), sleep=pauses.append)
    assert log == [("a", LAUNCHES), ("a", 34), ("a", 34), ("a", 34)]  # the second captures the graph
    assert pauses == [0.25, pytest.approx(34 * 0.03e-3 / 0.03)]


class FakeClock:
    """1500 MHz, and a counter of energy that a GPU of 600 W moves every 0.1 s; reading it takes a millisecond."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return 1500.0

    def energy_j(self) -> float:
        self.seconds += 1e-3
        return 60.0 * math.floor(self.seconds / 0.1)

    def now(self) -> float:
        return self.seconds


def test_sustained_runs_are_interleaved_and_each_follows_its_own_heat():
    log: list = []
    runs = {name: FakeTimed(name, [8.0] * 7, log) for name in "ab"}
    times = burst(runs, Pace(2, 0.0), FakeClock())  # type: ignore[arg-type]
    sustained.sustain(runs, times, 2, FakeClock())  # type: ignore[arg-type]
    assert times["a"].burst_driver_mhz == [1500.0] * 2
    heat = [(name, 5, n) for name in "ab" for n in (sustained.WARM_REPLAYS, sustained.SUSTAINED_REPLAYS)]
    assert log[6:] == heat * 2  # graphs of 5 launches of 8 ms
    assert len(times["a"].sustained) == 2
    assert times["a"].sustained_driver_mhz == [1500.0] * 2
    assert times["a"].sustained_w == [], "what no graph holds may have ended while its power is read"


def test_a_sustained_run_lasts_longer_than_its_power_is_read():
    assert sustained.GRAPH_MS * sustained.SUSTAINED_REPLAYS > 1e3 * sustained.SAMPLED_S + sustained.GRAPH_MS


def test_power_is_counted_from_step_to_step_of_the_counter():
    clock = FakeClock()
    assert sustained.power_w(clock.energy_j, 1.0, clock.now) == pytest.approx(600, rel=0.02)
    clock.seconds = 0.05  # begun between two steps, and ended between two
    assert sustained.power_w(clock.energy_j, 0.93, clock.now) == pytest.approx(600, rel=0.02)
    assert math.isnan(sustained.power_w(clock.energy_j, 0.05, clock.now)), "one step says nothing"
    ticks = iter(np.arange(0, 9, 0.1))
    assert math.isnan(sustained.power_w(lambda: math.nan, 1.0, lambda: next(ticks))), "nobody counts"


def test_the_clock_is_the_median_over_the_sms_that_were_read_twice():
    before = np.array([[10, 100], [20, 100], [0, 0], [30, 100], [5, 100]])
    after = np.array([[17010, 10100], [18020, 10100], [99, 10100], [19030, 10100], [5, 100]])
    assert sm_mhz(before, after) == 1800.0  # 1700, 1800, 1900; SM 2 was not read before, SM 4 not after
    assert math.isnan(sm_mhz(np.zeros((4, 2), np.int64), after[:4]))


def test_a_record_holds_medians_and_cycles_are_those_of_each_burst():
    bursts = [LaunchTime(1.0, 1900.0), LaunchTime(9.0, 1000.0), LaunchTime(2.0, 1000.0)]
    times = Times(bursts, [1900, 1980, 1970], [LaunchTime(3.0, 1400.0)], [1500.0])
    record = results.measured("k", "script", times, SOUND)
    assert (record.burst_ms, record.burst_driver_mhz, record.burst_sm_mhz) == (2.0, 1970, 1000.0)
    assert (record.sustained_ms, record.sustained_sm_mhz, record.sustained_driver_mhz) == (3.0, 1400.0, 1500.0)
    assert record.burst_cycles == 2e6  # of 1.9, 9 and 2 million
    assert record.status == "ok"


def test_a_kernel_whose_bits_differ_has_no_speed():
    times = Times([LaunchTime(1.0, 1.0)], [1980.0], [LaunchTime(1.0, 1.0)], [1.0])
    record = results.measured("k", "script", times, SOUND._replace(bits_differing=3))
    assert math.isnan(record.burst_ms)
    assert math.isnan(record.burst_cycles)
    assert math.isnan(record.sustained_ms)
    assert record.rounds_ms == ()
    assert "bits differ from the twin: 3 of 1000" in record.status


def test_flops_of_the_papers_grid():
    # 4 * 16384 * 2048 * seqlen; half when causal. Hand-computed for 16k: 2.199e12.
    whole, causal = cells.paper(["fp16"], [64, 128, 256], [16384], [False, True])[:2]
    assert whole.flops == 4 * 16384 * 16384 * 2048
    assert causal.flops * 2 == whole.flops
    assert {c.flops for c in cells.paper(["fp16"], [64, 128, 256], [512], [True])} == {2 * 16384 * 512 * 2048}


def test_the_papers_grid_has_36_cells_of_16k_tokens_and_hidden_2048():
    grid = cells.select("paper", ["fp16"])
    assert len(grid) == 36
    assert len({c.key for c in grid}) == 36
    assert all(c.batch * c.seqlen_q == 16384 and c.nheads * c.head_dim == 2048 for c in grid)


def test_decoding_reads_every_key_and_value_once():
    first = cells.select("decode", ["bf16"])[0]
    assert first.kv_bytes == 32 * 8192 * 8 * 128 * 2 * 2


@pytest.mark.parametrize(
    ("options", "rule"), [({"seqlens": [1000]}, "seqlen must divide 16384"), ({"head_dims": [96]}, "head_dim")]
)
def test_a_shape_the_grid_cannot_have_is_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        cells.select("paper", ["fp16"], **options)


def records_file(tmp_path: Path, *records: results.CellRecord, launches: str = "abc") -> Path:
    path = tmp_path / "bench.jsonl"
    head = {
        "kind": "run",
        "schema": results.SCHEMA,
        "run": "r",
        "launches_sha256": launches,
        "missing": {"fa4": "absent"},
    }
    for body in (head, *(r.to_json() for r in records)):
        results.append(path, body)
    return path


def record(cell: cells.Cell = CELL, **milliseconds: float) -> results.CellRecord:
    measured = [
        results.measured(name.replace("_", "."), "script", Times([LaunchTime(ms, 1700.0)], [1980.0]), SOUND, SCHEDULE)
        for name, ms in milliseconds.items()
    ]
    return results.CellRecord("r", cell, 1, tuple(measured))


def test_records_survive_the_file(tmp_path):
    original = record(gluon=1.0, fa3=2.0)
    read = results.read(records_file(tmp_path, original))
    assert repr(read.cells[CELL.key]) == repr(original)
    assert read.missing() == {"fa4": "absent"}


def test_a_file_from_before_evidence_was_of_launches_is_read_and_of_no_kernels(tmp_path):
    path = records_file(tmp_path, record(gluon=1.0))
    path.write_text(path.read_text().replace("launches_sha256", "kernel_sources_sha256"))
    read = results.read(path)
    assert read.cells[CELL.key].kernels[0].burst_ms == 1.0
    assert not read.is_done(CELL, ["gluon"], "abc")
    assert tables.provenance(read)["launches_sha256"] == "unknown"


def test_a_cell_is_done_only_for_the_same_kernels_and_launches(tmp_path):
    read = results.read(records_file(tmp_path, record(gluon=1.0, fa3=2.0)))
    assert read.is_done(CELL, ["gluon"], "abc")
    assert not read.is_done(CELL, ["gluon", "fa4"], "abc")
    assert not read.is_done(CELL, ["gluon"], "changed")
    assert not read.is_done(cells.select("gqa", ["fp16"])[0], ["gluon"], "abc")


def test_the_latest_record_of_a_cell_counts(tmp_path):
    read = results.read(records_file(tmp_path, record(gluon=1.0), record(gluon=4.0)))
    assert read.cells[CELL.key].kernels[0].burst_ms == 4.0


@given(st.integers(1, 200))
def test_a_line_cut_short_is_forgotten_and_overwritten(tmp_path_factory, cut):
    path = records_file(
        tmp_path_factory.mktemp("cut"), record(gluon=1.0), record(cells.select("gqa", ["fp16"])[0], gluon=1.0)
    )
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(results.read(path).cells) == [CELL.key]
    results.append(path, record(cells.select("gqa", ["fp16"])[1], gluon=1.0).to_json())
    assert len(results.read(path).cells) == 2


def test_a_foreign_line_is_refused_by_number(tmp_path):
    path = records_file(tmp_path)
    path.write_text(path.read_text() + json.dumps({"kind": "other"}) + "\n" + json.dumps({"kind": "run"}) + "\n")
    with pytest.raises(ValueError, match="line 2: not a record"):
        results.read(path)


def test_a_file_of_the_schema_before_is_refused_by_name(tmp_path):
    path = records_file(tmp_path)
    path.write_text(path.read_text().replace("fa3verify.bench/2", "fa3verify.bench/1"))
    with pytest.raises(ValueError, match=r"line 1: .* schema must be fa3verify\.bench/2, got fa3verify\.bench/1"):
        results.read(path)


SHORT, LONG = cells.select("schedules", ["fp16"], head_dims=[128], causal=False)[::2]


def test_bits_count_for_no_other_kernel_mask_grid_or_source(tmp_path):
    known = results.read(records_file(tmp_path, record(SHORT, gluon=1.0)))
    causal = cells.select("schedules", ["fp16"], head_dims=[128], causal=True)[0]
    paper = cells.select("paper", ["fp16"], head_dims=[128], causal=False)[0]
    assert known.judged(LONG, "changed") == known.judged(causal, "abc") == known.judged(paper, "abc") == set()
