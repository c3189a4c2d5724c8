"""The simulator beside the device: predicted cycles, ablation, regret, timelines, overlap and traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reports import stamps
from fa3_reports.device.blocks import Figure, Section, as_printed, fixed, whole
from fa3_reports.device.figures import draw_predictions, draw_timeline
from fa3_reports.device.kernels import look
from fa3_reports.device.source import Row, Source
from fa3verify.report.tables import PageColumn, PageTable, percent

ERRORS = ("simulated_cycles", "roofline_cycles", "closed_form_cycles")
BLOCKS_SHOWN = 2.5  # of a timeline
ABLATION = ("gluon.no_pingpong", "gluon.no_overlap", "gluon.no_specialisation")


def section(source: Source) -> Section:
    """All that is there of predicted beside measured."""
    paths = source.find("**/validation.csv")
    blocks: list[Any] = []
    if paths:
        blocks += [_scatter(source, paths), _by_table(source, paths), _by_group(source, paths), *_ablation(source)]
        blocks += [_rankings(source, paths)]
    blocks += _backward(source) + _timelines(source) + _overlap(source)
    text = [
        "The simulator's constants come from microbenchmarks of one SM, none from an attention kernel; the choice "
        "among models had some of these rows in view. A row is predicted at the clock that was counted when it was "
        "measured. Beside it the roofline, and a closed form whose two constants were fitted to published timings "
        "of an H100. Kernels whose schedule is not known (cuDNN, FlashAttention-2, FlexAttention) have no "
        "prediction.",
        "What the errors were when each set of rows was read for the first time stands in [the "
        "note](../notes/simulator.md); this page shows the model as it is now.",
    ]
    return Section("simulator", "Simulated beside measured", text, blocks)


def _errors(rows: Sequence[Row], column: str = ERRORS[0]) -> np.ndarray:
    return np.array([float(r[column]) / float(r["measured_cycles"]) - 1 for r in rows])


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    simulated = _errors(rows)
    figures = {"rows": len(rows), "mape": float(np.abs(simulated).mean()), "bias": float(simulated.mean())}
    figures |= {"largest": float(np.abs(simulated).max())}
    beside = {c: float(np.abs(_errors(rows, c)).mean()) for c in ERRORS[1:]}
    return figures | {"roofline": beside[ERRORS[1]], "closed_form": beside[ERRORS[2]]}


ERROR_COLUMNS = (
    PageColumn("rows", "rows", whole),
    PageColumn("mean absolute error", "mape", percent),
    PageColumn("bias", "bias", lambda x: f"{100 * x:+.1f} %"),
    PageColumn("largest", "largest", percent),
    PageColumn("roofline", "roofline", percent),
    PageColumn("closed form", "closed_form", percent),
)


def _group(row: Row) -> str:
    family = "ours" if row["kernel"].startswith("gluon") else look(row["kernel"]).title.split(" (")[0]
    return f"{family}, {'e4m3' if row['dtype'] == 'e4m3' else '16 bits'}"


def _scatter(source: Source, paths: Sequence[str]) -> Figure:
    points: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in (r for path in paths for r in source.rows(path)):
        pair = (float(row["measured_cycles"]), float(row["simulated_cycles"]))
        points.setdefault(int(row["head_dim"]), {}).setdefault(_group(row), []).append(pair)
    drawings = [
        draw_predictions(f"predicted-d{dim}", f"head_dim {dim}", dict(sorted(points[dim].items())))
        for dim in sorted(points)
    ]
    reading = "Forward launches that were counted in cycles. At 1 both are equal; dotted: 10 % off."
    return Figure("predicted", "Predicted and measured cycles", drawings, tuple(paths), reading)


def _by_table(source: Source, paths: Sequence[str]) -> PageTable:
    rows = [{"table": path.removesuffix("/validation.csv")} | _figures(source.rows(path)) for path in paths]
    rows.append({"table": "all"} | _figures([r for path in paths for r in source.rows(path)]))
    return PageTable(
        "prediction-errors",
        "Errors by table of timings",
        [PageColumn("timings", "table"), *ERROR_COLUMNS],
        rows,
        tuple(paths),
    )


def _by_group(source: Source, paths: Sequence[str]) -> PageTable:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (r for path in paths for r in source.rows(path)):
        groups.setdefault((_group(row), row["head_dim"]), []).append(row)
    rows = [
        {"group": g, "head_dim": int(d)} | _figures(groups[g, d])
        for g, d in sorted(groups, key=lambda k: (k[0], int(k[1])))
    ]
    columns = [PageColumn("kernel", "group"), PageColumn("head_dim", "head_dim"), *ERROR_COLUMNS]
    return PageTable("prediction-groups", "Errors by kernel and head_dim", columns, rows, tuple(paths))


def _ablation(source: Source) -> list[Any]:
    """The paper's shape, switch by switch: cycles of the full schedule over cycles without."""
    found: list[Any] = []
    for path in source.bench_tables():
        predicted_path = f"{path.rpartition('/')[0]}/validation.csv"
        if not source.has(predicted_path):
            continue
        measured = [(i, r) for i, r in enumerate(source.rows(path), 2) if r["grid"] == "ablation" and r["burst_cycles"]]
        predicted = {int(r["line"]): r for r in source.rows(predicted_path)}
        for dtype in sorted({r["dtype"] for _, r in measured}, reverse=True):
            of = {r["kernel"]: (i, r) for i, r in measured if r["dtype"] == dtype and i in predicted}
            if "gluon" not in of or not any(name in of for name in ABLATION):
                continue
            found.append(_ablation_table(source, path, predicted_path, dtype, of, predicted))
    return found


