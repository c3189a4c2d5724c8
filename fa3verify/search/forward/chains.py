"""Mutations of scores that are long sums of products, called chains, of which the tensor core truncates the terms.

They join the mutations of :mod:`fa3verify.search.forward.scores`.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.twin.wgmma import operand, operand_b, wgmma
from fa3_reference.bounds.device import TENSOR_CORE
from fa3_reference.bounds.steps import score_error
from fa3_reference.formats import Format
from fa3verify.search.colony import Rng, full_fractions, positive, rounded
from fa3verify.search.forward.guide import Row

VARIANTS = 32  # of one key that screened compares


def screened(row: Row, rng: Rng) -> None:
    """Take the best of many variants of one key, the heaviest or any: that with the largest error over its bound."""
    key = int(row.exact.argmax()) if rng.random() < 0.5 else rng.choice(row.some())
    fmt = row.fmt
    q = row.q
    k = np.repeat(row.k[key][None], VARIANTS, axis=0)
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
    error = np.abs(_chains(q[None], k, fmt) - exact) / np.maximum(bound, 2.0**-300)
    row.k[key] = k[int(np.nan_to_num(error, posinf=0.0).argmax())]


def _chains(q: np.ndarray, k: np.ndarray, fmt: Format) -> np.ndarray:
    """Return raw scores (rows, keys) as the tensor core adds them, float64."""
    padding = ((0, 0), (0, -q.shape[1] % TENSOR_CORE[fmt.name].k_step))
    a, b = (np.pad(x, padding).astype(fmt.dtype) for x in (q, k))
    return wgmma(operand(a, fmt.name), operand_b(b, fmt.name)).astype(np.float64)


@np.errstate(all="ignore")
def _lost(q: np.ndarray, k: np.ndarray, fmt: Format, sign: np.ndarray, shift: int) -> np.ndarray:
    """Return K (..., width) with products just below the last bit that survives alignment to the largest product.

    The largest product itself, and channels where Q is 0, stay as they are.
    """
    exponents = np.where(q * k != 0, np.frexp(q)[1] + np.frexp(k)[1] - 2, -999)  # of operands, not of products
    top = exponents.max(-1, keepdims=True)
    unit = np.ldexp(1.0, top - TENSOR_CORE[fmt.name].align_bits + shift)
    return np.where((exponents < top) & (q != 0), rounded(sign * unit * (1 - fmt.epsilon / 2) / q, fmt.name), k)


def _cut_off(row: Row, rng: Rng) -> None:
    """Make products too small for the alignment to the largest one, so that each is lost whole or in part."""
    q_descale = row.colony.q_descale
    fmt = row.fmt
    sign = rng.choice([-1.0, 1.0]) if rng.random() < 0.7 else rng.choice([-1.0, 1.0], row.q.size)
    channels = rng.random(row.q.size) < rng.random() ** 0.5
    is_narrow = fmt.name == "e4m3" and row.colony.island.is_chained  # its range ends 2^17 below its largest number
    if is_narrow and (top := np.abs(row.k).max()) > 0:
        lift = np.exp2(np.floor(np.log2(fmt.max_finite / top)))
        row.k[:] *= lift
        q_descale[row.index] = positive(q_descale[row.index] / lift)
    for key in row.some()[:16]:
        lost = _lost(row.q, row.k[key], fmt, sign, int(rng.integers(2)))
        row.k[key] = np.where(channels, lost, row.k[key])


def _full_fractions(row: Row, rng: Rng) -> None:
    """Make products of Q and K end in ones, so that truncation costs the most."""
    keys = row.some()
    row.q[:] = _ending_in_ones(row.q, row, rng)
    row.k[keys] = rounded(_ending_in_ones(row.k[keys], row, rng), row.dtype)


def _ending_in_ones(x: np.ndarray, row: Row, rng: Rng) -> np.ndarray:
    return np.where(x == 0, 0.0, full_fractions(x, row.fmt, rng.integers(1, 4, x.shape)))


def _spread_exponents(row: Row, rng: Rng) -> None:
    """Move products of one chain far apart in size, so that the small ones are cut off."""
    keys = row.some()
    depth = rng.uniform(0, 30)
    gaps = np.where(rng.random(row.q.size) < rng.random(), np.exp2(-np.round(rng.uniform(0, depth, row.q.size))), 1.0)
    if rng.random() < 0.5:
        row.q[:] = rounded(row.q * gaps, row.dtype)
    else:
        row.k[keys] = rounded(row.k[keys] * gaps, row.dtype)


def _one_sign(row: Row, rng: Rng) -> None:
    """Make products of one sign, or cancelling ones, in a row of several channels."""
    keys = row.some()
    signs = np.sign(row.q) * (1 if rng.random() < 0.5 else rng.choice([-1, 1], row.q.size))
    row.k[keys] = np.abs(row.k[keys]) * signs


def _cancel(row: Row, rng: Rng) -> None:
    """Take a score back to about zero, or to another key's, by its last channel: what was lost remains."""
    last = rng.integers(row.q.size)
    keys = row.some()
    q = row.q[last]
    if q != 0:
        factors = row.colony.factors[row.index, keys]
        wanted = row.scores[rng.integers(row.keys)] / factors if rng.random() < 0.5 else 0.0
        rest = row.k[keys] @ row.q - row.k[keys, last] * q
        row.k[keys, last] = rounded((wanted - rest) / q, row.dtype)


MUTATIONS = (_cut_off, _full_fractions, _spread_exponents, _one_sign, _cancel)
