"""A sink among the sums of a row: what it adds to the row sum, and how far rounding may take it from the truth."""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.device import LG2_REL, U_FP32
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import State
from fa3_reference.bounds.steps import FLOAT64, LN2, OUTWARD, gamma, log_error
from fa3_reference.formats import FORMATS

_SINK_ROUNDINGS = 8
_OFFSET = 9.0  # |log2| at most of what P is multiplied with
_SINK_REACH = 112.0  # binary orders of a sink above the largest key: 2^127 less an offset of e4m3, and room


def take_sink(state: State, sink: np.ndarray) -> None:
    """Let O be a mean of the sink's V as well, which is 0. Where the exponential of a sink that the maximum does not
    hold may overflow, O may be lost, which is next to 0, and no lse is promised; nor where it may vanish in a row
    without a key.
    """
    has_sink = np.logical_not(np.isneginf(sink))
    state.v_min = np.where(has_sink[:, None], np.minimum(state.v_min, 0.0), state.v_min)
    state.v_max = np.where(has_sink[:, None], np.maximum(state.v_max, 0.0), state.v_max)
    state.keys += 1
    reach = np.where(np.isneginf(state.keys_max), np.abs(sink), sink - state.keys_max)  # without a key, from 0
    is_far = has_sink & (reach > _SINK_REACH)
    state.lse_lost |= is_far
    state.o_error = state.o_error + np.where(is_far[:, None], state.oa + state.boa, 0.0)


def sink_error(sink: np.ndarray, keys: np.ndarray, model: KernelModel) -> np.ndarray:
    """Bound the error of a sink's exponent in log2 units, of which the largest key may be taken as it was rounded or
    once more: log2(e), its product with the sink, the difference, two roundings of the maximum, and what the
    logarithm of a sum adds that is large next to it; and of the sink among scores that are kept in 16 bits their
    rounding.
    """
    size, of_keys = (np.abs(np.where(np.isneginf(x), 0.0, x)) for x in (sink, keys))
    kept = 0.0 if model.scores == "fp32" else FORMATS[model.scores].unit_roundoff
    return (gamma(_SINK_ROUNDINGS) + LG2_REL) * (size + of_keys + _OFFSET) + kept * size


def add_sink(state: State, sink: np.ndarray, model: KernelModel) -> None:
    """Add a sink to the row sum of all keys, in the scale of their maximum, or of its own where there are none."""
    of_keys = (state.max, state.max_low, state.max_high)
    state.max, state.max_low, state.max_high = (np.where(np.isneginf(x), sink, x) for x in of_keys)
    p = np.exp2(sink - np.where(np.isneginf(state.max), 0.0, state.max))
    r = LN2 * (sink_error(sink, state.max, model) + 2 * state.tau) + log_error(model.exp_error)
    state.l = state.l + p
    state.l_up = state.l_up + p * np.expm1(r) * OUTWARD
    state.l_down = state.l_down - p * np.expm1(-r) * OUTWARD
    lost = np.where(p > 0, U_FP32 * (state.l + state.l_up + state.l_error), 0.0)
    state.l_error = (state.l_error + lost) * OUTWARD
    state.weights = state.weights + (p > 0)
    state.l_grid = np.where(p > 0, 0.0, state.l_grid)
    state.worst = np.maximum(state.worst, r)
    state.noise = np.maximum(state.noise, FLOAT64 * np.abs(np.where(p > 0, sink, 0.0)))
