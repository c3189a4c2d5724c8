"""How far the numbers that a quantiser stores may be from the exact ones when it computes in binary32.

    y = rotation(x - mean),   descale = max|y| / 448,   stored = e4m3(y / descale),   lse correction = scale q . mean

Every operation in binary32 is off by at most u = 2^-24 of its result, in whatever order a kernel adds:

- a sum of n additions deep: gamma_n sum |x|, with gamma_n = n u / (1 - n u);
- the rotation: log2(head_dim) additions deep, on operands that centring has already moved;
- a descale: the error of the maximum, and up to three roundings (norm, product, division); where descales are rounded
  up to powers of two, both the power that the least maximum leads to and that of the largest are allowed;
- y / descale: the error of y over the descale, and up to four roundings (norm, reciprocal, their product, the product
  with y). The descale is the one that was stored, so that an error of the maximum is charged once.

A code may differ from the correctly rounded one only where the exact scaled value lies within that error of a rounding
boundary: :func:`distance_to_codes` over the bound is the ratio to judge by. ``fa3verify.operations.quantize`` judges a
kernel with these two functions. What quantising costs in the output of attention is in
:mod:`fa3_reference.bounds.quantisation`. This module imports no kernel and no twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_reference.attention import as_float64
from fa3_reference.bounds.device import U_FP32
from fa3_reference.formats import FORMATS, decode
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, condition, shared_maxima
from fa3_reference.scales import ROUNDINGS

_E4M3 = FORMATS["e4m3"]
_TINY = 2.0**-148  # underflow of the few binary32 operations behind one value
# the range of descales: both they and their reciprocals are normal numbers of binary32
_LEAST = 2.0**-126
_LARGEST = 2.0**126
# roundings of a descale and of a scaled value, by whether the operand is rotated, which brings in a norm
_DESCALE_STEPS = {False: 1, True: 3}
_SCALING_STEPS = {False: 2, True: 4}


Stored = dict[str, np.ndarray]  # float64 arrays, by the names of what a quantiser returns


def stored_values(
    problem: AttentionProblem,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    scheme: QuantScheme,
    descales: tuple[np.ndarray, np.ndarray, np.ndarray],
    mean_additions: int,
) -> tuple[Stored, Stored]:
    """Return the exact values of what a quantiser should store, and bounds of how far binary32 may be from them.

    Parameters
    ----------
    problem : AttentionProblem
        What q, k and v are for.
    arrays : float arrays q, k and v of the problem's shapes
        What the quantiser was given, finite; exact in binary32.
    scheme : QuantScheme
        How they are scaled, rotated and centred.
    descales : float arrays (batch, heads, blocks)
        As the quantiser stored them for q, k and v; the scaled values refer to these.
    mean_additions : int
        Longest chain of additions behind the sum of the K mean.

    Returns
    -------
    exact, bound : dict of str to float64 array
        ``q``, ``k`` and ``v`` over the stored descales, in the problem's shapes; ``q_descale``, ``k_descale`` and
        ``v_descale`` (batch, heads, blocks); ``k_mean`` (batch, nheads_kv, head_dim) and ``lse_correction`` (the
        problem's lse shape), which are zero without a K mean. The exact values are off by a few 2^-53 of a row's
        2-norm, which the bounds include.

    Raises
    ------
    ValueError
        If a shape is wrong or :func:`fa3_reference.quantize.condition` rejects the scheme.
    """
    q, k, v = as_float64(q=(arrays[0], problem.q_shape), k=(arrays[1], problem.k_shape), v=(arrays[2], problem.v_shape))
    turned = condition(problem, q, k, scheme)
    mean, mean_error, moved_k = _centring(problem, q, k, scheme, mean_additions)
    exact = {"q": turned.q, "k": turned.k, "v": v}
    moved = {"q": np.zeros(q.shape), "k": moved_k, "v": np.zeros(v.shape)}
    is_rotated = scheme.hadamard_seed is not None
    if is_rotated:
        centred = condition(problem, q, k, replace(scheme, hadamard_seed=None))
        moved |= {"q": _rotation_error(centred.q, moved["q"]), "k": _rotation_error(centred.k, moved["k"])}
    shift = np.zeros(problem.lse_shape) if turned.lse_shift is None else turned.lse_shift
    values = {"k_mean": mean, "lse_correction": shift}
    errors = {"k_mean": mean_error, "lse_correction": _correction_error(problem, q, mean, mean_error)}
    for name, stored in zip("qkv", descales, strict=True):
        is_turned = is_rotated and name != "v"
        amax, amax_moved = (shared_maxima(problem, x[name], name, scheme) for x in (exact, moved))
        values[f"{name}_descale"], errors[f"{name}_descale"] = _descale(
            amax, amax_moved, _DESCALE_STEPS[is_turned], ROUNDINGS[scheme.rounding]
        )
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = 1 / _per_row(problem, name, stored, scheme)
            values[name] = exact[name] * factor
            errors[name] = _with_roundings(np.abs(values[name]), moved[name] * factor, _SCALING_STEPS[is_turned])
    return values, errors


def _gamma(steps: int) -> float:
    """Relative error of ``steps`` roundings; its factor 1 + 2^-10 also covers the float64 rounding of this module."""
    return steps * U_FP32 * (1 + 2.0**-10)


def _with_roundings(size: np.ndarray, error: np.ndarray, steps: int) -> np.ndarray:
    """Error of a value of at most this size that is off by ``error`` already, after ``steps`` roundings more."""
    return error + _gamma(steps) * (size + error)


def _centring(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, scheme: QuantScheme, additions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the K mean and its error, both (batch, nheads_kv, head_dim), and the error of the centred K, in its shape.

    All three are zero where the scheme does not centre, and for sequences without keys.
    """
    mean = np.zeros((problem.batch, problem.nheads_kv, problem.head_dim))
    mean_error = np.zeros(mean.shape)
    moved = np.zeros(k.shape)
    for seq in problem.sequences() if scheme.k_mean else ():
        if seq.seqlen_k == 0:
            continue
        rows = problem.rows_k(k, seq)  # (seqlen_k, nheads_kv, head_dim)
        mean[seq.index] = rows.mean(axis=0)
        mean_error[seq.index] = _gamma(additions + 1) * np.abs(rows).mean(axis=0) + _TINY
        centred = np.abs(rows - mean[seq.index])
        problem.rows_k(moved, seq)[:] = _with_roundings(centred, mean_error[seq.index], 1)
    return mean, mean_error, moved


def _rotation_error(x: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return the error of every channel of the rotated x, where each channel of x was off by ``moved``, both of the
    shape of x."""
    levels = int(math.log2(x.shape[-1]))
    total = np.sum(_with_roundings(np.abs(x), moved, levels), axis=-1, keepdims=True)
    return np.broadcast_to(total / math.sqrt(x.shape[-1]), x.shape)


def _descale(
    amax: np.ndarray, moved: np.ndarray, steps: int, rounded: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact descale of maxima that may be off by ``moved``, and the error of the stored one.

    ``rounded`` is a function of ROUNDINGS; a maximum of 0 has descale 1.
    """

    def of(maximum: np.ndarray) -> np.ndarray:
        return rounded(np.clip(maximum / _E4M3.max_finite, _LEAST, _LARGEST))

    exact = np.where(amax > 0, of(amax), 1.0)
    low = of((amax - moved) * (1 - _gamma(steps)))  # no less than the least descale
    high = of((amax + moved) * (1 + _gamma(steps)))
    error = np.maximum(np.abs(high - exact), np.abs(exact - low))
    may_vanish = (amax <= moved) & (moved > 0)  # a maximum that is computed as 0 has descale 1
    error = np.where(may_vanish, np.maximum(error, np.abs(1 - exact)), error)
    return exact, np.where((amax == 0) & (moved == 0), 0.0, error)


def _per_row(problem: AttentionProblem, name: str, descale: np.ndarray, scheme: QuantScheme) -> np.ndarray:
    """Return the descale of every row of an operand, float64 in its shape with one channel."""
    shape = problem.q_shape if name == "q" else problem.k_shape
    factors = np.ones((*shape[:-1], 1))
    block_rows = scheme.rows_per_descale(name)
    for seq in problem.sequences():
        rows = (problem.rows_q if name == "q" else problem.rows_k)(factors, seq)  # (seqlen, heads, 1)
        blocks = np.arange(len(rows)) // (block_rows or len(rows) or 1)
        rows[..., 0] = descale[seq.index].astype(np.float64)[:, blocks].T
    return factors


def _correction_error(problem: AttentionProblem, q: np.ndarray, mean: np.ndarray, mean_error: np.ndarray) -> np.ndarray:
    """Return the error of the lse correction scale q . mean, in the problem's lse shape; 0 where the mean is exact.

    It has a tree of additions over the channels, and three roundings: the products, softmax_scale and its product.
    """
    steps = math.ceil(math.log2(problem.head_dim)) + 3
    off = _with_roundings(np.abs(mean), mean_error, steps)
    result = np.zeros(problem.lse_shape)
    for seq in problem.sequences() if np.any(mean_error) else ():
        per_head = np.repeat(off[seq.index], problem.group, axis=0)
        total = np.einsum("qhd,hd->hq", np.abs(problem.rows_q(q, seq)), per_head)
        problem.rows_lse(result, seq)[:] = problem.softmax_scale * total + problem.head_dim * _TINY
    return result


def distance_to_codes(codes: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return how far exact values lie outside the numbers that round to the stored codes.

    Parameters
    ----------
    codes : float64 array of e4m3 numbers
        The values of the codes.
    exact : float64 array of the same shape
        What was to be rounded to them.

    Returns
    -------
    float64 array
        0 where the code is a correct rounding; at a tie both neighbours are. 448 is the rounding of everything larger.
        NaN for a NaN code.

    >>> distance_to_codes(np.array([1.0, 1.0, 448.0, 0.0]), np.array([1.0625, 1.125, 1e9, -1.0]))
    array([0.        , 0.0625    , 0.        , 0.99902344])
    """
    numbers = decode(np.arange(_E4M3.max_code + 1, dtype=_E4M3.bits_dtype), _E4M3).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    index = np.minimum(np.searchsorted(numbers, np.abs(codes)), _E4M3.max_code)
    lower = np.append(0.0, middles)[index]
    upper = np.append(middles, np.inf)[index]
    along = np.where(codes == 0, np.abs(exact), exact * np.sign(codes))
    return np.maximum(np.maximum(lower - along, along - upper), 0.0)
