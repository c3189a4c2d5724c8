"""How well a schedule overlaps: efficiencies, and a ledger that gives every idle tick of the tensor core one cause.

They are computed from a program and its :class:`~fa3_simulator.engine.Trace`. Let T be the time of a run and T_r the
busy time of resource r. The tensor efficiency is U = T_tensor / T. The overlap efficiency is B = max_r T_r / T, which
is 1 when the busiest resource never waits. The hidden softmax is H = 1 - (T - T_tensor) / T_softmax, where T_softmax is
the vector work of all consumers run alone: 1 when it is hidden altogether, 0 when nothing is. H is negative where the
tensor core idles for longer than that work takes, so for another reason. For a backward H says nothing about the
softmax, as dS and dQ are vector work too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fa3_simulator.costs import ALONE, RESOURCES, Costs
from fa3_simulator.engine import Trace
from fa3_simulator.program import Op, Program

CAUSES = (
    "prologue",
    "wait Q",
    "wait K",
    "wait V",
    "wait dO",
    "turn",
    "other warpgroup",
    "mask",
    "exp2",
    "dS",
    "P to shared memory",
    "dQ to shared memory",
    "dQ to memory",
    "proxy fence",
    "row max",
    "exp2 and rescale O",
    "last sums",
    "rescale O",
    "add P V",
    "addresses",
    "warp barrier",
    "row statistics",
    "wgmma latency",
    "multiply-adds",
    "issue",
    "operand fetch",
    "tile change",
    "epilogue",
    "other",
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Efficiencies of one run; ``binds`` names the busiest resource, and ``ledger`` has the idle ticks of each cause,
    which sum to T - T_tensor."""

    tensor_efficiency: float
    overlap_efficiency: float
    hidden_softmax: float
    binds: str
    ledger: dict[str, int]


def softmax_ticks(program: Program, costs: Costs) -> int:
    """Return the ticks of the vector work of all actors that issue wgmma, each run alone on an idle machine."""
    total = 0
    for actor in program.actors:
        rows = actor.ops.tolist()
        if not any(row[0] == Op.WGMMA for row in rows):
            continue
        for kind, x, *_ in rows:
            if kind == Op.VECTOR:
                total += int(costs.work[x, 0] * costs.work[x, 1 : 1 + ALONE].max())
    return total


def _cause(program: Program, actor: int, index: int) -> str:
    """Return the cause, one of CAUSES, for an operation that held up the warpgroup which issues the next wgmma."""
    kind = int(program.actors[actor].ops[index][0])
    text = program.describe(actor, index)
    if kind == Op.WAIT:
        return {"q": "wait Q", "k": "wait K", "v": "wait V", "d": "wait dO"}.get(text.removeprefix("wait ")[0], "other")
    if kind == Op.BAR_SYNC:
        if "epilogue" in text:  # our kernels use one barrier for the store of O and in every step
            following = int(program.actors[actor].ops[index + 1][0])
            return "epilogue" if following == Op.STORE else "warp barrier"
        causes = {"turn": "turn", "all warpgroups": "other warpgroup", "dq_empty": "dQ to memory"}
        return next((cause for name, cause in causes.items() if name in text), "epilogue")
    if kind == Op.WGMMA_WAIT:
        return "wgmma latency"
    if kind == Op.WGMMA:
        return "issue"
    if kind == Op.REDUCE or (kind == Op.STORE_WAIT and _stages_dq(program, actor, index + 1)):
        return "dQ to memory"
    if kind in (Op.STORE, Op.STORE_WAIT) or text in ("normalise O", "O to shared memory"):
        return "epilogue"
    if kind == Op.DELAY:
        return {"warp_skew_cycles": "warp barrier", "proxy_fence_cycles": "proxy fence"}.get(text, "tile change")
    return "row statistics" if text == "row reduction" else text if text in CAUSES else "other"


def _stages_dq(program: Program, actor: int, index: int) -> bool:
    """Tell whether an operation writes a part of dQ to shared memory."""
    ops = program.actors[actor].ops
    return index < len(ops) and program.describe(actor, index).startswith("write dq")


def ledger(program: Program, trace: Trace) -> dict[str, int]:
    """Attribute every tick in which the tensor core idles.

    The time that multiply-adds took from wgmma under way comes first. The rest of an idle stretch belongs to the
    warpgroup that ends it by issuing: the operation that it was busy with is the cause. Everything before the first
    instruction is prologue, and everything after the last one epilogue.

    Returns
    -------
    dict
        Cause -> ticks, summing exactly to ``trace.end - trace.busy["tensor"]``.
    """
    idle_ticks: Counter[str] = Counter()
    spans: dict[int, list] = {}
    for span in trace.spans:
        spans.setdefault(span.actor, []).append(span)
    cursor = dict.fromkeys(spans, 0)
    free = 0
    for number, burst in enumerate(trace.bursts):
        lost = min(burst.taken, max(0, burst.start - free))
        idle_ticks["multiply-adds"] += lost
        free += lost
        idle = burst.start - free
        if idle > 0 and number == 0:
            idle_ticks["prologue"] += idle
        elif idle > 0:
            mine = spans[burst.actor]
            i = cursor[burst.actor]
            left = idle
            while i < len(mine) and mine[i].stop <= free:
                i += 1
            cursor[burst.actor] = i
            while i < len(mine) and mine[i].start < burst.start:
                piece = min(mine[i].stop, burst.start) - max(mine[i].start, free)
                if mine[i].row == burst.row and int(program.actors[burst.actor].ops[burst.row][0]) == Op.WGMMA:
                    idle_ticks["operand fetch"] += piece
                else:
                    idle_ticks[_cause(program, burst.actor, mine[i].row)] += piece
                left -= piece
                i += 1
            idle_ticks["issue"] += left
        free = burst.stop
    idle_ticks["epilogue"] += trace.end - free
    return {cause: idle_ticks[cause] for cause in CAUSES if idle_ticks[cause]}


def measure(program: Program, costs: Costs, trace: Trace) -> Overlap:
    """Return the efficiencies and the ledger of a run."""
    resources = {name: trace.busy[name] for name in RESOURCES}
    binds = max(resources, key=lambda name: resources[name])
    alone = softmax_ticks(program, costs)
    idle = trace.end - trace.busy["tensor"]
    return Overlap(
        trace.busy["tensor"] / trace.end,
        resources[binds] / trace.end,
        1 - idle / alone if alone else 1.0,
        binds,
        ledger(program, trace),
    )
