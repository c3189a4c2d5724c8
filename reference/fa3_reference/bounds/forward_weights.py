"""Weights of a key block, P: how far the exponential and the rounding to P's format may take them from the truth.

These are steps 3 and 4 of the bound of a forward, in reference/README.md. :mod:`fa3_reference.bounds.forward` calls
:func:`weights_of` for every key block; what becomes of the weights in sums is in
:mod:`fa3_reference.bounds.forward_sums`, and the P of a backward in :mod:`fa3_reference.bounds.gradient_steps`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import EX2_REL, EXACT_EX2, FP32_MIN_NORMAL, RCP_REL, U_FP32
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import VANISHES, State
from fa3_reference.bounds.steps import LN2, OUTWARD, binary32_error, gamma, grid, log_error, rounding_error
from fa3_reference.formats import FORMATS, Format

# In an unknown order the maximum may move with every key, and each move multiplies a weight by an exponential. A weight
# meets half of all moves on average. Charging 4 times the error of ex2 once in 8 keys, beside the additions of the row
# sum, covers exponentials that each err by 2 ulp the same way.
_KEYS_OF_A_STEP = 8
LIFTED = 2.0**8  # largest weight that is allowed where rounding the row's maximum takes weights beyond 1
_SCALE_OF_P = 2.0**-12  # e4m3 P is multiplied by a number of that format up to this relative error (448 as 2^8.807)
_HOPELESS = 50.0  # error of ln of a weight beyond which O is only known to be a mean of V rows


class BlockWeights(NamedTuple):
    """Weights of one block's keys and their errors, (rows, keys) each where nothing else is said.

    ``p`` is the exact weight in the scale of the exact running maximum, and ``visible`` says which keys a row sees. The
    computed weight lies between p (1 - down) and p (1 + up), and ``either`` is the larger of down and up. ``rounding``
    bounds what rounding the weight to P's format adds. ``unit`` (rows, 1) is the factor from p to the kernel's P.
    ``counts`` (rows,) is how many weights of a row may differ from zero. All of a row are multiples of ``grid`` (rows,)
    before they are rounded to P's format and of ``p_grid`` (rows,) after that, both in units of the kernel.
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
        """Return the weights of all keys but the last, where a sink stands."""
        of_keys = ("p", "visible", "either", "down", "rounding")
        return self._replace(**{name: getattr(self, name)[:, :-1] for name in of_keys})


def weights_of(state: State, x: np.ndarray, dx: np.ndarray, model: KernelModel, has_sink: bool = False) -> BlockWeights:
    """Steps 3 and 4: return the weights of a block, their errors, and what rounding them to P's format adds.

    ``x`` (rows, keys) are exact scores in log2 units, -inf where hidden, and ``dx`` their errors; with ``has_sink`` the
    last key is the sink. Rows whose weights are unknown or leave the domain are marked in the state.
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
    if model.order.weights == "normalised" and has_sink:  # P may be divided by a row sum that the sink is not in yet
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
    """Return how many weights of a row may differ from zero, and the powers of two of which all are multiples before
    and after they are rounded to P's format; (rows,) each, and zeros where the order is not stated.

    The weights lie in [low, high] up to a factor ``shift`` (rows, 1), by which the maximum may be off.
    """
    if not model.is_stated:
        return [np.zeros(len(low))] * 3
    low = low / shift
    high = np.where(high * shift < FP32_MIN_NORMAL, 0.0, high * shift)
    return [
        (high > 0).sum(1),
        *(grid(low, high, fmt).min(1) for fmt in (FORMATS["fp32"], FORMATS[model.probabilities])),
    ]


def _log_errors(y: np.ndarray, dx: np.ndarray, tau: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return the largest |ln of a weight's error| apart from moves of the maximum (step 3), (rows, keys).

    The weights are 2^y with y <= 0, whose scores are off by ``dx`` and whose maximum by ``tau`` (rows, 1).
    """
    exponent = y + model.p_offset_log2
    within = dx + tau
    exp = log_error(model.exp_error)
    if not model.is_stated:
        return LN2 * (dx + U_FP32 * (_exponent(y, model) + within)) + exp
    r = LN2 * (dx + binary32_error(exponent - within, exponent + within)) + exp
    # An exponent this near to an integer is rounded to it, and an ex2 that is correct to 2^-22.7 is exact there.
    is_largest = (np.abs(y) + within < EXACT_EX2) & (model.exp_error <= EX2_REL)
    return np.where(is_largest, np.minimum(r, LN2 * (np.abs(y) + tau)), r)


