"""Speed: ratios to every peer and to the hardware's limit, and the other benches.

The limit is what the slower of tensor cores and special-function units lets through at the clock that was counted
during the very launch: every FLOP of the GEMMs at full rate, one ex2 per score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fa3_kernels.plan.barriers import WARP_THREADS
from fa3_reports.bench.cells import CELL_FIELDS
from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.device.blocks import Section, fixed, whole
from fa3_reports.device.kernels import in_order, is_ours, look
from fa3_reports.device.source import Row, Source
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import SUB_CORES
from fa3verify.report.tables import PageColumn, PageTable

CURVES = {"paper": "forward", "backward": "backward"}  # grids whose cells are lengths of 16k tokens
DTYPES = ("fp16", "bf16", "e4m3")


def limit_tflops(machine: Machine, row: Row, mhz: float) -> float:
    """Return what no kernel can exceed at a clock, in TFLOP/s, by tensor cores or by one ex2 per score.

    An FP8 GEMM has twice the rate. A forward has 2 FLOP per score and channel of K and of V, a backward 6 and 4: five
    GEMMs, three of them over the channels of K.
    """
    cycles_per_us = machine["sms"] * mhz
    tensor = machine["tensor_flops_16bit"] * (2 if row["dtype"] == "e4m3" else 1)
    of_k, of_v = (6, 4) if row["grid"].startswith("backward") else (2, 2)
    flops_per_score = of_k * int(row["head_dim"]) + of_v * int(row.get("head_dim_v") or row["head_dim"])
    exponentials = SUB_CORES * WARP_THREADS / machine["mufu_cycles"] * flops_per_score
    return min(tensor, exponentials) * cycles_per_us / 1e6


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape: TFLOP/s and counted MHz by kernel."""

    row: Row
    tflops: dict[str, float]
    mhz: dict[str, float]

    @property
    def head_dim(self) -> int:
        return int(self.row["head_dim"])

    @property
    def width(self) -> str:
        """The head_dim, and that of V where it is another: of latent attention 192/128."""
        of_v = self.row.get("head_dim_v") or self.row["head_dim"]
        return self.row["head_dim"] if of_v == self.row["head_dim"] else f"{self.row['head_dim']}/{of_v}"

    @property
    def causal(self) -> bool:
        return self.row["causal"] == "True"

    @property
    def seqlen(self) -> int:
        return int(self.row["seqlen_k"])

    @property
    def name(self) -> str:
        return f"d{self.width} {'causal' if self.causal else 'dense'} {self.seqlen}"

    def best_peer(self) -> str | None:
        return max((name for name in self.tflops if not is_ours(name)), key=self.tflops.__getitem__, default=None)

    def ratio(self, kernel: str, peer: str | None) -> float:
        """Speed over a peer's; NaN where one of them has none."""
        return self.tflops.get(kernel, math.nan) / self.tflops.get(peer or "", math.nan)


def cells(rows: Iterable[Row], figure: str = "burst") -> list[Cell]:
    """Group timed rows by shape, by head_dim, mask and length; the figure is ``burst`` or ``sustained``."""
    found: dict[tuple[str, ...], Cell] = {}
    for row in rows:
        if row["status"] != "ok" or not row[f"{figure}_tflops"]:
            continue
        cell = found.setdefault(_shape(row)[2:], Cell(row, {}, {}))
        cell.tflops[row["kernel"]] = float(row[f"{figure}_tflops"])
        if clock := row[f"{figure}_sm_mhz"]:
            cell.mhz[row["kernel"]] = float(clock)
    return sorted(found.values(), key=lambda c: (c.head_dim, c.causal, c.seqlen))


@dataclass(frozen=True, slots=True)
class Bench:
    """The cells of one table, grid and dtype."""

    path: str
    grid: str
    dtype: str
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        return f"{self.path.split('/')[-2]}-{CURVES.get(self.grid, self.grid)}-{self.dtype}".replace("_", "-")

    @property
    def title(self) -> str:
        return f"{self.dtype} {CURVES.get(self.grid, self.grid)}, {self.path.split('/')[-2].replace('_', ' ')}"

    @property
    def kernels(self) -> list[str]:
        return in_order(name for cell in self.cells for name in cell.tflops)


def benches(source: Source, grids: Iterable[str], figure: str = "burst") -> list[Bench]:
    """Return the cells of all speed tables by grid and dtype."""
    found = []
    for path in source.bench_tables():
        rows = source.rows(path)
        for grid in grids:
            for dtype in DTYPES:
                chosen = cells((r for r in rows if (r["grid"], r["dtype"]) == (grid, dtype)), figure)
                if chosen:
                    found.append(Bench(path, grid, dtype, chosen))
    return sorted(found, key=lambda b: (list(grids).index(b.grid), DTYPES.index(b.dtype), -len(b.cells)))


