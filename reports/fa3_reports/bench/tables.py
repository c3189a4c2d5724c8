"""The files that bench writes from its records: CSV, netCDF, and Markdown tables with ratios to every peer.

Records are read and appended by :mod:`fa3_reports.bench.results`, and ratios are computed in
:mod:`fa3_reports.bench.ratios`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fa3_reports.bench.cells import CELL_FIELDS
from fa3_reports.bench.ratios import best_peer, is_ours, names_of, summarize, worst_against_best
from fa3_reports.bench.results import FIGURES, MEASURED, CellRecord, Measured, Results, Switches, launches_of
from fa3verify import files
from fa3verify.files import Json, json_text, markdown_table, replacing, write_text

PAPER_ABLATION = {"gluon": 661, "gluon.no_overlap": 582, "gluon.no_specialisation": 570}  # H100, TFLOP/s, its table 2
COLUMNS = (*FIGURES, "bits_differing", "outputs")
SWITCHES = tuple(each.name for each in fields(Switches))
# Unit of a figure by the last word of its name; others have none.
UNITS = {"ms": "ms", "mhz": "MHz", "w": "W", "tflops": "TFLOP/s", "cycles": "cycles"}


def _row(record: CellRecord, m: Measured) -> Json:
    """Return one kernel in one cell by column."""
    return {
        **{name: getattr(record.cell, name) for name in CELL_FIELDS},
        "head_dim_v": record.cell.value_dim,
        **({"line": record.cell.line} if record.cell.line else {}),
        "kernel": m.name,
        "status": m.status,
        "timed_by": m.timed_by,
        "input_copies": record.copies,
        **{name: getattr(m.schedule, name, "") for name in SWITCHES},
        "burst_ms": m.burst_ms,
        "burst_tflops": record.tflops(m.name),
        "burst_sm_mhz": m.burst_sm_mhz,
        "burst_cycles": m.burst_cycles,
        "burst_driver_mhz": m.burst_driver_mhz,
        "sustained_ms": m.sustained_ms,
        "sustained_tflops": record.tflops(m.name, sustained=True),
        "sustained_sm_mhz": m.sustained_sm_mhz,
        "sustained_driver_mhz": m.sustained_driver_mhz,
        "sustained_w": m.sustained_w,
        "joules": record.joules(m.name),
        "kv_tb_per_s": record.cell.kv_bytes / 1e9 / m.burst_ms,
        "ratio_to_best_peer": record.ratio(m.name, best_peer(record) or ""),
        "outputs_checked": m.outputs,
        "bits_differing": m.bits_differing,
        "rel_rmse": m.rel_rmse,
        "gain": m.gain,
        "run": record.run,
    }


def csv_text(records: Iterable[CellRecord]) -> str:
    """Return a table with a line per cell and kernel, without records only its head; NaN is an empty cell."""
    rows = [_row(record, m) for record in records for m in record.kernels]
    head = list(max(rows, key=len, default=["kernel"]))  # problems in words have a column more
    return files.csv_text(head, ([_cell_text(row.get(name, "")) for name in head] for row in rows))


def _cell_text(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def dataset(results: Results) -> Any:
    """Return a Dataset: figures by (cell, kernel), bursts by (cell, kernel, round), provenance in attributes."""
    import numpy as np
    import xarray as xr

    records = list(results.cells.values())
    names = sorted({m.name for r in records for m in r.kernels}, key=lambda n: (not is_ours(n), n))
    rounds = max((len(m.rounds_ms) for r in records for m in r.kernels), default=0)
    cells = [{m.name: m for m in r.kernels}.get(name) for r in records for name in names]
    figures = {name: [getattr(m, name, math.nan) for m in cells] for name in COLUMNS}
    figures["burst_tflops"] = [r.tflops(name) for r in records for name in names]
    schedules = [m.schedule if m else None for m in cells]
    figures |= {
        name: [getattr(schedule, name, math.nan) for schedule in schedules] for name in SWITCHES
    }  # not of peers
    axes = ("cell", "kernel")
    shape = (len(records), len(names))
    variables: dict[str, Any] = {
        name: (axes, np.array(x, float).reshape(shape), {"units": UNITS.get(name.rpartition("_")[2], "1")})
        for name, x in figures.items()
    }
    every = [(m.rounds_ms if m else ()) + (math.nan,) * rounds for m in cells]
    bursts = np.array([x[:rounds] for x in every], float).reshape(*shape, rounds)
    variables["rounds_ms"] = ((*axes, "round"), bursts, {"units": "ms"})
    status = np.array([m.status if m else "not measured" for m in cells], object)
    variables["status"] = (axes, status.reshape(shape).astype(str))
    coordinates = {"cell": [r.cell.key for r in records], "kernel": names, "run": ("cell", [r.run for r in records])}
    for name in CELL_FIELDS:
        values = [getattr(r.cell, name) for r in records]
        coordinates[name] = ("cell", [int(v) if isinstance(v, bool) else v for v in values])
    attributes = {
        "Conventions": "CF-1.11",
        "title": "fa3verify bench",
        "runs_json": json.dumps(results.runs, sort_keys=True),
    }
    return xr.Dataset(variables, coordinates, attributes)


def provenance(results: Results) -> Json:
    """Return the runs behind the figures, and the hash of the kernels they timed, or that these were of several."""
    used = {r.run for r in results.cells.values()}
    runs = [facts for name, facts in results.runs.items() if name in used]
    hashes = {launches_of(facts) for facts in runs}
    return {
        "evidence_of": "+".join(sorted({facts.get("evidence_of", "forward") for facts in runs})),
        "launches_sha256": hashes.pop() if len(hashes) == 1 else "of several versions",
        "runs": runs,
    }


def write(results: Results, out: Path) -> None:
    """Write ``bench.csv``, ``bench.nc``, ``bench.md`` and ``bench_provenance.json``."""
    write_text(out / "bench_provenance.json", json_text(provenance(results)))
    records = list(results.cells.values())
    write_text(out / "bench.csv", csv_text(records))
    write_text(out / "bench.md", markdown(results))
    with replacing(out / "bench.nc") as temporary:
        dataset(results).to_netcdf(temporary, engine="h5netcdf")


def markdown(results: Results) -> str:
    """Return the page: for each grid its tables and ratios to peers; then what is missing, and the runs."""
    parts = ["# Speed", ""]
    grids = dict.fromkeys(r.cell.grid for r in results.cells.values())
    for grid in grids:
        records = [r for r in results.cells.values() if r.cell.grid == grid]
        parts += {"paper": _paper, "accumulator_loss": _accumulator_loss}.get(grid, _listed)(grid, records)
        parts += _energy(records)
        if grid != "accumulator_loss":
            parts += _ratios(records)
    parts += _missing(results)
    parts += ["## Runs", ""]
    for run in results.runs.values():
        told = (f"{k} {v}" for k, v in run.items() if k not in ("kind", "schema", "missing", "kernels", "launches"))
        parts.append("- " + ", ".join(told))
    return "\n".join(parts) + "\n"


def _figure(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _paper(grid: str, records: Sequence[CellRecord]) -> list[str]:
    parts = [f"## Grid {grid}: TFLOP/s in cool bursts (sustained in brackets)", ""]
    blocks: dict[tuple, dict[int, CellRecord]] = {}
    for r in records:
        blocks.setdefault((r.cell.dtype, r.cell.head_dim, r.cell.causal), {})[r.cell.seqlen_k] = r
    for (dtype, head_dim, causal), by_length in blocks.items():
        lengths = sorted(by_length)
        parts += [f"**{dtype}, head_dim {head_dim}, {'causal' if causal else 'not causal'}**", ""]
        rows = []
        for name in names_of(list(by_length.values())):
            rows.append([name, *(_speed(by_length[n], name) for n in lengths)])
        parts += markdown_table(["kernel", *map(str, lengths)], rows)
    counted = [m.burst_sm_mhz for r in records for m in r.kernels if m.burst_sm_mhz > 0]
    if counted:
        parts += [f"SM clock counted in the bursts: {min(counted):.0f} to {max(counted):.0f} MHz", ""]
    return parts


def _energy(records: Sequence[CellRecord]) -> list[str]:
    """Joules of a launch by NVML's energy counter, and operations per joule, where they were measured."""
    weighed = [r for r in records if any(m.sustained_w > 0 for m in r.kernels)]
    if not weighed:
        return []
    names = names_of(weighed)
    rows = [[r.cell.key, *(_energy_text(r, name) for name in names)] for r in weighed]
    title = "Under sustained load: joules a launch (TFLOP per joule, watts), by the energy counter of the GPU:"
    return [title, "", *markdown_table(["cell", *names], rows)]


