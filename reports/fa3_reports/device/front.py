"""The sections of a device's first page: what a newcomer wants to see, each drawn from the same data as the details.

A kernel stands in the charts of a pass once. The run with most kernels is drawn whole, runs of today's code before
others; of the other runs come the kernels that it lacks. Ratios are of kernels that were timed in turns, in one run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fa3_reports.device import accuracy, speed
from fa3_reports.device.blocks import Drawing, Figure, Section, fixed, whole
from fa3_reports.device.figures import draw_strips
from fa3_reports.device.kernels import in_order, is_ours, look
from fa3_reports.device.keys import why_stale
from fa3_reports.device.source import Source
from fa3_reports.device.speed import Bench, Cell
from fa3verify.report.notation import number
from fa3verify.report.svg import SERIES
from fa3verify.report.tables import PageColumn, PageTable
from fa3verify.timed.ratios import geometric_mean

PASSES = (("forward", "bf16"), ("forward", "e4m3"), ("backward", "fp16"), ("forward", "fp16"), ("backward", "bf16"))
OPEN = 3  # of the passes: the other two look like them
GRIDS = {"forward": ("paper", "widths"), "backward": ("backward", "backward_widths")}
COLOURS = {"fp16": SERIES[0], "bf16": SERIES[2], "e4m3": SERIES[1]}
PAGES = {"pages of 16 keys": SERIES[0], "of 64": SERIES[2], "of 256": SERIES[1]}
SERVING = "serving/serving.json"
OF_TORCH = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
BUILDS = ("vllm", "sglang")
HOST = "speed/host/host.csv"
OVERLAP = "simulator/overlap/overlap.md"
FASTEST = "the fastest other"
FASTER = "Right of the line ours is faster. A dot is a shape, a bar the geometric mean."
SITUATIONS = {
    "batched": "fresh tensors",
    "decode": "a decoding loop",
    "varlen": "packed sequences",
    "compiled": "torch.compile",
    "graph": "a CUDA graph, replayed",
}
MEASURES = {
    "T_tensor / T": ("Tensor cores at work", "share of the time"),
    "softmax hidden": ("Softmax hidden", "share of its work"),
    "kilocycles": ("Time", "thousand cycles"),
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


def at_a_glance(source: Source, every: Sequence[Pass]) -> Section:
    """The first figure: how fast ours are over the fastest other kernel, by pass and head_dim, and over pages."""
    drawings = []
    for what in GRIDS:
        rows: dict[str, dict[str, list[float]]] = {}
        for one in (one for one in every if one.what == what):
            for cell, ratio in one.ratios():
                rows.setdefault(f"head_dim {cell.width}", {}).setdefault(one.dtype, []).append(ratio)
        if rows:
            ordered = dict(sorted(rows.items(), key=lambda item: _by_width(item[0])))
            drawings.append(_ratios(f"glance-{what}", what.capitalize(), ordered, COLOURS))
    data = tuple(dict.fromkeys(path for one in every for path in one.paths(is_whole=True)))
    if source.has(SERVING):
        rows = {}
        for row in _served(source):
            rows.setdefault(row["kind"], {}).setdefault(row["dtype"], []).append(row["ratio"])
        drawings.append(_ratios("glance-pages", "Keys in pages of a cache", rows, COLOURS))
        data = (*data, SERVING)
    title = "Speed of ours over the fastest other kernel of the same run"
    reading = f"{FASTER} fp16, bf16 and e4m3 are formats of numbers; e4m3 has 8 bits."
    return Section("glance", "", (), [Figure("glance", title, drawings, data, reading)] if drawings else ())


def _ratios(
    name: str, title: str, rows: Mapping[str, Mapping[str, Sequence[float]]], colours: Mapping[str, str]
) -> Drawing:
    return draw_strips(name, title, "speed over the fastest other", rows, colours)


def charts(every: Sequence[Pass]) -> Section:
    """Speed as papers draw it, and the ratios to every other kernel."""
    blocks: list[Any] = [_table(every)] if every else []
    for i, one in enumerate(every):
        own = in_order(name for run in one.runs if not run.is_whole for name in run.peers)
        added = f" Of runs of their own: {', '.join(look(name).title for name in own)}." if own else ""
        reading = (
            f"16 thousand tokens, 2,048 channels in all heads, cool bursts.{added} Clocks, and how much of this GPU's "
            "limit it is: [all tables](DETAILS.md)."
        )
        drawings = speed.curves(f"{one.what}-{one.dtype}", one.title, one.cells())
        figure = Figure(
            f"{one.what}-{one.dtype}", f"{one.title}: TFLOP/s over sequence length", drawings,
            one.paths(is_whole=True), reading,
        )  # fmt: skip
        blocks.append(replace(figure, others=one.paths(is_whole=False), abreast=4, fold=i >= OPEN))
    text = [
        "All kernels of a shape are timed in turns on the same operands, and a kernel of ours has a speed only where "
        "its outputs have the bits of its twin. FLOP are counted as the paper counts them."
    ]
    return Section("speed", "Speed", text if blocks else (), blocks)


def _table(every: Sequence[Pass]) -> PageTable:
    """Our mean speed over each other kernel, by head_dim."""
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
                {"pass": one.title, "peer": look(peer).title if peer else FASTEST}
                | {"cells": len(pairs)}
                | {"mean": geometric_mean(ratio for _, ratio in pairs), "worst": worst[1], "cell": worst[0].name}
                | {f"d{width}": geometric_mean(ratios) for width, ratios in of.items()}
            )
    columns = [PageColumn("pass", "pass"), PageColumn("over", "peer"), PageColumn("mean", "mean", fixed(2))]
    columns += [PageColumn(f"d{width}", f"d{width}", fixed(2)) for width in sorted(widths, key=_by_width)]
    columns += [PageColumn("shapes", "cells", whole), PageColumn("slowest", "worst", fixed(2))]
    columns.append(PageColumn("which", "cell"))
    shown = (run for one in every for run in one.runs if run.is_whole or not run.is_stale)
    note = "Geometric means of speed over speed: above 1 ours is faster. d64 is head_dim 64."
    data = tuple(dict.fromkeys(run.bench.path for run in shown))
    return PageTable("speed", "Speed of ours over every other kernel", columns, rows, data, note)


def _served(source: Source) -> list[dict[str, Any]]:
    """Return the calls over pages, each with its ratio to the faster of the builds that serve."""
    found = []
    for row in source.json(SERVING)["rows"]:
        queries = row["queries"]
        kind = "1 query" if queries == 1 else f"{queries} queries" if queries < 16 else "prompts, chunks"
        heads = "" if row["heads_kv"] == 8 else f", {row['heads_kv']} head of keys"
        shape = f"{row['batch']}{' ragged' if row['is_ragged'] else ''} x {row['keys']:,}{heads}"
        ratio = min(row["us"][name] for name in BUILDS if name in row["us"]) / row["us"]["ours"]
        page = next(name for name in PAGES if f"of {row['page_size']}" in name)
        found.append(
            {"dtype": OF_TORCH[row["dtype"]], "kind": kind, "ratio": ratio, "page": page}
            | {"shape": shape if queries == 1 else f"{shape}, {queries} queries"}
        )
    return found


def decoding(source: Source) -> Section:
    """Ratios over pages and rows of a cache by shape, and what a model that decodes takes."""
    drawings = []
    data = []
    blocks: list[Any] = []
    if source.has(SERVING):
        served = _served(source)
        data.append(SERVING)
        for dtype in OF_TORCH.values():
            of: dict[str, dict[str, list[float]]] = {}
            for row in (row for row in served if row["dtype"] == dtype):
                of.setdefault(row["shape"], {}).setdefault(row["page"], []).append(row["ratio"])
            drawings.append(_ratios(f"pages-{dtype}", f"Pages, {dtype}: batch x keys", of, PAGES))
        blocks.append(_sums(served))
    rows: dict[str, dict[str, list[float]]] = {}
    for bench in speed.benches(source, ("decode",)):
        for cell in bench.cells:
            if not math.isnan(ratio := cell.ratio("gluon", cell.best_peer())):
                shape = f"{cell.row['batch']} x {cell.seqlen:,}"
                rows.setdefault(shape, {}).setdefault(bench.dtype, []).append(ratio)
        data.append(bench.path)
    if rows:
        drawings.append(_ratios("decode", "Cache in one piece: batch x keys", rows, COLOURS))
    title = "One new token a call: speed over the fastest other build"
    reading = f"{FASTER} 32 heads, of keys 8, head_dim 128."
    if drawings:
        figure = Figure("decoding", title, drawings, tuple(dict.fromkeys(data)), reading)
        blocks.insert(0, figure)
    text = ["The others are the builds of vLLM and SGLang over pages; in one piece FlashAttention-3 and cuDNN."]
    return Section("decoding", "Decoding and pages", text if blocks else (), blocks)


def _sums(served: Iterable[Mapping[str, Any]]) -> PageTable:
    groups: dict[tuple[str, str], list[float]] = {}
    for row in served:
        groups.setdefault((row["dtype"], row["kind"]), []).append(row["ratio"])
    rows = [
        {"dtype": dtype, "kind": kind, "mean": geometric_mean(ratios), "worst": min(ratios), "shapes": len(ratios)}
        for (dtype, kind), ratios in groups.items()
    ]
    columns = [PageColumn("dtype", "dtype"), PageColumn("calls", "kind"), PageColumn("shapes", "shapes", whole)]
    columns += [PageColumn("mean", "mean", fixed(2)), PageColumn("slowest", "worst", fixed(2))]
    note = "Speed over the faster of the two builds. [All shapes, and what a call costs the host](serving/README.md)."
    return PageTable("pages", "Over pages, by kind of call", columns, rows, (SERVING,), note, fold=True)


def errors(source: Source, every: Sequence[Pass]) -> Section:
    """The error of every kernel beside each other's, and what is lost over long keys."""
    found: dict[str, dict[str, list[float]]] = {}
    titles: dict[str, str] = {}
    data: dict[str, None] = {}
    for one in sorted(every, key=lambda one: (one.what != "forward", one.dtype)):
        titles[f"{one.what}_{one.dtype}"] = one.title
        for path in one.paths(is_whole=True):
            rows = [r for r in source.rows(path) if r["grid"] in GRIDS[one.what] and r["dtype"] == one.dtype]
            for row in (row for row in rows if row["rel_rmse"]):
                of = found.setdefault(row["kernel"], {}).setdefault(f"{one.what}_{one.dtype}", [])
                of.append(float(row["rel_rmse"]))
                data[path] = None
    blocks: list[Any] = [block for block in accuracy.section(source).blocks if isinstance(block, Figure)]
    if found:
        columns = [PageColumn("kernel", "kernel"), *(PageColumn(title, key, number) for key, title in titles.items())]
        means = [
            {"kernel": look(name).title} | {key: geometric_mean(values) for key, values in found[name].items()}
            for name in in_order(found)
        ]
        note = "Against float64 attention of the same operands, normal inputs; geometric mean over the shapes."
        blocks.append(PageTable("errors", "Relative RMSE of outputs and gradients", columns, means, tuple(data), note))
    return Section("errors", "Accuracy", (), blocks)


