"""Gradients that hardware adds in any order: the smallest and largest result that binary32 additions can give.

A reduction adds n parts to one accumulator, one after the other, each addition rounded to nearest. Rounding is
monotone, so that the least sum over all orders of a set of parts is the least over its last part p of
fl(least of the others + p): a walk over all 2^n subsets gives both ends exactly. For more parts, every exact partial
sum lies in [-N, P], where N and P are the sums of the magnitudes of the negative and of the positive parts, so that no
addition errs by more than half an ulp of the largest of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.backward import BackwardConfig
from fa3_kernels.twin import float32
from fa3_kernels.twin.backward import Gradients, backward
from fa3_reference.problem import AttentionProblem, BackwardOperands

EXHAUSTIVE = 8  # parts; 256 subsets, each an array of the result's size
_HALF_ULP_LOG2 = -24
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_NORMAL = 2.0**-126


class Range(NamedTuple):
    """Ends of a set of numbers, float32; NaN where every order gives NaN or Inf."""

    low: np.ndarray
    high: np.ndarray


class GradientRange(NamedTuple):
    """The smallest and the largest value that the library can return, by element; see :func:`backward_range`."""

    low: Gradients
    high: Gradients

    def outside(self, observed: Gradients) -> Gradients:
        """Tell where an observed gradient is one that no order of additions gives: arrays of bool.

        Where the ends are NaN every order gives NaN or Inf, so a finite number lies outside.
        """
        return Gradients(*(_outside(*ends) for ends in zip(self.low, self.high, observed, strict=True)))


def _outside(low: np.ndarray, high: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Tell where ``observed`` is not in [low, high], or is finite although the ends are NaN."""
    a, b, x = (y.astype(np.float64) for y in (low, high, observed))
    return np.where(np.isnan(a), np.isfinite(x), ~((a <= x) & (x <= b)))


def backward_range(problem: AttentionProblem, operands: BackwardOperands, config: BackwardConfig) -> GradientRange:
    """Return the ends of what additions in any order give, element by element, rounded as the kernel rounds.

    Parameters
    ----------
    problem, operands, config
        As of :func:`fa3_kernels.twin.backward.backward`.

    Returns
    -------
    GradientRange
        Every order of the additions gives an element between the two ends, both included. With at most
        :data:`EXHAUSTIVE` parts both ends are themselves results of some order; with more they are a proven enclosure.
        Not every number between them is the result of an order.

    Raises
    ------
    ValueError
        As :func:`fa3_kernels.twin.backward.backward`.
    """

    def low(parts: np.ndarray, flushes: bool) -> np.ndarray:
        return range_of_sums(parts, flushes=flushes).low

    def high(parts: np.ndarray, flushes: bool) -> np.ndarray:
        return range_of_sums(parts, flushes=flushes).high

    return GradientRange(*(backward(problem, operands, config, add=end) for end in (low, high)))


def range_of_sums(parts: np.ndarray, *, flushes: bool = True) -> Range:
    """Return the ends of what additions of parts to zero give in any order.

    Parameters
    ----------
    parts : float32 (parts, ...)
    flushes : bool
        Whether subnormal parts and sums are taken as zero, as atomics of single elements do (PTX ISA, red); bulk
        reductions of TMA keep them (measured on an H100: the sign of a gradient that is flushed afterwards).

    Returns
    -------
    Range
        Up to :data:`EXHAUSTIVE` parts that are not zero everywhere, both ends are results of some order, and no order
        leaves them. With more, no order leaves them. Where a part is NaN or Inf both are NaN; where an order may
        overflow and there are more parts, they are -Inf and Inf.
    """
    parts = parts[parts.any(axis=tuple(range(1, parts.ndim)))]
    if flushes:
        parts = float32.flushed(parts)
    if not len(parts):
        zero = np.zeros(parts.shape[1:], np.float32)
        return Range(zero, zero)
    with np.errstate(invalid="ignore", over="ignore"):
        ends = _exhaustive(parts, flushes) if len(parts) <= EXHAUSTIVE else _enclosing(parts, flushes)
    lost = ~np.isfinite(parts).all(0)
    return Range(*(np.where(lost, np.float32(np.nan), end) for end in ends))


def _exhaustive(parts: np.ndarray, flushes: bool) -> Range:
    """Return both ends over all orders, found subset by subset, by growing size."""
    ends = []
    for choose in (np.fmin, np.fmax):
        best = {0: np.zeros(parts.shape[1:], np.float32)}
        for _ in parts:
            best = _larger_subsets(best, parts, choose, flushes)
        ends.append(best[(1 << len(parts)) - 1])
    return Range(*ends)


def _larger_subsets(best: dict[int, np.ndarray], parts: np.ndarray, choose: np.ufunc, flushes: bool) -> dict:
    """Return the end of every subset with one more part, from those of the subsets before.

    A subset is a bit mask of parts; ``choose`` takes the smaller or the larger sum.
    """
    found: dict[int, np.ndarray] = {}
    for subset, end in best.items():
        for i, part in enumerate(parts):
            if subset >> i & 1:
                continue
            total = end + part
            total = float32.flushed(total) if flushes else total
            key = subset | 1 << i
            found[key] = choose(found[key], total) if key in found else total
    return found


def _enclosing(parts: np.ndarray, flushes: bool) -> Range:
    """Return an interval that no order leaves: computed in float64 with what its own rounding may lose, then rounded.

    After k additions the accumulator differs from the exact partial sum by at most (k - 1) h, with h half an ulp of the
    largest magnitude M = max(N, P) + (n - 1) h that it can have, and by 2^-126 for each flushed result. The ends may be
    rounded to nearest because the result is a binary32 number inside the interval.
    """
    n = len(parts)
    wide = parts.astype(np.float64)
    total = wide.sum(0)
    largest = np.maximum(np.maximum(wide, 0).sum(0), -np.minimum(wide, 0).sum(0))
    own = n * 2.0**-52 * np.abs(wide).sum(0)  # of these float64 sums
    flushed = n * _SMALLEST_NORMAL if flushes else 0.0
    largest = (largest + own + flushed) * (1 + n * 2.0**-23)
    half_ulp = np.exp2(np.maximum(np.floor(np.log2(np.maximum(largest, _SMALLEST_NORMAL))), -126) + _HALF_ULP_LOG2)
    radius = ((n - 1) * half_ulp + own + flushed) * (1 + 2.0**-40)
    overflows = largest >= _LARGEST
    low = (total - radius).astype(np.float32)
    high = (total + radius).astype(np.float32)
    return Range(np.where(overflows, np.float32(-np.inf), low), np.where(overflows, np.float32(np.inf), high))
