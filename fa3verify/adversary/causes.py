"""Why a kernel left its bound: the trigger that an individual has, in the order of how extreme it is."""

from __future__ import annotations

import numpy as np

from fa3_reference.formats import FORMATS
from fa3verify.adversary.colony import FP32_MAX, LOG2_E, Colony
from fa3verify.adversary.guide import Guide

CAUSES: dict[str, str] = {
    "softcap": "softcap, or what is computed from it, leaves binary32",
    "scale product": "a product of softmax_scale and descales leaves binary32",
    "raw score": "a score overflows before it is scaled",
    "descale ratio": "the ratio of V descales of neighbouring blocks leaves binary32",
    "unnormalised": "the output overflows before it is divided by the row sum",
    "flushed": "a weight or a factor between maxima is flushed to zero",
    "subnormal": "a stored V, or a stored P that meets a value, is subnormal",
    "other": "none of these",
}
_LEAST = 2.0**-126


def cause_of(colony: Colony, row: int, column: int) -> str:
    """Return the first of :data:`CAUSES` whose trigger an individual has."""
    with np.errstate(all="ignore"):
        lone = colony.alone(row, column)
        triggers = (_softcap, _scale_product, _raw_score, _descale_ratio, _unnormalised, _flushed, _subnormal)
        for cause, trigger in zip(CAUSES, triggers):
            if trigger(lone, row, column):
                return cause
    return "other"


def _leaves(*values: float) -> bool:
    """Whether a number is beyond binary32's normal range."""
    size = np.abs(np.array(values, np.float64))
    return bool(((size > FP32_MAX) | (size < _LEAST)).any())


def _softcap(colony: Colony, row: int, column: int) -> bool:
    softcap = colony.environment.softcap
    return bool(softcap) and _leaves(softcap * LOG2_E, 2 / softcap, *(2 / softcap * colony.factors[row]))


def _scale_product(colony: Colony, row: int, column: int) -> bool:
    scale = colony.environment.softmax_scale * LOG2_E
    return _leaves(scale, scale * float(colony.q_descale[row]), *colony.factors[row])


def _raw_score(colony: Colony, row: int, column: int) -> bool:
    return bool((np.abs(colony.k[row]) @ np.abs(colony.q[row]) >= 2.0**127).any())


def _descale_ratio(colony: Colony, row: int, column: int) -> bool:
    descale = colony.environment.v_descale.astype(np.float64)
    return descale.size > 1 and _leaves(*(descale[1:] / descale[:-1]))


def _tile_maxima(colony: Colony, row: int) -> np.ndarray:
    """Largest log2 score of each key tile."""
    scores, size = Guide.of(colony).scores[row], colony.island.tile_n
    return np.array([scores[i : i + size].max() for i in range(0, scores.size, size)])


def _unnormalised(colony: Colony, row: int, column: int) -> bool:
    scores, size = Guide.of(colony).scores[row], colony.island.tile_n
    v = np.abs(colony.v[column])
    offset, top, total, largest = colony.island.config.p_offset_log2, -np.inf, 0.0, 0.0
    descale = colony.per_key(colony.environment.v_descale)
    before = descale[-1]
    for start in reversed(range(0, scores.size, size)):
        keys = slice(start, start + size)
        new = max(top, scores[keys].max())
        if np.isneginf(new):
            continue
        total = total * np.exp2(top - new) * before / descale[start] + np.exp2(scores[keys] - new + offset) @ v[keys]
        top, before, largest = new, descale[start], max(largest, total)
    return largest >= 2.0**127


def _flushed(colony: Colony, row: int, column: int) -> bool:
    maxima = _tile_maxima(colony, row)
    maxima = maxima[np.isfinite(maxima)]
    return maxima.size > 1 and float(np.ptp(maxima)) > 125


def _subnormal(colony: Colony, row: int, column: int) -> bool:
    guide, fmt = Guide.of(colony), FORMATS[colony.island.dtype]
    p, v = guide.stored[row], np.abs(colony.v[column])
    counts = (p > 0) & (v > 0)
    return bool((counts & ((p < fmt.min_normal) | (v < fmt.min_normal))).any())
