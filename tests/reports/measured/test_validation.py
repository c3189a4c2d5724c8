"""Validation gives back the errors, the rank agreement and the regret that were put into a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fa3_kernels.plan.config import Config, default_config
from fa3_reference.problem import AttentionProblem
from fa3_reports.measured import timings as measured, validation as validate
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3verify.files import csv_text, write_text

H200, CLOCK = load("h200"), 1650.0
PROBLEM = AttentionProblem(1, 16, 16, 2048, 2048, 128)
SCHEDULES = (Config(), Config(intra_wg_overlap=False), Config(pingpong=False, warp_specialized=False))
EMPTY = dict.fromkeys(measured.COLUMNS, "")


def line(schedule: Config, error: float, problem: AttentionProblem = PROBLEM, **changes: object) -> dict[str, object]:
    """A row that the simulator misses by ``error``, relative to the measurement."""
    cycles = estimate(problem, schedule, H200, CLOCK).cycles / (1 + error)
    fields = {"grid": "schedules", "dtype": schedule.dtype, "kernel": "gluon.any", "status": "ok"}
    fields |= {
        name: getattr(problem, name) for name in ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "causal")
    }
    fields |= {
        name: getattr(schedule, name) for name in ("head_dim", "tile_m", "tile_n", "pingpong", "warp_specialized")
    }
    fields |= {"overlap": schedule.intra_wg_overlap, "promotion_interval": schedule.promotion_interval}
    fields |= {"holds_turn": schedule.holds_turn, "holds_queries": schedule.holds_queries}
    return EMPTY | fields | {"burst_sm_mhz": CLOCK, "burst_cycles": cycles} | changes


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    head = list(rows[0])
    write_text(path, csv_text(head, ([row[name] for name in head] for row in rows)))
    return path


def figures(path: Path, rows: list[dict[str, object]]) -> dict:
    file = table(path / "bench.csv", rows)
    return validate.figures_of(file.name, H200, *validate.compare_file(file, H200))


def test_known_errors_come_back(tmp_path: Path) -> None:
    fp8 = Config(dtype="e4m3", promotion_interval=128)
    causal = replace(PROBLEM, causal=True)
    rows = [line(SCHEDULES[0], -0.1), line(SCHEDULES[1], 0.02), line(SCHEDULES[0], 0.06, causal), line(fp8, -0.3)]
    found = figures(tmp_path, rows)
    by_group = {g["group"]: g["models"]["simulated"] for g in found["groups"]}
    assert set(by_group) == {"gluon fp16 d128 dense", "gluon fp16 d128 causal", "gluon e4m3 d128 dense", "all"}
    dense, every = by_group["gluon fp16 d128 dense"], by_group["all"]
    assert (dense["mape"], dense["max"], dense["bias"]) == pytest.approx((0.06, 0.1, -0.04))
    assert (every["mape"], every["max"], every["bias"]) == pytest.approx((0.12, 0.3, -0.08))
    assert every["low"] < every["mape"] < every["high"]


def test_a_row_of_a_schedule_that_our_kernel_no_longer_has_is_left_out(tmp_path: Path) -> None:
    """A row that says nothing of the turn is of a kernel that did not hold it."""
    row = line(Config(dtype="e4m3", promotion_interval=128), 0.0)
    rows, left_out = measured.read(table(tmp_path / "now.csv", [row]))
    assert (len(rows), left_out) == (1, {})
    of_former = row | {"former": "True"}
    silent = {name: value for name, value in row.items() if name != "holds_turn"}
    for name, before in (("former", of_former), ("silent", silent)):
        rows, left_out = measured.read(table(tmp_path / f"{name}.csv", [before]))
        assert (rows, left_out) == ([], {"our kernel has another schedule by now": 1})


def test_a_row_of_a_kernel_that_did_not_hold_its_queries_is_left_out(tmp_path: Path) -> None:
    row = line(Config(head_dim=96), 0.0, replace(PROBLEM, head_dim=96, head_dim_v=96))
    rows, left_out = measured.read(table(tmp_path / "now.csv", [row]))
    assert (len(rows), left_out) == (1, {})
    silent = {name: value for name, value in row.items() if name != "holds_queries"}
    rows, left_out = measured.read(table(tmp_path / "silent.csv", [silent]))
    assert (rows, left_out) == ([], {"our kernel has another schedule by now": 1})


def test_the_bootstrap_interval_is_that_of_the_mean(tmp_path: Path) -> None:
    """1000 absolute errors uniform in [0, 0.2]: the mean's standard error is 0.0577 / sqrt(1000)."""
    found = validate.accuracy(np.random.default_rng(1).uniform(-0.2, 0.2, 1000))
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.2 / np.sqrt(12 * 1000), rel=0.1)
    assert found == validate.accuracy(np.random.default_rng(1).uniform(-0.2, 0.2, 1000))


def test_a_right_ranking_has_tau_1_and_no_regret(tmp_path: Path) -> None:
    (ranking,) = figures(tmp_path, [line(s, 0.05) for s in SCHEDULES])["rankings"]
    assert (ranking["schedules"], ranking["tau"], ranking["regret"]) == (3, pytest.approx(1.0), (0.0, 0.0))