def _exponent(y: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return the largest |exponent| of a weight 2^y, whatever factor P is multiplied with."""
    return np.maximum(np.abs(y + model.p_offset_log2), np.abs(y + model.largest_offset_log2))


def _moves(x: np.ndarray, distance: np.ndarray, state: State, model: KernelModel) -> np.ndarray:
    """Return what the factors of moved maxima add to |ln of a weight's error| where the blocks are not known.

    The exponents of these factors telescope, so that their roundings count by ``distance``, how far the weight's score
    may be from the maximum, and only the errors of the exponentials count by the number of moves.
    """
    keys = (~np.isneginf(x)).sum(1)
    times = np.zeros(keys.shape) if model.order.weights == "normalised" else -(-keys // _KEYS_OF_A_STEP)
    largest = state.largest_score if model.order.maxima == "unscaled" else np.zeros(keys.shape)
    return (times * log_error(model.exp_error))[:, None] + gamma(3) * LN2 * (distance + 2 * largest[:, None])


def _p_rounding(
    low: np.ndarray, high: np.ndarray, tau: np.ndarray, cap: np.ndarray, model: KernelModel
) -> tuple[np.ndarray, np.ndarray]:
    """Step 4: bound |round(p^) - p^| in the scale of the exact maximum, for p^ in [low, high] there.

    Returns the bound (rows, keys), and ``unit`` (rows, 1) as :class:`BlockWeights` has it. ``tau`` (rows,) is how far
    the maximum may be off, and ``cap`` (rows,) the largest computed weight.
    """
    fmt = model.p_format
    is_float = isinstance(fmt, Format)
    if is_float and model.is_blocked and model.order.rescale != "lazy":  # step 4
        unit = 2.0**model.p_offset_log2
        shift = np.exp2(tau)[:, None]
        low = unit * low / shift
        high = unit * np.minimum(high * shift, cap[:, None])
        return rounding_error(low, high, fmt) * shift / unit * OUTWARD, np.full((len(tau), 1), unit)
    least = low.sum(1)[:, None]
    largest = high.sum(1)[:, None]
    if is_float and model.order.weights == "normalised":
        own = 1 + gamma(low.shape[1] + 4) + RCP_REL
        rounding = rounding_error(low / largest / own, high / least * own, fmt) * largest
        return rounding * OUTWARD, 1 / largest
    # In whatever scale a kernel rounds P, P is not smaller than after division by the row sum, or, for running weights,
    # than in the scale of the largest maximum. Rounding to nearest costs no more than P itself.
    unit = 1 / largest if model.order.weights != "running" else np.exp2(-tau)[:, None]
    rounding = np.minimum(fmt.unit_roundoff * high + fmt.min_subnormal / 2 / unit, high)
    return rounding * OUTWARD, unit


def _apart(x: np.ndarray, dx: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return how far a running weight may lie from the factor that P is multiplied with, relative to it, (rows, 1).

    That factor is a number of P's format, and rounding to nearest moves no number farther than to the next number of
    the format. Each maximum that a weight meets is the largest of some visible keys, so that the weight is below the
    factor by no more than the spread of the row's scores; by nothing where one key is visible.
    """
    visible = ~np.isneginf(x)
    lowest = np.where(visible, x - dx, np.inf).min(1)
    highest = np.where(visible, x + dx, -np.inf).max(1)
    spread = np.where(visible.sum(1) > 1, highest - lowest, 0.0)
    largest = np.maximum(np.abs(lowest), np.abs(highest)) + model.largest_offset_log2
    distance = LN2 * (spread + gamma(6) * largest) + log_error(model.exp_error)
    return (np.expm1(distance) * OUTWARD + (_SCALE_OF_P if model.probabilities == "e4m3" else 0.0))[:, None]
