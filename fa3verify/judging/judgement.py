"""Judge one case: run the kernel, compare its outputs with float64, and divide the errors by the bound.

Users call it as :func:`fa3verify.judge`. :mod:`fa3verify.campaign.plan` judges many cases in worker processes, and
:mod:`fa3verify.campaign.summary` draws a verdict over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3_kernels.plan.families import OURS
from fa3_reference.bounds.quantisation import predict_error, quantization_bound
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import condition
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.judging import hypotheses, metrics
from fa3verify.kernels import calls
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import Twin
from fa3verify.operations import Outputs
from fa3verify.operations.operation import Arrays, error_ratio

_STATED = ""  # stands for the name of a hypothesis where a kernel states its order
Enclosure = Mapping[str, tuple[np.ndarray, np.ndarray]]  # smallest and largest possible value, by name of output
Exact = Mapping[str, NDArray[np.float64]]  # truths and bounds by name of output


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything known about one run; outputs, truths and bound are arrays by name of output, such as "out" and "lse".

    Parameters
    ----------
    case : Case
        What was run; :func:`fa3verify.judge` of it gives the same figures again.
    inputs : tuple of float64 arrays
        The arrays q, k and v, and what else the operation takes, before rounding or quantisation.
    operands : Operands
        What the kernel saw.
    outputs : mapping of str to array
        What the kernel returned, in its own formats.
    seen : mapping of str to float64 array
        The truth for the operands the kernel saw.
    unrounded : mapping of str to float64 array, optional
        The truth for ``inputs``; None when it was not asked for.
    bound : mapping of str to float64 array
        Largest ``|outputs - seen|`` of a sound kernel, element by element; inf where nothing is promised.
    measures : dict of str to float
        Figures of :mod:`fa3verify.judging.metrics` by name; ``ratio_max`` is the largest error / bound. A NaN that
        should be none counts as an infinite error.
    hypotheses : mapping of str to dict of str to float
        For a kernel that states no order the figures under each hypothesis (:mod:`fa3verify.judging.hypotheses`), else
        empty; ``bound`` and ``measures`` are of the hypothesis with the smallest error / bound.
    """

    case: Case
    inputs: Arrays
    operands: Operands
    outputs: Outputs
    seen: Exact
    unrounded: Exact | None
    bound: Exact
    measures: dict[str, float]
    hypotheses: Mapping[str, dict[str, float]] = field(default_factory=dict)

    @property
    def quantisation(self) -> dict[str, float] | None:
        """Return what quantising Q, K and V did: mean squared error measured and predicted, largest error / its bound.

        None where nothing was quantised, where the truth of the unrounded inputs was not asked for, and for problems
        with sinks.
        """
        problem = self.case.problem
        scheme = self.case.scheme
        if scheme is None or self.unrounded is None or problem.sinks:
            return None
        q, k, v = self.inputs
        exact = (*condition(problem, q, k, scheme)[:2], v)  # as quantised: centred and rotated
        moved = [np.abs(a - b) for a, b in zip(self.operands.dequantized(problem), exact, strict=True)]
        bound = quantization_bound(problem, *exact, *moved).out
        error = np.abs(self.seen["out"] - self.unrounded["out"])
        predicted = predict_error(problem, q, k, v, scheme)
        return {
            "measured": float(np.mean(np.square(error))),
            "predicted": float(np.mean(np.square(predicted.total))),
            "bound_ratio": float(np.max(error_ratio(error, bound), initial=0.0)),
        }


def judge(kernel: Kernel, case: Case, *, unrounded: bool = True) -> Judgement:
    """Run and measure one case.

    Parameters
    ----------
    unrounded : bool
        Also compare with the truth of the inputs before rounding, as the FlashAttention-3 paper does.

    Raises
    ------
    ValueError
        If the kernel takes no such case.
    fa3verify.kernels.calls.KernelError
        If it raises, changes its operands, or returns what it does not declare.
    """
    operation = operations.find(kernel.operation)
    problem = case.problem
    case.check_descales(kernel)
    arrays, prepared = case.draw()
    operands = kernel.given(prepared.operands)
    config = kernel.config_for(problem, case.changes)
    exact = operands.dequantized(problem)
    sides = hypotheses.under(kernel)

    def references(got: Outputs) -> tuple[Outputs, Outputs | None, dict[str, Outputs]]:
        seen = operation.truth(problem, exact, config, got)
        original = operation.truth(problem, arrays, config, got) if unrounded else None
        bounds = {}
        for name, side in (sides or {_STATED: kernel}).items():
            bound = operation.bound(problem, operands, hypotheses.assumed(side, config), got)
            bounds[name] = freed(kernel.policy, problem, bound, math.inf, operands.term)
        return seen, original, bounds

    # Made before the kernel runs, which then cannot change what they are made from; a quantiser's need its outputs.
    before = None if operation.judges_choices else references({})
    enclosure = {} if sides else _enclosure(kernel, problem, operands, hypotheses.assumed(kernel, config))
    got = calls.run(kernel, problem, operands, config)
    seen, original, bounds = before or references(got)
    beside = metrics.enclosed(got, seen, enclosure)
    if kernel.twin is not None:
        beside |= _bits(kernel.twin, problem, operands, config, got)
    under = {
        name: metrics.figures(operation, got, seen, original, bound, config) | beside for name, bound in bounds.items()
    }
    least = min(under, key=lambda name: hypotheses.strain(operation, under[name]))
    return Judgement(case, arrays, operands, got, seen, original, bounds[least], under[least], under if sides else {})


def _bits(twin: Kernel, problem: AttentionProblem, operands: Operands, config: Any, got: Outputs) -> dict[str, float]:
    """Return how many values have other bits than the twin's; empty where the twin does not take the problem.

    A twin of the same family as the kernel's configuration runs in that configuration. A twin of another family, such
    as that of a learned order, runs in its own; it may not take the problem, and all NaN count as equal there.
    """
    is_other = isinstance(twin.code, Twin) and twin.code.family != getattr(config, "family", OURS)
    if is_other:
        if twin.refusal(problem):
            return {}
        config = twin.config_for(problem)
    bits = calls.run(twin, problem, operands, config)
    return {"bits_differing": metrics.bits_differing(got, bits, equal_nans=is_other)}


def _enclosure(kernel: Kernel, problem: AttentionProblem, operands: Operands, assumed: Any) -> Enclosure:
    """Return the ranges in which the stated order of operations leaves the outputs, unlimited where policy is free."""
    ranges = operations.find(kernel.operation).enclosure(problem, operands, assumed)
    low, high = ({name: ends[i] for name, ends in ranges.items()} for i in (0, 1))
    low = freed(kernel.policy, problem, low, -math.inf)
    high = freed(kernel.policy, problem, high, math.inf)
    return {name: (low[name], high[name]) for name in ranges}


def passes(kernel: Kernel, measures: dict[str, float]) -> bool:
    """Tell whether one judged case passes.

    No element may leave its bound, no bit may differ from the twin's, and no value may be outside its enclosure, where
    there is a twin or an enclosure.
    """
    operation = operations.find(kernel.operation)
    wrong = ("bits_differing", "outside")
    return hypotheses.strain(operation, measures) <= 1 and not any(measures.get(name, 0) for name in wrong)
