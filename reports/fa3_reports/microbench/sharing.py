"""Who gets what where two warps of a scheduler want different pipes: kinds of vector work in pairs and in threes.

Every warpgroup repeats one kind of work, with a stamp every few passes, and all end at about the same time: what it
takes for a pass beside the others, over what it takes alone, is what the others cost it. With and without a warpgroup
that keeps the tensor core busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

from fa3_reports.microbench.experiment import Experiment, one_cta
from fa3_reports.microbench.ptx import Body, keep_accumulators, repeat, stamp, wgmma
from fa3_reports.microbench.softmax import Dtype, Step, convert, exponentials, fold, keep, rescale, setup

STAMPS = 24
BUSY = 300  # times eight wgmma of 128 columns, longer than what runs beside them
# Kinds of work and their passes between two stamps, of about as many cycles.
PASSES = {"maxima": 10, "exponentials": 3, "conversion": 10}
DTYPES: tuple[Dtype, ...] = ("fp16", "e4m3")


def _kind(step: Step, kind: str) -> Body:
    text = {
        "maxima": fold(step),
        "exponentials": exponentials(step),
        "conversion": convert(step, carry=True) + rescale(step),
    }[kind]
    passes = repeat(Body(text, setup(step)), PASSES[kind])
    return stamp() + repeat(passes + stamp(), STAMPS - 1) + keep(step)


def _beside(step: Step, works: tuple[str, ...], *, wgmma_runs: bool) -> Experiment:
    bodies = [_kind(step, kind) for kind in works]
    stamps = [STAMPS] * len(works)
    if wgmma_runs:
        chain = repeat(wgmma(step.dtype, 128, 8, a_in_registers=True), BUSY)
        bodies = [*bodies, stamp() + chain + stamp() + keep_accumulators(128)]
        stamps = [*stamps, 2]
    parameters = {"dtype": step.dtype, "n": step.n, "works": " ".join(works), "wgmma": wgmma_runs}
    return one_cta("sharing", parameters, bodies, stamps=stamps)


def sharing() -> Iterator[Experiment]:
    """Kinds of a softmax step alone and in pairs, with and without wgmma; of 64 keys alone and in threes, without."""
    for wgmma_runs in (False, True):
        for dtype in DTYPES:
            for count in (1, 2):
                for works in combinations_with_replacement(PASSES, count):
                    yield _beside(Step(dtype, 128, 64), works, wgmma_runs=wgmma_runs)
    for dtype in DTYPES:
        for count in (1, 3):
            for works in combinations_with_replacement(PASSES, count):
                yield _beside(Step(dtype, 64, 64), works, wgmma_runs=False)
