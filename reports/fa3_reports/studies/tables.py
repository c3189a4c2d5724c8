"""The tables that stand beside figures of studies: the paper's, accumulator loss, slopes, heads that rotation harms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa3verify.report.tables import DASH, PageColumn, PageTable, count, number, percent, signed, written

if TYPE_CHECKING:
    import xarray as xr


def _pooled(values: xr.DataArray) -> str:
    return number(np.sqrt(float((values**2).mean())))


def _range(values: xr.DataArray) -> str:
    return f"{number(values.min())} … {number(values.max())}"


def paper(data: xr.Dataset) -> PageTable:
    """The paper's table with ours and the H200's figures."""
    rows = []
    for variant in data.variant.values:
        one = data.sel(variant=variant)
        rows.append(
            {
                "label": str(one.label.item()),
                "paper": one.paper,
                "h200": one.h200,
                "h200_kernel": str(one.h200_kernel.item()) if np.isfinite(one.h200) else DASH,
                "ours": _pooled(one.rmse_unrounded),
                "range": _range(one.rmse_unrounded),
                "max": one.max_error_unrounded.max(),
                "seen": _pooled(one.rmse_seen),
                "share": one.input_rounding_share.mean(),
            }
        )
    columns = (
        PageColumn("attention", "label"),
        PageColumn("paper", "paper", number),
        PageColumn("NVIDIA H200", "h200", number),
        PageColumn("measured there", "h200_kernel"),
        PageColumn("ours", "ours", written),
        PageColumn("smallest … largest draw", "range", written),
        PageColumn("largest error", "max", number),
        PageColumn("ours, seen", "seen", written),
        PageColumn("input rounding", "share", percent),
    )
    note = (
        f"Standard over flash FP16: {_ratio(data, 'standard_fp16_s', 'flash_fp16')}; the paper: 1.7. "
        f"FP8 per tensor over Hadamard with blocks: {_ratio(data, 'fp8_tensor', 'fp8_hadamard_block')}; the paper: 2.6."
    )
    return PageTable("paper_accuracy", "RMSE, paper / H200 / ours", columns, rows, note=note)


def _ratio(data: xr.Dataset, over: str, under: str) -> str:
    """Ratio of pooled errors, with the smallest and largest draw."""
    a, b = (data.rmse_unrounded.sel(variant=v, drop=True) for v in (over, under))
    pooled = np.sqrt(float((a**2).mean()) / float((b**2).mean()))
    return f"{number(pooled)} ({_range(a / b)})"


def accumulator_loss(data: xr.Dataset) -> PageTable:
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
    columns = [PageColumn("V mean", "v_mean"), PageColumn("kernel", "kernel"), PageColumn("where", "where")]
    columns += [PageColumn(f"{count(n)} keys", str(n), written) for n in lengths]
    return PageTable("accumulator_loss", "Relative RMSE (bias)", columns, rows)


def slopes(data: xr.Dataset) -> PageTable:
    """Fitted exponents with their 95 % intervals."""
    rows = []
    for kernel in data.kernel.values:
        for distribution in data.distribution.values:
            one = data.sel(kernel=kernel, distribution=distribution)
            fits = {
                n: f"{_fixed(one[f'slope_{n}'])} ± {_fixed(one[f'slope_{n}_ci95'])}"
                for n in ("rel_rmse_seen", "ratio_max")
            }
            rows.append({"kernel": kernel, "distribution": distribution, "worst": one.ratio_max.max()} | fits)
    columns = (
        PageColumn("kernel", "kernel"),
        PageColumn("input", "distribution"),
        PageColumn("exponent of relative RMSE", "rel_rmse_seen", written),
        PageColumn("exponent of max error / bound", "ratio_max", written),
        PageColumn("largest error / bound", "worst", number),
    )
    return PageTable("growth", "Exponent a in error ~ N^a, with 95 % interval", columns, rows)


def _fixed(value: Any) -> str:
    return f"{float(value):+.2f}".replace("+", "").replace("-", "−") if np.isfinite(value) else DASH


def losers(data: xr.Dataset) -> PageTable:
    """Heads that rotation makes worse, worst first."""
    worse = data.isel(head=np.flatnonzero(data.gain.values < 1)).sortby("gain")
    columns = (
        PageColumn("head", "head"),
        PageColumn("gain", "gain", number),
        PageColumn("predicted", "gain_predicted", number),
        PageColumn("rel. RMSE plain", "rel_rmse_plain", number),
        PageColumn("rel. RMSE rotated", "rel_rmse_rotated", number),
    )
    values = zip(*(worse[column.key].values for column in columns), strict=True)
    rows = [dict(zip((column.key for column in columns), row, strict=True)) for row in values]
    mean, correlation = (number(data.attrs[name]) for name in ("geometric_mean_gain", "log_correlation"))
    note = (
        f"Geometric mean gain over all heads {mean}, from {_range(data.gain)}; "
        f"correlation of log gains, measured and predicted: {correlation}."
    )
    return PageTable("rotation", "Heads that rotation makes worse", columns, rows, note=note)
