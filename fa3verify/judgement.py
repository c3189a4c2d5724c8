"""Judge one case: run the kernel, compare with float64, divide by the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import calls, candidates, metrics, operations
from fa3verify.candidates import Candidate
from fa3verify.cases import Case
from fa3verify.operations import Outputs
from fa3verify.operations.operation import Arrays
from fa3verify.policy import freed

Enclosure = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything known about one run; outputs, truths and bound are arrays by name of output.

    ``inputs`` are q, k and v, and what else the operation takes, before rounding or quantisation. ``seen`` is the truth
    for the operands the kernel saw, ``unrounded`` for the inputs (None when not asked for); ``measures`` holds the
    figures of :mod:`fa3verify.metrics`.
    """

    case: Case
    inputs: Arrays
    operands: Operands
    outputs: Outputs
    seen: Outputs
    unrounded: Outputs | None
    bound: Outputs
    measures: dict[str, float]


def judge(candidate: Candidate, case: Case, *, unrounded: bool = True) -> Judgement:
    """Run and measure one case.

    Parameters
    ----------
    unrounded : bool
        Also compare with the truth of the inputs before rounding, as the FlashAttention-3 paper does.

    Raises
    ------
    ValueError
        If the candidate takes no such case.
    fa3verify.calls.CandidateError
        If it raises, changes its operands, or returns what it does not declare.
    """
    operation, problem = operations.find(candidate.operation), case.problem
    candidate.check_descales(case)
    arrays, prepared = case.draw()
    operands = prepared.operands
    config = candidate.config_for(problem, case.changes)
    exact, assumed = operands.dequantized(problem), operation.assumed(candidate, config)

    def references(got: Outputs) -> tuple[Outputs, Outputs | None, Outputs]:
        seen = operation.truth(problem, exact, config, got)
        original = operation.truth(problem, arrays, config, got) if unrounded else None
        bound = operation.bound(problem, operands, assumed, got)
        return seen, original, freed(candidate.policy, problem, bound, math.inf)

    before = None if operation.judges_choices else references({})  # what the kernel does can then not reach them
    enclosure = _enclosure(candidate, problem, operands, assumed)
    got = calls.run(candidate, problem, operands, config)
    seen, original, bound = before or references(got)
    measures = metrics.figures(operation, got, seen, original, bound, config)
    measures |= metrics.enclosed(got, seen, enclosure)
    if candidate.twin is not None:
        expected = calls.run(candidates.find(candidate.twin), problem, operands, config)
        measures["bits_differing"] = metrics.bits_differing(got, expected)
    return Judgement(case, arrays, operands, got, seen, original, bound, measures)


def _enclosure(candidate: Candidate, problem: AttentionProblem, operands: Operands, assumed: Any) -> Enclosure:
    """Ranges that the stated order of operations leaves the outputs, by name; everything where the policy is free."""
    ranges = operations.find(candidate.operation).enclosure(problem, operands, assumed)
    low, high = ({name: ends[i] for name, ends in ranges.items()} for i in (0, 1))
    low, high = freed(candidate.policy, problem, low, -math.inf), freed(candidate.policy, problem, high, math.inf)
    return {name: (low[name], high[name]) for name in ranges}


def passes(candidate: Candidate, measures: dict[str, float]) -> bool:
    """Whether one judged case passes: no bit differs from the twin and no value is outside its enclosure, where there
    is one, and no element leaves its bound.
    """
    sides = operations.find(candidate.operation).sides
    ratios = [measures["ratio_max"], *(measures.get(f"ratio_{side.name}_max", 0.0) for side in sides)]
    wrong = ("nonfinite", "bits_differing", "outside")
    return max(ratios) <= 1 and not any(measures.get(name, 0) for name in wrong)
