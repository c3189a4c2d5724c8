"""The sums behind gradients: products of rounded P or dS, the addition of parts, softmax_scale and the last rounding.

These are steps B6 to B8 of the bound of gradients, in reference/README.md. :mod:`fa3_reference.bounds.backward` calls
them; P and dS come from there and from :mod:`fa3_reference.bounds.gradient_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.steps import OUTWARD, gamma, rounded_error
from fa3_reference.formats import FORMATS

_OWN = 2.0**-20  # error of float64 sums over that of binary32, 2^-53 / 2^-24, with room for chains of other lengths
SCALED_OPERANDS = 6  # roundings more of a product whose factors softmax_scale, or its root, may have multiplied before


class Sum(NamedTuple):
    """Exact sums, their error so far, and the sums of absolute values that rounding is relative to, one shape each."""

    exact: np.ndarray
    error: np.ndarray
    size: np.ndarray


def product(w: np.ndarray, dw: np.ndarray, x: np.ndarray, model: BackwardModel) -> Sum:
    """Step B6: return w x in one chain of wgmma, or by any tree of additions in binary32.

    ``w`` (m, n) is P or dS and ``dw`` its error; ``x`` (n, channels) is an operand, which is exact.
    """
    size = (np.abs(w) + dw) @ np.abs(x)
    cut = np.zeros(size.shape)
    if model.accumulator != "wgmma":
        relative = gamma(len(x) + SCALED_OPERANDS, model.addition) + model.factors
        cut = relative * size + 2 * len(x) * FP32_MIN_NORMAL * (size > 0)
    if model.accumulator in ("wgmma", "either"):
        cut = np.maximum(cut, _chain_error(w, dw, x, size, model))
    own = size * len(x) * 2.0**-52
    error = (dw @ np.abs(x) + cut + own) * OUTWARD
    return Sum(w @ x, np.where(size + error > FP32_MAX, np.inf, error), size)


def _chain_error(w: np.ndarray, dw: np.ndarray, x: np.ndarray, size: np.ndarray, model: BackwardModel) -> np.ndarray:
    # what a chain of wgmma steps over n loses of w x, (m, channels); arguments as of :func:`product`
    core = model.core
    steps = -(-len(x) // core.k_step)
    promoted = 0.0
    if model.accumulator == "either":  # groups of half a step or more, any of which may move to binary32
        steps = -(-len(x) // (core.k_step // 2))
        promoted = gamma(steps, model.addition)
    least = core.operand.min_normal
    w_power = np.maximum(np.abs(w) + dw, least).max(1, initial=0)
    x_power = np.maximum(np.abs(x), least).max(0, initial=0)
    power = w_power[:, None] * x_power * (size > 0)
    cut = (core.k_step + 1) * core.align * np.maximum(power, size) + core.out * size + core.tiny * (size > 0)
    return steps * cut * (1 + steps * 2.0**-19) + promoted * size


def added(parts: list[Sum], model: BackwardModel, count: int = 0) -> Sum:
    """Step B7: return the sum of parts, added in any order in the model's format of parts.

    A kernel may have cut the same sum into other parts than these, ``count`` at most; 0 stands for as many.
    """
    fmt = FORMATS[model.parts]
    count = count or len(parts)
    if count == 1 and len(parts) == 1:
        return parts[0]
    exact, error, size = (np.sum([getattr(x, name) for x in parts], axis=0) for name in Sum._fields)
    if model.parts == "fp32":
        error = error + gamma(count) * (size + error) + 2 * count * FP32_MIN_NORMAL * (size > 0)
    else:  # every part is rounded, and every sum
        error = error + gamma(count + 1, fmt.unit_roundoff) * (size + error)
        error = error + 2 * count * fmt.min_subnormal * (size > 0)
    return Sum(exact, np.where(size + error > fmt.max_finite, np.inf, error) * OUTWARD, size)


def scaled(x: Sum, scale: float) -> Sum:
    """Step B8: return a sum times softmax_scale, which is rounded to binary32 itself, as is the product."""
    error = x.error + gamma(2) * (np.abs(x.exact) + x.error)
    error = error * scale * OUTWARD + FP32_MIN_NORMAL * (1 + scale) * (x.size > 0)
    size = x.size * scale
    return Sum(x.exact * scale, np.where(size + error > FP32_MAX, np.inf, error), size)


def stored(x: Sum, model: BackwardModel) -> np.ndarray:
    """Return the error of a sum after the last rounding, to the format of the gradients; inf where it is NaN.

    The error of the float64 sums, here and in the truth, is a tiny part (``_OWN``) of the error in binary32, as both
    are relative to the same sums of absolute values. It is added before the last rounding and once more after it.
    """
    error = x.error + FP32_MIN_NORMAL * (x.size > 0)
    own = error * _OWN
    if model.output.name != "fp32":
        error = rounded_error(x.exact, error + own, model.output)
    return np.where(np.isnan(error), np.inf, error + own)
