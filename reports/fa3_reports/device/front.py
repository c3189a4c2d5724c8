"""The sections of a device's first page: what a newcomer wants to see, each drawn from the same data as the details.

A kernel stands in the charts of a pass once. The run with most kernels is drawn whole, runs of today's code before
others; of the other runs come the kernels that it lacks. Ratios are of kernels that were timed in turns, in one run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.device import accuracy, speed
from fa3_reports.device.blocks import Drawing, Figure, Section, fixed, whole
from fa3_reports.device.figures import draw_speed, draw_strips
from fa3_reports.device.kernels import in_order, is_ours, look
from fa3_reports.device.keys import is_stale, why_stale
from fa3_reports.device.source import Row, Source
from fa3_reports.device.speed import Bench, Cell
from fa3_reports.measured import decoding as served
from fa3verify.report.svg import SERIES
from fa3verify.report.tables import PageColumn, PageTable, number

PASSES = (("forward", "bf16"), ("forward", "e4m3"), ("backward", "fp16"), ("forward", "fp16"), ("backward", "bf16"))
OPEN = 3  # of the passes: the other two look like them
GRIDS = {"forward": ("paper", "widths"), "backward": ("backward", "backward_widths")}
COLOURS = {"fp16": SERIES[0], "bf16": SERIES[2], "e4m3": SERIES[1]}
BESIDE = {"counted": SERIES[0], "simulated": SERIES[2]}
PAGES = {1: "pages of 1 key", 16: "of 16", 64: "of 64"}
KINDS = {"decode": "1 query", "chunk": "chunks of prompts"}
SERVED = tuple(f"speed/{grid}/bench.jsonl" for grid in served.GRIDS)
HOST = "speed/host/host.csv"
OVERLAP = "simulator/overlap/overlap.md"
MEASURES = {  # columns of its first table: title and axis of a drawing
    "T_tensor / T": ("Tensor cores at work", "share of the time"),
    "softmax hidden": ("Softmax hidden", "share of its work"),
    "kilocycles": ("Time", "thousand cycles"),
}
FASTEST = "the fastest other"
FASTER = "Right of the line ours is faster. A dot is a shape, a bar the geometric mean."
SITUATIONS = {
    "batched": "fresh tensors",
    "decode": "a decoding loop",
    "varlen": "packed sequences",
    "training": "forward and backward",
    "compiled": "torch.compile",
    "graph": "a CUDA graph, replayed",
}


class Run(NamedTuple):
    """A run of a pass in one dtype, and the kernels of others that are shown of it; of a whole run ours as well."""

    bench: Bench
    peers: list[str]
    is_whole: bool
    is_stale: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass in one dtype, and what there is of it."""

    what: str
    dtype: str
    runs: Sequence[Run]

    @property
    def title(self) -> str:
        return f"{self.what.capitalize()}, {self.dtype}"

    def paths(self, *, is_whole: bool) -> tuple[str, ...]:
        """Return the files of whole runs, or of those of which kernels of others are shown alone."""
        of_whole = dict.fromkeys(run.bench.path for run in self.runs if run.is_whole)
        others = dict.fromkeys(run.bench.path for run in self.runs if run.bench.path not in of_whole)
        return tuple(of_whole if is_whole else others)

    def draws(self, row: Row) -> bool:
        """Tell whether a row of a whole run is of ours and of this dtype."""
        return row["dtype"] == self.dtype and is_ours(row["kernel"])

    def cells(self) -> list[Cell]:
        """Return the cells with all their kernels."""
        found: dict[tuple[str, bool, int], Cell] = {}
        for run in self.runs:
            shown = {name for name in run.bench.kernels if name in run.peers or (run.is_whole and is_ours(name))}
            for cell in run.bench.cells:
                place = (cell.width, cell.causal, cell.seqlen)
                known = found.get(place, Cell(cell.row, {}, {}))
                tflops = {name: x for name, x in cell.tflops.items() if name in shown}
                mhz = {name: x for name, x in cell.mhz.items() if name in shown}
                if tflops:
                    found[place] = Cell(known.row, known.tflops | tflops, known.mhz | mhz)
        return sorted(found.values(), key=lambda cell: (_by_width(cell.width), cell.causal, cell.seqlen))

    def ratios(self, peer: str | None = None) -> list[tuple[Cell, float]]:
        """Return our speed over a peer's of the same run by cell, by default over the fastest of whole runs."""
        runs = [run for run in self.runs if run.is_whole or (peer in run.peers and not run.is_stale)]
        cells = [cell for run in runs if not peer or peer in run.peers for cell in run.bench.cells]
        found = [(cell, cell.ratio("gluon", peer or cell.best_peer())) for cell in cells]
        return [(cell, ratio) for cell, ratio in found if not math.isnan(ratio)]