def _energy_text(record: CellRecord, name: str) -> str:
    joules = record.joules(name)
    if math.isnan(joules):
        return "-"
    return f"{joules:.3g} ({record.cell.flops / 1e12 / joules:.3f}, {record.of(name).sustained_w:.0f})"


def _speed(record: CellRecord, name: str) -> str:
    hot = record.tflops(name, sustained=True)
    return _figure(record.tflops(name)) + ("" if math.isnan(hot) else f" ({hot:.0f})")


def _listed(grid: str, records: Sequence[CellRecord]) -> list[str]:
    parts = [f"## Grid {grid}", ""]
    rows = []
    for r in records:
        for m in r.kernels:
            us = m.burst_ms * 1e3
            figures = [_figure(us, 1), _figure(r.tflops(m.name)), _figure(r.tflops(m.name, sustained=True))]
            figures += [_figure(r.cell.kv_bytes / 1e9 / m.burst_ms, 2), _figure(m.burst_sm_mhz)]
            figures.append(_figure(m.burst_cycles / 1e3, 1))
            extra = [f"{PAPER_ABLATION.get(m.name, '-')}"] if grid == "ablation" else []
            rows.append([r.cell.key, m.name, *figures, *extra, "" if m.status == MEASURED else m.status])
    header = ["cell", "kernel", "us", "TFLOP/s", "sustained", "TB/s of KV", "SM MHz", "kilocycles"]
    header += ["paper, H100"] if grid == "ablation" else []
    return parts + markdown_table([*header, "note"], rows)


