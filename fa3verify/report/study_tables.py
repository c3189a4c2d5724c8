"""The tables that stand beside figures: the paper's, accumulator loss, slopes, heads that rotation makes worse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3verify.report.notation import DASH, count, number, percent, signed
from fa3verify.report.tables import Table, table

if TYPE_CHECKING:
    import xarray as xr


def _pooled(values: xr.DataArray) -> str:
    return number(np.sqrt(float((values**2).mean())))


def _range(values: xr.DataArray) -> str:
    return f"{number(values.min())} … {number(values.max())}"


def paper(data: xr.Dataset) -> Table:
    """The paper's table with ours and the H200's figures."""
    rows = []
    for variant in data.variant.values:
        one = data.sel(variant=variant)
        rows.append(
            {
                "label": str(one.label.item()),
                "paper": number(one.paper),
                "h200": number(one.h200),
                "h200_kernel": str(one.h200_kernel.item()) if np.isfinite(one.h200) else DASH,
                "ours": _pooled(one.rmse_unrounded),
                "range": _range(one.rmse_unrounded),
                "max": number(one.max_error_unrounded.max()),
                "seen": _pooled(one.rmse_seen),
                "share": percent(one.input_rounding_share.mean()),
            }
        )
    columns = [
        ("attention", "label"),
        ("paper", "paper"),
        ("NVIDIA H200", "h200"),
        ("measured there", "h200_kernel"),
        ("ours", "ours"),
        ("smallest … largest draw", "range"),
        ("largest error", "max"),
        ("ours, seen", "seen"),
        ("input rounding", "share"),
    ]
    note = (
        f"Standard over flash FP16: {_ratio(data, 'standard_fp16_s', 'flash_fp16')}; the paper: 1.7. "
        f"FP8 per tensor over Hadamard with blocks: {_ratio(data, 'fp8_tensor', 'fp8_hadamard_block')}; the paper: 2.6."
    )
    return table("paper_accuracy", "RMSE, paper / H200 / ours", columns, rows, ("label", "h200_kernel"), note)


def _ratio(data: xr.Dataset, over: str, under: str) -> str:
    """Ratio of pooled errors, with the smallest and largest draw."""
    a, b = (data.rmse_unrounded.sel(variant=v, drop=True) for v in (over, under))
    pooled = np.sqrt(float((a**2).mean()) / float((b**2).mean()))
    return f"{number(pooled)} ({_range(a / b)})"


def accumulator_loss(data: xr.Dataset) -> Table:
    """Relative RMSE and bias by number of keys, twins and H200 peers; V of mean 0 and 1."""
    rows = []
    lengths = [int(n) for n in data.seqlen_k.values]
    for mean in data.v_mean.values:
        for kernel in data.kernel.values:
            one = data.sel(kernel=kernel, v_mean=mean)
            cells = {
                str(n): f"{_pooled(one.rel_rmse.sel(seqlen_k=n))} ({signed(one.bias.sel(seqlen_k=n).mean())})"
                for n in lengths
            }
            rows.append({"v_mean": f"{mean:g}", "kernel": str(kernel), "where": "this run"} | cells)
        for peer in data.peer.values:
            values = data.h200_rel_rmse.sel(peer=peer, v_mean=mean)
            rows.append(
                {"v_mean": f"{mean:g}", "kernel": str(peer), "where": "NVIDIA H200"}
                | {str(n): number(values.sel(seqlen_k=n)) for n in lengths}
            )
    columns = [
        ("V mean", "v_mean"),
        ("kernel", "kernel"),
        ("where", "where"),
        *((f"{count(n)} keys", str(n)) for n in lengths),
    ]
    return table("drift", "Relative RMSE (bias)", columns, rows, ("v_mean", "kernel", "where"))


def slopes(data: xr.Dataset) -> Table:
    """Fitted exponents with their 95 % intervals."""
    rows = []
    for kernel in data.kernel.values:
        for distribution in data.distribution.values:
            one = data.sel(kernel=kernel, distribution=distribution)
            fits = {
                n: f"{_fixed(one[f'slope_{n}'])} ± {_fixed(one[f'slope_{n}_ci95'])}"
                for n in ("rel_rmse_seen", "ratio_max")
            }
            rows.append(
                {"kernel": str(kernel), "distribution": str(distribution), "worst": number(one.ratio_max.max())} | fits
            )
    columns = [
        ("kernel", "kernel"),
        ("input", "distribution"),
        ("exponent of relative RMSE", "rel_rmse_seen"),
        ("exponent of max error / bound", "ratio_max"),
        ("largest error / bound", "worst"),
    ]
    return table("growth", "Exponent a in error ~ N^a, with 95 % interval", columns, rows, ("kernel", "distribution"))


def _fixed(value: Any) -> str:
    return f"{float(value):+.2f}".replace("+", "").replace("-", "−") if np.isfinite(value) else DASH


def losers(data: xr.Dataset) -> Table:
    """Heads that rotation makes worse, worst first."""
    worse = data.isel(head=np.flatnonzero(data.gain.values < 1)).sortby("gain")
    rows = [
        {
            "head": str(head),
            "gain": number(worse.gain.values[i]),
            "predicted": number(worse.gain_predicted.values[i]),
            "plain": number(worse.rel_rmse_plain.values[i]),
            "rotated": number(worse.rel_rmse_rotated.values[i]),
        }
        for i, head in enumerate(worse["head"].values)
    ]
    mean, correlation = (number(data.attrs[name]) for name in ("geometric_mean_gain", "log_correlation"))
    note = (
        f"Geometric mean gain over all heads {mean}, from {_range(data.gain)}; "
        f"correlation of log gains, measured and predicted: {correlation}."
    )
    columns = [
        ("head", "head"),
        ("gain", "gain"),
        ("predicted", "predicted"),
        ("rel. RMSE plain", "plain"),
        ("rel. RMSE rotated", "rotated"),
    ]
    return table("rotation", "Heads that rotation makes worse", columns, rows, ("head",), note)


STUDY_TABLES = {"paper_accuracy": paper, "drift": accumulator_loss, "growth": slopes, "rotation": losers}


def of_studies(studies: Mapping[str, xr.Dataset]) -> dict[str, Table]:
    """Tables that stand beside figures, by study."""
    return {name: build(studies[name]) for name, build in STUDY_TABLES.items() if name in studies}
