"""The benchmark's bookkeeping, on fake kernels: medians, pauses, what has no speed, resuming. No GPU, no torch."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import Dtype, Operands
from fa3verify.adapters import peers
from fa3verify.gpu.bench import cells, check, kernels, results, run, tables, timing
from fa3verify.gpu.bench.kernels import Inputs, Kernel, Output, Run, Unsupported
from fa3verify.gpu.bench.timing import LAUNCHES, Burst, Pace, Times, measure, sm_mhz

CELL = cells.Cell("paper", "fp16", 2, 512, 512, 4, 4, 128, False)
SOUND = check.Verdict(1000, 0, 1e-4, 0.0)
SCHEDULE = results.Schedule(128, 128, True, True, True, 0)


class FakeTimed:
    """Takes scripted milliseconds and notes every call in one shared log."""

    timed_by = "script"

    def __init__(self, name: str, milliseconds: list[float], log: list) -> None:
        self.name, self.milliseconds, self.log = name, iter(milliseconds), log

    def time(self, launches: int, probe) -> Burst:
        self.log.append((self.name, launches))
        probe()
        return Burst(next(self.milliseconds), 1700.0)


def test_bursts_are_interleaved_and_each_waits_for_the_chip_to_cool():
    log: list = []
    runs = {name: FakeTimed(name, [4.0, 4.0, 5.0, 9.0], log) for name in "ab"}
    times = measure(runs, Pace(3, 0.25, False), lambda: 1980.0, lambda s: log.append(("pause", s)))
    assert log[:2] == [("a", LAUNCHES), ("b", LAUNCHES)]  # how many launches a burst has
    assert log[2:] == [("pause", 0.25), ("a", LAUNCHES), ("pause", 0.25), ("b", LAUNCHES)] * 3
    assert times["a"] == Times([Burst(ms, 1700.0) for ms in (4.0, 5.0, 9.0)], [1980.0] * 3)
    log.clear()
    measure({"a": FakeTimed("a", [0.5] * 3, log)}, Pace(2, 0.25, False), lambda: 0.0, lambda s: log.append(round(s, 6)))
    assert log[1:] == [0.25, ("a", LAUNCHES), 0.05, ("a", LAUNCHES)]  # 1.5 ms are 3 % of 50 ms


def test_a_burst_of_a_short_kernel_lasts_a_millisecond():
    log: list = []
    pauses: list[float] = []
    measure({"a": FakeTimed("a", [0.03] * 4, log)}, Pace(2, 0.25, False), lambda: 0.0, pauses.append)
    assert log == [("a", LAUNCHES), ("a", 34), ("a", 34), ("a", 34)]  # the second captures the graph
    assert pauses == [0.25, pytest.approx(34 * 0.03e-3 / 0.03)]


def test_sustained_runs_fill_40_ms_after_four_times_their_own_heat():
    log: list = []
    measure({"a": FakeTimed("a", [8.0] * 17, log)}, Pace(1, 0.0, True), lambda: 0.0, lambda s: None)
    assert log[2:] == [("a", 5)] * 15  # 3 times (4 warm, 1 timed) of 5 launches


def test_counters_are_read_outside_the_events_and_the_driver_is_asked_during_the_run(monkeypatch):
    log: list[str] = []

    class FakeEvent:
        names = iter(("start", "stop"))

        def __init__(self, enable_timing: bool) -> None:
            self.name = next(self.names)

        def record(self) -> None:
            log.append(self.name)

        def elapsed_time(self, _other) -> float:
            return 6.0

    class FakeCounters:
        def begin(self) -> None:
            log.append("begin")

        def end(self) -> None:
            log.append("end")

        def readings(self) -> tuple[np.ndarray, np.ndarray]:
            return np.array([[1, 1]]), np.array([[7, 4]])

    cuda = SimpleNamespace(Event=FakeEvent, synchronize=lambda: log.append("synchronize"))
    monkeypatch.setattr(timing, "_counters", FakeCounters)
    found = timing._between_events(SimpleNamespace(cuda=cuda), lambda: log.append("run"), 3, lambda: log.append("ask"))
    assert log == ["begin", "start", "run", "stop", "end", "ask", "synchronize"]
    assert found == Burst(2.0, 2000.0)


def test_the_clock_is_the_median_over_the_sms_that_were_read_twice():
    before = np.array([[10, 100], [20, 100], [0, 0], [30, 100], [5, 100]])
    after = np.array([[17010, 10100], [18020, 10100], [99, 10100], [19030, 10100], [5, 100]])
    assert sm_mhz(before, after) == 1800.0  # 1700, 1800, 1900; SM 2 was not read before, SM 4 not after
    assert math.isnan(sm_mhz(np.zeros((4, 2), np.int64), after[:4]))


def test_a_record_holds_medians_and_cycles_are_those_of_each_burst():
    bursts = [Burst(1.0, 1900.0), Burst(9.0, 1000.0), Burst(2.0, 1000.0)]
    times = Times(bursts, [1900, 1980, 1970], [Burst(3.0, 1400.0)], [1500.0])
    record = results.measured("k", "script", times, SOUND)
    assert (record.burst_ms, record.burst_driver_mhz, record.burst_sm_mhz) == (2.0, 1970, 1000.0)
    assert (record.sustained_ms, record.sustained_sm_mhz, record.sustained_driver_mhz) == (3.0, 1400.0, 1500.0)
    assert record.burst_cycles == 2e6  # of 1.9, 9 and 2 million
    assert record.status == "ok"


def test_a_kernel_whose_bits_differ_has_no_speed():
    times = Times([Burst(1.0, 1.0)], [1980.0], [Burst(1.0, 1.0)], [1.0])
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


def fake_kernel(name: str, milliseconds: float, *, error: Exception | None = None) -> Kernel:
    def prepare(cell, inputs):
        if error:
            raise error
        return Run(FakeTimed(name, [milliseconds] * 100, []), lambda: Output(None))

    return Kernel(name, "", ("fp16",), prepare, missing=None)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(run, "draw", lambda cell, copies, seed: [Inputs(None, None, None)])
    monkeypatch.setattr(run, "synchronize", lambda: None)
    monkeypatch.setattr(check, "judge", lambda *_: SOUND)


def test_one_failing_kernel_is_a_status_and_the_others_are_timed(without_gpu):
    candidates = [
        fake_kernel("gluon", 1.0),
        fake_kernel("picky", 1.0, error=Unsupported("takes no such thing")),
        fake_kernel("broken", 1.0, error=RuntimeError("two\nlines")),
    ]
    settings = run.Settings([CELL], Path("out"), pace=Pace(2, 0.0, False))
    record = run.measure_cell(CELL, candidates, settings, lambda: 1980.0, "now", 1)
    assert [m.status for m in record.kernels] == [
        "ok",
        "unsupported: takes no such thing",
        "failed: RuntimeError: two lines",
    ]
    assert record.tflops("gluon") == pytest.approx(CELL.flops / 1e9)
    assert math.isnan(record.tflops("broken"))


def test_a_lost_cuda_context_ends_the_run_with_a_record_of_who_did_it(without_gpu, monkeypatch):
    def gone():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(run, "synchronize", gone)
    candidates = [
        fake_kernel("gluon", 1.0),
        fake_kernel("wild", 1.0, error=RuntimeError("illegal")),
        fake_kernel("fa3", 1.0),
    ]
    with pytest.raises(run.ContextLost, match="wild took the CUDA context") as caught:
        run.measure_cell(CELL, candidates, run.Settings([CELL], Path("out")), lambda: 1980.0, "now", 1)
    lost = "not measured: wild took the CUDA context with it"
    assert [m.status for m in caught.value.record.kernels] == [lost, "failed: RuntimeError: illegal", lost]


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
        results.measured(name.replace("_", "."), "script", Times([Burst(ms, 1700.0)], [1980.0]), SOUND, SCHEDULE)
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


def test_bits_of_a_schedule_are_judged_once_for_every_kind_of_kernel(tmp_path, without_gpu, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(check, "judge", lambda cell, *_: asked.append(cell.key) or SOUND)
    monkeypatch.setattr(run, "schedule_of", lambda kernel, cell: SCHEDULE)
    known = results.read(records_file(tmp_path, record(SHORT, gluon=1.0)))
    settings = run.Settings([LONG], tmp_path, pace=Pace(1, 0.0, False))
    judged = known.judged(LONG, "abc")
    assert judged == {("gluon", SCHEDULE)}
    candidates = [fake_kernel("gluon", 1.0), fake_kernel("gluon.128x64", 1.0)]
    found = run.measure_cell(LONG, candidates, settings, lambda: 0.0, "now", 1, judged)
    assert asked == [LONG.key]  # for the second kernel
    assert [(m.status, m.outputs, m.bits_differing) for m in found.kernels] == [("ok", 0, -1), ("ok", 1000, 0)]


def test_bits_count_for_no_other_kernel_mask_grid_or_source(tmp_path):
    known = results.read(records_file(tmp_path, record(SHORT, gluon=1.0)))
    causal = cells.select("schedules", ["fp16"], head_dims=[128], causal=True)[0]
    paper = cells.select("paper", ["fp16"], head_dims=[128], causal=False)[0]
    assert known.judged(LONG, "changed") == known.judged(causal, "abc") == known.judged(paper, "abc") == set()


def test_tiles_are_tried_where_they_are_listed_and_do_not_ship():
    def names(dtype: Dtype, head_dim: int, **filters) -> set[str]:
        (cell, *_) = cells.select("schedules", [dtype], head_dims=[head_dim], **filters)
        return {k.name for k in kernels.ours() if k.takes(cell)}

    assert {"gluon", "gluon.128x64", "gluon.192x64", "gluon.no_specialisation"} <= names("fp16", 128)
    assert "gluon.128x128" not in names("fp16", 128)  # ships
    assert names("bf16", 128) == {"gluon"}
    assert "gluon.192x128" in names("fp16", 64, causal=True, seqlens=[1024])  # ships from 4096 rows on
    assert "gluon.192x128" not in names("fp16", 64, causal=True, seqlens=[4096])
    assert "gluon.no_overlap" not in names("e4m3", 256)
    ablation = cells.select("ablation", ["e4m3"])[0]
    assert {k.name for k in kernels.ours() if k.takes(ablation)} == {"gluon", "gluon.chained"}


def test_every_variant_of_the_schedules_has_a_configuration():
    for cell in cells.select("schedules", ["fp16", "bf16", "e4m3"]):
        for kernel in kernels.ours():
            if kernel.takes(cell) and kernel.options:
                config_of(cell.problem, **kernel.options(cell))


def test_input_copies_exceed_the_cache_twice_but_are_at_most_three():
    cache = 60 << 20
    for cell in cells.select("paper", ["fp16"]):
        assert run.copies_for(cell, cache) == 1  # 256 MiB
    small = cells.Cell("decode", "fp16", 1, 1, 8192, 32, 8, 128, False)
    assert run.copies_for(small, cache) == 3


def test_names_may_be_patterns():
    settings = run.Settings([], Path("out"), kernels=("gluon*", "fa3"))
    assert [n for n in ("gluon", "gluon.chained", "fa3", "fa3.dew") if settings.wants(n)] == [
        "gluon",
        "gluon.chained",
        "fa3",
    ]


def test_a_peer_that_does_not_load_is_kept_with_its_reason(tmp_path):
    def broken(folder):
        raise OSError("two\nlines")

    for load, reason in (
        (broken, "OSError: two lines"),
        (lambda f: peers.library(f, "x.so"), f"neither x.so nor x.so.xz is in {tmp_path}"),
    ):
        kernel = peers._loaded(fake_kernel("peer", 1.0), load, tmp_path)
        assert kernel.missing == reason
        with pytest.raises(Unsupported, match=reason.partition(":")[0]):
            kernel.prepare(CELL, [])


def test_a_packed_library_is_unpacked_once(tmp_path):
    (tmp_path / "x.so.xz").write_bytes(lzma.compress(b"library"))
    path = peers.library(tmp_path, "x.so")
    assert path.read_bytes() == b"library"
    (tmp_path / "x.so.xz").unlink()
    assert peers.library(tmp_path, "x.so") == path
    with pytest.raises(Unsupported, match="--peers names"):
        peers.library(None, "x.so")


@pytest.mark.parametrize(
    ("seqlen", "nheads_kv", "causal"), [(512, 2, True), (500, 2, False), (300, 1, True)], ids=["tiles", "tail", "gqa"]
)
def test_the_last_tile_alone_has_the_bits_it_has_in_the_whole(monkeypatch, seqlen, nheads_kv, causal):
    cell = cells.Cell("gqa", "fp16", 2, seqlen, seqlen, 2, nheads_kv, 64, causal)
    rng = np.random.default_rng(0)
    shapes = (cell.problem.q_shape, cell.problem.k_shape, cell.problem.v_shape)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    config = default_config(cell.problem)
    whole = forward(cell.problem, Operands(q, k, v), config)
    monkeypatch.setattr(check, "to_numpy", np.ascontiguousarray)
    sound = check.judge(cell, Inputs(q, k, v), Output(whole.out, whole.lse), config)
    assert sound.bits_differing == 0
    assert 0 < sound.rel_rmse < 1e-3
    wrong = whole.out.copy()
    wrong.view(np.uint16)[-1, -1, -1, -1] ^= 1  # one bit of the last output
    assert check.judge(cell, Inputs(q, k, v), Output(wrong, whole.lse), config).bits_differing == 1