def _ablation_table(
    source: Source,
    path: str,
    predicted_path: str,
    dtype: str,
    of: dict[str, tuple[int, Row]],
    predicted: dict[int, Row],
) -> PageTable:
    full_line, full = of["gluon"]
    rows = []
    for name in ("gluon", *(n for n in ABLATION if n in of)):
        line, row = of[name]
        cycles = float(row["burst_cycles"])
        simulated = float(predicted[line]["simulated_cycles"])
        rows.append(
            {"kernel": look(name).title, "tflops": float(row["burst_tflops"]), "mhz": float(row["burst_sm_mhz"])}
            | {"cycles": cycles / 1e3, "measured": float(full["burst_cycles"]) / cycles}
            | {
                "simulated": float(predicted[full_line]["simulated_cycles"]) / simulated,
                "error": simulated / cycles - 1,
            }
        )
    columns = (
        PageColumn("schedule", "kernel"),
        PageColumn("TFLOP/s", "tflops", fixed(0)),
        PageColumn("SM MHz", "mhz", fixed(0)),
        PageColumn("thousand cycles", "cycles", fixed(0)),
        PageColumn("speed in cycles, measured", "measured", fixed(2)),
        PageColumn("simulated", "simulated", fixed(2)),
        PageColumn("error of the cycles", "error", lambda x: f"{100 * x:+.1f} %"),
    )
    title = f"The paper's ablation, {dtype}: what each switch is worth in cycles"
    return PageTable(f"ablation-simulated-{dtype}", title, columns, rows, (path, predicted_path))


def _rankings(source: Source, paths: Sequence[str]) -> PageTable:
    """Kendall's tau and regret as the validation pages have them."""
    rows = []
    pages = [path.replace(".csv", ".md") for path in paths]
    for page in pages:
        ranked = [t for t in source.markdown(page) if t.columns[:1] == ["problem"]]
        for cells in (row for table in ranked for row in table.rows if row[0] in ("median", "worst")):
            tau, *regret = (float(c.rstrip("% ")) for c in cells[2:])
            problems = sum(len(table.rows) - 2 for table in ranked)
            rows.append(
                {"table": page.removesuffix("/validation.md"), "of": cells[0], "problems": problems, "tau": tau}
                | {"top1": regret[0] / 100, "top3": regret[1] / 100}
            )
    columns = (
        PageColumn("timings", "table"),
        PageColumn("", "of"),
        PageColumn("problems", "problems", whole),
        PageColumn("Kendall tau", "tau", fixed(2)),
        PageColumn("regret of the first", "top1", percent),
        PageColumn("of the first three", "top3", percent),
    )
    note = (
        "Schedules of one problem, ranked by simulated cycles: how much slower the best of the first k is than the "
        "best of all. Problems with fewer than three schedules are not ranked."
    )
    return PageTable("rankings", "Choosing a schedule by simulated cycles", columns, rows, tuple(pages), note)


def _backward(source: Source) -> list[PageTable]:
    path = "simulator/backward/validation.md"
    if not source.has(path):
        return []
    table = source.markdown(path)[0]
    note = "Clocks of most rows are assumed; the page of the data says of which."
    return [as_printed("backward-errors", "Backward passes", table, path, note)]


def _timelines(source: Source) -> list[Any]:
    drawings = []
    rows = []
    paths = []
    for path in source.find("simulator/timelines/*.stamps.csv"):
        source.text(path)
        found = stamps.read(source.root / path)
        name = path.rpartition("/")[2].removesuffix(".stamps.csv")
        first = 6 * found.cycles_per_block
        if not math.isnan(first):
            title = f"{name.replace('_', ' ')}, {found.tile[0]} x {found.tile[1]}"
            drawings.append(
                draw_timeline(
                    f"timeline-{name}", title, found.bars, first, first + BLOCKS_SHOWN * found.cycles_per_block
                )
            )
        rows.append(
            {"kernel": name, "tile": f"{found.tile[0]} x {found.tile[1]}", "seqlen": found.seqlen, "mhz": found.sm_mhz}
            | {"cycles": found.cycles_per_block, "slowdown": found.slowdown - 1}
        )
        paths.append(path)
    if not paths:
        return []
    columns = (
        PageColumn("kernel", "kernel"),
        PageColumn("tile", "tile"),
        PageColumn("seqlen", "seqlen", whole),
        PageColumn("SM MHz", "mhz", fixed(0)),
        PageColumn("cycles a key block", "cycles", fixed(0)),
        PageColumn("slower by its stamps", "slowdown", lambda x: f"{round(100 * x, 1) + 0.0:.1f} %"),
    )
    reading = (
        "Two and a half key blocks from the middle of a CTA, by cycle counts that the kernel itself stamped. Grey "
        "is waiting. `fa3verify simulate --trace OUT.json --measured FILE` draws them beside the simulated ones for "
        "Perfetto."
    )
    table = PageTable("timelines", "Timelines that kernels stamped", columns, rows, tuple(paths))
    return [Figure("timelines", "What happens inside, step by step", drawings, tuple(paths), reading), table]


def _overlap(source: Source) -> list[Any]:
    """Counted overlap and traffic beside simulated, as their page has them."""
    found: list[Any] = []
    for path in source.find("simulator/overlap/*.md"):
        for i, table in enumerate(t for t in source.markdown(path) if t.rows):
            name = f"{Path(path).stem}-{i + 1}"
            found.append(as_printed(name, table.heading or "Overlap", table, path))
    return found