def ratios(bench: Bench, source: Source, name: str = "") -> PageTable:
    """Geometric means of our speed over each peer's and over the best, by head_dim, with the worst cell."""
    rows = []
    dims = sorted({cell.head_dim for cell in bench.cells})
    named = [k for k in bench.kernels if not is_ours(k)]
    peers: list[str | None] = [None, *named] if len(named) > 1 else [*named]
    for ours in (k for k in bench.kernels if is_ours(k)):
        for peer in peers:
            pairs = [(c, c.ratio(ours, peer or c.best_peer())) for c in bench.cells]
            pairs = [(c, ratio) for c, ratio in pairs if not math.isnan(ratio)]
            if not pairs:
                continue
            worst = min(pairs, key=lambda pair: pair[1])
            means = {f"d{d}": geometric_mean(r for c, r in pairs if c.head_dim == d) for d in dims}
            rows.append(
                {"kernel": look(ours).title, "peer": look(peer).title if peer else "best of all peers"}
                | {"cells": len(pairs), "mean": geometric_mean(r for _, r in pairs)}
                | {key: None if math.isnan(value) else value for key, value in means.items()}
                | {"worst": worst[1], "worst_cell": worst[0].name}
            )
    columns = [PageColumn("kernel", "kernel"), PageColumn("over", "peer"), PageColumn("cells", "cells", whole)]
    columns += [PageColumn("geometric mean", "mean", fixed(3)), *(PageColumn(f"d{d}", f"d{d}", fixed(3)) for d in dims)]
    columns += [PageColumn("worst", "worst", fixed(3)), PageColumn("worst cell", "worst_cell")]
    title = f"{bench.title}: speed over peers"
    return PageTable(f"ratios-{name or bench.name}", title, columns, rows, (bench.path,))


def listed(bench: Bench, source: Source, machine: Machine) -> PageTable:
    """Every cell: TFLOP/s of all kernels, ours over the best peer, its clock, and over the limit at that clock."""
    kernels = bench.kernels
    ours = next((k for k in kernels if is_ours(k)), kernels[0])
    rows = []
    for cell in bench.cells:
        peer = cell.best_peer()
        mhz = cell.mhz.get(ours)
        limit = limit_tflops(machine, cell.row, mhz) if mhz else None
        speed = cell.tflops.get(ours)
        rows.append(
            {"head_dim": cell.head_dim, "mask": "causal" if cell.causal else "dense", "seqlen": cell.seqlen}
            | cell.tflops
            | {"best_peer": look(peer).title if peer else None, "ratio": cell.ratio(ours, peer) if peer else None}
            | {"mhz": mhz, "limit": limit, "share": speed / limit if limit and speed else None}
        )
    columns = [PageColumn("head_dim", "head_dim"), PageColumn("mask", "mask"), PageColumn("seqlen", "seqlen", whole)]
    columns += [PageColumn(look(k).title, k, fixed(0)) for k in kernels]
    columns += [PageColumn("best peer", "best_peer"), PageColumn(f"{look(ours).title} / best", "ratio", fixed(3))]
    columns += [PageColumn("SM MHz", "mhz", fixed(0)), PageColumn("limit", "limit", fixed(0))]
    columns += [PageColumn("of the limit", "share", fixed(2))]
    title = f"{bench.title}: all {len(rows)} cells, TFLOP/s"
    return PageTable(f"cells-{bench.name}", title, columns, rows, (bench.path,), fold=True)


def section(source: Source, machine: Machine) -> Section:
    """Ratios and all cells of every run whose lengths make a curve; the first page has the curves."""
    blocks: list[Any] = []
    for bench in benches(source, CURVES):
        if len({c.seqlen for c in bench.cells}) >= 2 and not _is_sustained(source, bench):
            blocks += [ratios(bench, source), listed(bench, source, machine)]
    text = [
        "All kernels of a cell are timed in turns in cool bursts, and a kernel of ours has a speed only where the "
        "bits of the outputs that were compared are those of its twin. Ratios are of speeds: above 1 ours is "
        "faster. The limit is the slower of tensor cores and one ex2 per score, at the SM clock counted during the "
        "launch."
    ]
    return Section("speed", "Speed", text, blocks)


def _is_sustained(source: Source, bench: Bench) -> bool:
    return any(r.get("sustained_tflops") for r in source.rows(bench.path) if r["grid"] == bench.grid)


def sustained(source: Source, machine: Machine) -> Section:
    """Speed under a kernel's own heat."""
    blocks: list[Any] = []
    for bench in benches(source, CURVES, "sustained"):
        blocks += [ratios(bench, source, f"sustained-{bench.name}"), _heat(bench, source)]
    return Section("sustained", "Under its own heat", (), blocks)


