"""Merging partial results: out and lse of all keys, from those of parts of the keys, as rings and split keys have them.

Parts are exact up to their last rounding, so that a merge is judged by itself. They are those of q, k and v that a
recipe draws, with some lse lifted and some outputs enlarged: what has no weight may be large. A causal mask leaves rows
that see no key of some parts, and of some sequences none at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fa3_kernels.plan.config import Setting
from fa3_reference.formats import FORMATS, encode
from fa3_reference.merging import MergeOperands, by_rows, merge, parts_of
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reference.quantize import Quantized, QuantScheme
from fa3verify.operations.operation import (
    Accumulator,
    Arrays,
    Chosen,
    Configure,
    Descales,
    ForwardOf,
    Names,
    Operation,
    Output,
    Outputs,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from fa3verify.inputs.recipe import Recipe

PARTS = (2, 3, 8, 64, 1)
UNWRITTEN = "unwritten"  # the feature of a kernel that does not read the out of a part whose lse is -inf
_MOST = max(PARTS)
_LIFTS_NATS = (
    0.0,
    0.0,
    0.0,
    0.0,
    1.0,
    -1.0,
    20.0,
    -20.0,
    100.0,
    -100.0,
    1e4,
    -1e4,
)  # what is added to the lse of a part
_GAINS_LOG2 = (0, 0, 0, 0, 8, 15, -8, -24)  # what its output is multiplied by
_LARGEST = 2.0**100  # of an output of a part: sums of 64 do not overflow binary32
_FARTHEST_NATS = 1e6  # of an lse from 0
_BY_TWO, _AT_ONCE = "parts merged by two", "parts merged at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """The configuration of a kernel that merges: its formats, and what a case asks of it.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "fp32"}
        Format of the outputs of parts.
    out_dtype : {"fp16", "bf16", "fp32"}
        Format of the merged output.
    merges_two : bool
        Whether the kernel is a function of two results, which is called for one part after the other.
    by_two : bool
        Whether the bound assumes that results are merged by two.
    parts : int
        How many parts there are.
    unwritten : bool
        Whether the output of a part whose lse is -inf is NaN, as memory that nobody wrote.
    """

    dtype: Dtype
    out_dtype: str
    merges_two: bool = False
    by_two: bool = False
    parts: int = PARTS[0]
    unwritten: bool = False


class Merge(Operation):
    """out = sum_i exp(lse_i - lse) out_i and lse = log sum_i exp(lse_i) over parts of the keys."""

    name = "merge"
    outputs = (
        Output("out", lambda problem, config: problem.out_shape, lambda config: config.out_dtype),
        Output("lse", lambda problem, config: problem.lse_shape, lambda config: "fp32", main=False, unit="nat"),
    )
    config = MergeConfig
    features = frozenset({"causal", "varlen"})
    serving = frozenset({UNWRITTEN})
    has_orders = True

    def configure(self, problem: AttentionProblem, **changes: Any) -> MergeConfig:
        return replace(MergeConfig(dtype=problem.dtype, out_dtype=problem.dtype), **changes)

    def draw(self, problem: AttentionProblem, recipe: Recipe) -> Arrays:
        rng = np.random.default_rng([recipe.seed, problem.seqlen_q, problem.seqlen_k, problem.head_dim])
        lifts = rng.choice(_LIFTS_NATS, _MOST)
        gains = np.exp2(rng.choice(_GAINS_LOG2, _MOST))
        turn = np.array(rng.integers(-_MOST, _MOST), float)
        return *recipe.draw(problem), lifts, gains, turn

    def prepare(
        self, problem: AttentionProblem, arrays: Arrays, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> Quantized:
        fmt = FORMATS[problem.dtype]
        outs, lses = _parts(problem, arrays, cast(int, changes.get("parts", PARTS[0])))
        most = min(fmt.max_finite, _LARGEST)
        outs = encode(np.clip(outs, -most, most), fmt, "ieee")
        if changes.get("unwritten"):
            outs[np.broadcast_to(by_rows(np.isneginf(lses)), outs.shape)] = np.nan
        q, k, v = arrays[:3]
        return Quantized(MergeOperands(q=q, k=k, v=v, outs=outs, lses=lses.astype(np.float32)))

    def truth(self, problem: AttentionProblem, arrays: Arrays, config: MergeConfig, got: Outputs) -> Outputs:
        parts = arrays if len(arrays) == 2 else _parts(problem, arrays, config.parts)
        return merge(*parts)._asdict()

    def hypothesis_names(self, forward: ForwardOf) -> tuple[str, ...]:
        return _BY_TWO, _AT_ONCE

    def hypotheses(self, config: MergeConfig, accumulator: Accumulator) -> Mapping[str, MergeConfig]:
        by_two = {_BY_TWO: replace(config, by_two=True)}
        return by_two if config.merges_two else by_two | {_AT_ONCE: config}

    def bound(self, problem: AttentionProblem, operands: Operands, assumed: MergeConfig, got: Outputs) -> Outputs:
        from fa3_reference.bounds.merging import merge_bound

        outs, lses = operands.dequantized(problem)
        return merge_bound(outs, lses, assumed.out_dtype, by_two=assumed.by_two, stores=assumed.merges_two)._asdict()

    def shapes(self, of_forward: tuple[AttentionProblem, ...], *, is_quick: bool) -> tuple[AttentionProblem, ...]:
        return of_forward

    def choices(
        self, problem: AttentionProblem, recipe: Recipe, index: int, features: Names, changeable: Names
    ) -> Chosen:
        return None, self._asked(PARTS[(index + recipe.seed) % len(PARTS)], UNWRITTEN in features and index % 2 == 0)

    def draw_choices(
        self, draw: DrawFn, problem: AttentionProblem, features: Names, configure: Configure, descales: Descales
    ) -> Chosen:
        from hypothesis import strategies as st

        return None, self._asked(draw(st.sampled_from(PARTS)), UNWRITTEN in features and draw(st.booleans()))

    def _asked(self, parts: int, unwritten: bool) -> tuple[tuple[str, Setting], ...]:
        return ("parts", parts), *([("unwritten", True)] if unwritten else [])

    def descales_of(
        self, problem: AttentionProblem, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> frozenset[str]:
        return frozenset({UNWRITTEN}) if changes.get("unwritten") else frozenset()


def _parts(problem: AttentionProblem, arrays: Arrays, count: int) -> Arrays:
    """Return outs and lses of the parts of drawn inputs, in the order of the keys or, of every second case, of a ring.

    A rank of a ring has its own keys first, and then those of the ranks before it.
    """
    q, k, v, lifts, gains, turn = arrays
    order = np.arange(count)
    if turn >= 0:
        order = (int(turn) - order) % count
    outs, lses = (x[order] for x in parts_of(problem, q, k, v, count))
    own = (count, *[1] * (lses.ndim - 1))
    lifted = np.clip(lses, -_FARTHEST_NATS, _FARTHEST_NATS) + lifts[:count].reshape(own)
    return outs * gains[:count].reshape(*own, 1), np.where(np.isneginf(lses), lses, lifted)
