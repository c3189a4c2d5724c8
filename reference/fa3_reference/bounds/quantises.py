"""Kernels that quantise Q, K, V or P themselves: what shares a scale, and how far its codes are from the numbers.

A number x of a group whose largest magnitude is a becomes s round(x / s), where s = a / m and m is the largest code. So
int8 is off by at most a / 254, and e4m3 by |x| / 16 or, of its subnormal codes, by a / (448 2^10). Numbers of magnitude
a are exact. Rounding is to nearest, with ties to either side. A group may be cut into smaller ones with scales of their
own, as every part has a largest magnitude of at most a.

:mod:`fa3_reference.bounds.forward` adds these errors to those of scores and of P V, as its bound is about the operands
that the kernel was given. What quantising operands in front of the kernel costs is in
:mod:`fa3_reference.bounds.quantisation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from fa3_reference.bounds.device import FP32_MIN_NORMAL, U_FP32, TensorCore
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.rules import is_integer, require

Shared = Literal["tensor", "head", "channel"]
Group = tuple[Literal["int8", "int4", "e4m3"], int | Shared]

# Scales are in binary32, and so is x / s: a few roundings, of numbers up to 127 or 448.
_SLACK = 1 + 2.0**-12
# Hopper's tensor core aligns a subnormal e4m3 code as the least normal number, and keeps 13 bits below it. A step of 32
# products so loses 2^-13 of one subnormal code's unit at most, an eighth of half the spacing of the subnormal codes.
_ALIGNED = 1 + 2.0**-3
# No kernel divides by 0: it raises scales to a least number, of 1e-12 to 1e-5 in public ones, or adds 1e-7 or less.
_LEAST_SCALE = 1e-5
_ADDED_TO_SCALE = 1e-7


class Codes(NamedTuple):
    """A format in units of its scale: its largest code, the spacing of its least ones, their largest relative error."""

    max_finite: float
    min_subnormal: float
    unit_roundoff: float


CODES: dict[str, Codes] = {
    "int8": Codes(127.0, _SLACK, 0.0),
    "int4": Codes(7.0, _SLACK, 0.0),
    "e4m3": Codes(448.0, 2.0**-9 * _ALIGNED, 2.0**-4 * _SLACK),
}


@dataclass(frozen=True, slots=True)
class Quantises:
    """Says which of its operands a kernel of 16 or 32 bits quantises before it multiplies them.

    Parameters
    ----------
    q, k, v : tuple of (format, group), optional
        A format of "int8" (codes to 127), "int4" (to 7) and "e4m3" (to 448), and what shares a scale: a number of rows
        of one head, counted from the first of its sequence; "head", all rows of a sequence and head; "channel", one
        channel of these; "tensor", the whole operand. Smaller groups, such as the rows of a warp, keep the same bound.
        None, as for all by default, where the operand is not quantised.
    p : tuple of (format, factor), optional
        What P is rounded to in front of the second product, and the integer that it is multiplied with before, such as
        ("int8", 127) and ("e4m3", 448). No P is larger than 1: the running maximum is never a smaller score.
    smooth_k : bool
        Whether the mean of K over the keys of a sequence is taken from K first. It moves all scores of a row alike, so
        that lse must be corrected by the product of q and that mean.

    Raises
    ------
    ValueError
        For an unknown format or group, and for ``smooth_k`` without a format of K.

    Examples
    --------
    >>> Quantises(q=("int8", 128), k=("int8", 64), v=("e4m3", "channel"), p=("e4m3", 448), smooth_k=True).said
    {'q': ('int8', 128), 'k': ('int8', 64), 'v': ('e4m3', 'channel'), 'p': ('e4m3', 448)}
    """

    q: Group | None = None
    k: Group | None = None
    v: Group | None = None
    p: Group | None = None
    smooth_k: bool = False

    def __post_init__(self) -> None:
        for name, group in self.said.items():
            named = get_args(Shared) if name != "p" else ()
            if len(group) != 2 or group[0] not in CODES or not (group[1] in named or is_integer(group[1], 1)):
                known = ", ".join(("a positive integer", *named))
                raise ValueError(f"{name} must be a pair of {', '.join(CODES)} and of {known}, got {group!r}")
        require(not self.smooth_k or self.k is not None, "smooth_k is of a kernel that quantises k")

    @property
    def said(self) -> dict[str, Group]:
        """Return the format and the group, or the factor, of what is quantised, by name; empty where nothing is."""
        return {name: group for name in ("q", "k", "v", "p") if (group := getattr(self, name)) is not None}

    @property
    def weights(self) -> Codes | None:
        """Return the codes of P in units of P; None where it is not quantised."""
        if self.p is None:
            return None
        codes = CODES[self.p[0]]
        return codes._replace(max_finite=math.inf, min_subnormal=codes.min_subnormal / int(self.p[1]))


def coded_rows(
    problem: AttentionProblem,
    operands: Operands,
    by: Quantises,
    each: list[np.ndarray],
    k: np.ndarray,
    v: np.ndarray,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray]:
    """Return q, k and v of some query heads of a kv head, how far codes are from them, and what lse loses by the mean.

    ``each`` has the queries (rows, head_dim) of a head, which are put together. K is returned without its mean where
    that is taken out. NaN and Inf make all numbers of their group NaN, as nothing is known of its scale.
    """
    require(
        not (problem.qv or (by.smooth_k and (problem.softcap or problem.sinks))),
        "a kernel that quantises takes no qv, and with smooth_k neither softcap nor sinks",
    )
    unit = FORMATS[problem.dtype].unit_roundoff if by.smooth_k else 0.0
    mean = k.mean(axis=0) if by.smooth_k and len(k) else np.zeros(k.shape[1])
    k = k - mean
    # The mean may be rounded, and what is left of K when it is taken out.
    of_mean = unit * (np.abs(mean).max() + np.abs(k).max(initial=0.0)) if by.smooth_k else 0.0
    q = np.concatenate(each)
    dq = np.concatenate([_errors(x, by.q, operands.q) for x in each])
    dk = _errors(k, by.k, operands.k, of_mean) + unit * np.abs(k)
    dv = _errors(v, by.v, operands.v)
    # lse loses what the product of q and the mean does, which may be rounded as well, and its sum with lse.
    lse_lost = (len(mean) * 2 * U_FP32 + 2 * unit) * problem.softmax_scale * (np.abs(q) @ np.abs(mean))
    return (q + 0 * dq, k + 0 * dk, v + 0 * dv), tuple(np.nan_to_num(x) for x in (dq, dk, dv)), lse_lost


def _errors(x: np.ndarray, group: Group | None, operand: np.ndarray, of_mean: float = 0.0) -> np.ndarray:
    """Return how far the codes of the rows of one head may be from them, (rows, channels); NaN where that is unknown.

    The rows are of ``operand``; with ``of_mean`` they are less their mean, which the kernel knows up to it.
    """
    if group is None or not len(x):
        return np.zeros(x.shape)
    codes = CODES[group[0]]
    size = np.abs(x)
    if isinstance(group[1], int):
        blocks = np.arange(len(x)) // group[1]
        top = np.maximum.reduceat(size.max(axis=1), np.arange(0, len(x), group[1]))[blocks, None]
    elif group[1] == "tensor":  # a mean is no larger than the largest number
        top = np.abs(operand.astype(np.float64)).max() * (1 + (of_mean > 0))
    else:
        top = size.max(axis=0 if group[1] == "channel" else None)
    unit = (top + of_mean) / codes.max_finite + _LEAST_SCALE
    half = np.maximum(codes.unit_roundoff * size, unit * codes.min_subnormal / 2)
    is_largest = (size == top) & (top > 2 * _LEAST_SCALE * codes.max_finite)  # an exact code, of a scale not raised
    lost = np.where(is_largest, 2 * of_mean + 2.0**-20 * top + _ADDED_TO_SCALE * codes.max_finite, size)
    return np.where(np.isfinite(unit), np.minimum(half, lost), np.nan)


def product_of_codes(
    q: np.ndarray, k: np.ndarray, dq: np.ndarray, dk: np.ndarray, core: TensorCore | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the exact products of rows (rows, keys), a bound of the error of those of their codes, and what no sum of
    magnitudes of products of codes exceeds.

    ``q`` (rows, head_dim) and ``k`` (keys, head_dim) are off by ``dq`` and ``dk``. Products of int8 are added exactly,
    those of e4m3 in binary32 or by the tensor core, if any, and both scales multiply the sum.
    """
    depth = q.shape[1]
    size = np.abs(q)
    moved = (size + dq) @ dk.T + dq @ np.abs(k).T
    sizes = size @ np.abs(k).T + moved
    lost = (2 * depth + 8) * U_FP32 * _SLACK
    if core is not None:
        steps = 2 * depth / core.k_step + 2
        lost += (depth + steps) * core.align + steps * core.out
    return q @ k.T, moved + lost * sizes + depth * FP32_MIN_NORMAL, sizes