def _heat(bench: Bench, source: Source) -> PageTable:
    """Every sustained cell beside its burst, with power and joules where they were measured."""
    of = [r for r in source.rows(bench.path) if (r["grid"], r["dtype"]) == (bench.grid, bench.dtype)]
    bursts = {c.name: c.tflops for c in cells(of)}
    measured = {(r["kernel"], _shape(r)): r for r in of}
    rows = []
    for cell in bench.cells:
        for kernel in in_order(cell.tflops):
            speed = cell.tflops[kernel]
            burst = bursts.get(cell.name, {}).get(kernel)
            row = measured[kernel, _shape(cell.row)]
            watts, joules = (_float(row.get(name, "")) for name in ("sustained_w", "joules"))
            rows.append(
                {"cell": cell.name, "kernel": look(kernel).title, "sustained": speed, "burst": burst}
                | {"of_burst": speed / burst if burst else None, "mhz": cell.mhz.get(kernel)}
                | {"watts": watts, "joules": joules, "per_joule": speed / watts if watts else None}
            )
    columns = [PageColumn("cell", "cell"), PageColumn("kernel", "kernel")]
    columns += [PageColumn("sustained TFLOP/s", "sustained", fixed(0)), PageColumn("burst TFLOP/s", "burst", fixed(0))]
    columns += [PageColumn("of the burst", "of_burst", fixed(2)), PageColumn("SM MHz", "mhz", fixed(0))]
    if any(row["joules"] for row in rows):
        columns += [PageColumn("W", "watts", fixed(0)), PageColumn("joules a launch", "joules", fixed(3))]
        columns.append(PageColumn("TFLOP a joule", "per_joule", fixed(2)))
    name = f"sustained-cells-{bench.name}"
    title = f"{bench.title}: sustained and burst"
    return PageTable(name, title, columns, rows, (bench.path,), fold=len(rows) > 12)


def others(source: Source) -> Section:
    """Grids that are lists of cells: odd lengths, drawn ones, the paper's ablation, decoding; packed sequences."""
    blocks: list[Any] = []
    titles = {
        "widths": "Head dims that are no power of two",
        "backward_widths": "Their gradients",
        "fresh": "Lengths that no tile divides",
        "ragged": "Short and chunked work",
        "drawn": "Problems that a seed drew, with the heads of public models",
        "backward_drawn": "Gradients that a seed drew",
        "practice": "Over pages, with the heads of public models",
    }
    titles |= {"ablation": "The paper's ablation", "gqa": "Grouped heads", "decode": "Decoding"}
    for grid, title in titles.items():
        for bench in benches(source, (grid,)):
            blocks.append(_cells_by_kernel(bench, source, title))
    return Section("shapes", "Ablation, grouped heads, decoding, calls", (), blocks)


def _cells_by_kernel(bench: Bench, source: Source, title: str) -> PageTable:
    rows = []
    by_kernel = {(r["kernel"], _shape(r)): r for r in source.rows(bench.path) if r["status"] == "ok"}
    for cell in bench.cells:
        for kernel in in_order(cell.tflops):
            row = by_kernel[kernel, _shape(cell.row)]
            ratio = cell.ratio(kernel, cell.best_peer()) if is_ours(kernel) else None
            rows.append(
                {"shape": _told(cell.row), "kernel": look(kernel).title, "tflops": cell.tflops[kernel]}
                | {"mhz": cell.mhz.get(kernel), "kilocycles": _thousands(row["burst_cycles"])}
                | {"tb_per_s": _float(row["kv_tb_per_s"]), "ratio": ratio}
            )
    columns = [PageColumn("shape", "shape"), PageColumn("kernel", "kernel")]
    if bench.grid != "decode":
        columns.append(PageColumn("TFLOP/s", "tflops", fixed(0)))
    columns += [PageColumn("SM MHz", "mhz", fixed(0)), PageColumn("thousand cycles", "kilocycles", fixed(0))]
    if bench.grid == "decode":
        columns.append(PageColumn("K and V, TB/s", "tb_per_s", fixed(2)))
    columns.append(PageColumn("over the best peer", "ratio", fixed(3)))
    name = f"{bench.grid}-{bench.path.split('/')[-2]}-{bench.dtype}".replace("_", "-")
    return PageTable(name, f"{title}, {bench.dtype}", columns, rows, (bench.path,))


def _shape(row: Row) -> tuple[str, ...]:
    """Return what was timed; tables of one head_dim have no column of V's."""
    return (*(row[name] for name in CELL_FIELDS), row.get("line", ""), row.get("head_dim_v") or row["head_dim"])


def _told(row: Row) -> str:
    if row.get("line"):
        return row["line"]
    heads = row["nheads"] if row["nheads"] == row["nheads_kv"] else f"{row['nheads']}/{row['nheads_kv']}"
    mask = "causal" if row["causal"] == "True" else "dense"
    head_dim_v = _shape(row)[-1]
    width = f"d{row['head_dim']}" + (f" with V of {head_dim_v}" if head_dim_v != row["head_dim"] else "")
    return f"batch {row['batch']}, {row['seqlen_q']} x {row['seqlen_k']}, {heads} heads, {width}, {mask}"


def _float(text: str) -> float | None:
    return float(text) if text else None


def _thousands(text: str) -> float | None:
    return float(text) / 1e3 if text else None