def _accumulator_loss(grid: str, records: Sequence[CellRecord]) -> list[str]:
    parts = ["## FP8 accumulator loss: relative RMSE against float64, V with mean 1 (gain - 1 in brackets)", ""]
    names = names_of(records)
    rows = [
        [str(r.cell.head_dim), str(r.cell.seqlen_k), *(_loss_text(r, name) for name in names)]
        for r in sorted(records, key=lambda r: (r.cell.head_dim, r.cell.seqlen_k))
    ]
    return parts + markdown_table(["head_dim", "keys", *names], rows)


def _loss_text(record: CellRecord, name: str) -> str:
    measured = record.of(name)
    return "-" if math.isnan(measured.rel_rmse) else f"{measured.rel_rmse:.2e} ({measured.gain:+.1e})"


def _ratios(records: Sequence[CellRecord]) -> list[str]:
    """Return a table of ratios of ours to every peer, per dtype, and the worst cells; empty without a ratio."""
    rows = []
    worst = []
    for dtype in dict.fromkeys(r.cell.dtype for r in records):
        chosen = [r for r in records if r.cell.dtype == dtype]
        names = names_of(chosen)
        for name in (n for n in names if is_ours(n)):
            for peer in (n for n in names if not is_ours(n)):
                if found := summarize(chosen, name, peer):
                    dims = ", ".join(f"d{d} {x:.3f}" for d, x in found.per_head_dim.items())
                    mean = f"{found.geometric_mean:.3f}"
                    rows.append(
                        [dtype, name, peer, str(found.cells), mean, dims, f"{found.worst:.3f}", found.worst_cell]
                    )
            if found := worst_against_best(chosen, name):
                worst.append(
                    f"{dtype} {name}: worst cell against the best peer {found[0]:.3f} ({found[1]}, {found[2]})"
                )
    if not rows:
        return []
    header = ["dtype", "kernel", "peer", "cells", "geometric mean", "per head_dim", "worst", "worst cell"]
    return [
        "Times as fast as a peer, cool bursts:",
        "",
        *markdown_table(header, rows),
        *(f"- {line}" for line in worst),
        "",
    ]


def _missing(results: Results) -> list[str]:
    parts = [f"- missing peer {name}: {reason}" for name, reason in results.missing().items()]
    first: dict[tuple[str, str], str] = {}
    for r in results.cells.values():
        for m in r.kernels:
            first.setdefault((m.name, m.status), r.cell.key)
    troubles = ((name, key, status) for (name, status), key in first.items() if status != MEASURED)
    parts += [f"- {name} has no speed in {key}: {status}" for name, key, status in troubles]
    return ["## Missing", "", *(parts or ["- nothing"]), ""]
