"""Constants follow from a table of microbenchmarks: the H100's file is what they give, and each moves with its own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from fa3_reports.microbench.constants import EVIDENCE, Stretches, main, read, select, text_of, transferred
from fa3_simulator.machine import load

REPORTS = Path(__file__).parents[3] / "reports"
H200, H100 = (REPORTS / name / "simulator" / "microbench" / "microbench.csv" for name in ("h200", "h100"))
REFERENCE = load("h200")
# from tables of their own, which nobody measured on an H100
OF_THE_H200 = {
    "drain_cycles",
    "mma_tail_cycles",
    "shared_load_cycles",
    "store_queue_bytes",
    "thread_store_bytes_per_cycle",
}


@pytest.fixture(scope="module")
def tables() -> tuple[Stretches, Stretches]:
    return read(H200), read(H100)


def test_every_measured_constant_has_evidence_and_no_other() -> None:
    measured = {name for name, constant in REFERENCE.constants().items() if constant.kind == "measured"}
    assert measured - OF_THE_H200 == set(EVIDENCE)


def test_all_experiments_of_two_gpus_join_by_key_launches_too(tables: tuple[Stretches, Stretches]) -> None:
    assert len(tables[0]) == 986 + 62
    assert set(tables[0]) == set(tables[1])
    assert len(select(tables[1], "launch")) == 24


# Statistics that are the constant itself, in its unit: of the H200 they are what people read off, or nearly. Rates of
# copies and the mbarrier's hop were read off an earlier run of the same experiments.
@pytest.mark.parametrize(
    ("name", "scale", "tolerance"),
    [
        ("wgmma_issue_cycles", 1, 0.001),
        ("wgmma_window", 1, 0),
        ("wgmma_rs_cycles", 1, 0),
        ("issue_cycles", 1, 0.001),
        ("alu_cycles", 1, 0.002),
        ("mufu_cycles", 1, 0.01),
        ("trip_cycles", 1, 0.002),
        ("named_barrier_cycles", 1, 0.004),
        ("mbarrier_hop_cycles", 1, 0.09),
        ("tma_issue_cycles", 1, 0),
        ("store_bytes_per_cycle", 1, 0.002),
        ("launch_cycles", 1, 0.001),
        ("l2_bytes_per_cycle", 1, 0.032),
        ("hbm_bytes_per_ns", 1.98, 0.023),
        ("hbm_lone_bytes_per_cycle", 1, 0.001),
        ("memory_latency_ns", 1 / 1.98, 0.037),
    ],
)
def test_statistics_give_the_constants_of_the_h200(name: str, scale: float, tolerance: float, tables) -> None:
    found = EVIDENCE[name].statistic(tables[0]) * scale
    assert found == pytest.approx(REFERENCE[name], rel=tolerance, abs=1e-9)


def test_the_file_of_the_h100_is_what_its_table_gives(tables: tuple[Stretches, Stretches]) -> None:
    source = "reports/h100/simulator/microbench/microbench.csv"
    found = transferred(tables[1], REFERENCE, tables[0], "H100", source, "2026-11-21")
    assert (resources.files("fa3_simulator") / "machines" / "h100.toml").read_text() == text_of(found)
    assert found.assumed() == []


def test_inside_an_sm_the_two_gpus_are_alike_and_memory_and_launch_are_not() -> None:
    h100 = load("h100")
    assert {name for name in h100.constants() if h100[name] != REFERENCE[name]} == {
        "memory_latency_ns",
        "l2_bytes_per_cycle",
        "hbm_bytes_per_ns",
        "hbm_lone_bytes_per_cycle",
        "store_bytes_per_cycle",
        "launch_cycles",
    }


def test_an_experiment_that_takes_longer_moves_the_constants_it_stands_for_alone(
    tables: tuple[Stretches, Stretches],
) -> None:
    slower = {
        key: [[2 * x for x in group] for group in groups] if key[0] == "launch" else groups
        for key, groups in tables[0].items()
    }
    found = transferred(slower, REFERENCE, tables[0], "slow", "slow.csv", "2026-11-22")
    assert found["launch_cycles"] == 2 * REFERENCE["launch_cycles"]
    assert [name for name in found.constants() if found[name] != REFERENCE[name]] == ["launch_cycles"]


def test_a_table_without_an_experiment_or_of_another_kind_is_refused(tmp_path: Path, capsys) -> None:
    arguments = ["--name", "X", "--date", "2026-11-22", "--reference-table", str(H200)]
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main([str(other), *arguments]) == 2
    assert "other.csv is no table of microbenchmarks" in capsys.readouterr().err
    other.write_text("experiment,parameters,cycles\nstamp,{},85 20\n")
    assert main([str(other), *arguments]) == 2
    assert "the table has no experiment serial_step" in capsys.readouterr().err
