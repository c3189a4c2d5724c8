"""The law of quantised operands: conditioning and rounding to e4m3 stay within their bound of the unrotated truth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_reference.attention import attention
from fa3_reference.bounds.quantisation import quantization_bound
from fa3_reference.hadamard import can_rotate
from fa3_reference.quantize import condition
from fa3verify.properties.compare import Found, summed, within
from fa3verify.properties.law import Setup, Trial, set_up
from fa3verify.properties.trials import Wanted, drawn, law, needs

_UNIT = 2.0**-53


def _rounding(x: np.ndarray, steps: float) -> np.ndarray:
    """Bound the error of conditioning in float64: ``steps`` roundings of a row's 2-norm, in every channel."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.broadcast_to(steps * _UNIT * norm, x.shape)


def _rotation(setup: Setup, trial: Trial) -> Found:
    """Compare attention of rotated Q and K with the plain truth, first in float64, then of the kernel on e4m3."""
    case = trial.case
    problem = case.problem
    scheme = case.scheme
    if scheme is None:
        raise ValueError(f"{trial.law} needs a quantisation scheme")
    if can_rotate(problem.head_dim):
        scheme = replace(scheme, hadamard_seed=trial.integer("hadamard_seed", 0, 2**16))
    q, k, v = case.recipe.draw(problem)
    truth = attention(problem, q, k, v)
    turned_q, turned_k, lse_shift = condition(problem, q, k, scheme)
    shift = 0.0 if lse_shift is None else lse_shift
    steps = 2 * (math.log2(problem.head_dim) + 4) + problem.seqlen_k
    dq = _rounding(turned_q, steps)
    dk = _rounding(turned_k, steps) + _rounding(k, steps)
    still = quantization_bound(problem, turned_q, turned_k, v, dq, dk, np.zeros_like(v))
    rotated = attention(problem, turned_q, turned_k, v)
    expected = {"out": truth.out, "lse": truth.lse - shift}
    noise = {"out": np.zeros(()), "lse": 2.0**-48 * (1 + np.abs(shift) * np.ones(problem.lse_shape))}
    what = "float64 attention of rotated Q and K"
    yield within(what, rotated._asdict(), expected, summed(still._asdict(), noise))
    quantised = set_up(setup.kernel, replace(case, scheme=scheme))
    q8, k8, v8 = quantised.operands.dequantized(problem)
    moved = quantization_bound(
        problem, turned_q, turned_k, v, np.abs(q8 - turned_q) + dq, np.abs(k8 - turned_k) + dk, np.abs(v8 - v)
    )
    limit = summed(moved._asdict(), quantised.bound(), noise)
    yield within("rotated and quantised against the unrotated truth", quantised.run(), expected, limit)


ROTATION_LAWS = (
    law(
        "rotation_and_centring_keep_attention",
        "e4m3: rotating Q and K and centring K keeps float64 attention; the kernel stays within quantisation plus "
        "rounding bound of the plain truth",
        "bounded",
        _rotation,
        wanted=Wanted(longest_q=16),
        parameters=drawn(hadamard_seed=st.integers(0, 2**16)),
        applies=needs(dtypes=("e4m3",)),
    ),
)
