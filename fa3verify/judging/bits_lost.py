"""Bits lost: how many bits an output loses over the ideal kernel of its format, the number that ranks kernels.

The ideal kernel computes exactly on the operands that a kernel was given and rounds its outputs once, to the same
format. A row of outputs (one query, one head) loses log2(its root mean square error / that of the ideal kernel), where
neither error counts as less than that of an average rounding, ulp / sqrt(12): a row that the ideal kernel has exactly,
as with one visible key, would divide by 0. Logarithms of rows are averaged, so that a few large outputs decide nothing;
then families of inputs are averaged, each with the same weight. No output is nearer to the truth than the rounded
truth, so that no row loses less than 0 bits, and the ideal kernel loses exactly 0.

The cases are those drawn with seed 0, which every campaign judges whatever its own seed is: families of few blocks or
heads move the mean by up to 0.1 bit from draw to draw, all kernels alike, so that kernels compare on one draw. Cases
that ask for another output format than the kernel's own are left out. :func:`of_rows` is used by
:mod:`fa3verify.judging.metrics` for each case, :func:`of_kernel` by :mod:`fa3verify.campaign.summary` for a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

DEFINITION = (
    "Bits lost: log2 of a row's RMS error over that of the ideal kernel, which rounds the exact output once to the "
    "same format; mean over rows, then over input families"
)
SEED = 0  # the seed of the cases that count


def of_rows(error: np.ndarray, ideal: np.ndarray, ulps: np.ndarray, judged: np.ndarray) -> tuple[float, int]:
    """Return the bits that an output array loses, and the number of outputs that they are a mean over.

    Parameters
    ----------
    error, ideal : float64 arrays, (..., head_dim)
        Errors of the kernel and of the ideal kernel: value - exact value.
    ulps : float64 array of the same shape
        Spacing of the output format at the exact value.
    judged : bool array of the same shape
        Where the exact value, its bound and its rounding are finite; nothing else counts.

    Returns
    -------
    tuple of float and int
        The bits are 0 or more: the mean over judged outputs, each of which loses what its row loses. Infinite where a
        judged error is not finite, 0 where nothing is judged.
    """
    weights = judged.sum(axis=-1)
    rows = weights > 0
    if not rows.any():
        return 0.0, 0
    if not np.isfinite(error[judged]).all():
        return math.inf, int(weights.sum())
    least = _power(ulps, judged)[rows] / 12
    ratio = np.maximum(_power(error, judged)[rows], least) / np.maximum(_power(ideal, judged)[rows], least)
    return float(np.average(0.5 * np.log2(ratio), weights=weights[rows])), int(weights.sum())


def _power(x: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """Return for every row the sum of squares of its judged elements."""
    return np.square(np.where(judged, x, 0.0)).sum(axis=-1)


@dataclass(frozen=True, slots=True)
class BitsLost:
    """The number that ranks a kernel, in bits: the mean over its families, and the family that loses most."""

    mean: float
    worst: float
    worst_family: str
    families: int


def of_kernel(families: Mapping[str, float | None], complete: Iterable[str]) -> BitsLost | None:
    """Return the number that ranks a kernel: the mean of its families, each with the same weight.

    Parameters
    ----------
    families : mapping
        Bits that each family loses, None for a family that does not have the figure.
    complete : iterable of str
        Families that count. All of them must be there: means over different families cannot be compared.

    Returns
    -------
    BitsLost, optional
        None where a family is missing or does not have the figure, and where no family counts.
    """
    bits = {name: families.get(name) for name in complete}
    lost = {name: x for name, x in bits.items() if x is not None}
    if not lost or len(lost) < len(bits):
        return None
    worst = max(lost, key=lambda name: lost[name])
    return BitsLost(math.fsum(lost.values()) / len(lost), lost[worst], worst, len(lost))


def bits_text(bits: float) -> str:
    """Write bits with two decimals.

    >>> bits_text(0.305), bits_text(math.inf)
    ('0.30', 'infinitely many')
    """
    return f"{bits:.2f}" if math.isfinite(bits) else "infinitely many"
