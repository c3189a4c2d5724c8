"""This module says how a chain of products mutates: what the tensor core cuts off as it adds the channels of one
score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa3_kernels.twin.wgmma import operand, operand_b, wgmma
from fa3_reference.bounds.device import TENSOR_CORE
from fa3_reference.bounds.steps import score_error
from fa3_reference.formats import FORMATS, Format
from fa3verify.search.forward.colony import positive, rounded

if TYPE_CHECKING:
    from fa3verify.search.forward.scores import Row

VARIANTS = 32  # of one key that are compared


def screened(row: Row) -> None:
    """The best of many variants of one key, the heaviest or any, by the error of its chain beside the bound of that."""
    colony = row.colony
    rng = row.rng
    key = int(row.exact.argmax()) if rng.random() < 0.5 else rng.choice(row.some())
    fmt = FORMATS[colony.island.dtype]
    q = colony.q[row.index]
    k = np.repeat(colony.k[row.index, key][None], VARIANTS, axis=0)
    chosen = rng.random(k.shape) < np.maximum(rng.random((VARIANTS, 1)) ** 2, 1 / q.size)
    kinds = (
        k * (1 + fmt.epsilon * rng.choice([-1, 1], k.shape)),
        k * np.exp2(rng.integers(-3, 4, k.shape)),
        -k,
        _lost(q, k, fmt, rng.choice([-1.0, 1.0], (VARIANTS, 1)), 0),
    )
    kind = rng.integers(len(kinds), size=(VARIANTS, 1))
    k = rounded(np.where(chosen, np.choose(kind, kinds), k), fmt.name)
    exact, bound = score_error(q[None], k, TENSOR_CORE[fmt.name])
    error = np.abs(_chains(q[None], k, fmt.name) - exact) / np.maximum(bound, 2.0**-300)
    colony.k[row.index, key] = k[int(np.nan_to_num(error, posinf=0.0).argmax())]


def _chains(q: np.ndarray, k: np.ndarray, dtype: str) -> np.ndarray:
    """Raw scores (rows, keys) as the tensor core adds them, float64."""
    fmt = FORMATS[dtype]
    padding = ((0, 0), (0, -q.shape[1] % TENSOR_CORE[dtype].k_step))
    a, b = (np.pad(x, padding).astype(fmt.dtype) for x in (q, k))
    return wgmma(operand(a, dtype), operand_b(b, dtype)).astype(np.float64)


def _lost(q: np.ndarray, k: np.ndarray, fmt: Format, sign: np.ndarray, shift: int) -> np.ndarray:
    """K (..., width) with which products are just below what the largest one is aligned to, but for the largest."""
    exponents = np.where(q * k != 0, np.frexp(q)[1] + np.frexp(k)[1] - 2, -999)  # of operands, not of products
    top = exponents.max(-1, keepdims=True)
    unit = np.ldexp(1.0, top - TENSOR_CORE[fmt.name].align_bits + shift)
    with np.errstate(all="ignore"):
        return np.where((exponents < top) & (q != 0), rounded(sign * unit * (1 - fmt.epsilon / 2) / q, fmt.name), k)


def _cut_off(row: Row) -> None:
    """Products of a chain just too small for the alignment of the largest one: each is lost, whole or in part."""
    colony = row.colony
    i = row.index
    rng = row.rng
    q = colony.q[i]
    fmt = FORMATS[colony.island.dtype]
    sign = rng.choice([-1.0, 1.0]) if rng.random() < 0.7 else rng.choice([-1.0, 1.0], q.size)
    channels = rng.random(q.size) < rng.random() ** 0.5
    is_narrow = fmt.name == "e4m3" and colony.island.is_chained  # its range ends 2^17 below its largest number
    if is_narrow and (top := np.abs(colony.k[i]).max()) > 0:
        lift = np.exp2(np.floor(np.log2(fmt.max_finite / top)))
        colony.k[i], colony.q_descale[i] = colony.k[i] * lift, positive(colony.q_descale[i] / lift)
    for key in row.some()[:16]:
        lost = _lost(q, colony.k[i, key], fmt, sign, int(rng.integers(2)))
        colony.k[i, key] = np.where(channels, lost, colony.k[i, key])


def _full_fractions(row: Row) -> None:
    """Q and K whose products end in ones, so that truncation costs the most."""
    colony = row.colony
    i = row.index
    fmt = FORMATS[colony.island.dtype]
    for x in (colony.q[i], colony.k[i][row.some()]):
        exponent = np.floor(np.log2(np.maximum(np.abs(x), fmt.min_normal)))
        full = np.exp2(exponent) * (2 - fmt.epsilon * row.rng.integers(1, 4, x.shape))
        x[...] = np.where(x == 0, 0.0, np.copysign(full, x))
    colony.k[i] = rounded(colony.k[i], colony.island.dtype)


def _spread_exponents(row: Row) -> None:
    """Products of one chain far apart in size, so that the small ones are cut off."""
    colony = row.colony
    i = row.index
    rng = row.rng
    width = colony.q.shape[1]
    dtype = colony.island.dtype
    keys = row.some()
    depth = rng.uniform(0, 30)
    gaps = np.where(rng.random(width) < rng.random(), np.exp2(-np.round(rng.uniform(0, depth, width))), 1.0)
    if rng.random() < 0.5:
        colony.q[i] = rounded(colony.q[i] * gaps, dtype)
    else:
        colony.k[i][keys] = rounded(colony.k[i][keys] * gaps, dtype)


def _one_sign(row: Row) -> None:
    """Products of one sign, or cancelling ones, in a row of several channels."""
    colony = row.colony
    i = row.index
    rng = row.rng
    keys = row.some()
    signs = np.sign(colony.q[i]) * (1 if rng.random() < 0.5 else rng.choice([-1, 1], colony.q.shape[1]))
    colony.k[i][keys] = np.abs(colony.k[i][keys]) * signs


def _cancel(row: Row) -> None:
    """Take a score back to about zero, or to another key's, by its last channel: what was lost remains."""
    colony = row.colony
    i = row.index
    rng = row.rng
    last = rng.integers(colony.q.shape[1])
    keys = row.some()
    q = colony.q[i, last]
    if q != 0:
        wanted = row.scores[rng.integers(row.keys)] / colony.factors[i, keys] if rng.random() < 0.5 else 0.0
        rest = colony.k[i][keys] @ colony.q[i] - colony.k[i][keys, last] * q
        colony.k[i][keys, last] = rounded((wanted - rest) / q, colony.island.dtype)


MUTATIONS = (_cut_off, _full_fractions, _spread_exponents, _one_sign, _cancel)
