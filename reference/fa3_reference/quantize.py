"""From float64 inputs to the operands a kernel sees: rounding to 16 bits, and scaled, rotated, centred e4m3.

    x is stored as e4m3(x / descale),   descale = fp32(max|x| / 448) per tensor, head, block of rows, or row

FlashAttention-3's interface has one descale per (batch, kv head); its paper adds blocks of rows and the
Hadamard rotation. Frameworks often have one for a whole layer. :func:`prepare` is what most callers need; the kinds of
scale are listed in :mod:`fa3_reference.scales`. This is the truth in float64: the quantiser kernels are in
``fa3_kernels``, and what their binary32 may err by in :mod:`fa3_reference.bounds.quantizer`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import as_float64
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Descale, Floats, Operands
from fa3_reference.rules import require
from fa3_reference.scales import (
    ROUNDINGS,
    SHARING,
    QuantScheme as QuantScheme,
    Rounding,
    num_blocks,
    random_signs,
    rotate,
)

_E4M3 = FORMATS["e4m3"]
_FP32 = FORMATS["fp32"]


class Quantized(NamedTuple):
    """Operands for a kernel, and what must be added to its lse.

    Parameters
    ----------
    operands : Operands
        Arrays in the format of the problem, with descales where it is e4m3.
    lse_shift : float64 array of shape ``problem.lse_shape``, optional
        What the kernel's lse lacks where the mean of K was taken out; None is nothing.
    """

    operands: Operands
    lse_shift: NDArray[np.float64] | None = None


class Conditioned(NamedTuple):
    """Q and K as a scheme quantises them: centred and rotated, before any rounding to e4m3."""

    q: np.ndarray
    k: np.ndarray
    lse_shift: np.ndarray | None


def condition(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, scheme: QuantScheme) -> Conditioned:
    """Apply the steps of a scheme that leave attention unchanged: K-mean subtraction, then the Hadamard rotation.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    q, k : float arrays of the problem's shapes
        Operands before quantisation.
    scheme : QuantScheme
        Only its ``k_mean`` and ``hadamard_seed`` are read.

    Returns
    -------
    Conditioned
        float64, accurate to a few 2^-53 of a row's 2-norm. ``lse_shift`` is None without a K mean. NaN and Inf pass
        through, possibly to their whole row or channel.

    Raises
    ------
    ValueError
        If a shape is wrong, ``k_mean`` meets softcap, or head_dim is no power of two for a rotation.
    """
    q, k = as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape))
    lse_shift = None
    if scheme.k_mean:
        require(
            problem.softcap <= 0, f"k_mean needs softcap = 0, as tanh is not shift-invariant, got {problem.softcap}"
        )
        k, lse_shift = _centre(problem, q, k)
    if scheme.hadamard_seed is not None:
        signs = random_signs(problem.head_dim, scheme.hadamard_seed)
        q = rotate(q, signs)
        k = rotate(k, signs)
    return Conditioned(q, k, lse_shift)


def _centre(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # K less its mean over the keys of each sequence, and softmax_scale q . mean in the problem's lse shape
    centred = k.copy()
    shift = np.zeros(problem.lse_shape)
    for seq in problem.sequences():
        if seq.seqlen_k == 0:
            continue
        rows = problem.rows_k(centred, seq)  # (seqlen_k, nheads_kv, head_dim)
        mean = rows.mean(axis=0)
        rows -= mean
        dot = np.einsum("qhd,hd->hq", problem.rows_q(q, seq), np.repeat(mean, problem.group, axis=0))
        problem.rows_lse(shift, seq)[:] = problem.softmax_scale * dot
    return centred, shift


def descales_of(amax: np.ndarray, rounding: Rounding = "amax") -> np.ndarray:
    """Return the descale that maps each amax to 448, the largest e4m3 number.

    Parameters
    ----------
    amax : float64 array
        Finite and >= 0.
    rounding : {"amax", "power_of_two"}
        To the nearest float32, or up to a power of two.

    Returns
    -------
    float32 array like ``amax``
        amax / 448 correctly rounded but for one float64 division; 1 where amax is 0; at least 2^-126, since
        hardware flushes subnormal factors.

    Raises
    ------
    ValueError
        If amax / 448 exceeds the largest float32.
    """
    exact = np.maximum(np.asarray(amax, np.float64) / _E4M3.max_finite, _FP32.min_normal)
    exact = ROUNDINGS[rounding](exact)
    if np.any(exact > _FP32.max_finite):
        raise ValueError(f"max|x| / 448 must be at most the largest float32, got max|x| = {np.max(amax)}")
    return np.where(np.asarray(amax) > 0, exact, 1.0).astype(np.float32)


def shared_maxima(problem: AttentionProblem, x: np.ndarray, operand: str, scheme: QuantScheme) -> np.ndarray:
    """Return for every descale of an operand the ``max|x|`` of the elements that share it.

    ``operand`` is "q", "k" or "v". The result is float64 (batch, heads, blocks) for every kind of sharing: heads and
    sequences that share a descale repeat one number. It is 0 for blocks without rows.
    """
    heads = x.shape[-2]
    seqlen = problem.seqlen_q if operand == "q" else problem.seqlen_k
    block_rows = scheme.rows_per_descale(operand)
    result = np.zeros((problem.batch, heads, num_blocks(seqlen, block_rows)))
    for seq in problem.sequences():
        rows = problem.rows_q(x, seq) if operand == "q" else problem.rows_k(x, seq)
        per_row = np.abs(rows).max(axis=2)  # (seqlen, heads)
        if per_row.shape[0]:
            starts = np.arange(0, per_row.shape[0], block_rows or per_row.shape[0])
            result[seq.index, :, : starts.size] = np.maximum.reduceat(per_row, starts, axis=0).T
    sharing = SHARING[scheme.granularity]
    shared = sharing.heads_per_descale(operand, problem.nheads, problem.nheads_kv)
    groups = result.reshape(problem.batch, heads // shared, shared, result.shape[2])
    result = np.repeat(groups.max(axis=2), shared, axis=1)
    return np.broadcast_to(result.max(axis=0), result.shape) if sharing.all_sequences else result


def _quantize(
    problem: AttentionProblem, x: np.ndarray, operand: str, scheme: QuantScheme
) -> tuple[np.ndarray, Descale]:
    require(np.isfinite(x).all(), f"{operand} must be finite to be quantised, got NaN or Inf")
    maxima = shared_maxima(problem, x, operand, scheme)
    descale = Descale(descales_of(maxima, scheme.rounding), scheme.rows_per_descale(operand))
    scaled = x.copy()
    for seq in problem.sequences():
        rows = problem.rows_q(scaled, seq) if operand == "q" else problem.rows_k(scaled, seq)
        for head in range(rows.shape[1]):
            rows[:, head] /= descale.rows(seq.index, head, rows.shape[0])[:, None].astype(np.float64)
    return encode(scaled, _E4M3, "saturate"), descale


def quantize_qkv(problem: AttentionProblem, q: Floats, k: Floats, v: Floats, scheme: QuantScheme) -> Quantized:
    """Quantise q, k and v to e4m3.

    Parameters
    ----------
    problem : AttentionProblem
        What the operands are for; its dtype must be e4m3.
    q, k, v : finite float arrays of the problem's shapes
        Operands of any float dtype.
    scheme : QuantScheme
        How they are scaled, rotated and centred.

    Returns
    -------
    Quantized
        Each element is e4m3(x / descale) rounded to nearest even (after one float64 division), so that its
        dequantised value is off by at most ``max(2^-4 |x|, 2^-10 descale)``. ``lse_shift`` is None without
        ``scheme.k_mean``.

    Raises
    ------
    ValueError
        If the problem is not e4m3, an operand has the wrong shape or holds NaN or Inf, a descale would exceed
        float32, or :func:`condition` rejects the scheme.
    """
    require(problem.dtype == "e4m3", f"a quantisation scheme needs dtype e4m3, got {problem.dtype}")
    (v,) = as_float64(v=(v, problem.v_shape))
    q, k, lse_shift = condition(problem, q, k, scheme)
    q8, q_descale = _quantize(problem, q, "q", scheme)
    k8, k_descale = _quantize(problem, k, "k", scheme)
    v8, v_descale = _quantize(problem, v, "v", scheme)
    return Quantized(Operands(q8, k8, v8, q_descale, k_descale, v_descale), lse_shift)


def round_operands(problem: AttentionProblem, q: Floats, k: Floats, v: Floats) -> Operands:
    """Round q, k and v once, to nearest even, to the problem's dtype, without scaling.

    Overflow follows IEEE: Inf in fp16 and bf16, NaN in e4m3. NaN and Inf pass through.

    Raises
    ------
    ValueError
        If an operand has the wrong shape.
    """
    q, k, v = as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape), v=(v, problem.v_shape))
    fmt = FORMATS[problem.dtype]
    return Operands(encode(q, fmt, "ieee"), encode(k, fmt, "ieee"), encode(v, fmt, "ieee"))


def prepare(problem: AttentionProblem, q: Floats, k: Floats, v: Floats, scheme: QuantScheme | None = None) -> Quantized:
    """Turn inputs into a kernel's operands: quantised by a scheme, or plainly rounded without one.

    Parameters
    ----------
    problem : AttentionProblem
        What the operands are for; its ``dtype`` is theirs.
    q, k, v : float arrays of shapes ``problem.q_shape``, ``k_shape``, ``v_shape``
        Of any float dtype; finite where a scheme is given.
    scheme : QuantScheme, optional
        How e4m3 operands are scaled; None for 16 bits, and for e4m3 without descales.

    Returns
    -------
    Quantized
        Each element rounded once, to nearest even. Without a scheme NaN and infinities pass, and overflow becomes an
        infinity in fp16 and bf16, NaN in e4m3. With one, a dequantised value is off by at most
        ``max(2^-4 |x|, 2^-10 descale)``, and nothing overflows.

    Raises
    ------
    ValueError
        If an operand has the wrong shape; with a scheme also if the problem is not e4m3, an operand holds NaN or Inf,
        a descale would exceed float32, or the scheme does not suit the problem (a rotation needs a head_dim that is a
        power of two, ``k_mean`` no softcap).

    Examples
    --------
    >>> problem = AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=2, seqlen_k=2, head_dim=16, dtype="e4m3")
    >>> x = np.full(problem.q_shape, 7.0)
    >>> operands, _ = prepare(problem, x, x, x, QuantScheme("tensor"))
    >>> float(operands.q[0, 0, 0, 0]), float(operands.q_descale.values[0, 0, 0])  # 7 = 448 / 64
    (448.0, 0.015625)
    """
    if scheme is None:
        return Quantized(round_operands(problem, q, k, v))
    return quantize_qkv(problem, q, k, v, scheme)
