"""tune as a user calls it: which kernel, what the GPU adds, and what is said where it is absent."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_kernels.plan.config import Config
from fa3_reports.stored import read_csv
from fa3_simulator import tune
from fa3verify.cli.main import main

SHORT = ("--seqlen", 1024, "--nheads", 4)
WIDE = ("--head-dim", 256)  # which has the fewest tiles and schedules to simulate
LONG = (*WIDE, "--seqlen", 8192, "--nheads", 8, "--causal")  # for which there are intervals


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """Simulate once what several tests ask for: what is under test is how it is asked and told."""
    found: dict[tuple, list] = {}
    simulate = tune.tune

    def remembered(problem: Any, machine: Any, clock: float, **options: Any) -> list:
        asked = (problem, machine.name, clock, *sorted(options.items()))
        if asked not in found:
            found[asked] = simulate(problem, machine, clock, **options)
        return found[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "tune", remembered)
        yield


@pytest.fixture
def tuning() -> Any:
    """The GPU's side of tune, for tests that replace parts of it."""
    from fa3verify.bench import tuning

    return tuning


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["tune", *map(str, (*SHORT, *arguments))])
    return result.exit_code, result.stdout, result.stderr


def figures(*arguments: object) -> dict:
    return json.loads(run(*arguments, "--json", "-")[1])


def test_the_kernel_is_a_choice_and_ours_the_default_as_in_simulate() -> None:
    default, flash3 = figures(*WIDE), figures(*WIDE, "--kernel", "flash3")
    assert default == figures(*WIDE, "--kernel", "gluon")
    assert flash3["kernel"] == "flash3"
    assert [r["cycles"] for r in flash3["ranked"]] != [r["cycles"] for r in default["ranked"]]
    shipped = json.loads(CliRunner().invoke(main, ["simulate", *map(str, (*SHORT, *WIDE)), "--json", "-"]).stdout)
    own = next(r for r in default["ranked"] if (r["tile"], r["schedule"]) == ("128x64", "pingpong+overlap"))
    assert own["gluon"]
    assert shipped["schedule"].startswith("gluon fp16 d256 128x64")


def table(*arguments: object) -> list[str]:
    code, out, _ = run(*arguments)
    assert code == 0
    return out.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        WIDE,
        pytest.param((), marks=pytest.mark.nightly),
        ("--kernel", "gluon", "--dtype", "e4m3"),
        pytest.param(("--seqlen-q", 1, "--nheads", 8, "--nheads-kv", 1), marks=pytest.mark.nightly),
        LONG,
        pytest.param(("--head-dim", 96), marks=pytest.mark.nightly),
        ("--seqlen-q", 1, "--nheads", 8, "--nheads-kv", 1, "--top", 10),
    ],
)
def test_a_table_fits_80_columns_and_names_problem_machine_clock_and_error(arguments: tuple) -> None:
    lines = table("--top", 4, *arguments)
    assert max(map(len, lines)) <= 80, lines
    assert {"stages", "cycles", "ms"} <= set(lines[2].split())
    assert "slots" not in lines[2]
    assert f"x {8192 if arguments == LONG else 1024}: " in lines[0]
    assert lines[0].endswith(" on H200 at 1980 MHz")
    assert lines[1].startswith("lower bound ")
    said = " ".join(" ".join(lines).split())
    assert ("90%: interval of the measured time, by held-out H200 timings of " in said) == (arguments == LONG)
    assert ("no interval: too few such launches were timed" in said) == (arguments != LONG)
    assert "nan" not in " ".join(lines)