def overlap(source: Source) -> Section:
    """How much of a launch the tensor cores work, and how much of the softmax is hidden: counted beside simulated."""
    if not source.has(OVERLAP):
        return Section("overlap", "Overlap")
    shown: dict[str, dict[str, dict[str, list[float]]]] = {}
    table = source.markdown(OVERLAP)[0]
    for told in (dict(zip(table.columns, cells, strict=True)) for cells in table.rows):
        kernel = look(told["kernel"]).short.split(" (")[0]
        row = " ".join([*told["problem"].split()[:2], kernel])
        for name in MEASURES:
            counted, simulated = map(float, told[name].split(" / "))
            shown.setdefault(name, {})[row] = {"counted": [counted], "simulated": [simulated]}
    colours = {"counted": SERIES[0], "simulated": SERIES[2]}
    drawings = [
        draw_strips(f"overlap-{name.split()[0].lower()}", title, axis, shown[name], colours, is_ratio=False)
        for name, (title, axis) in MEASURES.items()
    ]
    reading = (
        "Forward, dense, 8,192 tokens. Kernels compute the softmax of one tile while the tensor cores multiply "
        "another; hidden is the share of its work that costs no time. The simulator knows microbenchmarks of this GPU "
        "and no attention kernel."
    )
    title = "Softmax under the GEMMs: counted on the GPU beside simulated"
    return Section("overlap", "Overlap", (), [Figure("overlap", title, drawings, (OVERLAP,), reading)])


def host(source: Source) -> Section:
    """What a call costs the host before the GPU does anything."""
    if not source.has(HOST):
        return Section("host", "Cost of the host")
    found: dict[str, dict[str, float]] = {}
    every = source.rows(HOST)
    last = max(int(row["run"]) for row in every)
    for row in (row for row in every if int(row["run"]) == last):
        kernel = row["kernel"].partition(".")[0]
        found.setdefault(row["situation"], {})[kernel] = float(row["median_us"])
    rows = [{"situation": SITUATIONS.get(name, name)} | of for name, of in found.items()]
    columns = [PageColumn("call", "situation"), PageColumn("ours", "gluon", fixed(1))]
    columns += [PageColumn("FlashAttention-3 (fa3-fwd)", "flash3", fixed(1)), PageColumn("torch", "torch", fixed(1))]
    note = "Medians of the last run. [Every run](DETAILS.md), [how it was measured](speed/host/host.md)."
    title = "Host time of a call before the GPU does anything, microseconds"
    return Section("host", "Cost of the host", (), [PageTable("host-us", title, columns, rows, (HOST,), note)])
