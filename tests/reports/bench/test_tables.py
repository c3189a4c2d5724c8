"""Ratios, geometric means and worst cells are those of a hand calculation; every output names what is missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fa3_reports.bench import cells, ratios, results, tables
from fa3_reports.bench.results import SampleFigures
from fa3_reports.bench.sustained import Times
from fa3_reports.stored import csv_rows
from fa3verify.timed.timing import LaunchTime

A, B = cells.paper(["fp16"], [64, 128], [512], [False])


def record(cell: cells.Cell, run: str = "r", **milliseconds: float) -> results.CellRecord:
    kernels = []
    for name, ms in milliseconds.items():
        verdict = SampleFigures(100, 5 if ms < 0 else 0, 1e-3, -0.5)
        times = Times([LaunchTime(abs(ms), 1500.0)], [1980.0])
        schedule = results.Switches(128, 64, True, False, True, 0) if name == "gluon" else None
        kernels.append(results.measured(name.replace("_", "."), "script", times, verdict, schedule))
    return results.CellRecord(run, cell, 1, tuple(kernels))


def collected(*records: results.CellRecord) -> results.Results:
    facts = {"run": "r", "gpu": "GPU", "launches_sha256": "abc", "missing": {"fa4": "no such package"}}
    return results.Results({r.cell.key: r for r in records}, {"r": facts})


# gluon against fa3: 2.0 and 0.5; against cudnn 1.0 and 4.0.
BOTH = (record(A, gluon=1.0, fa3=2.0, torch_cudnn=1.0), record(B, gluon=2.0, fa3=1.0, torch_cudnn=8.0))


def test_ratios_are_times_of_the_peer_over_ours():
    found = ratios.summarize(BOTH, "gluon", "fa3")
    assert found is not None
    assert (found.cells, found.worst, found.worst_cell) == (2, 0.5, B.key)
    assert found.geometric_mean == pytest.approx(1.0)
    assert found.per_head_dim == {64: pytest.approx(2.0), 128: pytest.approx(0.5)}


def test_only_cells_with_both_times_count():
    broken = record(B, gluon=-2.0, fa3=1.0)
    found = ratios.summarize([BOTH[0], broken], "gluon", "fa3")
    assert found is not None
    assert (found.cells, found.geometric_mean) == (1, pytest.approx(2.0))
    assert ratios.summarize([broken], "gluon", "fa3") is None


def test_the_best_peer_is_never_one_of_ours():
    assert ratios.best_peer(record(A, gluon_chained=0.1, fa3=2.0, torch_cudnn=1.5)) == "torch.cudnn"
    assert ratios.best_peer(record(A, gluon=1.0)) is None


def test_worst_cell_against_the_best_peer():
    assert ratios.worst_against_best(BOTH) == (0.5, B.key, "fa3")


def test_geometric_mean_of_nothing_is_nan():
    assert math.isnan(ratios.geometric_mean([]))


def test_joules_are_watts_times_the_milliseconds_under_the_same_load():
    """700 W for 2 ms are 1.4 J; cell A counts 34.4 GFLOP."""
    times = Times([LaunchTime(1.0, 1900.0)], [1980.0], [LaunchTime(2.0, 1500.0)] * 2, [1500.0] * 2, [690.0, 710.0])
    weighed = results.CellRecord(
        "r", A, 1, (results.measured("gluon", "script", times, SampleFigures(1, 0, 0.0, 0.0)),)
    )
    assert weighed.joules("gluon") == pytest.approx(1.4)
    assert math.isnan(weighed.joules("flash3"))
    (row,) = csv_rows(tables.csv_text([weighed]), "")
    assert (row["sustained_w"], row["joules"]) == ("700", "1.4")
    assert f"| {A.key} | 1.4 ({A.flops / 1e12 / 1.4:.3f}, 700) |" in tables.markdown(collected(weighed))
    assert "joules" not in tables.markdown(collected(*BOTH)), "nothing was weighed"


def test_csv_has_one_line_per_cell_and_kernel_and_no_speed_without_bits():
    rows = csv_rows(tables.csv_text([BOTH[0], record(B, gluon=-2.0)]), "")
    assert [(r["kernel"], r["burst_ms"]) for r in rows] == [
        ("gluon", "1"),
        ("fa3", "2"),
        ("torch.cudnn", "1"),
        ("gluon", ""),
    ]
    assert rows[0]["burst_tflops"] == f"{A.flops / 1e9:.6g}"
    assert rows[0]["ratio_to_best_peer"] == "1"
    assert rows[3]["status"].startswith("bits differ")


def test_csv_has_the_counted_clock_beside_the_drivers_and_the_schedule_of_ours_alone():
    ours, peer = csv_rows(tables.csv_text([record(A, gluon=2.0, fa3=1.0)]), "")
    figures = ("burst_sm_mhz", "burst_cycles", "burst_driver_mhz", "sustained_sm_mhz")
    assert [ours[name] for name in figures] == ["1500", "3e+06", "1980", ""]  # 2 ms at 1.5 GHz
    fields = tables.SWITCHES
    assert [ours[name] for name in fields] == ["128", "64", "True", "False", "True", "0", "False", "False"]
    assert [peer[name] for name in fields] == [""] * len(fields)


def test_markdown_names_missing_peers_kernels_without_speed_and_the_machine():
    text = tables.markdown(collected(BOTH[0], record(B, gluon=-2.0, fa3=1.0)))
    assert "missing peer fa4: no such package" in text
    assert f"gluon has no speed in {B.key}: bits differ" in text
    assert "gpu GPU" in text
    assert "| fp16 | gluon | fa3 | 1 | 2.000 | d64 2.000 | 2.000 |" in text


def test_dtypes_are_never_pooled():
    other = cells.Cell("paper", "bf16", 32, 512, 512, 16, 16, 128, False)
    lines = ratios.ratio_lines(collected(record(A, gluon=1.0, fa3=2.0), record(other, gluon=2.0, fa3=1.0)), "paper")
    assert [line.split(" over")[0] for line in lines] == [
        "paper bf16: gluon is 0.500 times as fast as fa3",
        "paper fp16: gluon is 2.000 times as fast as fa3",
    ]


def test_grids_are_never_pooled():
    records = (record(replace(A, grid=grid), gluon=1.0, fa3=2.0) for grid in ("decode", "paper", "shapes"))
    (line,) = ratios.ratio_lines(collected(*records), "paper")
    assert line.startswith("paper fp16: gluon is 2.000 times as fast as fa3 over 1 cells")


def test_netcdf_holds_figures_rounds_and_provenance(tmp_path):
    import xarray as xr

    tables.write(collected(*BOTH), tmp_path)
    with xr.open_dataset(tmp_path / "bench.nc", engine="h5netcdf") as data:
        assert float(data["burst_ms"].sel(cell=B.key, kernel="torch.cudnn")) == 8.0
        assert float(data["rounds_ms"].sel(cell=A.key, kernel="fa3", round=0)) == 2.0
        assert data["kernel"].values.tolist()[0] == "gluon"
        assert float(data["burst_cycles"].sel(cell=A.key, kernel="fa3")) == 3e6
        assert (data["burst_cycles"].units, data["burst_sm_mhz"].units) == ("cycles", "MHz")
        assert float(data["tile_n"].sel(cell=A.key, kernel="gluon")) == 64
        assert math.isnan(float(data["tile_n"].sel(cell=A.key, kernel="fa3")))
        assert "no such package" in data.attrs["runs_json"]
    names = {"bench.csv", "bench.md", "bench.nc", "bench_provenance.json"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_figures_of_several_kernel_versions_are_never_of_one(tmp_path):
    mixed = collected(record(A, gluon=1.0), record(B, run="later", gluon=1.0))
    assert tables.provenance(mixed)["launches_sha256"] == "abc"
    mixed.runs["later"] = mixed.runs["r"] | {"launches_sha256": "def"}
    assert tables.provenance(mixed)["launches_sha256"] == "of several versions"


def test_decode_and_accumulator_loss_tables_show_their_own_figures():
    decode = cells.select("decode", ["bf16"])[0]
    loss = cells.select("accumulator_loss", ["e4m3"])[0]
    text = tables.markdown(collected(record(decode, gluon=0.25), record(loss, gluon=1.0)))
    assert f"| {decode.key} | gluon | 250.0 |" in text
    assert f" {decode.kv_bytes / 1e9 / 0.25:.2f} |" in text  # TB/s
    assert "| 64 | 8192 | 1.00e-03 (-5.0e-01) |" in text
