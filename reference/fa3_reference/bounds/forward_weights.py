"""Weights of a key block, P: how far the exponential and the rounding to P's format may take them from the truth.

Steps 3 and 4 of the bound of a forward, in reference/README.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import EX2_REL, EXACT_EX2, FP32_MIN_NORMAL, RCP_REL, U_FP32
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import VANISHES, State
from fa3_reference.bounds.steps import LN2, OUTWARD, binary32_error, gamma, grid, log_error, rounding_error
from fa3_reference.formats import FORMATS

# Of an unknown order, whose maximum may move with every key: weights meet half of all moves on average, and four times
# the error of ex2 once in 8 keys, beside the additions of the row sum, is no less than half of 2 ulp in each key.
_KEYS_OF_A_STEP = 8
LIFTED = 2.0**8  # of a weight beyond 1, by the rounding of its row's maximum
_SCALE_OF_P = 2.0**-12  # what e4m3 P is multiplied with is so near to a number of that format: 448 is also 2^8.807
_HOPELESS = 50.0  # of ln of a weight: beyond, only a mean of V rows is known


class BlockWeights(NamedTuple):
    """Weights of one block's keys, (rows, keys) each but for ``unit``.

    ``p`` is exact in the scale of the exact running maximum. The computed one is between p (1 - down) and p (1 + up);
    ``either`` is the larger of the two. ``rounding`` bounds what rounding it to P's format adds, and ``unit`` (rows,
    1) is what the kernel's P is in units of p. ``counts`` (rows,) weights may not be zero; all are multiples of
    ``grid`` (rows,) before they are rounded to P's format, of ``p_grid`` after that, both in units of the kernel.
    """

    p: np.ndarray
    visible: np.ndarray
    either: np.ndarray
    down: np.ndarray
    rounding: np.ndarray
    unit: np.ndarray
    counts: np.ndarray
    grid: np.ndarray
    p_grid: np.ndarray

    def without_last(self) -> BlockWeights:
        """Return the weights of all keys but the last."""
        of_keys = ("p", "visible", "either", "down", "rounding")
        return self._replace(**{name: getattr(self, name)[:, :-1] for name in of_keys})


def weights_of(state: State, x: np.ndarray, dx: np.ndarray, model: KernelModel, has_sink: bool = False) -> BlockWeights:
    """Steps 3 and 4: the weights of a block, their errors, and what rounding them to P's format adds; behind the keys
    may stand a sink.
    """
    base = np.where(np.isneginf(state.max), 0.0, state.max)
    offset = model.p_offset_log2
    tau = state.tau
    visible = ~np.isneginf(x)
    if model.order.exponent == "rounded":
        dx = dx + U_FP32 * (np.abs(x) + dx)
    y = x - base[:, None]
    p = np.exp2(y)
    r = _log_errors(y, dx, tau[:, None], model)
    if not model.is_blocked:
        r = r + _moves(x, _exponent(y, model) + dx + tau[:, None], state, model)
    r = np.where(visible, r, 0.0)
    state.unknown |= r.max(1) > _HOPELESS
    state.worst = np.maximum(state.worst, r.max(1))
    flushed = y + offset - dx - tau[:, None] < -VANISHES
    # The largest computed weight is 2^0 but for the rounding of its maximum.
    cap = np.exp2(2 * U_FP32 * (np.abs(base) + model.largest_offset_log2 + tau)) * (1 + 2 * model.exp_error)
    # A maximum of millions is rounded so far that P leaves its format, and larger ones lift every weight.
    lifted = cap * (2.0**8 if model.order.rescale == "lazy" else 1.0) * 2.0**offset
    largest = np.inf if model.order.weights == "normalised" else model.p_format.max_finite
    state.outside |= ~((lifted <= largest) & (cap <= LIFTED))[:, None]
    if not model.is_blocked or model.order.rescale == "lazy":
        cap = np.full_like(cap, np.inf)
    up = np.minimum(np.expm1(r) * OUTWARD, (np.exp2(tau) * cap)[:, None] / np.where(p > 0, p, 1.0) - 1.0)
    down = np.where(flushed, 1.0, -np.expm1(-r) * OUTWARD)
    either = np.maximum(up, down)
    low = np.where(flushed, 0.0, p * np.exp(-r))
    high = p * np.exp(r)
    rounding, unit = _p_rounding(low, high, tau, cap, model)
    if model.order.weights == "normalised" and has_sink:  # a finished O may take the sink: P is without it
        apart, _ = _p_rounding(low[:, :-1], high[:, :-1], tau, cap, model)
        rounding[:, :-1] = np.fmax(rounding[:, :-1], apart)
    if not model.is_blocked and model.order.weights == "running":
        rounding = np.fmin(rounding, high * _apart(x, dx, model))
    counts, *grids = _weight_grids(low * 2.0**offset, high * 2.0**offset, np.exp2(tau)[:, None], model)
    if model.order.row_sum_of == "rounded":  # rounding is an error of the weights, of O and the row sum alike
        relative = rounding / np.where(p > 0, p, 1.0)
        either = either + relative
        down = np.minimum(down + relative, 1.0)
        rounding = np.zeros_like(p)
    return BlockWeights(p, visible, either, down, rounding, unit, counts, *grids)


def _weight_grids(low: np.ndarray, high: np.ndarray, shift: np.ndarray, model: KernelModel) -> list[np.ndarray]:
    """Number of the weights of a row that may not be zero, and powers of two of which all are multiples, before and
    after they are rounded to P's format."""
    if not model.is_stated:
        return [np.zeros(len(low))] * 3
    low = low / shift
    high = np.where(high * shift < FP32_MIN_NORMAL, 0.0, high * shift)
    return [(high > 0).sum(1), *(grid(low, high, fmt).min(1) for fmt in (FORMATS["fp32"], model.p_format))]


