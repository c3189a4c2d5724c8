"""Comparisons of results that end in a finding: bit for bit, or within a bound."""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.forward import ErrorBound
from fa3_reference.problem import AttentionProblem
from fa3verify.candidates import Result
from fa3verify.metrics import error_ratio, lse_error
from fa3verify.properties.law import Finding


def out_rows(problem: AttentionProblem, rows: np.ndarray) -> np.ndarray:
    """Reorder a row mask from the layout of lse to (batch, seqlen_q, nheads, 1), or its packed form."""
    return (rows.T if problem.is_varlen else rows.transpose(0, 2, 1))[..., None]


def same_bits(
    what: str, got: Result, expected: Result, *, rows: np.ndarray | None = None, problem: AttentionProblem | None = None
) -> Finding | None:
    """Compare two results bit for bit; every NaN equals every NaN.

    Parameters
    ----------
    what : str
        What is compared, for the message.
    rows : bool array in the layout of lse, optional
        Rows to compare; needs ``problem``. All by default.
    """
    for name, a, b in (("out", got.out, expected.out), ("lse", got.lse, expected.lse)):
        if a is None or b is None:
            continue
        mask = None
        if rows is not None and problem is not None:
            mask = np.broadcast_to(rows if name == "lse" else out_rows(problem, rows), a.shape)
        if finding := same_values(f"{what}: {name}", a, b, mask):
            return finding
    return None


def same_values(what: str, got: np.ndarray, expected: np.ndarray, mask: np.ndarray | None = None) -> Finding | None:
    """Compare arrays of one float dtype bit for bit where ``mask`` holds; every NaN equals every NaN."""
    if got.dtype != expected.dtype:
        return Finding(f"{what} has dtype {got.dtype}, expected {expected.dtype}")
    bits = np.dtype(f"u{got.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        differs = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
        differs &= ~(np.isnan(got) & np.isnan(expected))
    if mask is not None:
        differs &= mask
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    values = f"got {float(got[index])!r}, expected {float(expected[index])!r} bit for bit"
    message = f"{what}{list(index)}: {values}; {int(differs.sum())} of {differs.size} values differ"
    return Finding(message, where=f"{what}{list(index)}")


def within(what: str, got: Result, expected: Result | tuple, bound: ErrorBound | tuple) -> Finding | None:
    """Compare a result with (out, lse) in float64 within (out, lse) bounds; an infinite bound asks nothing."""
    for name, a, b, limit in zip(("out", "lse"), got, expected, bound, strict=True):
        if a is None or b is None:
            continue
        if finding := close(f"{what}: {name}", np.asarray(a, np.float64), np.asarray(b, np.float64), limit):
            return finding
    return None


def close(what: str, got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> Finding | None:
    """Compare float64 arrays within a bound; -inf equals -inf, any other infinity or NaN needs an infinite bound."""
    with np.errstate(invalid="ignore"):
        ratio = error_ratio(lse_error(got, expected), bound)
    if ratio.size == 0 or ratio.max() <= 1:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    message = (
        f"{what}{list(index)}: got {float(got[index])!r}, expected {float(expected[index])!r}, "
        f"bound {float(bound[index]):.3e}, ratio {float(ratio[index]):.3g}"
    )
    return Finding(message, where=f"{what}{list(index)}", ratio=float(ratio[index]))
