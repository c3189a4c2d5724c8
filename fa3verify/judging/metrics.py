"""Error figures of one judged case: each is defined here, with its unit, and computed by :func:`figures`.

:mod:`fa3verify.judging.judgement` calls them; :mod:`fa3verify.judging.family` pools the figures of several cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fa3_reference.formats import FORMATS, round_to, ulp
from fa3verify import operations
from fa3verify.judging import bits_lost
from fa3verify.operations import Operation, Output, Outputs
from fa3verify.operations.operation import difference, error_ratio

# name -> (unit, meaning), of an operation's main outputs; "seen" is against the truth of the operands the kernel saw,
# "unrounded" of the original inputs
MEASURES: dict[str, tuple[str, str]] = {
    "outputs": ("1", "output values compared"),
    "nonfinite": ("1", "output values that are NaN or Inf although the truth and its bound are finite"),
    "unbounded": ("1", "output values for which the bound promises nothing"),
    "rms": ("1", "root mean square of the exact output"),
    "rmse_seen": ("1", "root mean square error"),
    "rmse_unrounded": ("1", "root mean square error, as the FlashAttention-3 paper tabulates it"),
    "rel_rmse_seen": ("1", "rmse_seen / rms"),
    "rel_rmse_unrounded": ("1", "rmse_unrounded / rms"),
    "rel_rmse_ideal": ("1", "root mean square error of the exact output rounded once / rms"),
    "bits_lost": ("bit", "log2 of a row's root mean square error over that of the exact output rounded once, mean"),
    "max_error": ("1", "largest absolute error, against seen"),
    "ulp_p50": ("ulp", "median absolute error in ulp of the output format at the exact value"),
    "ulp_p99": ("ulp", "99th percentile of the same"),
    "ulp_p999": ("ulp", "99.9th percentile of the same"),
    "ulp_max": ("ulp", "maximum of the same"),
    "ratio_max": ("1", "largest error / bound; above 1 the kernel is wrong, or its order is not the one it states"),
    "ratio_median": ("1", "median error / bound"),
    "outside": (
        "1",
        "values that the stated order of operations cannot give, assuming the tensor-core model; where one is stated",
    ),
    "enclosed_median": ("1", "median error / largest error that the order of operations can give"),
    "determined": ("1", "share of outputs of which the order of operations leaves one value"),
    "bias": ("1", "signed: regression gain of the output on the truth, minus 1"),
    "bit_equal": ("1", "share of outputs equal to the correctly rounded truth"),
    "bits_differing": ("1", "output values whose bits differ from the twin's; only for kernels that have one"),
}


def measures_of(operation: Operation) -> dict[str, tuple[str, str]]:
    """Return name -> (unit, meaning) of every figure of an operation."""
    sides = {}
    for output in operation.sides:
        sides[output.figure("ratio")] = ("1", f"largest {output.words} error / bound")
        sides[output.figure("max")] = (output.unit, f"largest absolute {output.words} error, against seen")
        sides[output.figure("rms")] = (output.unit, f"root mean square {output.words} error, against seen")
    return MEASURES | sides


def all_measures(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return name -> (unit, meaning) of every figure of the operations of these names."""
    measures = dict(MEASURES)
    for name in dict.fromkeys(names):
        measures |= measures_of(operations.find(name))
    return measures


def bits_differing(got: Outputs, twin: Outputs, *, equal_nans: bool = False) -> int:
    """Count values whose bits differ in the outputs that both have; with ``equal_nans`` all NaN are equal."""
    shared = got.keys() & twin.keys()
    return sum(int(other_bits(got[name], twin[name], equal_nans=equal_nans).sum()) for name in shared)


def bits_of(x: np.ndarray) -> np.ndarray:
    """Return the bits of floats as unsigned integers of the same size."""
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


@np.errstate(invalid="ignore")
def other_bits(a: np.ndarray, b: np.ndarray, *, equal_nans: bool = True) -> np.ndarray:
    """Return where two arrays of one float dtype differ in bits, -0 from +0 too; with ``equal_nans`` all NaN are
    equal.
    """
    return (bits_of(a) != bits_of(b)) & ~(equal_nans & np.isnan(a) & np.isnan(b))


