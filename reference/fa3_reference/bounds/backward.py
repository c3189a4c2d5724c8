"""A-priori bound of the rounding error of every element of dQ, dK and dV, for the order of FlashAttention's backward.

The truth is the closed form of :mod:`fa3_reference.attention_bwd` on what the kernel was given, out and lse included.
The kernel: S and dP by wgmma; P by one fused exponent in log2 units and ex2; D and dS in binary32; P and dS rounded to
16 bits; dV and dK chained over the rows by wgmma; dQ a part per key block, the parts added in binary32 in any order,
and so dK and dV over the heads of a group; dQ and dK times softmax_scale; one rounding. Steps B1 to B8 are numbered as
in reference/README.md. Nothing here knows the twin.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import EX2_REL, FP32_MAX, FP32_MIN_NORMAL, U_FP32, TensorCore
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.steps import LOG2_E, OUTWARD, gamma, rounded, rounded_error, score_error
from fa3_reference.problem import AttentionProblem, BackwardOperands, Sequence

_OWN = 2.0**-20  # 2^-53 of float64 over 2^-24 of binary32, with room for chains of different lengths
_LARGEST_SUM = 2.0**126  # of absolute products, below which no partial sum overflows
_SCALE_ROUNDINGS = 3  # of softmax_scale, of log2(e), of their product


class BackwardBound(NamedTuple):
    """Largest absolute errors, float64, in the shapes of q, k and v."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class _Sum(NamedTuple):
    """Exact sums, their error so far, and the sums of absolute values that rounding is relative to."""

    exact: np.ndarray
    error: np.ndarray
    size: np.ndarray


class _Head(NamedTuple):
    """What one query head reads, float64, and which pairs are visible."""

    q: np.ndarray  # (seqlen_q, head_dim)
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray  # (seqlen_q,)
    visible: np.ndarray  # bool (seqlen_q, seqlen_k)


def backward_bound(problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel) -> BackwardBound:
    """Bound the rounding error of every element of dQ, dK and dV.

    Parameters
    ----------
    problem : AttentionProblem
        Without softcap.
    operands : BackwardOperands
    model : BackwardModel

    Returns
    -------
    BackwardBound
        0 where no pair is visible and everything is exactly 0. inf where nothing is promised: sums that NaN or Inf in
        an operand reach, or an lse that is no finite number though its row sees a key; weights, dS, sums or gradients
        that may overflow their format.

    Raises
    ------
    ValueError
        For a problem with softcap.
    """
    if problem.softcap > 0:
        raise ValueError(f"the bound of gradients knows no softcap, got {problem.softcap}")
    found = BackwardBound(*(np.zeros(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)))
    with np.errstate(all="ignore"):
        for seq in problem.sequences():
            for kv_head in range(problem.nheads_kv):
                heads = range(kv_head * problem.group, (kv_head + 1) * problem.group)
                sums = [_head_sums(problem, _head(problem, operands, seq, head), model) for head in heads]
                for head, (dq, _, _) in zip(heads, sums, strict=True):
                    problem.rows_q(found.dq, seq)[:, head] = _stored(_scaled(dq, problem), model)
                dk = _added([_scaled(dk, problem) for _, dk, _ in sums])
                problem.rows_k(found.dk, seq)[:, kv_head] = _stored(dk, model)
                problem.rows_k(found.dv, seq)[:, kv_head] = _stored(_added([dv for _, _, dv in sums]), model)
    return found


def _head(problem: AttentionProblem, operands: BackwardOperands, seq: Sequence, head: int) -> _Head:
    o, kv_head = operands, head // problem.group
    q, dout, out = (problem.rows_q(x, seq)[:, head].astype(np.float64) for x in (o.q, o.dout, o.out))
    k, v = (problem.rows_k(x, seq)[:, kv_head].astype(np.float64) for x in (o.k, o.v))
    lse = problem.rows_lse(o.lse, seq)[head].astype(np.float64)
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
    keys = np.arange(seq.seqlen_k)
    return _Head(q, k, v, dout, out, lse, (keys >= first[:, None]) & (keys < stop[:, None]))


