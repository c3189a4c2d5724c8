"""The search of the forward on islands of our own twins, in the configuration of each island."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fa3_kernels.twin.arithmetic import Source
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import Attention, attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import forward_bound
from fa3_reports.adversary.causes import cause_of
from fa3_reports.adversary.violations import ViolationSearch
from fa3verify.search.climb import Judge, Ratios
from fa3verify.search.colony import Place
from fa3verify.search.forward import judge as judging
from fa3verify.search.forward.colony import ForwardColony, Island
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.judge import Bound, Pair
from fa3verify.search.forward.search import ForwardSearch

# Figures that climb in turn, and whether extremes are tried then (see Judge.objectives).
OBJECTIVES = (
    *(("out", True), ("rest", False), ("lse", True)),
    *(("out", False), ("rest", True), ("lse", False)),
)
UNROUNDED: frozenset[Source] = frozenset({"output"})
# Few keys let a single operation's error stand alone, whole tiles let errors of one sign add up, several tiles and
# splits rescale, and a row of more than 16 or 32 channels is a chain of its own.
_SIXTEEN_BITS = (
    Island("few", "fp16", 16, 16),
    Island("tile", "fp16", 128, 128),
    Island("two tiles", "fp16", 32, 16),
    Island("tiles", "fp16", 256, 64),
    Island("splits", "fp16", 96, 16, num_splits=3),
    Island("chains", "fp16", 16, 16, 32, batch=16, rows=1),
    Island("softcap", "fp16", 32, 16, softcap=True),
    Island("causal", "fp16", 96, 32, causal=True),
)
_EIGHT_BITS = (
    Island("few", "e4m3", 32, 32, 2),
    Island("tile", "e4m3", 128, 128, rows=32, promotion_interval=128),
    Island("two tiles", "e4m3", 128, 64, 2, promotion_interval=64, descale_tiles=1),
    Island("chained tiles", "e4m3", 96, 32, 2, descale_tiles=1),
    Island("parts", "e4m3", 256, 128, rows=32, promotion_interval=64, out_dtype="fp16"),
    Island("splits", "e4m3", 192, 32, rows=32, num_splits=4, promotion_interval=32, descale_tiles=2),
    Island("chains", "e4m3", 32, 32, 64, batch=16, rows=1, out_dtype="fp16"),
    Island("softcap", "e4m3", 32, 32, 2, softcap=True),
    Island("causal", "e4m3", 96, 32, rows=32, promotion_interval=32, causal=True),
)

ISLANDS: tuple[Island, ...] = (
    *_SIXTEEN_BITS,
    *(replace(island, dtype="bf16") for island in _SIXTEEN_BITS),
    *_EIGHT_BITS,
    *(Island("tanh", dtype, 32, 16, rows=32, softcap=True, family="flash3") for dtype in ("fp16", "bf16")),
    Island("tanh", "e4m3", 32, 32, width=2, softcap=True, family="flash3"),
)


class Twin:
    """Runs a colony on the twin, in the configuration of the colony's island."""

    def config(self, colony: ForwardColony) -> Any:
        """Return its configuration for the colony's problem."""
        return colony.island.config

    def model(self, config: Any) -> KernelModel:
        """Return the order of operations that its bound is for."""
        return config.kernel_model()

    def outputs(self, colony: ForwardColony, config: Any, ideal: frozenset[Source]) -> Pair:
        """Return out and lse; the steps in ``ideal`` do not round."""
        return forward(colony.problem, colony.operands, config, ideal=ideal)

    def run(self, colony: ForwardColony, config: Any, truth: Attention) -> Pair:
        """Return out before its last rounding, and lse."""
        return self.outputs(colony, config, UNROUNDED)


TWIN = Twin()


def judge(
    colony: ForwardColony, guide: Guide | None = None, bound: Bound = forward_bound, kernel: Twin = TWIN
) -> Ratios:
    """Judge a colony as :func:`fa3verify.search.forward.judge.judge` does, on the twin."""
    return judging.judge(colony, guide, bound=bound, kernel=kernel)


@np.errstate(all="ignore")
def judge_rounded(colony: ForwardColony, bound: Bound = forward_bound, kernel: Twin = TWIN) -> np.ndarray:
    """Return error over bound of what the twin stores, (problems, columns)."""
    problem = colony.problem
    operands = colony.operands
    config = kernel.config(colony)
    truth = attention(problem, *operands.dequantized(problem))
    limit = judging.sound_bound(colony, bound)(problem, operands, kernel.model(config))
    out, _ = kernel.outputs(colony, config, frozenset())
    out, exact, allowed = (x.reshape(colony.island.problems, -1) for x in (out, truth.out, limit.out))
    return judging.ratio(out, exact, allowed, judging.truth_error(colony, truth.lse.reshape(-1))[1])


@dataclass(frozen=True, slots=True)
class TwinJudge(Judge):
    """Judges the twin: ``rounded``, which is estimated while a search climbs, is computed from what is stored."""

    bound: Bound = forward_bound
    kernel: Twin = TWIN

    def published(self, colony: ForwardColony, name: str) -> np.ndarray:
        if name == "rounded":
            return judge_rounded(colony, self.bound, self.kernel)
        return self.ratios(colony)[name]


def over_bound(bound: Bound = forward_bound, kernel: Twin = TWIN) -> Judge:
    """Return the judge of error over bound of the twin; beyond 1 the bound is violated.

    Parameters
    ----------
    bound : callable
        A function like :func:`fa3_reference.bounds.forward.forward_bound`.
    kernel : Twin
    """
    ratios = partial(judge, bound=bound, kernel=kernel)
    return TwinJudge(ratios, OBJECTIVES, ("out", "rounded", "lse"), bound=bound, kernel=kernel)


class TwinSearch(ViolationSearch, ForwardSearch):
    """The search on one island of our own twins."""

    ISLANDS = ISLANDS
    JUDGE = over_bound()
    COLUMNS = "out before and after its last rounding, lse"
    VIOLATED = ("out", "lse")

    def __init__(
        self,
        island: Island,
        seed: int | list[int],
        judge: Judge | None = None,
        start: tuple[ForwardColony, Place] | None = None,
    ) -> None:
        super().__init__(island, seed, judge or self.JUDGE, start)

    def suspects(self, beyond: np.ndarray) -> np.ndarray:
        return beyond[self.rng.permutation(len(beyond))[:3]]

    def cause(self, colony: ForwardColony, name: str, place: Place) -> tuple[str, tuple[str, ...]]:
        return cause_of(colony, *place), self.VIOLATED
