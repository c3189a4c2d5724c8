"""How well a schedule overlaps: efficiencies, and a ledger that gives every idle tick of the tensor core one cause.

They are computed from a program and its :class:`~fa3_simulator.engine.Trace`. Let T be the time of a run and T_r the
busy time of resource r. The tensor efficiency is U = T_tensor / T. The overlap efficiency is B = max_r T_r / T, which
is 1 when the busiest resource never waits. The hidden softmax is H = 1 - (T - T_tensor) / T_softmax, where T_softmax is
the vector work of all consumers run alone: 1 when it is hidden altogether, 0 when nothing is. H is negative where the
tensor core idles for longer than that work takes, so for another reason. For a backward H says nothing about the
softmax, as dS and dQ are vector work too.

:func:`account` does the same for the cycles of a launch, so that two launches differ by what adds up exactly.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from fa3_simulator.costs import ALONE, RESOURCES, TICKS, Costs, costs
from fa3_simulator.cta import EXACT_BLOCKS, SimulatedKernel
from fa3_simulator.engine import Span, Trace, simulate
from fa3_simulator.machine import Machine
from fa3_simulator.program import Op, Program
from fa3_simulator.run import Estimate
from fa3_simulator.schedules import TileBlocks

TENSOR = "the tensor core works"
BESIDE = "launch, and waits for HBM and other CTAs"
AROUND = "kernels in front and behind"

# what tells operations apart that wait for the same: the index of a slot, and which CTA on an SM
_NUMBER = re.compile(r"\[\d+\]|CTA \d+ | of CTA \d+|_cycles$")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Efficiencies of one run; ``binds`` names the busiest resource, and ``ledger`` has the idle ticks of each cause,
    which sum to T - T_tensor, most first."""

    tensor_efficiency: float
    overlap_efficiency: float
    hidden_softmax: float
    binds: str
    ledger: dict[str, int]


def softmax_ticks(program: Program, tables: Costs) -> int:
    """Return the ticks of the vector work of all actors that issue wgmma, each run alone on an idle machine."""
    each = tables.work[:, 0] * tables.work[:, 1 : 1 + ALONE].max(axis=1, initial=0)
    consumers = [actor.ops for actor in program.actors if (actor.ops[:, 0] == Op.WGMMA).any()]
    return sum(int(each[ops[ops[:, 0] == Op.VECTOR, 1]].sum()) for ops in consumers)


def _cause(program: Program, span: Span) -> str:
    """Return the cause of an idle tick for an operation that held up the warpgroup which issues the next wgmma.

    It is the operation in the program's own words, such as "wait k_full", "exp2" or "cold code", without the numbers
    of slots and CTAs.
    """
    known = {Op.WGMMA: "issue", Op.WGMMA_WAIT: "wgmma latency"}
    kind = Op(program.actors[span.actor].ops[span.row, 0])
    text = _NUMBER.sub("", program.describe(span.actor, span.row))
    return known.get(kind, text.replace("_", " ") if kind == Op.DELAY else text)


def ledger(program: Program, trace: Trace) -> dict[str, int]:
    """Attribute every tick in which the tensor core idles.

    The time that multiply-adds took from wgmma under way comes first. The rest of an idle stretch belongs to the
    warpgroup that ends it by issuing: the operation that it was busy with is the cause, and if that is the wgmma itself
    the fetch of its operands. Everything before the first instruction is prologue, and everything after the last one
    epilogue.

    Returns
    -------
    dict
        Cause -> ticks, most first, summing exactly to ``trace.end - trace.busy["tensor"]``.
    """
    idle: Counter[str] = Counter()
    spans: defaultdict[int, deque[Span]] = defaultdict(deque)
    for span in trace.spans:
        spans[span.actor].append(span)
    free = 0
    for number, burst in enumerate(trace.bursts):
        lost = min(burst.taken, max(0, burst.start - free))
        idle["multiply-adds"] += lost
        free += lost
        left = max(0, burst.start - free)
        mine = spans[burst.actor] if left and number else deque()
        while mine and mine[0].stop <= free:
            mine.popleft()
        for span in mine:
            if span.start >= burst.start:
                break
            piece = min(span.stop, burst.start) - max(span.start, free)
            idle["operand fetch" if span.row == burst.row else _cause(program, span)] += piece
            left -= piece
        idle["issue" if number else "prologue"] += left
        free = burst.stop
    idle["epilogue"] += trace.end - free
    return {cause: ticks for cause, ticks in idle.most_common() if ticks}


