"""Errors: over long keys, of quantisation, and of a training run."""

from __future__ import annotations

from typing import Any

from fa3_reports.device.blocks import Figure, Section, fixed, whole
from fa3_reports.device.figures import draw_curves
from fa3_reports.device.kernels import in_order, look
from fa3_reports.device.source import Source
from fa3verify.report.tables import PageColumn, PageTable, number


def section(source: Source) -> Section:
    """Errors over long keys, of quantisation, and a training run."""
    blocks: list[Any] = [
        *_accumulator_loss(source),
        *_quantiser(source),
        *_training(source),
    ]
    text = [
        "What verify says of every kernel, with the largest error of each family of inputs, is in [the "
        "atlas](../atlas/README.md)."
    ]
    return Section("accuracy", "Accuracy", text if blocks else (), blocks)


def _accumulator_loss(source: Source) -> list[Any]:
    found: list[Any] = []
    for path in source.bench_tables():
        rows = [r for r in source.rows(path) if r["grid"] == "accumulator_loss" and r["rel_rmse"]]
        if not rows:
            continue
        dims = sorted({int(r["head_dim"]) for r in rows})
        drawings = []
        for dim in dims:
            curves: dict[str, list[tuple[float, float]]] = {}
            for r in (r for r in rows if int(r["head_dim"]) == dim):
                curves.setdefault(r["kernel"], []).append((int(r["seqlen_k"]), float(r["rel_rmse"])))
            drawings.append(draw_curves(f"loss-d{dim}", f"e4m3, head_dim {dim}", ("keys", "relative RMSE"), curves))
        table = [
            {"head_dim": dim, "keys": keys}
            | {
                r["kernel"]: float(r["rel_rmse"])
                for r in rows
                if (int(r["head_dim"]), int(r["seqlen_k"])) == (dim, keys)
            }
            for dim in dims
            for keys in sorted({int(r["seqlen_k"]) for r in rows})
        ]
        kernels = in_order(r["kernel"] for r in rows)
        columns = [PageColumn("head_dim", "head_dim"), PageColumn("keys", "keys", whole)]
        columns += [PageColumn(look(k).title, k, number) for k in kernels]
        reading = (
            "V has mean 1; reference: float64 attention of the dequantised operands. Without promotion FP8 loses "
            "output as keys grow."
        )
        found.append(Figure("accumulator-loss", "Accumulator loss over long keys", drawings, (path,), reading))
        found.append(PageTable("accumulator-loss", "Relative RMSE, V of mean 1", columns, table, (path,)))
    return found


def _quantiser(source: Source) -> list[PageTable]:
    tables = []
    accuracy_path = "quantiser/quantize_accuracy.csv"
    speed_path = "quantiser/quantize_speed.csv"
    if source.has(accuracy_path):
        groups: dict[tuple[str, str, str], list[float]] = {}
        for r in source.rows(accuracy_path):
            groups.setdefault((r["scope"], r["rotate"], r["subtract_k_mean"]), []).append(
                float(r["measured_over_predicted"])
            )
        rows = [
            {"scope": scope, "rotate": _yes(rotate), "mean": _yes(mean), "heads": len(values)}
            | {"median": sorted(values)[len(values) // 2], "least": min(values), "most": max(values)}
            for (scope, rotate, mean), values in groups.items()
        ]
        columns = (
            PageColumn("scales per", "scope"),
            PageColumn("rotated", "rotate"),
            PageColumn("mean of K subtracted", "mean"),
            PageColumn("measurements", "heads", whole),
            PageColumn("median", "median", fixed(2)),
            PageColumn("least", "least", fixed(2)),
            PageColumn("most", "most", fixed(2)),
        )
        title = "Quantisation of real activations: measured error over predicted"
        tables.append(PageTable("quantiser-accuracy", title, columns, rows, (accuracy_path,)))
    if source.has(speed_path):
        rows = [
            {"tokens": int(r["tokens"]), "head_dim": int(r["head_dim"]), "quantiser": r["quantiser"]}
            | {"tb": float(r["tb_per_s"]), "share": float(r["share_of_copy_bandwidth"])}
            for r in source.rows(speed_path)
        ]
        columns = (
            PageColumn("quantiser", "quantiser"),
            PageColumn("tokens", "tokens", whole),
            PageColumn("head_dim", "head_dim", whole),
            PageColumn("TB/s", "tb", fixed(2)),
            PageColumn("of a copy's bandwidth", "share", fixed(2)),
        )
        tables.append(PageTable("quantiser-speed", "Speed of the quantiser", columns, rows, (speed_path,), fold=True))
    return tables


def _yes(text: str) -> str:
    return "yes" if text == "True" else "no"


def _training(source: Source) -> list[Any]:
    path = "training/losses.csv"
    if not source.has(path):
        return []
    rows = source.rows(path)
    kernels = [name for name in rows[0] if name != "step"]
    last = rows[-20:]
    table = [
        {"kernel": look(k).title, "first": float(rows[0][k]), "last": sum(float(r[k]) for r in last) / len(last)}
        for k in kernels
    ]
    columns = (
        PageColumn("attention", "kernel"),
        PageColumn("loss of the first step", "first", fixed(4)),
        PageColumn("mean of the last 20", "last", fixed(4)),
    )
    return [PageTable("training", f"A small model trained for {len(rows)} steps", columns, table, (path,))]