def _head_sums(problem: AttentionProblem, h: _Head, model: BackwardModel) -> tuple[_Sum, _Sum, _Sum]:
    """Steps B1 to B6: unscaled dQ and dK, and dV, of one query head."""
    low, p, high = _weights(problem, h, model)
    t, dt = _differences(h, model)
    dp = np.maximum(high - p, p - low)
    ds = p * t
    error = (dp * np.abs(t) + high * dt) * OUTWARD
    error += U_FP32 * (np.abs(ds) + error) + FP32_MIN_NORMAL * (high > 0)  # B5
    hidden = np.logical_not(h.visible)
    p_low, p_high = rounded(low, model.operand), rounded(high, model.operand)
    p_error = np.maximum(p_high - p, p - p_low)
    ds_error = rounded_error(ds, error, model.operand)
    for x in (p, p_error, ds):
        x[hidden] = 0
    ds_error[hidden] = np.where(np.isfinite(dt), 0, np.inf)[hidden]  # P is 0 there, and 0 times infinity is NaN
    tile = model.tile_n or max(1, len(h.k))
    cuts = [slice(a, a + tile) for a in range(0, max(1, len(h.k)), tile)]
    parts = [_product(ds[:, cut], ds_error[:, cut], h.k[cut], model) for cut in cuts]
    dk, dv = (_product(w.T, e.T, x, model) for w, e, x in ((ds, ds_error, h.q), (p, p_error, h.dout)))
    return _added(parts, len(parts) if model.tile_n else -(-len(h.k) // model.core.k_step)), dk, dv


def _weights(problem: AttentionProblem, h: _Head, model: BackwardModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps B1 and B2: the exact P, and the ends between which ex2 leaves it."""
    s, ds = _scores(h.q, h.k, model.core)
    factor, lse = problem.softmax_scale * LOG2_E, (h.lse * LOG2_E)[:, None]
    x = s * factor - lse
    dx = factor * ds + gamma(_SCALE_ROUNDINGS) * factor * (np.abs(s) + ds) + gamma(2) * np.abs(lse)
    dx = (dx + U_FP32 * (np.abs(x) + dx) + FP32_MIN_NORMAL * (4 + np.abs(s) + ds)) * OUTWARD
    low = np.where(x - dx < -126, 0.0, np.exp2(x - dx) * (1 - EX2_REL) / OUTWARD)
    high = np.where(x + dx < -126, 0.0, np.exp2(x + dx) * (1 + EX2_REL) * OUTWARD)
    return low, np.exp2(x), np.where(x + dx >= 128, np.inf, high)


def _scores(a: np.ndarray, b: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Exact products of rows and the error of their chain; NaN beside operands that are not finite, and where a partial
    sum may overflow.
    """
    finite_rows, finite_columns = (np.isfinite(x).all(axis=1, keepdims=True) for x in (a, b))
    bad = np.logical_not(finite_rows & finite_columns.T)
    a, b = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b))
    bad |= np.abs(a) @ np.abs(b).T >= _LARGEST_SUM
    s, ds = score_error(a, b, core)
    return np.where(bad, np.nan, s), np.where(bad, np.nan, ds)


def _differences(h: _Head, model: BackwardModel) -> tuple[np.ndarray, np.ndarray]:
    """Steps B3 and B4: dP - D and its error."""
    dp, ddp = _scores(h.dout, h.v, model.core)
    size = np.sum(np.abs(h.dout * h.out), 1)
    depth = model.dots_depth or h.dout.shape[1]
    flushed = FP32_MIN_NORMAL * (np.sum(np.abs(h.out) + np.abs(h.dout), 1) + 2 * h.dout.shape[1])
    error = ddp + (gamma(depth) * size * OUTWARD + flushed)[:, None]
    t = dp - np.sum(h.dout * h.out, 1)[:, None]
    own = (np.abs(dp) + size[:, None]) * 2.0**-44  # of the exact differences in float64
    error = (error + U_FP32 * (np.abs(t) + error) + own + 2 * FP32_MIN_NORMAL) * OUTWARD
    return t, np.where(np.abs(dp) + size[:, None] + error > FP32_MAX, np.inf, error)


def _product(w: np.ndarray, dw: np.ndarray, x: np.ndarray, model: BackwardModel) -> _Sum:
    """Step B6: w x, with w off by dw, in one chain of wgmma."""
    core, n = model.core, x.shape[0]
    size = (np.abs(w) + dw) @ np.abs(x)
    steps = -(-n // core.k_step)
    least = core.operand.min_normal
    w_power = np.where(np.abs(w) + dw > 0, np.maximum(np.abs(w) + dw, least), 0).max(1, initial=0)
    x_power = np.where(x != 0, np.maximum(np.abs(x), least), 0).max(0, initial=0)
    power = np.minimum(w_power[:, None] * x_power, np.where(size > 0, np.inf, 0))
    cut = (core.k_step + 1) * core.align * np.maximum(power, size) + core.out * size + core.tiny * (size > 0)
    own = size * n * 2.0**-52
    error = (dw @ np.abs(x) + steps * cut * (1 + steps * 2.0**-19) + own) * OUTWARD
    return _Sum(w @ x, np.where(size + error > FP32_MAX, np.inf, error), size)


def _added(parts: list[_Sum], count: int = 0) -> _Sum:
    """Step B7: binary32 additions of at most ``count`` parts in any order; of all by default."""
    count = count or len(parts)
    if count == 1:
        return parts[0]
    exact, error, size = (np.sum([getattr(x, name) for x in parts], axis=0) for name in _Sum._fields)
    error = error + gamma(count) * (size + error) + 2 * count * FP32_MIN_NORMAL * (size > 0)
    return _Sum(exact, np.where(size + error > FP32_MAX, np.inf, error) * OUTWARD, size)


def _scaled(x: _Sum, problem: AttentionProblem) -> _Sum:
    """Step B8: times softmax_scale, rounded to binary32 as a factor and once more as a product."""
    scale = problem.softmax_scale
    error = x.error + gamma(2) * (np.abs(x.exact) + x.error)
    error = error * scale * OUTWARD + FP32_MIN_NORMAL * (1 + scale) * (x.size > 0)
    size = x.size * scale
    return _Sum(x.exact * scale, np.where(size + error > FP32_MAX, np.inf, error), size)


def _stored(x: _Sum, model: BackwardModel) -> np.ndarray:
    """The last rounding; inf for what is undefined.

    What the float64 sums here and in the truth err by is a tiny part of the error in binary32, which is relative to the
    same sums of absolute values; it counts once more where the last rounding is known.
    """
    error = x.error + FP32_MIN_NORMAL * (x.size > 0)
    own = error * _OWN
    if model.output.name != "fp32":
        error = rounded_error(x.exact, error + own, model.output)
    return np.where(np.isnan(error), np.inf, error + own)