def _by_width(width: str) -> list[int]:
    return [int(text) for text in re.findall(r"\d+", width)]


def passes(source: Source) -> list[Pass]:
    """Return what there is of every pass and dtype whose lengths make a curve."""
    grids = [grid for of in GRIDS.values() for grid in of]
    every = [bench for bench in speed.benches(source, grids) if any(is_ours(name) for name in bench.kernels)]
    stale = {path: bool(why_stale(source, path)) for path in {bench.path for bench in every}}
    found = []
    for what, dtype in PASSES:
        runs: list[Run] = []
        for grid in GRIDS[what]:
            of = [bench for bench in every if (bench.grid, bench.dtype) == (grid, dtype)]
            of.sort(key=lambda bench: (stale[bench.path], -sum(len(cell.tflops) for cell in bench.cells)))
            known: set[str] = set()
            for bench in of:
                peers = [name for name in bench.kernels if not is_ours(name) and name not in known]
                if peers:
                    runs.append(Run(bench, peers, not known, stale[bench.path]))
                known |= set(peers)
        found.append(Pass(what, dtype, runs))
    return [each for each in found if any(len({c.seqlen for c in run.bench.cells}) > 1 for run in each.runs)]


def grouped(found: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, list[float]]]:
    """Collect values by row and group, in the order in which they come."""
    rows: dict[str, dict[str, list[float]]] = {}
    for row, group, value in found:
        rows.setdefault(row, {}).setdefault(group, []).append(value)
    return rows


def _ratios(
    name: str, title: str, found: Iterable[tuple[str, str, float]], colours: Mapping[str, str] = COLOURS
) -> list[Drawing]:
    """Draw ratios by row and group, where there are any."""
    rows = grouped(found)
    return [draw_strips(name, title, "speed over the fastest other", rows, colours)] if rows else []


def at_a_glance(source: Source, every: Sequence[Pass]) -> Section:
    """The first figure: how fast ours are over the fastest other kernel, by pass and head_dim, and over pages."""
    drawings = []
    for what in GRIDS:
        found = [(cell, one.dtype, ratio) for one in every if one.what == what for cell, ratio in one.ratios()]
        found.sort(key=lambda each: _by_width(each[0].width))
        by_width = ((f"head_dim {cell.width}", dtype, ratio) for cell, dtype, ratio in found)
        drawings += _ratios(f"glance-{what}", what.capitalize(), by_width)
    calls = _served(source)
    by_kind = ((KINDS[row.kind], row.cell.dtype, row.ratio) for row in calls)
    drawings += _ratios("glance-pages", "Keys in pages of a cache", by_kind)
    data = dict.fromkeys(path for one in every for path in one.paths(is_whole=True))
    title = "Speed of ours over the fastest other kernel of the same run"
    reading = f"{FASTER} fp16, bf16 and e4m3 are formats of numbers; e4m3 has 8 bits."
    files = (*data, *(SERVED if calls else ()))
    figure = Figure("glance", title, drawings, files, reading, _is_stale(source, files, _ships))
    return Section("glance", "", (), [figure] if drawings else ())


def _is_stale(source: Source, files: Iterable[str], shown: Callable[[Row], bool]) -> bool:
    """Tell whether what is shown of some files is of a kernel that has changed since, whatever else they hold."""
    return any(is_stale(source, path, shown) for path in files)


def _ships(row: Row) -> bool:
    """Tell whether a row is of the kernel that ships, of which ratios are."""
    return row["kernel"] == "gluon"


def charts(source: Source, every: Sequence[Pass]) -> Section:
    """Speed as papers draw it, and the ratios to every other kernel."""
    tables = {what: [one for one in every if one.what == what] for what in GRIDS}
    blocks: list[Any] = [_table(source, what, of) for what, of in tables.items() if of]
    for i, one in enumerate(every):
        own = in_order(name for run in one.runs if not run.is_whole for name in run.peers)
        added = f" Of runs of their own: {', '.join(look(name).title for name in own)}." if own else ""
        reading = (
            f"16 thousand tokens, 2,048 channels in all heads, cool bursts.{added} Clocks, and how much of this GPU's "
            "limit it is: [all tables](DETAILS.md)."
        )
        by_width: dict[str, list[Cell]] = {}
        for cell in one.cells():
            by_width.setdefault(cell.width, []).append(cell)
        name = f"{one.what}-{one.dtype}"
        drawings = [
            draw_speed(f"{name}-d{width.replace('/', '-')}", f"{one.title}, head_dim {width}", cells)
            for width, cells in by_width.items()
        ]
        title = f"{one.title}: TFLOP/s over sequence length"
        files = one.paths(is_whole=True)
        stale = _is_stale(source, files, one.draws)
        figure = Figure(name, title, drawings, files, reading, stale, abreast=4, fold=i >= OPEN)
        blocks.append(replace(figure, others=one.paths(is_whole=False)))
    text = [
        "All kernels of a shape are timed in turns on the same operands, and a kernel of ours has a speed only where "
        "its outputs have the bits of its twin. FLOP are counted as the paper counts them."
    ]
    return Section("speed", "Speed", text if blocks else (), blocks)


