"""Error over bound of every individual of a colony, before and after the output's last rounding.

The truth is float64 and has an error of its own (:mod:`fa3_reference.attention`). It is subtracted from the kernel's
error before the division, so that the truth can never be the reason for a ratio above 1. In a colony each row has
channels of Q and K of its own and 0 in all others. Products with 0 are exact, so that only a row's own channels count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from fa3_kernels.plan.families import OURS
from fa3_reference.attention import Attention, attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.device import FP32_MIN_NORMAL
from fa3_reference.bounds.forward import ErrorBound
from fa3_reference.bounds.steps import LOG2_E, rounded_error
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.operations.operation import difference, error_ratio
from fa3verify.search.climb import Ratios
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.guide import Guide

Bound = Callable[[AttentionProblem, Operands, KernelModel], ErrorBound]
Pair = tuple[np.ndarray, np.ndarray]
_TINY = 2.0**-100  # smaller outputs have no errors but underflow


class Runs(Protocol):
    """Runs a colony on a kernel, as :class:`fa3verify.search.objectives.Hunted` does."""

    def config(self, colony: ForwardColony) -> Any:
        """Return its configuration for the colony's problem."""

    def model(self, config: Any) -> KernelModel:
        """Return the order of operations that its bound is for."""
        ...

    def run(self, colony: ForwardColony, config: Any, truth: Attention) -> Pair:
        """Return out before its last rounding and lse, which is exact where the kernel has none."""
        ...


@np.errstate(all="ignore")
def judge(colony: ForwardColony, guide: Guide | None = None, *, bound: Bound, kernel: Runs) -> Ratios:
    """Run a kernel, the truth and the bound on a colony.

    Parameters
    ----------
    colony : ForwardColony
    guide : Guide, optional
        The colony's, where it is known.
    bound : callable
        A function like :func:`fa3_reference.bounds.forward.forward_bound`.
    kernel : Runs

    Returns
    -------
    mapping
        Error over bound: ``out`` (problems, columns) before the last rounding, ``rounded`` after it, and ``lse``
        (problems,). ``rounded`` is an estimate: it rounds the output that the kernel has before its last rounding.
        ``rest`` is ``out`` after the known errors of rounding and flushing P, which drown all others, are subtracted
        from error and bound. ``out_bound``, ``rest_bound`` and ``lse_bound`` are log2 of the bounds, those of the
        output relative to sum P |v|.
    """
    guide = guide or Guide.of(colony)
    problem = colony.problem
    operands = colony.operands
    config = kernel.config(colony)
    truth = attention(problem, *operands.dequantized(problem))
    limit = sound_bound(colony, bound)(problem, operands, replace(kernel.model(config), out_dtype="fp32"))
    out, got_lse = kernel.run(colony, config, truth)
    lse = truth.lse.reshape(-1)
    size, out_floor, lse_floor = truth_error(colony, lse)
    out, exact, out_limit = (x.reshape(len(lse), -1) for x in (out, truth.out, limit.out))
    fmt = FORMATS[config.out_dtype]
    known = guide.rounding @ np.abs(colony.v * colony.per_key(colony.environment.v_descale)).T
    known = known / guide.exact.sum(1)[:, None]
    # Without a tenth of the bound left there is nothing to divide by.
    has_rest = (size > _TINY) & (known < 0.9 * out_limit)
    stored = encode(out.astype(np.float64), fmt, "ieee")
    return {
        "out": ratio(out, exact, out_limit, out_floor),
        "rounded": ratio(stored, exact, rounded_error(exact, out_limit, fmt), out_floor),
        "lse": ratio(got_lse.reshape(-1), lse, limit.lse.reshape(-1), lse_floor),
        "rest": np.where(has_rest, ratio(out, exact, out_limit - known, out_floor + known), 0.0),
        "out_bound": np.log2(out_limit / size),
        "rest_bound": np.log2((out_limit - known) / size),
        "lse_bound": np.log2(limit.lse.reshape(-1)),
    }


def sound_bound(colony: ForwardColony, bound: Bound) -> Bound:
    """Return a bound that is infinite for rows in which another family than ours is known to return NaN.

    These are rows whose factor of the scores, or the product of descales in it, is below binary32's normal numbers
    (reports/findings/0003).
    """
    if colony.island.family == OURS:
        return bound
    descales = colony.q_descale.astype(np.float64)[:, None] * colony.per_key(colony.environment.k_descale)
    lost = np.min(np.minimum(colony.factors, descales), axis=1) < FP32_MIN_NORMAL

    def limited(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
        out, lse = bound(problem, operands, model)
        rows = lost.reshape(lse.shape)
        return ErrorBound(np.where(rows.transpose(0, 2, 1)[..., None], np.inf, out), np.where(rows, np.inf, lse))

    return limited


def ratio(got: np.ndarray, exact: np.ndarray, limit: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Return error over ``limit``, after ``floor`` is subtracted from the error."""
    error = np.abs(difference(got, exact))
    return error_ratio(np.where(np.isfinite(error), np.maximum(error - floor, 0.0), error), limit)


def truth_error(colony: ForwardColony, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sum P |v| (problems, columns), and bounds of the truth's own float64 errors: of out likewise, of lse
    (problems,). ``lse`` is the truth's, (problems,).
    """
    scale = np.abs(colony.factors) / LOG2_E
    spread = (scale * np.einsum("rw,rkw->rk", np.abs(colony.q), np.abs(colony.k))).max(1)
    softcap = colony.environment.softcap
    score_range = 2 * np.minimum(spread, softcap or np.inf)
    relative = 2.0**-53 * ((colony.island.width + 8) * spread + score_range + colony.island.keys + 8)
    v = np.abs(colony.v) * colony.per_key(colony.environment.v_descale)
    s = scale * colony.raw_scores
    s = np.where(np.isfinite(s), s, 0.0)
    s = softcap * np.tanh(s / softcap) if softcap else s
    p = np.where(colony.island.visible, np.exp(np.minimum(s - lse[:, None], 0.0)), 0.0)
    weighted = p @ v.T
    least = colony.island.keys * 2.0**-1022 * v.max(1)
    return weighted, 2 * relative[:, None] * weighted + least, relative + 2.0**-53 * np.abs(lse)
