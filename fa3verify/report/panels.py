"""This module says which study is drawn by which figure, with its title and what to see in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3verify.report import figures, figures_fp8, svg

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure: the study it draws, and its words. ``reading`` tells what to see, never what to hope."""

    study: str
    draw: Callable[[xr.Dataset], Figure]
    title: str
    reading: str


PANELS: tuple[Panel, ...] = (
    Panel(
        "paper_accuracy",
        figures.paper,
        "The paper's accuracy table, ours beside it",
        "Filled dots: RMSE from the unrounded inputs, which the paper tabulates. Hollow dots: from the operands each "
        "kernel saw. For FP16 flash the gap between them is input rounding that no kernel can avoid.",
    ),
    Panel(
        "drift",
        figures.accumulator_loss,
        "Accumulator loss over long keys",
        "With V of mean 0 every FP8 kernel looks alike. With V of mean 1 a chained accumulator loses output as keys "
        "grow, while promotion every 128 keys should keep the error flat. Black or white marks: production kernels "
        "measured on an NVIDIA H200.",
    ),
    Panel(
        "outlier_sweep",
        figures_fp8.outlier_sweep,
        "Error against outlier size, per quantiser",
        "Reference: unrounded inputs. A steady scale costs e4m3 no precision, so the quantisers part only where "
        "outliers make single scores decide; bands reach from the smallest to the largest draw.",
    ),
    Panel(
        "error_distribution",
        figures.error_distribution,
        "Where the errors lie",
        "Reference: the operands each kernel saw. An unbiased kernel gives a symmetric histogram; truncation shifts "
        "it. Triangles: everything beyond 4 ulp.",
    ),
    Panel(
        "ratio_map",
        figures.ratio_map,
        "Error over bound, output by output",
        "Noise without structure is what a correct kernel gives; tile rows are ruled. Structure along the rules is "
        "the signature of a tiling bug: the last map shows one planted fault. Orange is above the bound.",
    ),
    Panel(
        "growth",
        figures.growth,
        "Growth with the number of keys",
        "A correct kernel stays below the bound, ratio 1, at every length. Dotted guides grow like √N and N; fitted "
        "slopes are in the table.",
    ),
    Panel(
        "fp8_usage",
        figures_fp8.usage,
        "How K uses e4m3, before and after rotation",
        "One row per input, synthetic ones first. Hollow: unrotated; filled: rotated. The scale spread is that of "
        "128-row blocks within one head: near 1, block scales have nothing to repair.",
    ),
    Panel(
        "error_budget",
        figures_fp8.budget,
        "Error budget, by switching sources off in the bit model",
        "Contribution = √(total² − without²). Sources interact, so contributions do not add up to the total; one "
        "that is missing was not above 0. 'rest' remains with every source off; 'inputs' is the exact change by "
        "rounding or quantising the inputs.",
    ),
    Panel(
        "rotation",
        figures_fp8.rotation,
        "Rotation on real activations: gains and losers",
        "Gain = RMSE with one scale per head over RMSE with Hadamard rotation and 128-row scales. Below 1 the "
        "rotation hurts. Differences under a quarter on one head are within the luck of a sign vector.",
    ),
)


def draw_all(studies: Mapping[str, xr.Dataset]) -> dict[str, str]:
    """Return the SVG of every panel whose study is there, by study name."""
    drawn = {}
    with svg.styled():
        for panel in PANELS:
            if panel.study in studies:
                figure = panel.draw(studies[panel.study])
                drawn[panel.study] = svg.render(figure, f"f-{panel.study}", f"{panel.title}. {panel.reading}")
    return drawn
