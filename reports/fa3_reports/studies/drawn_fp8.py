"""The figures of studies about quantisation: outliers, use of the e4m3 range, error budget, rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from fa3_reports.axes import log_axis
from fa3verify.report.svg import INK, MUTED, SERIES, colour, new_figure

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUANTISER_LINES = {
    "FP16": (SERIES[0], "-", "o"),
    "tensor": (SERIES[2], "-", "o"),
    "head": (SERIES[2], ":", "s"),
    "block": (SERIES[5], "-", "^"),
    "row (emulated)": (SERIES[4], "--", "v"),
    "Hadamard, tensor": (SERIES[3], "-", "D"),
    "Hadamard, block": (SERIES[1], "--", "d"),
}
_STEPS = [m * 10.0**e for e in range(-6, 2) for m in (1, 2, 3, 5)]
_SOURCES = {"scores": ("o", 4), "exp2": ("v", 5), "p_rounding": ("s", 2), "pv": ("D", 3)}


def outlier_sweep(data: xr.Dataset) -> Figure:
    """Relative RMSE against the outliers' standard deviation."""
    figure = new_figure(height=3.91)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    x = data.outlier_std.values
    for quantiser in data.quantiser.values:
        ax = right if quantiser == "FP16" else left
        shade, line, marker = _QUANTISER_LINES.get(quantiser, (SERIES[7], "-", "."))
        values = data.rel_rmse.sel(quantiser=quantiser)
        ax.plot(x, np.exp(np.log(values).mean("seed")), color=shade, linestyle=line, marker=marker, label=quantiser)
        ax.fill_between(x, values.min("seed"), values.max("seed"), color=shade, alpha=0.12, linewidth=0)
    is_fp16 = data.quantiser == "FP16"
    for ax, title, drawn in (
        (left, "FP8, one scale per ...", data.rel_rmse[~is_fp16]),
        (right, "FP16, for comparison", data.rel_rmse[is_fp16]),
    ):
        log_axis(ax, "x", ticks=(1, 3, 10, 30, 100, 300, 1000))
        low = float(drawn.min()) / 1.15
        high = float(drawn.max()) * 1.15
        log_axis(ax, "y", ticks=[t for t in _STEPS if low < t < high])
        ax.set_ylim(low, high)
        ax.axvline(10, color=MUTED, linewidth=0.9, linestyle=":")
        ax.set(xlabel="standard deviation of the outliers (dotted: the paper's)", title=title)
    right.set_xlabel("standard deviation of the outliers")
    left.set_ylabel("relative RMSE")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=6)
    return figure


def usage(data: xr.Dataset) -> Figure:
    """Subnormal share, quantisation noise and scale spread of K, per input, before and after rotation."""
    order = [*data.input.values[data.kind.values == "synthetic"], *data.input.values[data.kind.values == "activation"]]
    k = data.sel(tensor="k", input=order)
    figure = new_figure(height=1.1 + 0.2 * len(order))
    axes = figure.subplots(1, 3, sharey=True)
    small = k.underflow + k.subnormal
    panels = (
        (small, "share of values below\nthe normal range"),
        (k.sqnr_db, "signal to quantisation\nnoise, dB"),
        (k.scale_spread, "largest / smallest\nblock scale"),
    )
    y = np.arange(len(order))
    for ax, (values, label) in zip(axes, panels, strict=True):
        plain = values.sel(rotation="none").values
        rotated = values.sel(rotation="hadamard").values
        ax.hlines(y, np.fmin(plain, rotated), np.fmax(plain, rotated), color=MUTED, linewidth=0.8)
        ax.plot(plain, y, "o", color=SERIES[2], markerfacecolor="none", label="as it is")
        ax.plot(rotated, y, "o", color=SERIES[1], label="Hadamard-rotated")
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    log_axis(axes[2], "x", base=2)
    axes[0].set_xlim(left=0)
    for ax in axes[:2]:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
    names = [f"{n.split('_')[0]} {n.split('_')[-2]} {n.split('_')[-1]}" if n.count("_") > 2 else n for n in order]
    axes[0].set_yticks(y, names, fontsize=7.5)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def budget(data: xr.Dataset) -> Figure:
    """Contributions of each source, the rest, the total and input rounding, per kernel and input."""
    figure = new_figure(height=3.33)
    axes = figure.subplots(1, data.sizes["kernel"], sharey=True)
    y = np.arange(data.sizes["input"])
    for ax, kernel in zip(np.atleast_1d(axes), data.kernel.values, strict=True):
        one = data.sel(kernel=kernel)
        _positive(ax, one.total, y, "|", INK, "total", markersize=15, markeredgewidth=2)
        for source in data.source.values:
            marker, shade = _SOURCES.get(source, (".", 7))
            _positive(ax, one.contribution.sel(source=source), y, marker, SERIES[shade], str(source))
        _positive(ax, one.rest, y, "x", SERIES[0], "rest")
        _positive(ax, one.inputs, y, "o", INK, "inputs", markerfacecolor="none", markersize=7)
        log_axis(ax, "x")
        ax.set_title(str(kernel))
        ax.set_xlabel("relative RMSE")
    first = np.atleast_1d(axes)[0]
    first.set_yticks(
        y, [str(name).split("_dev")[0] + (" activation" if "_dev" in name else "") for name in data.input.values]
    )
    first.set_ylim(len(y) - 0.5, -0.5)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def _positive(ax: Axes, values: xr.DataArray, y: np.ndarray, marker: str, shade: str, label: str, **style) -> None:
    x = values.values
    ax.plot(np.where(x > 0, x, np.nan), y, marker, color=shade, label=label, linestyle="none", **style)


def rotation(data: xr.Dataset) -> Figure:
    """Sorted gains of all heads, and measured against predicted gain."""
    figure = new_figure(height=3.79)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    ordered = data.sortby("gain")
    x = np.arange(ordered.sizes["head"])
    left.plot(x, ordered.gain_predicted, "o", color=MUTED, markerfacecolor="none", label="predicted")
    for i, model in enumerate(dict.fromkeys(data.model.values)):
        mine = ordered.model.values == model
        shade = SERIES[(0, 2)[i % 2]]
        marker = "os"[i % 2]
        left.plot(x[mine], ordered.gain.values[mine], marker, color=shade, label=model)
        right.plot(ordered.gain_predicted.values[mine], ordered.gain.values[mine], marker, color=shade)
    both = np.concatenate([data.gain.values, data.gain_predicted.values])
    ends = np.array([both.min() * 0.92, both.max() * 1.08])
    right.plot(ends, ends, color=MUTED, linewidth=0.8)
    ticks = [t for t in (0.5, 0.7, 1, 1.4, 2, 2.8, 4) if ends[0] <= t <= ends[1]]
    for ax in (left, right):
        log_axis(ax, "y", base=2, ticks=ticks)
        ax.axhline(1.0, color=INK, linewidth=0.9)
        ax.set_ylim(*ends)
    log_axis(right, "x", base=2, ticks=ticks)
    right.set_xlim(*ends)
    losers = int((data.gain < 1).sum())
    left.axvspan(-0.5, losers - 0.5, color=colour("e4m3"), alpha=0.10, linewidth=0)
    left.set(xlabel="heads, sorted", ylabel="gain", title=f"{losers} of {len(x)} heads lose")
    right.set(xlabel="predicted gain", ylabel="measured gain", title="Against the error model")
    left.set_xlim(-0.5, len(x) - 0.5)
    left.legend(loc="upper left")
    return figure
