"""Why an individual of the forward is beyond its bound: the most extreme property of its numbers that may be why.

:mod:`fa3_reports.adversary.violations` keeps one violation of every cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fa3_kernels.plan.tiles import split_ranges
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL
from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.guide import Guide

# Name and description of each cause, the most extreme first. 2^127 below is half of what binary32 holds, so that a
# number on its way to an overflow counts.
CAUSES: dict[str, str] = {
    "split": "the output of a split overflows, though all splits together do not",
    "softcap": "softcap, or what is computed from it, leaves binary32",
    "scale product": "a product of softmax_scale and descales leaves binary32",
    "raw score": "a score overflows before it is scaled",
    "large maximum": "rounding a row maximum moves every weight by a binary order or more",
    "descale ratio": "the ratio of V descales of neighbouring blocks leaves binary32",
    "unnormalised": "the output overflows before it is divided by the row sum",
    "flushed": "a weight or a factor between maxima is flushed to zero",
    "subnormal": "a stored V, or a stored P that meets a value, is subnormal",
    "other": "none of these",
}


@np.errstate(all="ignore")
def cause_of(colony: ForwardColony, row: int, column: int) -> str:
    """Return the first of :data:`CAUSES` whose trigger an individual has, "other" where it has none."""
    lone, _ = colony.alone((row, column))
    triggers: dict[str, Callable[[], bool]] = {  # in the order of CAUSES
        "split": lambda: _split(lone, row, column),
        "softcap": lambda: _softcap(lone, row),
        "scale product": lambda: _scale_product(lone, row),
        "raw score": lambda: bool((np.abs(lone.k[row]) @ np.abs(lone.q[row]) >= 2.0**127).any()),
        "large maximum": lambda: abs(Guide.of(lone).top[row]) >= 2.0**23,
        "descale ratio": lambda: _descale_ratio(lone),
        "unnormalised": lambda: _unnormalised(lone, row, column),
        "flushed": lambda: _flushed(lone, row),
        "subnormal": lambda: _subnormal(lone, row, column),
    }
    return next((cause for cause in CAUSES if cause in triggers and triggers[cause]()), "other")


def _leaves(*values: float) -> bool:
    """Tell whether a number is beyond binary32's normal range."""
    size = np.abs(np.array(values, np.float64))
    return bool(((size > FP32_MAX) | (size < FP32_MIN_NORMAL)).any())


def _softcap(colony: ForwardColony, row: int) -> bool:
    softcap = colony.environment.softcap
    return bool(softcap) and _leaves(softcap * LOG2_E, 2 / softcap, *(2 / softcap * colony.factors[row]))


def _scale_product(colony: ForwardColony, row: int) -> bool:
    scale = colony.environment.softmax_scale * LOG2_E
    return _leaves(scale, scale * float(colony.q_descale[row]), *colony.factors[row])


def _descale_ratio(colony: ForwardColony) -> bool:
    descale = colony.environment.v_descale.astype(np.float64)
    return descale.size > 1 and _leaves(*(descale[1:] / descale[:-1]))


def _visits(colony: ForwardColony, row: int) -> Iterator[list[tuple[slice, float]]]:
    """Yield for each split its key tiles in the order of the kernel, each with the row's maximum up to then.

    Tiles without a visible key are left out.
    """
    island = colony.island
    scores = Guide.of(colony).scores[row]
    with_keys = [
        t for t in range(island.tiles) if np.isfinite(scores[t * island.tile_n : (t + 1) * island.tile_n]).any()
    ]
    for part in split_ranges(range(island.tiles), island.num_splits):
        visits = []
        top = -np.inf
        for tile in (t for t in reversed(part) if t in with_keys):
            keys = slice(tile * island.tile_n, (tile + 1) * island.tile_n)
            top = max(top, float(scores[keys].max()))
            visits.append((keys, top))
        yield visits


def _weights(colony: ForwardColony, row: int, keys: slice, top: float) -> np.ndarray:
    """Return P of a tile when it is visited."""
    return np.exp2(Guide.of(colony).scores[row, keys] - top + colony.island.config.p_offset_log2)


def _unnormalised(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether the running sum of P |V|, rescaled from tile to tile, may overflow."""
    v = np.abs(colony.v[column])
    descale = colony.per_key(colony.environment.v_descale)
    for visits in _visits(colony, row):
        total = 0.0
        before = None
        for keys, top in visits:
            here = descale[keys.start]
            if before is not None:
                total *= np.exp2(before[0] - top) * before[1] / here
            total += _weights(colony, row, keys, top) @ v[keys]
            if total >= 2.0**127 or total * here >= 2.0**127:
                return True
            before = top, here
    return False


def _split(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether the normalised output of a single split may overflow."""
    v = colony.v[column] * colony.per_key(colony.environment.v_descale)
    for visits in _visits(colony, row) if colony.island.num_splits > 1 else ():
        weights = np.zeros(v.size)
        for keys, _ in visits:
            weights[keys] = _weights(colony, row, keys, visits[-1][1])
        if np.abs(weights @ v) >= 2.0**127 * weights.sum() > 0:
            return True
    return False


def _flushed(colony: ForwardColony, row: int) -> bool:
    """Tell whether maxima of tiles or splits lie so far apart that a factor between them may be subnormal."""
    maxima = np.array([top for visits in _visits(colony, row) for _, top in visits])
    return maxima.size > 1 and float(np.ptp(maxima)) > 125


def _subnormal(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether a P that does not round to zero meets a V, and one of them is subnormal."""
    fmt = FORMATS[colony.island.dtype]
    v = np.abs(colony.v[column])
    for visits in _visits(colony, row):
        for keys, top in visits:
            p = _weights(colony, row, keys, top)
            counts = (p > fmt.min_subnormal / 4) & (v[keys] > 0)
            if (counts & ((p < fmt.min_normal) | (v[keys] < fmt.min_normal))).any():
                return True
    return False
