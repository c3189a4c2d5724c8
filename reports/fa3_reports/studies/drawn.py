"""The figures of studies about kernels: the paper's table, accumulator loss, error distribution, growth.

Lines are geometric means over draws, bands and bars reach from the smallest to the largest draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa3_reports.axes import log_axis
from fa3verify.report.svg import INK, MUTED, SERIES, colour, new_figure

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _spread(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Geometric mean, smallest and largest over draws."""
    x = values.where(values > 0)
    mean = np.exp(np.log(x.transpose("seed", ...).values).mean(axis=0))
    return mean, x.min("seed").values, x.max("seed").values


def _band(
    ax: Axes, x: np.ndarray, values: xr.DataArray, label: str, *, linestyle: str = "-", marker: str = "o"
) -> None:
    """Draw the line of a kernel with its band over draws."""
    mean, low, high = _spread(values)
    ax.plot(x, mean, color=colour(label), label=label, linestyle=linestyle, marker=marker)
    ax.fill_between(x, low, high, color=colour(label), alpha=0.18, linewidth=0)


def paper(data: xr.Dataset) -> Figure:
    """RMSE of every row of the paper's table: ours, published, H200."""
    figure = new_figure(height=3.79)
    ax = figure.subplots()
    y = np.arange(data.sizes["variant"])
    _, low, high = _spread(data.rmse_unrounded)
    pooled = np.sqrt((data.rmse_unrounded**2).mean("seed")).values
    seen = np.sqrt((data.rmse_seen**2).mean("seed")).values
    ax.hlines(y, low, high, color=SERIES[0], linewidth=4, alpha=0.35)
    ax.plot(pooled, y, "o", color=SERIES[0], label="this run: pooled, bar from smallest to largest draw")
    ax.plot(
        seen, y, "o", color=SERIES[0], markerfacecolor="none", label="this run, against the operands the kernel saw"
    )
    ax.plot(
        data.paper.values,
        y,
        "D",
        color=SERIES[2],
        markerfacecolor="none",
        markersize=7,
        label="FlashAttention-3 paper, Table 3",
    )
    ax.plot(data.h200.values, y, "x", color=INK, label="NVIDIA H200, this length")
    log_axis(ax, "x")
    ax.set_yticks(y, list(data.label.values))
    ax.invert_yaxis()
    ax.set_xlabel("root mean square error")
    ax.legend(loc="upper center", bbox_to_anchor=(0.3, -0.16), ncols=2)
    return figure


def accumulator_loss(data: xr.Dataset) -> Figure:
    """Relative RMSE against the number of keys, V of mean 0 and 1."""
    figure = new_figure(height=3.79)
    axes = figure.subplots(1, 2, sharey=True)
    keys = data.seqlen_k.values
    for ax, mean in zip(axes, data.v_mean.values, strict=True):
        for kernel in data.kernel.values:
            exact = "exact" in kernel
            values = data.rel_rmse.sel(kernel=kernel, v_mean=mean)
            _band(ax, keys, values, kernel, linestyle="--" if exact else "-", marker="" if exact else "o")
        for peer, marker in zip(data.peer.values, "x+1^", strict=False):
            ax.plot(
                keys,
                data.h200_rel_rmse.sel(peer=peer, v_mean=mean),
                marker,
                color=INK,
                markersize=6,
                markerfacecolor="none",
                label=f"H200: {peer}",
            )
        log_axis(ax, "x", base=2)
        log_axis(ax, "y")
        ax.set_xticks(keys)
        ax.set_title(f"V of mean {mean:g}" + (", as in the paper's test" if mean == 0 else ""))
        ax.set_xlabel("keys")
    axes[0].set_ylabel("relative RMSE")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def error_distribution(data: xr.Dataset) -> Figure:
    """Survival function of the error, and the signed histogram in ulp."""
    figure = new_figure(height=3.56)
    left, right = figure.subplots(1, 2)
    for kernel in data.kernel.values:
        one = data.sel(kernel=kernel)
        alive = one.survival.values > 0
        left.plot(data.level.values[alive], one.survival.values[alive], color=colour(kernel), label=kernel)
        right.step(data.ulp_bin.values, one.ulp_share.values, where="mid", color=colour(kernel), linewidth=1.2)
        right.plot(-4.35, one.below, "<", 4.35, one.beyond, ">", color=colour(kernel))
    log_axis(left, "x")
    log_axis(left, "y")
    left.set_xlim(left=1e-8)
    left.set(xlabel="absolute error / RMS of the exact output", ylabel="share of outputs above", title="Survival")
    log_axis(right, "y")
    right.axvline(0, color=MUTED, linewidth=0.7)
    right.set(xlabel="signed error in ulp of the output format", ylabel="share of outputs", title="Signed error")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def growth(data: xr.Dataset) -> Figure:
    """Relative RMSE and largest error over bound against seqlen_k, per distribution."""
    figure = new_figure(height=5.75)
    axes = figure.subplots(2, data.sizes["distribution"], sharex=True, sharey="row", squeeze=False)
    keys = data.seqlen_k.values.astype(float)
    for column, distribution in enumerate(data.distribution.values):
        for row, (name, label) in enumerate(
            (("rel_rmse_seen", "relative RMSE"), ("ratio_max", "largest error / bound"))
        ):
            ax = axes[row, column]
            for kernel in data.kernel.values:
                dashed = "chained" in str(kernel)
                values = data[name].sel(kernel=kernel, distribution=distribution)
                _band(ax, keys, values, kernel, linestyle="--" if dashed else "-")
            log_axis(ax, "x", base=2)
            log_axis(ax, "y")
            ax.set_xticks(keys)
            if column == 0:
                ax.set_ylabel(label)
            if row == 1:
                ax.axhline(1.0, color=INK, linewidth=0.9)
                ax.set_xlabel("seqlen_k")
            else:
                start = float(np.nanmin(data[name].values)) * 1.5
                for power, text in ((0.5, "√N"), (1.0, "N")):
                    ax.plot(keys, start * (keys / keys[0]) ** power, ":", color=MUTED, linewidth=0.9)
                    at = (keys[-1], start * (keys[-1] / keys[0]) ** power)
                    ax.annotate(
                        text, at, xytext=(-6, 2), textcoords="offset points", ha="right", color=MUTED, fontsize=8
                    )
                ax.set_title(str(distribution))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
