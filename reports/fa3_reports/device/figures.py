"""The drawings of a device's page: narrow ones, so that several stand side by side and one fills a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl

from fa3_reports.axes import log_axis
from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.device.blocks import Drawing
from fa3_reports.device.kernels import in_order, look
from fa3verify.report import svg
from fa3verify.report.svg import GRID, INK, MUTED, SERIES, new_figure

WIDTH = 4.2  # inches: a third of the page, and a phone's width at full size
NARROW = 3.1  # a quarter of the page
KINDS = {"wait": MUTED, "issue": SERIES[0], "vector": SERIES[2], "copy": SERIES[1]}  # of bars of a timeline


def drawn(name: str, alt: str, draw: Callable[[], Any]) -> Drawing:
    """Draw in the page's style."""
    with svg.styled(), mpl.rc_context({"legend.fontsize": 8.0, "lines.markersize": 3.6, "lines.linewidth": 1.4}):
        return Drawing(name, svg.render(draw(), f"f-{name}", alt), alt)


def draw_speed(name: str, title: str, cells: Sequence[Any]) -> Drawing:
    """Draw TFLOP/s over lengths: one axis for each mask, one line for each kernel."""
    masks = sorted({cell.causal for cell in cells})

    def draw() -> Any:
        figure = new_figure(width=NARROW, height=0.5 + NARROW * 0.43 * len(masks))
        axes = figure.subplots(len(masks), 1, sharex=True, squeeze=False)[:, 0]
        lengths = sorted({cell.seqlen for cell in cells})
        for ax, mask in zip(axes, masks, strict=True):
            of = [cell for cell in cells if cell.causal == mask]
            for kernel in in_order(k for cell in of for k in cell.tflops):
                points = [(c.seqlen, c.tflops[kernel]) for c in of if kernel in c.tflops]
                shown = look(kernel)
                ax.plot(
                    *zip(*points, strict=True),
                    color=shown.colour,
                    marker=shown.marker,
                    linestyle=shown.line,
                    label=shown.title.replace("FlashAttention-", "FA"),
                    zorder=3 if kernel.startswith("gluon") else 2,
                )
            log_axis(ax, "x", base=2)
            ax.set_xticks(lengths)
            ax.set_ylim(bottom=0)
            ax.locator_params(axis="y", nbins=5)
            ax.set_title(f"{title.rpartition(', ')[2]}, {'causal' if mask else 'dense'}")
        legend = {"loc": "outside lower center", "ncols": 3, "columnspacing": 0.9, "handlelength": 1.5}
        figure.legend(*axes[0].get_legend_handles_labels(), **legend)
        return figure

    return drawn(name, f"TFLOP/s over sequence length: {title}", draw)


def draw_strips(
    name: str,
    title: str,
    axis: str,
    rows: Mapping[str, Mapping[str, Sequence[float]]],
    colours: Mapping[str, str],
    *,
    is_ratio: bool = True,
) -> Drawing:
    """Draw a line of dots for every row and group, a bar at their geometric mean; of ratios 1 is ruled."""
    groups = [group for group in colours if any(group in of for of in rows.values())]

    def draw() -> Any:
        figure = new_figure(width=WIDTH, height=0.95 + 0.23 * len(rows))
        ax = figure.subplots()
        for i, group in enumerate(groups):
            shift = 0.5 * ((i + 0.5) / len(groups) - 0.5)
            shown = [(y + shift, of[group]) for y, of in enumerate(rows.values()) if of.get(group)]
            dots = [(x, y) for y, values in shown for x in values]
            style: Any = {"linestyle": "", "color": colours[group]}
            ax.plot(*zip(*dots, strict=True), marker="o", markersize=3.2, alpha=0.65, label=group, **style)
            means = [(geometric_mean(values), y) for y, values in shown if len(values) > 1]
            style |= {"marker": "|", "markersize": 9, "markeredgewidth": 1.8}
            ax.plot([x for x, _ in means], [y for _, y in means], **style)
        if is_ratio:
            ax.axvline(1, color=INK, linewidth=0.9)
        ax.locator_params(axis="x", nbins=6)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set(xlabel=axis, title=title, ylim=(len(rows) - 0.4, -0.6))
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, columnspacing=1.0)
        return figure

    return drawn(name, f"{axis}: {title}", draw)


def draw_predictions(name: str, title: str, points: Mapping[str, Sequence[tuple[float, float]]]) -> Drawing:
    """Draw predicted over measured against measured cycles, one marker per group; dotted where 10 % off."""

    def draw() -> Any:
        figure = new_figure(width=WIDTH, height=3.6)
        ax = figure.subplots()
        ax.axhline(1, color=INK, linewidth=0.9)
        for factor in (0.9, 1.1):
            ax.axhline(factor, color=MUTED, linewidth=0.9, linestyle=":")
        for i, (group, pairs) in enumerate(points.items()):
            style = {"marker": "os^Dv"[i % 5], "linestyle": "", "markersize": 3.0, "alpha": 0.8}
            measured = [m for m, _ in pairs]
            ratios = [predicted / m for m, predicted in pairs]
            ax.plot(measured, ratios, color=SERIES[(2, 5, 3, 0, 6)[i % 5]], label=group, **style)
        log_axis(ax, "x")
        ax.set(ylim=(0.7, 1.3), xlabel="measured cycles", ylabel="simulated / measured", title=title)
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, columnspacing=1.2)
        return figure

    return drawn(name, f"Simulated over measured cycles: {title}", draw)


def draw_curves(
    name: str,
    title: str,
    axes: tuple[str, str],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> Drawing:
    """Draw curves of kernels over keys, powers of two along x."""

    def draw() -> Any:
        figure = new_figure(width=WIDTH, height=3.3)
        ax = figure.subplots()
        for kernel in in_order(curves):
            shown = look(kernel)
            marker = shown.marker if len(curves[kernel]) < 20 else ""
            style: Any = {"color": shown.colour, "marker": marker, "linestyle": shown.line, "label": shown.title}
            ax.plot(*zip(*curves[kernel], strict=True), **style)
        log_axis(ax, "x", base=2)
        log_axis(ax, "y")
        ax.set_xticks(sorted({x for pairs in curves.values() for x, _ in pairs}))
        ax.set(xlabel=axes[0], ylabel=axes[1], title=title)
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, columnspacing=1.2)
        return figure

    return drawn(name, f"{axes[1]} over {axes[0]}: {title}", draw)


def draw_timeline(name: str, title: str, bars: Iterable[Any], first: float, last: float) -> Drawing:
    """Draw what each actor did between two cycles, a row each, coloured by kind."""
    shown = [bar for bar in bars if bar.stop > first and bar.start < last]

    def draw() -> Any:
        rows = sorted({bar.row for bar in shown})
        figure = new_figure(width=WIDTH, height=1.15 + 0.34 * len(rows))
        ax = figure.subplots()
        for kind, colour in KINDS.items():
            for y, row in enumerate(rows):
                spans = [(max(b.start, first) - first, b) for b in shown if (b.row, b.kind) == (row, kind)]
                pieces = [(start, min(b.stop, last) - first - start) for start, b in spans]
                if pieces:
                    ax.broken_barh(pieces, (y - 0.36, 0.72), facecolors=colour, edgecolor=GRID, linewidth=0.4)
            ax.plot([], [], color=colour, linewidth=5, label=kind)
        ax.set_yticks(range(len(rows)), rows)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set(xlabel="cycles", title=title, xlim=(0, last - first))
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.0)
        return figure

    return drawn(name, f"Timeline: {title}", draw)
