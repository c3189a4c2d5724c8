"""The benchmark on fake kernels: who fails and who is timed, whose bits are judged, which tiles and peers. No GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import Dtype, Operands
from fa3_reports.bench import cells, check, kernels, peers, results, run
from fa3_reports.bench.grids import GRIDS
from fa3_reports.bench.kernels import Given, TimedKernel
from fa3verify.bench import graphs
from fa3verify.known import launches, libraries
from fa3verify.known.launches import LaunchOutput
from fa3verify.known.libraries import Unsupported
from fa3verify.timed.timing import LaunchTime, Pace
from tests.reports.bench.test_results import CELL, LONG, SCHEDULE, SHORT, SOUND, FakeTimed, record, records_file

pytestmark = pytest.mark.optional


def test_host_has_a_head_start_counters_are_read_outside_the_events_and_the_driver_is_asked_during_the_run(monkeypatch):
    log: list[str] = []

    class FakeEvent:
        names = iter(("start", "stop"))

        def __init__(self, enable_timing: bool) -> None:
            self.name = next(self.names)

        def record(self) -> None:
            log.append(self.name)

        def elapsed_time(self, _other) -> float:
            return 6.0

    class FakeRead:
        cycles = iter(([1, 1], [7, 4]))

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def read(readings: torch.Tensor, *_, **__) -> None:
                log.append("read")
                readings[0] = torch.tensor(next(self.cycles))

            return read

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: zeros(shape, dtype=dtype))
    monkeypatch.setattr(graphs, "_READ_CLOCKS", FakeRead())
    found = graphs.between_events(lambda: log.append("run"), 3, lambda: log.append("ask"))
    assert log == ["sleep", "read", "start", "run", "stop", "read", "ask", "synchronize"]
    assert found == LaunchTime(2.0, 2000.0)


def fake_kernel(name: str, milliseconds: float, *, error: Exception | None = None) -> TimedKernel:
    def prepare(cell, inputs):
        if error:
            raise error
        return FakeTimed(name, [milliseconds] * 100, [])

    return TimedKernel(name, "", ("fp16",), prepare, missing=None)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(run, "draw", lambda cell, copies, seed: [Given(None, None, None)])
    monkeypatch.setattr(run, "synchronize", lambda: None)
    monkeypatch.setattr(run, "GraphTimed", lambda launch: launch)
    monkeypatch.setattr(check, "gather", lambda cell, *_: cell)
    monkeypatch.setattr(check, "judge", lambda work: SOUND)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_one_failing_kernel_is_a_status_and_the_others_are_timed(without_gpu, pool):
    candidates = [
        fake_kernel("gluon", 1.0),
        fake_kernel("picky", 1.0, error=Unsupported("takes no such thing")),
        fake_kernel("broken", 1.0, error=RuntimeError("two\nlines")),
    ]
    settings = run.BenchSettings([CELL], Path("out"), pace=Pace(2, 0.0), sustained=False)
    record = run.measure_cell(CELL, candidates, settings, lambda: 1980.0, "now", 1, pool)
    assert [m.status for m in record.kernels] == [
        "ok",
        "unsupported: takes no such thing",
        "failed: RuntimeError: two lines",
    ]
    assert record.tflops("gluon") == pytest.approx(CELL.flops / 1e9)
    assert math.isnan(record.tflops("broken"))


def test_a_lost_cuda_context_ends_the_run_with_a_record_of_who_did_it(without_gpu, pool, monkeypatch):
    def gone():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(run, "synchronize", gone)
    candidates = [
        fake_kernel("gluon", 1.0),
        fake_kernel("wild", 1.0, error=RuntimeError("illegal")),
        fake_kernel("flash3", 1.0),
    ]
    with pytest.raises(run.ContextLost, match="wild took the CUDA context") as caught:
        run.measure_cell(CELL, candidates, run.BenchSettings([CELL], Path("out")), lambda: 1980.0, "now", 1, pool)
    lost = "not measured: wild took the CUDA context with it"
    assert [m.status for m in caught.value.record.kernels] == [lost, "failed: RuntimeError: illegal", lost]


def test_bits_of_a_schedule_are_judged_once_for_every_kind_of_kernel(tmp_path, without_gpu, pool, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(check, "judge", lambda work: asked.append(work.key) or SOUND)
    monkeypatch.setattr(run, "schedule_of", lambda kernel, cell: SCHEDULE)
    known = results.read(records_file(tmp_path, record(SHORT, gluon=1.0)))
    settings = run.BenchSettings([LONG], tmp_path, pace=Pace(1, 0.0), sustained=False)
    judged = known.judged(LONG, "abc")
    assert judged == {("gluon", SCHEDULE)}
    candidates = [fake_kernel("gluon", 1.0), fake_kernel("gluon.128x64", 1.0)]
    found = run.measure_cell(LONG, candidates, settings, lambda: 0.0, "now", 1, pool, judged)
    assert asked == [LONG.key]  # for the second kernel
    assert [(m.status, m.outputs, m.bits_differing) for m in found.kernels] == [("ok", 0, -1), ("ok", 1000, 0)]


def test_what_is_judged_wrong_or_cannot_be_judged_keeps_no_time(without_gpu, pool, monkeypatch):
    verdicts = iter((SOUND._replace(bits_differing=3), ValueError("out must be float16")))

    def judge(work):
        if isinstance(verdict := next(verdicts), ValueError):
            raise verdict
        return verdict

    monkeypatch.setattr(check, "judge", judge)
    settings = run.BenchSettings([CELL], Path("out"), pace=Pace(2, 0.0), sustained=False)
    candidates = [fake_kernel("gluon", 1.0), fake_kernel("odd", 1.0)]
    found = run.measure_cell(CELL, candidates, settings, lambda: 0.0, "now", 1, pool).kernels
    assert [m.status for m in found] == [
        "bits differ from the twin: 3 of 1000 and their lse",
        "failed: ValueError: out must be float16",
    ]
    assert all(math.isnan(m.burst_ms) for m in found)


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


DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("unseen", cells.UNSEEN), ("unseen2", cells.UNSEEN2), ("unseen3", cells.UNSEEN3)],
)
def test_unseen_shapes_are_in_no_other_grid_and_run_the_schedules(name: str, shapes: tuple):
    unseen = cells.select(name, DTYPES)
    later = {"unseen": ["ragged"]}.get(name, [])  # made when the grid had been read
    grids = [grid for grid in GRIDS if grid not in (name, *later)]
    others = {cell.problem for grid in grids for cell in cells.select(grid, DTYPES)}
    assert len(unseen) == len(shapes) == len({cell.problem for cell in unseen})
    assert not others & {cell.problem for cell in unseen}
    rows = [cell.dtype for cell in unseen for kernel in kernels.ours() if kernel.takes(cell)]
    assert len(rows) >= 70
    assert rows.count("e4m3") > len(rows) / 3
    assert len([cell for cell in unseen[:12] if cell.dtype == "e4m3"]) == 6  # a run cut short has both alike


def test_unseen_shapes_are_neither_packed_nor_split_as_their_rows_do_not_say_so():
    for cell in [x for grid in ("unseen", "unseen2", "unseen3") for x in cells.select(grid, DTYPES)]:
        config = config_of(cell.problem, **kernels.our_kernel("gluon", "").options(cell))
        assert (config.pack_gqa, config.num_splits) == (False, 1), cell.key


def test_every_variant_of_the_schedules_has_a_configuration():
    configured = set()
    for cell in [x for grid in ("schedules", "unseen", "unseen2", "unseen3") for x in cells.select(grid, DTYPES)]:
        for kernel in kernels.ours():
            if kernel.takes(cell) and kernel.options:
                config_of(cell.problem, **kernel.options(cell))
                configured.add(kernel.name)
    assert {"gluon.128x64", "gluon.192x64", "gluon.192x128", "gluon.no_specialisation", "gluon.no_overlap"} < configured


def test_input_copies_exceed_the_cache_twice_but_are_at_most_three():
    cache = 60 << 20
    for cell in cells.select("paper", ["fp16"]):
        assert run.copies_for(cell, cache) == 1  # 256 MiB
    small = cells.Cell("decode", "fp16", 1, 1, 8192, 32, 8, 128, False)
    assert run.copies_for(small, cache) == 3


def test_names_may_be_patterns():
    settings = run.BenchSettings([], Path("out"), kernels=("gluon*", "flash3"))
    assert [n for n in ("gluon", "gluon.chained", "flash3", "flash3.dew") if settings.wants(n)] == [
        "gluon",
        "gluon.chained",
        "flash3",
    ]


def test_a_peer_that_does_not_load_is_kept_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(libraries.FOLDER_VARIABLE, str(tmp_path))

    def broken(name, operation):
        raise OSError("two\nlines")

    for load, reason in (
        (broken, "OSError: two lines"),
        (lambda name, operation: libraries.library("x.so"), f"neither x.so nor x.so.xz is in {tmp_path}"),
    ):
        monkeypatch.setattr(launches, "loaded", load)
        (kernel,) = peers.peers(lambda name: name == "flash3")
        assert kernel.missing == reason
        with pytest.raises(Unsupported, match=reason.partition(":")[0]):
            kernel.prepare(CELL, [])


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
    monkeypatch.setattr("fa3verify.bench.check.to_numpy", np.ascontiguousarray)
    sound = check.judge(check.gather(cell, Given(q, k, v), LaunchOutput(whole.out, whole.lse), config))
    assert sound.bits_differing == 0
    assert 0 < sound.rel_rmse < 1e-3
    wrong = whole.out.copy()
    wrong.view(np.uint16)[-1, -1, -1, -1] ^= 1  # one bit of the last output
    assert check.judge(check.gather(cell, Given(q, k, v), LaunchOutput(wrong, whole.lse), config)).bits_differing == 1


def test_a_cell_over_pages_is_for_builds_that_serve_and_others_say_why_not(monkeypatch):
    cell = cells.Cell.of("practice", "8/2 2 x 1 x 300-700 page 16 bf16")
    monkeypatch.setattr(launches, "loaded", lambda *_: lambda problem, given, options: lambda: (given, options))
    made = {name: peers.kernel(name, "forward") for name in ("vllm", "flash3")}
    assert made["vllm"].takes(cell)
    assert not made["vllm"].takes(cells.select("gqa", ("bf16",))[0])
    inputs = [Given(None, None, None, served={"q": None})]
    assert made["vllm"].prepare(cell, inputs)(0) == (inputs[0].served, {"is_scheduled": True, "num_splits": 0})
    with pytest.raises(Unsupported, match="it does not claim paged"):
        made["flash3"].prepare(cell, inputs)


def test_our_launch_over_pages_is_configured_as_it_is_planned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    config = kernels.our_kernel("gluon", "").configure(cells.Cell.of("practice", "28/4 2 x 1 x 9000 page 16 bf16"))
    assert (config.tile_m, config.pack_gqa) == (64, True)  # of one warpgroup, as over a cache alone
    assert config.num_splits > 1
