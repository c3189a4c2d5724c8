"""A sink among the sums of a row: what it adds to the row sum, and how far rounding may take that from the truth.

:mod:`fa3_reference.bounds.forward` calls these; the gradient of a sink is in
:mod:`fa3_reference.bounds.gradient_further`. Sinks are (rows,) in log2 units, -inf where a row has none.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.device import LG2_REL, U_FP32
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import State
from fa3_reference.bounds.steps import FLOAT64, LN2, OUTWARD, gamma, log_error
from fa3_reference.formats import FORMATS

_SINK_ROUNDINGS = 8  # of a sink's exponent, as :func:`sink_error` lists them
_OFFSET = 9.0  # largest |log2| of the factor that P is multiplied with: 448 is 2^8.8
_SINK_REACH = 112.0  # binary orders a sink may be above the largest key: 127, less an offset of e4m3 and room


def take_sink(state: State, sink: np.ndarray) -> None:
    """Note in the state that O is a mean of the sink's V as well, which is 0.

    A sink far above the largest key may overflow in an exponential whose maximum is of the keys alone. O, which is next
    to 0 there, may then be lost, and nothing is promised of lse. The same holds for a sink far from 0 in a row without
    a key.
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
    """Bound the error (rows,) of a sink's exponent, sink - maximum, in log2 units.

    ``keys`` (rows,) is the largest score of the keys. The roundings are those of log2(e), of its product with the sink,
    of the difference, two of the maximum, one of a factor on P, and what the logarithm of a sum far above 1 adds. Where
    scores are kept in 16 bits the sink is rounded to them too.
    """
    size, of_keys = (np.abs(np.where(np.isneginf(x), 0.0, x)) for x in (sink, keys))
    kept = 0.0 if model.scores == "fp32" else FORMATS[model.scores].unit_roundoff
    return (gamma(_SINK_ROUNDINGS) + LG2_REL) * (size + of_keys + _OFFSET) + kept * size


def add_sink(state: State, sink: np.ndarray, model: KernelModel) -> None:
    """Add a sink to the finished row sum, in the scale of the keys' maximum, or of its own in rows without a key.

    Rows with a sink of -inf stay as they are.
    """
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