def measure(program: Program, tables: Costs, trace: Trace) -> Overlap:
    """Return the efficiencies and the ledger of a run."""
    binds = max(RESOURCES, key=lambda name: trace.busy[name])
    alone = softmax_ticks(program, tables)
    idle = trace.end - trace.busy["tensor"]
    return Overlap(
        trace.busy["tensor"] / trace.end,
        trace.busy[binds] / trace.end,
        1 - idle / alone if alone else 1.0,
        binds,
        ledger(program, trace),
    )


class Traced(NamedTuple):
    """A launch: its name, its estimate, and the CTA that ends last, run with a record of its first tiles."""

    name: str
    estimate: Estimate
    program: Program
    tables: Costs
    trace: Trace


def first_blocks(tiles: tuple[TileBlocks, ...], most: int = EXACT_BLOCKS) -> list[TileBlocks]:
    """Return the first tiles, of together at most ``most`` blocks; the last of them may be cut.

    >>> first_blocks((TileBlocks(5), TileBlocks(5, 5)), 7)
    [TileBlocks(blocks=5, masked=0), TileBlocks(blocks=2, masked=2)]
    """
    kept = []
    for tile in tiles:
        blocks = min(tile.blocks, most)
        if blocks:
            kept.append(TileBlocks(blocks, min(tile.masked, blocks)))
        most -= blocks
    return kept


def traced(
    name: str, found: Estimate, kernel: SimulatedKernel, machine: Machine, tiles: Sequence[TileBlocks] | None = None
) -> Traced:
    """Return a launch that was ``found`` to take so long, with a record of some tiles of its longest CTA.

    Without ``tiles`` they are its :func:`first_blocks`.
    """
    program = kernel.program(first_blocks(found.tiles) if tiles is None else tiles)
    tables = costs(program, kernel.on(machine, found.clock_mhz), found.clock_mhz)
    return Traced(name, found, program, tables, simulate(program, tables, records=True))


def account(found: Traced) -> dict[str, int]:
    """Return the cycles of a launch by cause, which add up to its cycles, rounded.

    The causes of the longest CTA are those of its first :data:`~fa3_simulator.cta.EXACT_BLOCKS` blocks, scaled to its
    time.
    """
    estimate = found.estimate
    idle = ledger(found.program, found.trace)
    scale = estimate.cta_cycles / found.trace.cycles
    causes = {TENSOR: found.trace.busy["tensor"], **idle}
    cycles = {cause: ticks / TICKS * scale for cause, ticks in causes.items()}
    cycles |= {BESIDE: estimate.main_cycles - estimate.cta_cycles, AROUND: estimate.around_cycles}
    # each is the growth of the rounded sum, so that their sum is rounded once
    sums = map(round, accumulate(cycles.values(), initial=0.0))
    growths = zip(cycles, pairwise(sums), strict=True)
    return {cause: after - before for cause, (before, after) in growths if after != before}


def differences(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return how many cycles more the second launch takes by each cause, the largest difference first."""
    causes = dict.fromkeys((*first, *second))
    more = {cause: second.get(cause, 0) - first.get(cause, 0) for cause in causes}
    return {cause: more[cause] for cause in sorted(causes, key=lambda cause: -abs(more[cause])) if more[cause]}
