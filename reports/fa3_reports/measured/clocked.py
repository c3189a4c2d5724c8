"""Timed bursts joined with the clock that was sampled meanwhile: times, clocks and cycles of calls.

    python -m fa3_reports.measured.clocked ROWS.jsonl SAMPLES.csv OUT.csv

A row of ``ROWS.jsonl`` has ``piece``, ``kernel``, ``shape``, times of a call in ms (``hot_ms`` back to back,
``cold_ms`` each behind a flush of L2), and from when to when ``hot_ms`` were timed.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fa3verify.files import csv_lines

COLUMNS = (
    "piece",
    "kernel",
    "shape",
    "hot_ms",
    "hot_spread",
    "cold_ms",
    "sm_mhz",
    "sm_mhz_lowest",
    "sm_mhz_highest",
    "power_w",
    "samples",
    "cycles",
    "tflops",
    "tbytes_per_s",
    "error",
    "compiled",
)
_MARGIN_S = 0.02  # a sample is as old as NVML's own period


def of_burst(samples: Sequence[Mapping[str, float]], begin_s: float, end_s: float) -> list[Mapping[str, float]]:
    """Return the samples taken while a burst ran; those at its edges may be of what was before it."""
    return [each for each in samples if begin_s + _MARGIN_S <= each["unix_s"] <= end_s]


def _power(during: Sequence[Mapping[str, float]]) -> float:
    """Return the mean power from the energy counter, or the median of the readings where there is none."""
    if len(during) > 1 and during[-1]["energy_j"] > during[0]["energy_j"]:
        first, last = during[0], during[-1]
        return (last["energy_j"] - first["energy_j"]) / (last["unix_s"] - first["unix_s"])
    return median(each["power_w"] for each in during) if during else math.nan


def joined(row: Mapping[str, Any], samples: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return a burst with its clock; cycles are those of one call, NaN if no sample fell into it."""
    during = of_burst(samples, row["begin_s"], row["end_s"])
    clocks = [each["sm_mhz"] for each in during]
    clock = median(clocks) if clocks else math.nan
    hot, cold = median(row["hot_ms"]), row.get("cold_ms")
    return {
        "piece": row["piece"],
        "kernel": row["kernel"],
        "shape": row["shape"],
        "hot_ms": f"{hot:.6g}",
        "hot_spread": f"{(max(row['hot_ms']) - min(row['hot_ms'])) / hot:.4f}",
        "cold_ms": f"{median(cold):.6g}" if cold else "",
        "sm_mhz": f"{clock:g}",
        "sm_mhz_lowest": f"{min(clocks, default=math.nan):g}",
        "sm_mhz_highest": f"{max(clocks, default=math.nan):g}",
        "power_w": f"{_power(during):.1f}",
        "samples": len(during),
        "cycles": f"{hot * clock * 1e3:.0f}",
        "tflops": f"{row['flops'] / hot / 1e9:.2f}",
        "tbytes_per_s": f"{row['hbm_bytes'] / hot / 1e9:.3f}",
        "error": f"{row['error']:.3g}",
        "compiled": json.dumps(row["compiled"]) if row.get("compiled") else "",
    }


def read_samples(path: Path) -> list[Mapping[str, float]]:
    """Read what :mod:`fa3_reports.measured.clock_samples` wrote; a last line that was cut off is left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(text) for name, text in row.items()} for row in rows if None not in row.values()]


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Read the rows of bursts, one JSON object a line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def main(rows: Path, samples: Path, target: Path) -> None:
    """Write the table."""
    taken = read_samples(samples)
    table = [joined(row, taken) for row in read_rows(rows)]
    target.write_text(csv_lines([COLUMNS, *([row[name] for name in COLUMNS] for row in table)]), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