def _table(source: Source, what: str, every: Sequence[Pass]) -> PageTable:
    """Our mean speed over each other kernel in one pass, by head_dim."""
    rows: list[dict[str, Any]] = []
    widths: set[str] = set()
    for one in every:
        named = in_order(name for run in one.runs for name in run.peers)
        peers = [peer for peer in named if one.ratios(peer)]
        for peer in (None, *peers) if len(peers) > 1 else peers:
            pairs = one.ratios(peer)
            of = {cell.width: [r for c, r in pairs if c.width == cell.width] for cell, _ in pairs}
            widths |= set(of)
            worst = min(pairs, key=lambda pair: pair[1])
            rows.append(
                {"dtype": one.dtype, "peer": look(peer).title if peer else FASTEST}
                | {"cells": len(pairs)}
                | {"mean": geometric_mean(ratio for _, ratio in pairs), "worst": worst[1], "cell": worst[0].name}
                | {f"d{width}": geometric_mean(ratios) for width, ratios in of.items()}
            )
    columns = [PageColumn("dtype", "dtype"), PageColumn("over", "peer"), PageColumn("mean", "mean", fixed(2))]
    columns += [PageColumn(f"d{width}", f"d{width}", fixed(2)) for width in sorted(widths, key=_by_width)]
    columns += [PageColumn("shapes", "cells", whole), PageColumn("slowest", "worst", fixed(2))]
    columns.append(PageColumn("which", "cell"))
    shown = (run for one in every for run in one.runs if run.is_whole or not run.is_stale)
    note = "Geometric means of speed over speed: above 1 ours is faster. d64 is head_dim 64."
    data = tuple(dict.fromkeys(run.bench.path for run in shown))
    title = f"{what.capitalize()}: speed of ours over every other kernel"
    return PageTable(f"speed-{what}", title, columns, rows, data, note, stale=_is_stale(source, data, _ships))


def _served(source: Source) -> list[served.Beside]:
    """Return the calls over pages that were timed beside a build that serves, of groups whose heads share a tile."""
    if not all(source.has(path) for path in SERVED):
        return []
    for path in SERVED:
        source.read(path)
    return [row for row in served.rows(source.root / "speed") if row.is_packed and row.page in PAGES]


def decoding(source: Source) -> Section:
    """Ratios over pages and over a cache in one piece by shape."""
    calls = sorted(_served(source), key=lambda row: (row.cell.nheads, row.cell.nheads_kv, row.cell.head_dim))
    colours = dict(zip(PAGES.values(), COLOURS.values(), strict=True))
    drawings = []
    for dtype in ("bf16", "e4m3"):
        steps = [row for row in calls if (row.kind, row.cell.dtype) == ("decode", dtype)]
        heads = [f"{row.cell.nheads} on {row.cell.nheads_kv}, {row.cell.head_dim}" for row in steps]
        found = zip(heads, [PAGES[row.page] for row in steps], [row.ratio for row in steps], strict=True)
        drawings += _ratios(f"pages-{dtype}", f"Pages, {dtype}: heads, head_dim", found, colours)
    runs = speed.benches(source, ("decode",))
    cells = [(cell, bench.dtype, cell.ratio("gluon", cell.best_peer())) for bench in runs for cell in bench.cells]
    found = ((f"{c.row['batch']} x {c.seqlen:,}", dtype, ratio) for c, dtype, ratio in cells if not math.isnan(ratio))
    drawings += _ratios("decode", "Cache in one piece: batch x keys", found)
    if not drawings:
        return Section("decoding", "Decoding and pages")
    data = (*(SERVED if calls else ()), *dict.fromkeys(bench.path for bench in runs))
    title = "One new token a call: speed over the fastest other build"
    reading = f"{FASTER} In one piece: 32 heads, of keys 8, head_dim 128, beside FlashAttention-3 and cuDNN."
    text = ["Over pages the other is the build of FlashAttention-3 that vLLM ships, with its schedule made before."]
    blocks = [Figure("decoding", title, drawings, data, reading), *_sums(calls)]
    return Section("decoding", "Decoding and pages", text if calls else (), blocks)