def test_every_row_has_its_time_at_the_clock_predicted_under_load_and_the_table_that_of_the_first() -> None:
    found = figures(*WIDE)
    for row in found["ranked"]:
        assert row["clock_under_load_mhz"] < found["clock_mhz"]
        assert row["milliseconds_under_load"] > row["milliseconds"]
        assert row["tflops_under_load"] < row["tflops"]
    first = found["ranked"][0]
    said = " ".join(" ".join(table(*WIDE)).split())
    assert f"the first: {first['milliseconds_under_load']:.4g} ms, {first['tflops_under_load']:.0f} TFLOP/s at " in said
    assert f"at {first['clock_under_load_mhz']:.0f} MHz, the clock predicted under load (of a cool burst" in said
    assert found["answer"] in said


def test_rows_that_the_wider_interval_does_not_tell_from_the_first_share_its_place() -> None:
    rows = figures(*LONG)["ranked"]
    half = [(row["cycles_high"] - row["cycles_low"]) / 2 / row["cycles"] for row in rows]
    first = [row["place"] == 1 for row in rows]
    assert first == [row["cycles"] <= rows[0]["cycles"] * (1 + max(each, half[0])) for row, each in zip(rows, half)]
    assert 1 < sum(first) < len(rows)


def test_every_row_has_its_interval_in_the_table_json_and_csv_and_says_what_it_is_of() -> None:
    rows = figures(*LONG)["ranked"]
    _, text, _ = run(*LONG, "--csv", "-")
    assert {row["interval_class"] for row in rows} == {"gluon 16 bits d256, other schedules"}
    for row, line, of_csv in zip(rows, table(*LONG)[3:], csv.DictReader(io.StringIO(text)), strict=False):
        ends = (row["cycles_low"], row["cycles_high"])
        assert "..".join(f"{end / row['cycles'] - 1:+.0%}" for end in ends) in line
        assert float(of_csv["cycles_high"]) == pytest.approx(ends[1], rel=1e-5)
        assert row["milliseconds_low"] / row["milliseconds"] == pytest.approx(ends[0] / row["cycles"], rel=1e-4)
        assert (of_csv["interval_class"], int(of_csv["interval_rows"])) == (row["interval_class"], row["interval_rows"])


def test_tiles_that_hbm_binds_alike_are_one_row_that_says_its_gigabytes_per_second() -> None:
    """2.1 GB of K and V of 32 sequences: whatever the tile is."""
    decode = ("--batch", 32, "--seqlen", 8192, "--seqlen-q", 1, "--nheads", 32, "--nheads-kv", 8, "--head-dim", 256)
    first, *others = figures(*decode)["ranked"]
    assert first["packed"]
    assert first["binds"] == "hbm"
    assert len(first["alike"]) >= 2
    assert all(row["cycles"] > first["cycles"] for row in others)
    moved = 2 * 256 * (2 * 32 * 8 * 8192 + 2 * 32 * 32)
    assert first["hbm_gb_per_s"] == pytest.approx(moved / first["milliseconds"] / 1e6)
    assert " GB/s " in table(*decode)[3]


@pytest.mark.nightly
def test_few_heads_with_many_keys_are_cut_into_parts_and_packed() -> None:
    few = ("--batch", 1, "--seqlen", 32768, "--seqlen-q", 1, "--nheads", 32, "--nheads-kv", 8, "--head-dim", 256)
    whole = figures(*few, "--pack-gqa")["ranked"]
    assert whole[0]["splits"] >= 8
    assert whole[0]["packed"]
    head = next(line for line in table(*few) if " ms " in line)
    assert head.split()[:4] == ["#", "tile", "parts", "heads"]


def test_csv_has_the_rows_of_the_table(tmp_path: Any) -> None:
    target = tmp_path / "tune.csv"
    found = figures("--csv", target, "--top", 3, *WIDE)
    rows = read_csv(target)
    assert [row["tile"] for row in rows] == [row["tile"] for row in found["ranked"]]
    assert [int(row["cycles"]) for row in rows] == [row["cycles"] for row in found["ranked"]]


