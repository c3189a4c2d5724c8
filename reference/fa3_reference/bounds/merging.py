"""How far a kernel that merges partial results may be from the exact merge: the a-priori bound of out and lse.

It is step 8 of the bound of a forward (:func:`fa3_reference.bounds.epilogue.combine`), of parts that have no errors of
their own. reference/README.md derives it, "the bound of a merge".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

import numpy as np
from numpy.typing import NDArray

from fa3_reference.bounds.device import U_FP32
from fa3_reference.bounds.epilogue import combine, in_nats
from fa3_reference.bounds.forward import ErrorBound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import SplitResult
from fa3_reference.bounds.steps import FLOAT64, LN2, LOG2_E, stored_error
from fa3_reference.merging import by_rows

_ANY = KernelModel.any_order("fp32", "fp32")
_MODEL = replace(_ANY, order=replace(_ANY.order, combine="lse"))  # weights may be exponentials less the lse of all
_SHIFTED = 3  # roundings of a difference of two lse that becomes a part of the next one, and its change of base


def merge_bound(
    outs: NDArray[np.float64], lses: NDArray[np.float64], out_dtype: str, *, by_two: bool, stores: bool = False
) -> ErrorBound:
    """Bound the rounding error of every element of a merge in binary32.

    Parameters
    ----------
    outs, lses : float64 arrays
        What the kernel saw, as :func:`fa3_reference.merging.merge` takes them.
    out_dtype : {"fp16", "bf16", "fp32"}
        Format of the merged out.
    by_two : bool
        Whether results are merged by two, with an lse in binary32 after each. Otherwise the weights of all parts are
        exponentials of their distance from the largest lse, or from the lse of all.
    stores : bool
        Whether one part is merged after the other, in their order, and out is rounded to its format after each as well,
        as where a function merges two. Otherwise results are merged by two in any order, such as a tree.

    Returns
    -------
    ErrorBound
        float64, in the shapes of the merged out and lse. 0 where every part has an lse of -inf: the kernel must return
        exactly 0, and -inf. Weights below 2^-120 may be 0. It is proved for |out| below 2^100 and finite lse.
    """
    seen = ~np.isneginf(lses)
    values = np.where(by_rows(seen), outs, 0.0)
    out = np.zeros(outs.shape[1:])
    lse = np.zeros(lses.shape[1:])
    for head in range(outs.shape[-2]):
        rows = lses[..., head, :].reshape(len(lses), -1) * LOG2_E  # (parts, rows), in base 2
        of_head = values[..., head, :].reshape(*rows.shape, -1)
        with np.errstate(all="ignore"):
            apart = _any_order(rows) if by_two and not stores else 0.0
            parts = [_exact(o, own, apart) for o, own in zip(of_head, rows)]
            one_more = partial(_merged_in_turn, out_dtype=out_dtype if stores else "fp32")
            whole = reduce(one_more, parts) if by_two else _merged(parts)
            error = stored_error(whole.o, whole.error, out_dtype)
            lse_error = in_nats(whole, _MODEL) + FLOAT64 * (8 + len(parts) + 2 * np.abs(whole.lse))
        empty = np.isneginf(whole.lse)
        out[..., head, :] = np.where(empty[:, None], 0.0, error + whole.noise).reshape(out[..., head, :].shape)
        lse[..., head, :] = np.where(empty, 0.0, lse_error).reshape(lse[..., head, :].shape)
    return ErrorBound(out, lse)


def _any_order(lses: np.ndarray) -> np.ndarray:
    """Return what merges by two in any order may add to the error of an lse, (rows,): each what the largest distance
    of two parts, and the largest lse, may lose, and as much again where it is a weight."""
    finite = np.isfinite(lses)
    low = np.where(finite, lses, np.inf).min(axis=0)
    high = np.where(finite, lses, -np.inf).max(axis=0)
    lost = _SHIFTED * (high - low) + 2 * np.maximum(np.abs(high), np.abs(low))
    return np.where(finite.any(axis=0), 2 * (len(lses) - 1) * U_FP32 * lost, 0.0)


def _exact(o: np.ndarray, lse: np.ndarray, apart: np.ndarray | float) -> SplitResult:
    """Return a part without an error in out; its lse has the error of a change of base before or in the kernel."""
    nothing = np.zeros_like(o)
    error = np.where(np.isfinite(lse), apart, 0.0) + _of_lse(2 * U_FP32, lse)
    return SplitResult(o=o, error=nothing, noise=nothing, lse=lse, lse_error=error)


def _of_lse(unit: float, lse: np.ndarray) -> np.ndarray:
    """Return errors relative to an lse, 0 where it is infinite."""
    return np.where(np.isfinite(lse), unit * np.abs(lse), 0.0)


def _merged(parts: list[SplitResult]) -> SplitResult:
    """Merge parts; what has no part with an lse has out 0 and lse -inf."""
    # A weight has the float64 error of its lse, here and in the truth.
    noises = [part.noise + _of_lse(8 * FLOAT64, part.lse)[:, None] * np.abs(part.o) for part in parts]
    found = combine([part._replace(noise=noise) for part, noise in zip(parts, noises, strict=True)], _MODEL)
    # An exponential of the difference of two lse, each taken to base 2 by itself.
    size = sum(np.exp2(part.lse - found.lse)[:, None] * (np.abs(part.o) + part.error) for part in parts)
    apart = np.expm1(_of_lse(2 * LN2 * U_FP32, found.lse))[:, None] * size
    empty = np.isneginf(np.max([part.lse for part in parts], axis=0))
    wide = empty[:, None]
    return SplitResult(
        o=np.where(wide, 0.0, found.o),
        error=np.where(wide, 0.0, found.error + apart),
        noise=np.where(wide, 0.0, found.noise),
        lse=np.where(empty, -np.inf, found.lse),
        lse_error=np.where(empty, 0.0, found.lse_error),
    )


def _merged_in_turn(before: SplitResult, part: SplitResult, *, out_dtype: str) -> SplitResult:
    """Merge one part more; the next lse may be the last one plus the softplus of the difference."""
    found = _merged([before, part])
    gap = np.maximum(part.lse - before.lse, 0.0)
    lse_error = found.lse_error + _of_lse(_SHIFTED * U_FP32, gap) + _of_lse(2 * U_FP32, found.lse)
    return found._replace(error=stored_error(found.o, found.error, out_dtype), lse_error=lse_error)
