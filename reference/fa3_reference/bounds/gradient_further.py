"""A-priori bounds of the rounding error of the gradients of sinks and of a bias.

The gradient of a sink is dsink = -sum P_sink (D - dlse) over a head's rows. The kernel takes P_sink = exp(sink - lse)
by one exponential in binary32, D = rowsum(dO O) as for the other gradients (step B3, in reference/README.md), and
products and sums in binary32 in any order of rows and sequences. A kernel that computes its own forward, or D from P
and dP, may compute dS of a sink like that of a key, rounded to 16 bits.

The gradient of a bias is dS, summed over all pairs that share an element of it. The dS of a pair is P (dP - D), the
gradient of a score behind the softcap (steps B1 to B5). It may be summed as it is or as it enters the products of dQ
and dK, rounded to 16 bits; the sums over shared axes are in binary32, in any order, and the result is rounded to the
format of the bias. The gradients of Q, K and V are bounded in :mod:`fa3_reference.bounds.backward`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import sinks_of
from fa3_reference.bounds.backward import head_of, pairs_of, returned_by
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, U_FP32
from fa3_reference.bounds.gradient_steps import Sum, added, is_in_range, stored
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.steps import LN2, LOG2_E, OUTWARD, gamma, log_error
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3_reference.terms import add_to_bias

_ROUNDINGS = 4  # of an exponent (sink - lse) log2(e): log2(e) for each of the two, and the two products


@np.errstate(all="ignore")
def sinks_gradient_bound(
    problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel
) -> NDArray[np.float64]:
    """Bound the rounding error of the gradient of every sink.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed, with sinks.
    operands : BackwardOperands
        What the kernel saw; its lse holds the sinks.
    model : BackwardModel
        The order of the kernel. If it computes D from the given dO and O, only the additions of D and the exponential
        have errors. In any other order everything that dS depends on has.

    Returns
    -------
    float64 array (nheads,)
        Bounds of the distance from :func:`fa3_reference.attention_bwd.sinks_gradient` of the same out and lse, or of
        exact ones where the kernel computes its own forward. inf where a number may overflow or is not finite; 0 for a
        sink of -inf.

    Raises
    ------
    ValueError
        If the problem has no sinks.
    """
    if (model.forward, model.dots) == ("given", "out"):
        return _of_given_dots(problem, operands, model)
    sinks_of(problem, operands.sinks)
    errors = np.full(problem.nheads, 0.0 if is_in_range(problem) else np.inf)
    sizes = np.zeros(problem.nheads)
    returned = returned_by(problem, operands, model)
    for seq in problem.sequences():
        for head in range(problem.nheads):
            h = head_of(problem, operands, returned, seq, head)
            if h.sink is None:
                errors[head] += 0 * np.sum(h.dout * h.out)  # NaN unless all are finite
                continue
            x = pairs_of(problem, h, model)
            errors[head] += np.sum(x.ds_error[:, -1])
            sizes[head] += np.sum(np.abs(x.ds[:, -1]) + x.ds_error[:, -1])
    rows = sum(seq.seqlen_q for seq in problem.sequences())
    errors = (errors + gamma(rows + 2) * sizes + rows * 2 * FP32_MIN_NORMAL * (sizes > 0)) * OUTWARD
    return np.where(np.isfinite(errors) & (sizes < FP32_MAX), errors, np.inf)


@np.errstate(all="ignore")
def _of_given_dots(problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel) -> NDArray[np.float64]:
    # the bound (nheads,) of a kernel that computes D from the dO and O it is given; sums run over rows
    sinks = sinks_of(problem, operands.sinks)[:, None]
    is_sink = np.logical_not(np.isneginf(sinks))
    error = np.zeros(problem.nheads)
    size = np.zeros(problem.nheads)
    rows = 0
    for seq in problem.sequences():
        out, dout = (problem.rows_q(x, seq).astype(np.float64) for x in (operands.out, operands.dout))
        lse = problem.rows_lse(operands.lse, seq).astype(np.float64)  # (nheads, seqlen_q)
        dlse = np.zeros_like(lse) if operands.dlse is None else problem.rows_lse(operands.dlse, seq)
        dots = np.sum(out * dout, axis=2).T
        sizes = np.sum(np.abs(out * dout), axis=2).T
        depth = model.dots_depth or out.shape[2]
        flushed = FP32_MIN_NORMAL * (np.sum(np.abs(out) + np.abs(dout), axis=2).T + 2 * out.shape[2])
        off = (gamma(depth) + 2.0**-44) * sizes + flushed
        off = off + U_FP32 * (np.abs(dots) + off + np.abs(dlse)) * (operands.dlse is not None)
        x = (sinks - lse) * LOG2_E
        reach = (np.abs(sinks) + np.abs(lse)) * LOG2_E
        shift = LN2 * (gamma(_ROUNDINGS) * reach + U_FP32 * np.abs(x)) + log_error(model.exp_error)
        p = np.where(is_sink, np.exp2(x), 0.0)
        p_error = np.where(is_sink, p * np.expm1(shift) + FP32_MIN_NORMAL, 0.0)
        t = np.abs(dots - dlse)
        error += np.sum((p + p_error) * off + p_error * t, axis=1)
        size += np.sum((p + p_error) * (t + off), axis=1)
        rows += seq.seqlen_q
    error = error + gamma(rows + 2) * (size + error) + rows * 2 * FP32_MIN_NORMAL * is_sink[:, 0]
    error = error * OUTWARD
    return np.where(np.isfinite(error) & (size + error < FP32_MAX), error, np.inf)


@np.errstate(all="ignore")
def bias_gradient_bound(
    problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel
) -> NDArray[np.float64]:
    """Bound the rounding error of every element of the gradient of a bias.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed, with a bias in the format of the operands or in binary32.
    operands : BackwardOperands
        What the kernel saw.
    model : BackwardModel
        The order of the kernel.

    Returns
    -------
    float64 array of shape ``problem.term_shape``
        Bounds of the distance from the gradient that :func:`fa3_reference.attention_bwd.attention_bwd` adds up; 0 where
        all pairs are hidden. inf where a number may overflow or is not finite, and everywhere where softmax_scale or
        softcap makes a factor outside the normal range of binary32.
    """
    totals = np.zeros((3, *problem.term_shape))
    # dS may be summed before it is rounded, or after, whatever the order says of products
    model = replace(model, scales="any", parts="fp32", out_dtype=model.dtype if "bias" in problem.serving else "fp32")
    returned = returned_by(problem, operands, model)
    for seq in problem.sequences():
        for head in range(problem.nheads):
            x = pairs_of(problem, head_of(problem, operands, returned, seq, head), model, is_capped=False)
            for total, part in zip(totals, (x.ds, x.ds_error, np.abs(x.ds) + x.ds_error), strict=True):
                add_to_bias(total, part[:, : seq.seqlen_k], seq, head)
    pairs = problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k
    bound = stored(added([Sum(*totals)], model, pairs // max(1, totals[0].size)), model)
    return bound if is_in_range(problem) else np.full_like(bound, np.inf)
