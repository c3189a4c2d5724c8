"""This module says how many bits an output loses over the ideal kernel of its format: the one number that ranks
kernels.

The ideal kernel computes exactly on the operands that a kernel was given and rounds its outputs once, to the same
format. A row of outputs (one query, one head) loses log2(its root mean square error / that of the ideal kernel), where
neither error counts as less than that of an average rounding, ulp / sqrt(12): a row that the ideal kernel has exactly,
as with one visible key, would divide by 0. Logarithms of rows are averaged, so that a few large outputs decide nothing;
then families of inputs are averaged, each with the same weight. No output is nearer to the truth than the rounded
truth, so that no row loses less than 0 bits, and the ideal kernel loses exactly 0.

The cases are those drawn with seed 0, which every campaign judges whatever its own seed is: families of few blocks or
heads move the mean by up to 0.1 bit from draw to draw, all kernels alike, so that kernels compare on one draw. Cases
that ask for another output format than the kernel's own are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

DEFINITION = (
    "Bits lost: log2 of a row's RMS error over that of the ideal kernel, which rounds the exact output once to the "
    "same format; mean over rows, then over input families"
)
SEED = 0  # of the cases that count
_SHOWN = 4  # kernels that one line names


def of_rows(error: np.ndarray, ideal: np.ndarray, ulps: np.ndarray, judged: np.ndarray) -> tuple[float, int]:
    """Return the bits that an output array loses, and the number of outputs that they are a mean over.

    Parameters
    ----------
    error, ideal : float64 arrays, (..., head_dim)
        Of the kernel and of the ideal kernel: value - exact value.
    ulps : float64 array of the same shape
        Spacing of the output format at the exact value.
    judged : bool array of the same shape
        Where the exact value, its bound and its rounding are finite; nothing else counts.

    Returns
    -------
    tuple of float and int
        The bits are 0 or more, each output with those of its row; infinite where a judged error is not finite, 0 where
        nothing is judged.
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
    """Sum of squares of what is judged of every row."""
    return np.square(np.where(judged, x, 0.0)).sum(axis=-1)


def counts(case: Mapping[str, Any] | None) -> bool:
    """Tell whether a judged case, in JSON, is one of those that the number is over; outputs of no case are not."""
    return case is not None and case["recipe"]["seed"] == SEED and "out_dtype" not in case["changes"]


def of_family(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the bits that a family loses: the mean over the outputs of its cases that count.

    Parameters
    ----------
    records : iterable of mapping
        Judged cases with ``case`` and ``measures``.

    Returns
    -------
    float, optional
        Infinite where an output is not finite; None where no case counts or its operation has no such figure.
    """
    measures = [r["measures"] for r in records if "bits_lost" in r["measures"] and counts(r.get("case"))]
    weights = [m["outputs"] - m["unbounded"] for m in measures]
    if not sum(weights):
        return None
    return math.fsum(w * m["bits_lost"] for w, m in zip(weights, measures, strict=True) if w) / sum(weights)


def of_kernel(families: Sequence[Mapping[str, Any]], complete: Iterable[str]) -> dict[str, Any] | None:
    """Return the number of a kernel: the mean over its families, and the family that loses most.

    Parameters
    ----------
    families : sequence of mapping
        Figures by family, as a summary has them.
    complete : iterable of str
        Families that count. None of them may be missing, for a mean over others ranks nothing.

    Returns
    -------
    dict, optional
        ``mean``, ``worst`` (both in bits), ``worst_family`` and the number of ``families``; None where a family is
        missing or has no figure.
    """
    found = {f["family"]: f.get("bits_lost") for f in families}
    bits = {name: found.get(name) for name in complete}
    lost = {name: x for name, x in bits.items() if x is not None}
    if not lost or len(lost) < len(bits):
        return None
    worst = max(lost, key=lambda name: lost[name])
    return {
        "mean": math.fsum(lost.values()) / len(lost),
        "worst": lost[worst],
        "worst_family": worst,
        "families": len(lost),
    }


def line(kernels: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of text about the kernels of a summary, the one that loses most first; empty without a number.

    >>> lost = {"mean": 0.141, "worst": 0.41, "worst_family": "ramp_128", "families": 27}
    >>> line([{"name": "twin.fp16", "dtype": "fp16", "bits_lost": lost}])
    'twin.fp16 loses 0.14 bits over the ideal fp16 kernel, most in ramp_128: 0.41'
    """
    known = [(kernel, lost) for kernel in kernels if (lost := kernel.get("bits_lost"))]
    known.sort(key=lambda each: -float(each[1]["mean"]))
    if len(known) == 1:
        ((kernel, lost),) = known
        most = f"most in {lost['worst_family']}: {bits_text(lost['worst'])}"
        return f"{kernel['name']} loses {bits_text(lost['mean'])} bits over the ideal {kernel['dtype']} kernel, {most}"
    each = [
        f"{kernel['name']} {bits_text(lost['mean'])} ({lost['worst_family']} {bits_text(lost['worst'])})"
        for kernel, lost in known[:_SHOWN]
    ]
    more = f", and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    head = "bits lost over the ideal kernel of each format (and in its worst family)"
    return f"{head}: {', '.join(each)}{more}" if each else ""


def bits_text(bits: Any) -> str:
    """Write bits with two decimals; a summary that was read again has an infinite number as a text.

    >>> bits_text(0.305), bits_text("Infinity")
    ('0.30', 'infinitely many')
    """
    return f"{float(bits):.2f}" if math.isfinite(float(bits)) else "infinitely many"