def _log_errors(y: np.ndarray, dx: np.ndarray, tau: np.ndarray, model: KernelModel) -> np.ndarray:
    """|ln of a weight's error| at most where the blocks are known (step 3), ``y`` log2 units below the maximum."""
    exponent = y + model.p_offset_log2
    within = dx + tau
    exp = log_error(model.exp_error)
    if not model.is_stated:
        return LN2 * (dx + U_FP32 * (_exponent(y, model) + within)) + exp
    r = LN2 * (dx + binary32_error(exponent - within, exponent + within)) + exp
    # Nothing that is correct to 2^-22.7 errs at an integer, which is where an exponent ends that is so near to it.
    is_largest = (np.abs(y) + within < EXACT_EX2) & (model.exp_error <= EX2_REL)
    return np.where(is_largest, np.minimum(r, LN2 * (np.abs(y) + tau)), r)


def _exponent(y: np.ndarray, model: KernelModel) -> np.ndarray:
    """|exponent| at most of a weight ``y`` log2 units below its maximum, whatever P is multiplied with."""
    return np.maximum(np.abs(y + model.p_offset_log2), np.abs(y + model.largest_offset_log2))


def _moves(x: np.ndarray, distance: np.ndarray, state: State, model: KernelModel) -> np.ndarray:
    """Return what the factors of moved maxima add to ln of a weight where the blocks are not known: exponents
    telescope.
    """
    keys = (~np.isneginf(x)).sum(1)
    times = np.zeros(keys.shape) if model.order.weights == "normalised" else -(-keys // _KEYS_OF_A_STEP)
    largest = state.largest_score if model.order.maxima == "unscaled" else np.zeros(keys.shape)
    return (times * log_error(model.exp_error))[:, None] + gamma(3) * LN2 * (distance + 2 * largest[:, None])


def _p_rounding(
    low: np.ndarray, high: np.ndarray, tau: np.ndarray, cap: np.ndarray, model: KernelModel
) -> tuple[np.ndarray, np.ndarray]:
    """Bound on |round(p^) - p^| in the scale of the exact maximum, for p^ in [low, high] there; and P's unit."""
    fmt = model.p_format
    if model.is_blocked and model.order.rescale != "lazy":  # step 4
        unit = 2.0**model.p_offset_log2
        shift = np.exp2(tau)[:, None]
        low = unit * low / shift
        high = unit * np.minimum(high * shift, cap[:, None])
        return rounding_error(low, high, fmt) * shift / unit * OUTWARD, np.full((len(tau), 1), unit)
    least = low.sum(1)[:, None]
    largest = high.sum(1)[:, None]
    if model.order.weights == "normalised":
        own = 1 + gamma(low.shape[1] + 4) + RCP_REL
        rounding = rounding_error(low / largest / own, high / least * own, fmt) * largest
        return rounding * OUTWARD, 1 / largest
    # Whatever the scale, P is not smaller than normalised, or than in that of the largest maximum where it is not; and
    # rounding to nearest costs no more than P itself.
    unit = 1 / largest if model.order.weights == "any" else np.exp2(-tau)[:, None]
    rounding = np.minimum(fmt.unit_roundoff * high + fmt.min_subnormal / 2 / unit, high)
    return rounding * OUTWARD, unit


def _apart(x: np.ndarray, dx: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return how far, relative to it, a running weight may lie from what P is multiplied with, (rows, 1).

    Every maximum that a weight meets is that of some visible keys, of its own alone where it is the only one; and
    rounding to nearest moves no number by more than its distance from one of the format.
    """
    visible = ~np.isneginf(x)
    lowest = np.where(visible, x - dx, np.inf).min(1)
    highest = np.where(visible, x + dx, -np.inf).max(1)
    spread = np.where(visible.sum(1) > 1, highest - lowest, 0.0)
    largest = np.maximum(np.abs(lowest), np.abs(highest)) + model.largest_offset_log2
    distance = LN2 * (spread + gamma(6) * largest) + log_error(model.exp_error)
    return (np.expm1(distance) * OUTWARD + (_SCALE_OF_P if model.probabilities == "e4m3" else 0.0))[:, None]
