"""A stated order of operations, run once with every freedom it has drawn at random: what a kernel may return.

It is the program of the enclosure, in which each range that an operation leaves becomes one binary32 number of it.
"""

from __future__ import annotations

from functools import cache
from types import CodeType, FunctionType

import numpy as np
import pytest

from fa3_reference.bounds import enclosure
from fa3_reference.bounds.enclosure import Enclosure, Interval, forward_enclosure
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands
from tests.quality.edited_code import Edit, edited, running

FREE = (
    "x = «_tanh(s, c, cap, model)»",
    "state.sum = «Interval(_f32(low * (1 - gamma(steps))), _f32(high * (1 + gamma(steps))))»",
    "return («_exp2(Interval(low, high))», «_exp2(apart)»)",
    "inverse = «Interval(factor / total.high * (1 - RCP_REL), factor / total.low * (1 + RCP_REL))»",
    "lse = «Interval(state.max.low + lg2[0] - slack, state.max.high + lg2[1] + slack)»",
)
ROUNDED = (  # the last multiplications, which an execution does not do
    "radius = (o.high - o.low) / 2 + «(gamma(3) * largest + tiny)»",
    "width = LN2 * part.lse_error + «gamma(2) * (np.abs(part.lse) + part.lse_error)»",
)


@cache
def _program() -> list[tuple[FunctionType, CodeType]]:
    free = [Edit(enclosure, line, "_of_the_range({})") for line in FREE]
    return edited([*free, *(Edit(enclosure, line, "0.0") for line in ROUNDED)])


def number_of(x: Interval, rng: np.random.Generator) -> Interval:
    """Return one binary32 number of a range, uniform between its ends, as both ends."""
    drawn = (x.low + (x.high - x.low) * rng.random(x.low.shape)).astype(np.float32).astype(np.float64)
    drawn = np.where(np.isfinite(drawn), np.clip(drawn, x.low, x.high), x.low)
    return Interval(drawn, drawn)


def forward_execution(
    problem: AttentionProblem, operands: Operands, model: KernelModel, rng: np.random.Generator
) -> Enclosure:
    """Return one result of an order that :func:`forward_enclosure` takes, without splits; both ends are the result."""
    assert model.num_splits == 1
    with pytest.MonkeyPatch.context() as patch, running(_program()):
        patch.setattr(enclosure, "_of_the_range", lambda x: number_of(x, rng), raising=False)
        return forward_enclosure(problem, operands, model)
