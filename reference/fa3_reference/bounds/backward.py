"""A-priori bound of the rounding error of every element of dQ, dK and dV, for any declared order of a flash backward.

The truth is the closed form of :mod:`fa3_reference.attention_bwd` on what the kernel was given, out and lse included. A
kernel that computes its own out and lse is compared with the closed form on the exact ones. The order is that of a
:class:`BackwardModel`, by default FlashAttention's: S and dP by wgmma; P by one fused exponent in log2 units and ex2; D
and dS in binary32; P and dS rounded to 16 bits; dV and dK chained over the rows by wgmma; a part of dQ for each key
block, the parts added in binary32 in any order, and the heads of a group added to dK and dV likewise; dQ and dK times
softmax_scale; one rounding. Steps B1 to B10 are numbered as in reference/README.md.

This module goes from P to dS and puts the steps together. P itself and the sums behind dS are in ``gradient_steps``,
the gradients of sinks and of a bias in ``gradient_further``. None of them imports the kernels or the twin.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, U_FP32
from fa3_reference.bounds.gradient_steps import (
    DIVISION,
    BackwardHead,
    Slope,
    Sum,
    Weights,
    added,
    is_in_range,
    kept,
    product,
    row_products,
    scaled,
    stored,
    weights,
)
from fa3_reference.bounds.head import terms_of
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.steps import OUTWARD, gamma, rounded_error
from fa3_reference.formats import FORMATS, Format
from fa3_reference.problem import AttentionProblem, BackwardOperands, Sequence

# Least error of any weight: a weight that vanishes may or may not be lost in the truth's float64, so no error is 0.
_LEAST = 2.0**-500


class BackwardBound(NamedTuple):
    """Largest absolute errors of the gradients; inf where nothing is promised.

    Parameters
    ----------
    dq, dk, dv : float64 arrays of the shapes of q, k and v
        Bounds of ``|computed - exact|``.
    """

    dq: NDArray[np.float64]
    dk: NDArray[np.float64]
    dv: NDArray[np.float64]


class Pairs(NamedTuple):
    """Holds the exact P and dS of one query head, and how far the P and dS that enter products may be from them.

    Each is float64 (seqlen_q, keys), where a row's sink is one key more behind the others. Hidden pairs hold 0.
    """

    p: np.ndarray
    p_error: np.ndarray
    ds: np.ndarray
    ds_error: np.ndarray


@np.errstate(all="ignore")
def backward_bound(problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel) -> BackwardBound:
    """Bound the rounding error of every element of dQ, dK and dV.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    operands : BackwardOperands
        What the kernel saw, with the out and lse of its forward.
    model : BackwardModel
        Formats, tiling and order of operations of the kernel.

    Returns
    -------
    BackwardBound
        0 where no pair is visible and the gradient is exactly 0. inf where nothing is promised: sums that NaN or Inf in
        an operand reaches; sums of rows that see a key and have an lse that is not finite; weights, dS, sums or
        gradients that may overflow their format. Everything is inf where softmax_scale or softcap makes a factor
        outside the normal range of binary32.

    Raises
    ------
    ValueError
        For a softcap of scores that are kept in 16 bits, whose order is not known.

    Examples
    --------
    >>> problem = AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=16)
    >>> ones = np.ones(problem.q_shape, np.float16)
    >>> given = BackwardOperands(ones, ones, ones, dout=ones, out=ones, lse=np.full(problem.lse_shape, 4, np.float32))
    >>> bound = backward_bound(problem, given, BackwardModel.any_order("fp16"))
    >>> bound.dv.shape, bool(bound.dv.max() < 1e-3)  # dV is 1, of which half an ulp is 2^-11
    ((1, 1, 1, 16), True)
    """
    if problem.softcap > 0 and model.scores != "fp32":
        raise ValueError(f"a softcap of scores in {model.scores} is not known, got {problem.softcap}")
    is_lost = not is_in_range(problem)  # a factor of 0 or infinity makes NaN even of hidden pairs
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    found = BackwardBound(*(np.full(shape, np.inf if is_lost else 0.0) for shape in shapes))
    if is_lost:
        return found
    returned = returned_by(problem, operands, model)
    for seq in problem.sequences():
        for kv_head in range(problem.nheads_kv):
            heads = range(kv_head * problem.group, (kv_head + 1) * problem.group)
            parts = [head_of(problem, operands, returned, seq, head) for head in heads]
            pairs = [pairs_of(problem, h, model) for h in parts]
            pairs = [Pairs(*(of[:, : seq.seqlen_k] for of in x)) for x in pairs]  # without the sink
            for head, h, x in zip(heads, parts, pairs, strict=True):
                problem.rows_q(found.dq, seq)[:, head] = stored(_dq(problem.softmax_scale, h, x, model), model)
            dk, dv = _of_keys(problem.softmax_scale, parts, pairs, model)
            problem.rows_k(found.dk, seq)[:, kv_head] = stored(dk, model)
            problem.rows_k(found.dv, seq)[:, kv_head] = stored(dv, model)
    return found


def returned_by(problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel) -> Attention:
    """Return the out and lse that the truth uses: those the kernel was given, or exact ones of a forward of its own."""
    if model.forward == "own":
        given = (operands.q, operands.k, operands.v, operands.sinks, operands.term)
        return attention(problem, *(x.astype(np.float64) for x in given if x is not None))
    return Attention(operands.out, operands.lse.astype(np.float64))


def head_of(
    problem: AttentionProblem, operands: BackwardOperands, returned: Attention, seq: Sequence, head: int
) -> BackwardHead:
    # what the query head reads of one sequence; ``returned`` is from :func:`returned_by`
    o = operands
    kv_head = head // problem.group
    q, dout, out = (problem.rows_q(x, seq)[:, head].astype(np.float64) for x in (o.q, o.dout, returned.out))
    k, v = (problem.rows_k(x, seq)[:, kv_head].astype(np.float64) for x in (o.k, o.v))
    lse = problem.rows_lse(returned.lse, seq)[head].astype(np.float64)
    dlse = np.zeros_like(lse) if o.dlse is None else problem.rows_lse(o.dlse, seq)[head].astype(np.float64)
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
    keys = np.arange(seq.seqlen_k)
    visible = (keys >= first[:, None]) & (keys < stop[:, None])
    term = None if o.term is None else terms_of(problem, o.term, seq, (head,))
    visible &= term is None or ~np.isneginf(term[0])
    sink = -np.inf if o.sinks is None else float(o.sinks[head])
    if not np.isneginf(sink):
        v = np.concatenate([v, np.zeros((1, v.shape[1]))])
        visible = np.column_stack([visible, np.ones(len(q), bool)])
    dlse = np.where(visible.any(1), dlse, 0)  # an empty row's is not read
    return BackwardHead(q, k, v, dout, out, lse, dlse, visible, None if np.isneginf(sink) else sink, term)


def pairs_of(problem: AttentionProblem, h: BackwardHead, model: BackwardModel, *, is_capped: bool = True) -> Pairs:
    """Steps B1 to B5 and B10: return P and dS of one query head as they enter products, the sink's behind the keys'.

    Where ``is_capped`` is false dS is that of the capped scores, which a term is added to.
    """
    p = weights(problem, h, model)
    p = p if is_capped else p._replace(slope=None)
    t, dt = _differences(h, p, model)
    ds, ds_error = _ds(problem, p, t, dt, model)
    for x in (p.stored_error, ds_error):
        x += _LEAST
    hidden = np.logical_not(h.visible)
    for x in (p.exact, p.stored_error, ds):
        x[hidden] = 0
    is_known = np.isfinite(dt)
    if p.slope is not None:
        is_known &= np.isfinite(p.slope.error)
    ds_error[hidden] = np.where(is_known, 0, np.inf)[hidden]  # P is 0 there, and 0 times infinity would be NaN
    return Pairs(p.exact, p.stored_error, ds, ds_error)


def _dq(scale: float, h: BackwardHead, x: Pairs, model: BackwardModel) -> Sum:
    """Steps B6 to B8 of dQ: a part for each key block, all of them added."""
    tile = model.tile_n or max(1, len(h.k))
    cuts = [slice(a, a + tile) for a in range(0, max(1, len(h.k)), tile)]
    parts = [product(x.ds[:, cut], x.ds_error[:, cut], h.k[cut], model) for cut in cuts]
    # Where the tile is not known there may be as many parts as blocks of k_step keys, the smallest that wgmma takes.
    blocks = len(parts) if model.tile_n or model.parts != "fp32" else -(-len(h.k) // model.core.k_step)
    if model.parts == "fp32":
        return scaled(added(parts, model, blocks), scale)
    return added([scaled(part, scale) for part in parts], model, blocks)


def _of_keys(scale: float, heads: list[BackwardHead], pairs: list[Pairs], model: BackwardModel) -> tuple[Sum, Sum]:
    """Steps B6 to B8 of dK and dV of a kv head: a part for every query head, or one chain over the rows of all heads.

    Where the model allows either, the chain is charged, which errs at least as much, and the additions of parts too.
    """
    parts = len(heads) if model.heads == "any" else 0
    if model.heads != "added":
        pairs = [Pairs(*map(np.concatenate, zip(*pairs, strict=True)))]
        rows = [(np.concatenate([h.q for h in heads]), np.concatenate([h.dout for h in heads]))]
    else:
        rows = [(h.q, h.dout) for h in heads]
    blocks = -(-len(rows[0][0]) // model.tile_m) if model.tile_m else 0
    dk = []
    dv = []
    for x, (q, dout) in zip(pairs, rows, strict=True):
        dk.append(added([scaled(product(x.ds.T, x.ds_error.T, q, model), scale)], model, blocks))
        dv.append(added([product(x.p.T, x.p_error.T, dout, model)], model, blocks))
    return added(dk, model, parts), added(dv, model, parts)


def _differences(h: BackwardHead, p: Weights, model: BackwardModel) -> tuple[np.ndarray, np.ndarray]:
    """Steps B3 and B4: return dP - D + dlse (rows, keys) and its error, whichever two of the three meet first."""
    dp, ddp = kept(*row_products(h.dout, h.v, model), model.dp)
    size = np.sum(np.abs(h.dout * h.out), 1)
    dots = np.sum(h.dout * h.out, 1)
    depth = model.dots_depth or h.dout.shape[1]
    flushed = FP32_MIN_NORMAL * (np.sum(np.abs(h.out) + np.abs(h.dout), 1) + 2 * h.dout.shape[1])
    of_dots = gamma(depth) * size * OUTWARD + flushed
    if model.forward == "own":
        of_weights = _dots_of_weights_error(h, p, dp, ddp)
        is_kept = model.weights == "fp32"  # then the softmax itself is differentiated: D is of P and dP for certain
        of_dots = of_weights if is_kept else np.maximum(of_weights, _own_dots_error(h, p, model) + of_dots)
    elif model.dots == "weights":
        own_dots = np.sum(np.where(h.visible, p.exact * dp, 0), 1)
        of_dots = _dots_of_weights_error(h, p, dp, ddp) + np.abs(own_dots - dots) + 2.0**-44 * size
    error = ddp + of_dots[:, None]
    if h.dlse.any():
        of_lse = np.abs(h.dlse)
        sums = np.abs(dp - (dots - h.dlse)[:, None]) + (np.abs(dots) + of_lse)[:, None]
        error = error + (U_FP32 * (sums + error) + 2 * FP32_MIN_NORMAL) * OUTWARD
        dots = dots - h.dlse
        size = size + of_lse
    t = dp - dots[:, None]
    larger = np.maximum(np.abs(t), np.abs(dots)[:, None])  # P dP - P D may be one fma, which rounds P D
    own = (np.abs(dp) + size[:, None]) * 2.0**-44  # the error of the truth's differences in float64
    error = (error + U_FP32 * (larger + error) + own + 2 * FP32_MIN_NORMAL) * OUTWARD
    return t, np.where(np.abs(dp) + size[:, None] + error > FP32_MAX, np.inf, error)


def _own_dots_error(h: BackwardHead, p: Weights, model: BackwardModel) -> np.ndarray:
    """Step B9: return the error (rows,) of D = dO O where O is the kernel's own, rounded to the operands' format."""
    weights, error = (np.where(h.visible, x, 0) for x in (p.exact, p.stored_error))
    finite_v = np.abs(np.nan_to_num(h.v, posinf=0, neginf=0))
    relative = gamma(len(h.v) + DIVISION, model.addition / 2) + model.factors
    out_error = error @ finite_v + relative * ((weights + error) @ finite_v)
    out_error = out_error * OUTWARD + 2.0**-44 * (weights @ finite_v) + FP32_MIN_NORMAL
    out_error = np.maximum(out_error, rounded_error(h.out, out_error, FORMATS[model.dtype]))
    return np.sum(np.abs(h.dout) * out_error, 1) * (1 + gamma(h.dout.shape[1])) * OUTWARD


def _dots_of_weights_error(h: BackwardHead, p: Weights, dp: np.ndarray, ddp: np.ndarray) -> np.ndarray:
    """Step B9: return the error (rows,) of D = sum_j P_j dP_j.

    Hidden pairs take part in the sum with P = 0, so that an infinite dP of theirs makes it NaN and the error infinite.
    """
    is_lost = np.logical_not(np.isfinite(dp) & np.isfinite(ddp)).any(1)
    weights, error, dp, ddp = (np.where(h.visible, x, 0) for x in (p.exact, p.stored_error, dp, ddp))
    size = (weights + error) * (np.abs(dp) + ddp)
    terms = error * (np.abs(dp) + ddp) + weights * ddp + gamma(len(h.v) + 2) * size + 2 * FP32_MIN_NORMAL
    return np.where(is_lost, np.inf, np.sum(terms, 1) * OUTWARD)


def _ds(
    problem: AttentionProblem, p: Weights, t: np.ndarray, dt: np.ndarray, model: BackwardModel
) -> tuple[np.ndarray, np.ndarray]:
    """Steps B5 and B10: return dS (rows, keys) and its error as it enters the products.

    ``t`` is dP - D + dlse and ``dt`` its error.
    """
    p_error = np.maximum(p.high - p.exact, p.exact - p.low)
    high = p.high
    if model.forward == "own" or model.ds_of == "rounded":  # an own forward may keep P as it was rounded
        p_error = np.maximum(p_error, p.stored_error)
        high = p.exact + p_error
    ds = p.exact * t
    error = (p_error * np.abs(t) + high * dt) * OUTWARD
    error += U_FP32 * (np.abs(ds) + error) + FP32_MIN_NORMAL * (high > 0)
    if p.slope is not None:
        ds, error = _times_slope(problem.softcap, ds, error, p.slope, np.abs(t) + dt, model)
    errors = []
    if model.scales in ("sums", "any"):
        errors.append(rounded_error(ds, error, model.weight))
    if model.scales in ("weights", "any"):
        errors.append(_rounded_after(problem.softmax_scale, ds, error, model.weight))
    if model.scales == "any":  # dS may also stay unrounded, or be rounded both before and after softmax_scale
        errors += [error, _rounded_after(problem.softmax_scale, ds, errors[0], model.weight)]
    return ds, np.max(errors, axis=0)


def _times_slope(
    softcap: float, ds: np.ndarray, error: np.ndarray, slope: Slope, size: np.ndarray, model: BackwardModel
) -> tuple[np.ndarray, np.ndarray]:
    """Step B10: return dS times the slope of the softcap, and its error; the three factors meet in any order.

    ``size`` bounds |dP - D|, as the slope may meet that factor before P does.
    """
    around = max(softcap, 1 / softcap) if model.forward == "own" else 1.0  # it multiplies and divides by the softcap
    error = np.where((np.abs(ds) + error) * around > FP32_MAX, np.inf, error)
    error = np.abs(ds) * slope.error + error * (slope.exact + slope.error)
    ds = ds * slope.exact
    return ds, (error + gamma(3) * (np.abs(ds) + error) + FP32_MIN_NORMAL * (around + size)) * OUTWARD


def _rounded_after(scale: float, ds: np.ndarray, error: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the error of dS where it is multiplied by softmax_scale before it is rounded to ``fmt``."""
    error = error * scale + gamma(2) * (np.abs(ds) + error) * scale + FP32_MIN_NORMAL
    return rounded_error(ds * scale, error * OUTWARD, fmt) / scale * OUTWARD