def test_a_swapped_ranking_lowers_tau_and_costs_its_regret(tmp_path: Path) -> None:
    """The schedule simulated fastest is measured 10 % slower than the one simulated second; three hold the best."""
    rows = sorted((line(s, 0.0) for s in SCHEDULES), key=lambda row: float(str(row["burst_cycles"])))
    rows[2]["burst_cycles"] = 2 * float(str(rows[1]["burst_cycles"]))
    rows[0]["burst_cycles"] = 1.1 * float(str(rows[1]["burst_cycles"]))
    (ranking,) = figures(tmp_path, rows)["rankings"]
    assert ranking["tau"] == pytest.approx(1 / 3)
    assert ranking["regret"] == (pytest.approx(0.1), 0.0)


def test_two_schedules_are_no_ranking_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    found = figures(tmp_path, [line(SCHEDULES[0], e) for e in (0.0, 0.1)] + [line(SCHEDULES[1], 0.0)])
    assert found["rankings"] == []
    assert "No problem has 3 schedules" in validate.markdown(found)


def test_official_flash_attention_3_is_simulated_with_its_own_tile(tmp_path: Path) -> None:
    schedule = default_config(PROBLEM, family="flash3")
    empty = dict.fromkeys(measured.SCHEDULE_COLUMNS, "")
    (group, _) = figures(tmp_path, [line(schedule, 0.04, kernel="fa3", **empty)])["groups"]
    assert group["group"] == "flash3 fp16 d128 dense"
    assert group["models"]["simulated"]["mape"] == pytest.approx(0.04)


def test_decoding_with_keys_in_one_piece_is_compared_with_the_heads_of_a_group_packed(tmp_path: Path) -> None:
    problem, packed = AttentionProblem(2, 32, 8, 1, 8192, 128), replace(SCHEDULES[0], pack_gqa=True)
    (row,), left_out = measured.read(
        table(tmp_path / "bench.csv", [line(packed, 0.0, problem, grid="decode", kernel="gluon.one_split")])
    )
    assert (row.problem, row.config, dict(left_out)) == (problem, packed, {})


def test_decoding_is_compared_with_the_parts_that_a_library_chooses(tmp_path: Path) -> None:
    problem, empty = AttentionProblem(4, 32, 8, 1, 65536, 128), dict.fromkeys(measured.SCHEDULE_COLUMNS, "")
    rows = [
        line(replace(SCHEDULES[0], pack_gqa=True), 0.0, problem, grid="decode", kernel="gluon"),
        line(default_config(problem, family="flash3"), 0.0, problem, grid="decode", kernel="fa3", **empty),
    ]
    ours, upstream = measured.read(table(tmp_path / "bench.csv", rows))[0]
    assert (ours.config.num_splits, ours.config.pack_gqa) == (4, True)
    assert (upstream.config.num_splits, upstream.config.pack_gqa) == (4, True)


def test_what_cannot_be_compared_is_counted_by_reason(tmp_path: Path) -> None:
    empty = dict.fromkeys(measured.SCHEDULE_COLUMNS, "")
    rows = [
        line(SCHEDULES[0], 0.0),
        line(SCHEDULES[0], 0.0, kernel="torch.cudnn", **empty),
        line(SCHEDULES[0], 0.0, grid="decode", kernel="fa3.dew", **empty),
        line(SCHEDULES[0], 0.0, burst_cycles=""),
        line(SCHEDULES[0], 0.0, status="unsupported: no"),
        line(SCHEDULES[0], 0.0, kernel="fa4", head_dim=192, **empty),
    ]
    found = figures(tmp_path, rows)
    assert found["rows"] == 1
    assert sorted(reason.split(":")[0] for reason in found["left_out"]) == [
        "FlashAttention-4 with a tile not in our table",
        "decode",
        "no cycles",
        "no program for cudnn",
        "no timing",
    ]
    with pytest.raises(ValueError, match="has no row to compare: 1 x decode"):
        figures(tmp_path, rows[2:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"burst_cycles": "fast"}, "bench.csv, line 2: burst_cycles must be a number above 0, got 'fast'"),
        ({"burst_sm_mhz": "nan"}, "line 2: burst_sm_mhz must be a number above 0"),
        ({"pingpong": "maybe"}, "line 2: pingpong must be True or False, got 'maybe'"),
        ({"tile_n": "12.5"}, "line 2: tile_n must be a whole number of at least 1, got '12.5'"),
        ({"tile_n": "120"}, r"line 2: tile_n must be a multiple of 16 in \[16, 256\]"),
        ({"head_dim": "300"}, "line 2: head_dim must be at most 256, got 300"),
        ({"nheads_kv": "3"}, "line 2: nheads_kv must be a divisor of nheads 16, got '3'"),
        ({"dtype": "int8"}, "line 2: dtype must be one of fp16, bf16, e4m3"),
    ],
)
def test_a_bad_value_is_refused_by_line_and_column(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        figures(tmp_path, [line(SCHEDULES[0], 0.0, **changes)])


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b"kernel\n"])
def test_a_foreign_file_is_refused_in_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    assert validate.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("validation: other.csv")
    assert error.count("\n") == 1


def test_a_line_of_other_length_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "bench.csv", [line(SCHEDULES[0], 0.0)])
    path.write_text(path.read_text() + "one,two\n")
    with pytest.raises(ValueError, match=r"bench.csv, line 3: must have \d+ fields"):
        measured.read(path)


def test_the_table_says_that_the_closed_form_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, page = table(tmp_path / "bench.csv", [line(s, 0.05) for s in SCHEDULES]), tmp_path / "page.md"
    assert validate.main([str(path), "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert page.read_text() == printed
    assert "closed form's two constants were fitted to published H100 timings" in printed
    assert "| all | 3 | 5.0% [5.0%, 5.0%], largest 5.0%, bias +5.0%" in printed