def share_of(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return |error| / allowed, element by element, with 0/0 = 1."""
    return np.where((error == 0) & (allowed == 0), 1.0, error_ratio(error, allowed))


def enclosed(got: Outputs, truth: Outputs, enclosure: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Compare outputs with the ranges (low, high) that an order of operations leaves them.

    ``outside`` counts values of all outputs; the other figures are of the first output alone. Empty where there is no
    enclosure. A NaN is outside wherever the range is bounded.
    """
    if not enclosure:
        return {}
    outside = 0
    for name, (low, high) in enclosure.items():
        if name in got:
            value = got[name].astype(np.float64)
            outside += int((~((low <= value) & (value <= high)) & ~(np.isneginf(low) & np.isposinf(high))).sum())
    name, (low, high) = next(iter(enclosure.items()))
    with np.errstate(invalid="ignore"):
        error = np.abs(got[name].astype(np.float64) - truth[name])
        allowed = np.maximum(np.abs(low - truth[name]), np.abs(high - truth[name]))
        judged = np.isfinite(allowed) & np.isfinite(error)
        ratio = share_of(error, allowed)[judged]
    return {
        "outside": outside,
        "enclosed_median": float(np.median(ratio)) if ratio.size else 1.0,
        "determined": float(np.mean(low[judged] == high[judged])) if ratio.size else 1.0,
    }


@np.errstate(invalid="ignore", over="ignore")
def figures(
    operation: Operation, got: Outputs, seen: Outputs, unrounded: Outputs | None, bound: Outputs, config: Any
) -> dict[str, float]:
    """Compute every figure of :func:`measures_of` that the arguments allow.

    All outputs, truths and bounds are arrays by name of output; ``unrounded`` is None where nobody asked for it. The
    main outputs are taken together. Elements whose truth or bound is not finite are left out; an output that is not
    finite although these are counts as ``nonfinite``, makes ``ratio_max`` infinite, and is left out of averages.
    """
    main = [output for output in operation.outputs if output.main]

    def joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([arrays[output.name].astype(np.float64).ravel() for output in main])

    fmt = FORMATS[main[0].format(config)]
    ratio = np.concatenate([o.ratio(got[o.name], seen[o.name], bound[o.name]).ravel() for o in main])
    out = joined(got)
    truth = joined(seen)
    limit = joined(bound)
    error = out - truth
    judged = np.isfinite(truth) & np.isfinite(limit)
    lost = judged & ~np.isfinite(out)
    good = judged & ~lost
    ratio = np.where(judged, ratio, 0.0)
    exact = np.where(judged, truth, 0.0)
    rounded = round_to(exact, fmt, "ieee")
    spacing = ulp(exact, fmt)
    in_ulp = np.abs(error[good]) / spacing[good]
    result = {
        "outputs": out.size,
        "nonfinite": int(lost.sum()),
        "unbounded": int((~judged).sum()),
        "rms": _rms(truth[good]),
        "rmse_seen": _rms(error[good]),
        "max_error": float(np.max(np.abs(error[good]), initial=0.0)),
        "ratio_max": float(np.max(ratio, initial=0.0)),
        "ratio_median": float(np.median(ratio[judged])) if judged.any() else 0.0,
        "bias": _gain(out[good], truth[good]),
        "bit_equal": float(np.mean(rounded[good] == out[good])) if good.any() else 1.0,
    }
    quantiles = np.quantile(in_ulp, [0.5, 0.99, 0.999, 1.0]) if in_ulp.size else np.zeros(4)
    result |= dict(zip(("ulp_p50", "ulp_p99", "ulp_p999", "ulp_max"), map(float, quantiles), strict=True))
    result["rel_rmse_seen"] = _relative(result["rmse_seen"], result["rms"])
    finite = good & np.isfinite(rounded)
    result["rel_rmse_ideal"] = _relative(_rms((rounded - exact)[finite]), result["rms"])
    if not operation.judges_choices:  # an ideal kernel makes its own choices, of which nothing is known
        shapes = [seen[output.name].shape for output in main]
        ranked = judged & np.isfinite(rounded)
        result["bits_lost"] = _bits_lost((error, rounded - exact, spacing, ranked), shapes)
    if unrounded is not None:
        original = joined(unrounded)
        result["rmse_unrounded"] = _rms((out - original)[good & np.isfinite(original)])
        result["rel_rmse_unrounded"] = _relative(result["rmse_unrounded"], result["rms"])
    for output in operation.sides:
        if output.name in got:
            result |= _side_figures(output, *(x[output.name] for x in (got, seen, bound)))
    return result


def _bits_lost(joined: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> float:
    """Return the bits that all main outputs lose, from four joined arrays that are split again into their shapes.

    The arrays are errors, errors of the ideal kernel, spacings of the format, and which elements are judged.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    apart = zip(*(np.split(x, ends) for x in joined), strict=True)
    each = [bits_lost.of_rows(*(x.reshape(shape) for x in of)) for of, shape in zip(apart, shapes, strict=True)]
    return math.fsum(bits * count for bits, count in each if count) / (sum(count for _, count in each) or 1)


def _side_figures(output: Output, got: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> dict[str, float]:
    """Return the figures of one output beside the main ones; a truth of NaN has ratio 0."""
    error = difference(got, truth)
    ratio = np.where(np.isnan(truth), 0.0, error_ratio(error, bound))
    finite = np.abs(error[np.isfinite(error)])
    return {
        output.figure("ratio"): float(np.max(ratio, initial=0.0)),
        output.figure("max"): float(np.max(finite, initial=0.0)),
        output.figure("rms"): _rms(finite),
    }


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _relative(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else float("inf"))


def _gain(out: np.ndarray, truth: np.ndarray) -> float:
    power = float(np.dot(truth, truth))
    return float(np.dot(out, truth)) / power - 1 if power else 0.0
