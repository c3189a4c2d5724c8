"""Two warps of a scheduler do not share it evenly: what decision 0017 says is what its table has, on both GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fa3_reports.microbench.experiment import digest
from fa3_reports.microbench.sharing import PASSES, sharing
from fa3_reports.stored import read_csv

REPORTS = Path(__file__).parents[2] / "reports"
GPUS = ("h100", "h200")
Key = tuple[str, int, bool, str]


def rows_of(gpu: str) -> list[dict[str, str]]:
    return read_csv(REPORTS / gpu / "simulator" / "microbench" / "sharing.csv")


def measured(gpu: str) -> dict[Key, list[tuple[float, np.ndarray]]]:
    """Of each experiment the start of every warpgroup, and its stretches in cycles."""
    found: dict[Key, list[tuple[float, np.ndarray]]] = {}
    for row in rows_of(gpu):
        p = json.loads(row["parameters"])
        stretches = np.array([float(x) for x in row["cycles"].split()])
        mine = found.setdefault((p["dtype"], p["n"], p["wgmma"], p["works"]), [])
        mine.append((float(row["start_after_first_cycles"]), stretches))
    return found


def passes(table: dict, dtype: str, wgmma: bool, *works: str) -> list[float]:
    """Cycles of a pass of each kind of work while all of them run; the first stretch is cold."""
    groups = table[dtype, 128, wgmma, " ".join(works)][: len(works)]
    end = min(start + stretches.sum() for start, stretches in groups)
    taken = []
    for (start, stretches), kind in zip(groups, works, strict=True):
        together = start + np.cumsum(stretches) <= end
        together[0] = False
        taken.append(float(stretches[together].mean()) / PASSES[kind])
    return taken


def slowed(table: dict, dtype: str, wgmma: bool, *works: str) -> list[float]:
    alone = [passes(table, dtype, wgmma, kind)[0] for kind in works]
    return [x / y for x, y in zip(passes(table, dtype, wgmma, *works), alone, strict=True)]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_row_is_of_the_ptx_that_its_experiment_has_now(gpu: str) -> None:
    now = {digest(experiment.ptx()) for experiment in sharing()}
    assert {row["ptx_sha256"] for row in rows_of(gpu)} == now


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("dtype", "wgmma", "works", "times"),
    [
        ("fp16", False, ("maxima", "exponentials"), (1.42, 1.12)),
        ("fp16", True, ("maxima", "exponentials"), (1.50, 1.42)),
        ("fp16", False, ("exponentials", "conversion"), (3.66, 1.09)),
        ("fp16", True, ("exponentials", "conversion"), (4.35, 1.09)),
        ("e4m3", False, ("exponentials", "conversion"), (2.08, 1.17)),
        ("e4m3", True, ("exponentials", "conversion"), (2.42, 1.17)),
        ("fp16", False, ("maxima", "conversion"), (3.59, 1.16)),
        ("fp16", True, ("maxima", "conversion"), (4.20, 1.19)),
        ("fp16", False, ("exponentials", "exponentials"), (1.92, 1.79)),
        ("fp16", True, ("exponentials", "exponentials"), (1.84, 1.73)),
    ],
)
def test_rescaling_and_conversion_keep_the_scheduler(
    gpu: str, dtype: str, wgmma: bool, works: tuple[str, str], times: tuple[float, float]
) -> None:
    assert slowed(measured(gpu), dtype, wgmma, *works) == pytest.approx(times, rel=0.02)