def test_two_machines_are_told_apart() -> None:
    both = ("--machine", "h200", "--machine", "h100", "--top", 2, *WIDE)
    found = figures(*both)
    assert [found["machine"], *(other["machine"] for other in found["others"])] == ["H200", "H100"]
    (line,) = (x for x in table(*both) if x.startswith("H100 beside"))
    assert "6 other constants, above all hbm_bytes_per_ns" in line
    assert max(map(len, table(*both))) <= 80


@pytest.mark.optional
def test_only_what_the_kernels_take_is_timed(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr(tuning, "options_of", lambda config, problem: seen.append(config))
    monkeypatch.setattr(tuning, "measure_cycles", lambda problem, options: [1e4] * len(options))
    run("--measure", 100)
    assert len({replace(s, num_splits=1) for s in seen}) == 20
    assert {s.num_splits for s in seen} > {1}  # 32 tiles are fewer than SMs
    assert {(s.num_stages, s.softmax_stages, s.pv_from_registers, s.family) for s in seen} == {(2, 2, True, "gluon")}
    assert {(s.tile_m, s.tile_n) for s in seen} == {(128, 32), (128, 64), (128, 128), (192, 32), (192, 64)}


def test_measure_without_a_gpu_leaves_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    code, _, err = run("--measure", 3)
    assert (code, err.strip()) == (3, "fa3verify: tune --measure needs a GPU: no CUDA device")


@pytest.mark.optional
def test_measured_stands_beside_simulated(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four timed; the simulated best is measured 20 % slower than the second."""
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr(tuning, "measure_cycles", lambda cell, options: [12e3, 10e3, "refused: no", 13e3])
    found = figures("--measure", 4)
    assert [r.get("measured_cycles") for r in found["ranked"]] == [12e3, 10e3, None, 13e3]
    assert found["tau"] == pytest.approx(1 / 3)
    assert found["regret"] == [pytest.approx(0.2), 0.0]
    out = run("--measure", 4)[1]
    assert "! not measured: refused: no" in out
    assert "Kendall tau 0.33, regret top-1 20.0%, top-3 0.0%" in out


@pytest.mark.parametrize(
    ("cycles", "regret"), [([12e3, 10e3], [0.2, 0.0]), ([12e3, "refused: no"], []), (["refused: no"] * 2, [])]
)
def test_two_timings_are_needed_to_agree(cycles: list, regret: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked without the GPU's side of tune, which needs Triton."""
    timed = SimpleNamespace(
        cell_of=lambda problem: None, options_of=lambda *asked: None, measure_cycles=lambda cell, options: cycles
    )
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setitem(sys.modules, "fa3verify.bench.tuning", timed)
    monkeypatch.setattr("fa3verify.bench.tuning", timed, raising=False)
    found = figures("--measure", 2, *WIDE)
    assert found["regret"] == pytest.approx(regret)


def test_timing_upstreams_kernel_is_refused() -> None:
    code, _, err = run("--kernel", "flash3", "--measure", 3)
    assert code == 2
    assert "--measure is for --kernel gluon, got flash3" in err


def test_the_answer_is_a_sentence_and_a_picture_of_tiles_and_schedules(tmp_path: Path) -> None:
    """The first of the table is ringed, and what is half as slow again is left out."""
    picture = tmp_path / "tune.svg"
    out = run("--causal", "--svg", picture)[1]
    first, second, *_ = figures("--causal")["ranked"]
    gap = second["cycles"] / first["cycles"] - 1
    one, other = (re.escape(f"{row['tile']} {row['schedule']}") for row in (first, second))
    assert re.search(f"Take {one}[^:]*: {gap:.1%} ahead of {other}.*, bound by", " ".join(out.split()))
    drawn = re.findall(r">([^<>]+)</text>", picture.read_text())
    assert {first["tile"], second["tile"], first["schedule"]} <= set(drawn)
    shown = [words for words in drawn if re.fullmatch(r"\d+x\d+", words)]
    assert shown == sorted(shown, key=lambda tile: [*map(int, tile.split("x"))])
    assert "16x16" not in shown