def _sums(calls: Sequence[served.Beside]) -> list[PageTable]:
    rows = [
        {"dtype": dtype, "kind": kind, "shapes": len(of), "mean": geometric_mean(of), "worst": min(of)}
        for dtype, kinds in grouped((row.cell.dtype, KINDS[row.kind], row.ratio) for row in calls).items()
        for kind, of in kinds.items()
    ]
    columns = [PageColumn("dtype", "dtype"), PageColumn("calls", "kind"), PageColumn("shapes", "shapes", whole)]
    columns += [PageColumn("mean", "mean", fixed(2)), PageColumn("slowest", "worst", fixed(2))]
    note = "[Every problem, and how it was timed](serving/decoding.md)."
    title = "Over pages, by kind of call"
    return [PageTable("pages", title, columns, rows, SERVED, note, fold=True)] if rows else []


def errors(source: Source, every: Sequence[Pass]) -> Section:
    """The error of every kernel beside each other's, and what is lost over long keys."""
    found = [
        (path, row["kernel"], one.title, float(row["rel_rmse"]))
        for one in sorted(every, key=lambda one: (one.what != "forward", one.dtype))
        for path in one.paths(is_whole=True)
        for row in source.rows(path)
        if row["grid"] in GRIDS[one.what] and row["dtype"] == one.dtype and row["rel_rmse"]
    ]
    by_kernel = grouped(each[1:] for each in found)
    titles = dict.fromkeys(title for _, _, title, _ in found)
    columns = [PageColumn("kernel", "kernel"), *(PageColumn(title, title, number) for title in titles)]
    rows = [
        {"kernel": look(name).title} | {title: geometric_mean(values) for title, values in by_kernel[name].items()}
        for name in in_order(by_kernel)
    ]
    note = "Against float64 attention of the same operands, normal inputs; geometric mean over the shapes."
    data = tuple(dict.fromkeys(path for path, *_ in found))
    table = PageTable("errors", "Relative RMSE of outputs and gradients", columns, rows, data, note)
    figures = [block for block in accuracy.section(source).blocks if isinstance(block, Figure)]
    return Section("errors", "Accuracy", (), [*figures, *([table] if rows else [])])


def overlap(source: Source) -> Section:
    """How much of a launch the tensor cores work, and how much of the softmax is hidden: counted beside simulated."""
    if not source.has(OVERLAP):
        return Section("overlap", "Overlap")
    table = source.markdown(OVERLAP)[0]
    launches = [dict(zip(table.columns, cells, strict=True)) for cells in table.rows]
    drawings = []
    for name, (title, axis) in MEASURES.items():
        found = [
            (f"{problem} {look(told['kernel']).title.split(' (')[0]}", what, float(figure))
            for told in launches
            for problem in (" ".join(told["problem"].split()[:2]),)
            for what, figure in zip(BESIDE, told[name].split(" / "), strict=True)
        ]
        drawings.append(
            draw_strips(f"overlap-{title[:4].lower()}", title, axis, grouped(found), BESIDE, is_ratio=False)
        )
    reading = (
        "Forward, dense, 8,192 tokens. Kernels compute the softmax of one tile while the tensor cores multiply "
        "another; hidden is the share of its work that costs no time. The simulator knows microbenchmarks of this GPU "
        "and no attention kernel."
    )
    title = "Softmax under the GEMMs: counted on the GPU beside simulated"
    return Section("overlap", "Overlap", (), [Figure("overlap", title, drawings, (OVERLAP,), reading)])


def host(source: Source) -> Section:
    """What a call costs the host before the GPU does anything."""
    rows = source.rows(HOST) if source.has(HOST) else []
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        of = found.setdefault(row["situation"], {"situation": SITUATIONS.get(row["situation"], row["situation"])})
        of[row["kernel"].partition(".")[0]] = float(row["median_us"])
    columns = [PageColumn("call", "situation"), PageColumn("ours", "gluon", fixed(1))]
    columns += [PageColumn("FlashAttention-3 (fa3-fwd)", "flash3", fixed(1)), PageColumn("torch", "torch", fixed(1))]
    note = "Medians. [With the 90th percentile, and how they were made](speed/host/host.md)."
    title = "Host time of a call before the GPU does anything, microseconds"
    table = PageTable("host", title, columns, list(found.values()), (HOST,), note)
    return Section("host", "Cost of the host", (), [table] if rows else ())
