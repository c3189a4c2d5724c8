"""Judge one case: run the kernel, compare with float64, divide by the bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.problem import Operands
from fa3verify import candidates, metrics
from fa3verify.candidates import Candidate, Result
from fa3verify.cases import Case


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything known about one run.

    ``inputs`` are q, k and v before rounding or quantisation. ``seen`` is the truth for the operands the kernel saw,
    ``unrounded`` for the inputs (None when not asked for); ``measures`` holds the figures of :mod:`fa3verify.metrics`.
    """

    case: Case
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray]
    operands: Operands
    result: Result
    seen: Attention
    unrounded: Attention | None
    bound: ErrorBound
    measures: dict[str, float]


def run(candidate: Candidate, case: Case, operands: Operands, config: Config) -> Result:
    """Run a candidate on a case and check the shape of what it returns."""
    result = candidate.run(case.problem, operands, config)
    for name, array, shape in (
        ("out", result.out, case.problem.out_shape),
        ("lse", result.lse, case.problem.lse_shape),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{case.kernel} returned {name} of shape {array.shape}, expected {shape}")
    return result


def judge(candidate: Candidate, case: Case, *, unrounded: bool = True) -> Judgement:
    """Run and measure one case.

    Parameters
    ----------
    unrounded : bool
        Also compare with the truth of the inputs before rounding, as the FlashAttention-3 paper does.

    Raises
    ------
    ValueError
        If the candidate cannot run the case or returns arrays of the wrong shape.
    """
    arrays, prepared = case.draw()
    operands = prepared.operands
    config = candidate.config_for(case.problem, case.changes)
    result = run(candidate, case, operands, config)
    seen = attention(case.problem, *operands.dequantized(case.problem))
    original = attention(case.problem, *arrays) if unrounded else None
    bound = forward_bound(case.problem, operands, config.traits.kernel_model(config))
    shift = prepared.lse_shift
    if original is not None and shift is not None:
        original = Attention(original.out, original.lse - shift)
    measures = metrics.measure(result, seen, original, bound, config.out_dtype)
    if candidate.twin is not None:
        expected = candidates.find(candidate.twin).run(case.problem, operands, config)
        measures["bits_differing"] = metrics.bits_differing(result, expected)
    return Judgement(case, arrays, operands, result, seen, original, bound, measures)
