"""Error figures of one run. Every figure is defined here, once, with its unit."""

from __future__ import annotations

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.bounds.forward import ErrorBound
from fa3_reference.formats import FORMATS, encode, ulp
from fa3verify.candidates import Result

# name -> (unit, meaning); "seen" is against the truth of the operands the kernel saw, "unrounded" of the original inputs
MEASURES: dict[str, tuple[str, str]] = {
    "outputs": ("1", "output values compared"),
    "nonfinite": ("1", "output values that are NaN or Inf although the truth and its bound are finite"),
    "unbounded": ("1", "output values for which the bound promises nothing"),
    "rms": ("1", "root mean square of the exact output"),
    "rmse_seen": ("1", "root mean square error"),
    "rmse_unrounded": ("1", "root mean square error, as the FlashAttention-3 paper tabulates it"),
    "rel_rmse_seen": ("1", "rmse_seen / rms"),
    "rel_rmse_unrounded": ("1", "rmse_unrounded / rms"),
    "max_error": ("1", "largest absolute error, against seen"),
    "ulp_p50": ("ulp", "median absolute error in ulp of the output format at the exact value"),
    "ulp_p99": ("ulp", "99th percentile of the same"),
    "ulp_p999": ("ulp", "99.9th percentile of the same"),
    "ulp_max": ("ulp", "maximum of the same"),
    "ratio_max": ("1", "largest error / bound; above 1 the kernel is wrong, or the bound is (reports/findings/0001)"),
    "ratio_median": ("1", "median error / bound"),
    "ratio_lse_max": ("1", "largest lse error / bound"),
    "lse_max_error": ("nat", "largest absolute lse error, against seen"),
    "bias": ("1", "signed: regression gain of the output on the truth, minus 1"),
    "bit_equal": ("1", "share of outputs equal to the correctly rounded truth"),
    "bits_differing": ("1", "values of out and lse whose bits differ from the twin's; only for kernels that have one"),
}


def error_ratio(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return |error| / bound with 0/0 = 0; a NaN error is infinitely wrong unless the bound is infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(error) / bound
    ratio = np.where((error == 0) & (bound == 0), 0.0, ratio)
    ratio = np.where(np.isnan(error), np.inf, ratio)
    return np.where(np.isinf(bound), 0.0, ratio)


def lse_error(lse: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return lse - truth where -inf equals -inf; any other infinity is infinitely wrong."""
    lse = lse.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(lse == truth, 0.0, np.where(np.isinf(lse), np.inf, lse - truth))


def bits_differing(result: Result, twin: Result) -> int:
    """Count values of out and lse whose bit patterns differ (NaN equals NaN only bit for bit)."""
    count = 0
    for a, b in zip(result, twin, strict=True):
        if a is not None and b is not None:
            bits = f"u{a.dtype.itemsize}"
            count += int((np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)).sum())
    return count


def measure(
    result: Result, seen: Attention, unrounded: Attention | None, bound: ErrorBound, out_dtype: str
) -> dict[str, float]:
    """Compute every figure of :data:`MEASURES` that the arguments allow.

    Non-finite truths are left out; a non-finite output against a finite truth and bound counts as ``nonfinite`` and makes
    ``ratio_max`` infinite, and is left out of the averages.
    """
    out = result.out.astype(np.float64)
    fmt = FORMATS[out_dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        error = out - seen.out
        judged = np.isfinite(seen.out) & np.isfinite(bound.out)
        lost = judged & ~np.isfinite(out)
        good = judged & ~lost
        ratio = error_ratio(error, bound.out)
        ratio = np.where(judged, ratio, 0.0)
        in_ulp = np.abs(error[good]) / ulp(seen.out[good], fmt)
        figures = {
            "outputs": out.size,
            "nonfinite": int(lost.sum()),
            "unbounded": int((~judged).sum()),
            "rms": _rms(seen.out[good]),
            "rmse_seen": _rms(error[good]),
            "max_error": float(np.max(np.abs(error[good]), initial=0.0)),
            "ratio_max": float(np.max(ratio, initial=0.0)),
            "ratio_median": float(np.median(ratio[judged])) if judged.any() else 0.0,
            "bias": _gain(out[good], seen.out[good]),
            "bit_equal": float(np.mean(encode(seen.out[good], fmt, "ieee").astype(np.float64) == out[good]))
            if good.any()
            else 1.0,
        }
        quantiles = np.quantile(in_ulp, [0.5, 0.99, 0.999, 1.0]) if in_ulp.size else np.zeros(4)
        figures |= dict(zip(("ulp_p50", "ulp_p99", "ulp_p999", "ulp_max"), map(float, quantiles), strict=True))
        figures["rel_rmse_seen"] = _relative(figures["rmse_seen"], figures["rms"])
        if unrounded is not None:
            figures["rmse_unrounded"] = _rms((out - unrounded.out)[good & np.isfinite(unrounded.out)])
            figures["rel_rmse_unrounded"] = _relative(figures["rmse_unrounded"], figures["rms"])
        if result.lse is not None:
            figures |= _lse_figures(result.lse, seen.lse, bound.lse)
    return figures


def _lse_figures(lse: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> dict[str, float]:
    error = lse_error(lse, truth)
    ratio = np.where(np.isnan(truth), 0.0, error_ratio(error, bound))
    finite = np.abs(error[np.isfinite(error)])
    return {"ratio_lse_max": float(np.max(ratio, initial=0.0)), "lse_max_error": float(np.max(finite, initial=0.0))}


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _relative(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else float("inf"))


def _gain(out: np.ndarray, truth: np.ndarray) -> float:
    power = float(np.dot(truth, truth))
    return float(np.dot(out, truth)) / power - 1 if power else 0.0
