"""What it costs that many threads arrive at one mbarrier: round trips of a producer and its consumers, and streams.

In a round trip the producer's one thread completes the full barrier and waits for the empty one, at which so many
threads of each consumer arrive. With kind "both" they also arrive at the full barrier before they wait for it, as a
``cuda::barrier`` whose threads all take part has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import Body, mbarrier_arrive, mbarrier_wait, repeat

Kind = Literal["empty", "both"]
ROUNDS = 64
FULL = 0
EMPTY = 1
# of a consumer warpgroup: one, one of each warp, and whole warps
THREADS = (1, 4, 32, 64, 128)
MOST = {1: 128, 2: 256}  # arrivals of a round trip, by consumer warpgroups


def arrive(index: int, threads: int) -> Body:
    """Arrive once by each of so many threads of the warpgroup: the first ones, of 4 the first of each warp."""
    mask = 31 if threads == 4 else 127
    below = 1 if threads == 4 else threads
    return Body(
        f"{{ .reg .pred %mine; .reg .u32 %rank;\nand.b32 %rank, %id, {mask};\nsetp.lt.u32 %mine, %rank, {below};\n"
        f"@%mine mbarrier.arrive.shared::cta.b64 _, [%bars+{8 * index}];\n}}\n"
    )


def first_thread(body: Body) -> Body:
    """Run the body by the warpgroup's first thread alone."""
    return Body("{\n@!%first bra others;\n" + body.text + "others:\n}\n", body.declares)


def round_trips(kind: Kind, warpgroups: int, threads: int) -> Experiment:
    """Return trips between a producer's thread and consumers of which so many threads of each warpgroup arrive."""
    arrivals = warpgroups * threads
    is_both = kind == "both"
    producer = first_thread(repeat(mbarrier_arrive(FULL) + mbarrier_wait(EMPTY), ROUNDS))
    told = arrive(FULL, threads) if is_both else Body("")
    consumer = repeat(told + mbarrier_wait(FULL) + arrive(EMPTY, threads), ROUNDS)
    parameters = {"kind": kind, "arrivals": arrivals, "warpgroups": warpgroups, "rounds": ROUNDS}
    bodies = [timed(producer), *[timed(consumer)] * warpgroups]
    counts = (1 + arrivals if is_both else 1, arrivals)
    return one_cta("mbarrier_arrivals", parameters, bodies, counts, stamps=[2] * len(bodies))


def stream(warpgroups: int, threads: int) -> Experiment:
    """Return :data:`ROUNDS` arrivals of each thread at one barrier, whose one phase they complete together."""
    arrivals = warpgroups * threads
    body = timed(repeat(arrive(FULL, threads), ROUNDS) + mbarrier_wait(FULL))
    parameters = {"arrivals": arrivals, "warpgroups": warpgroups, "rounds": ROUNDS}
    counts = (arrivals * ROUNDS,)
    return one_cta("mbarrier_stream", parameters, [body] * warpgroups, counts, stamps=[2] * warpgroups)


def arrivals() -> Iterator[Experiment]:
    """By one and by two warpgroups of consumers."""
    cases = [(warpgroups, threads) for warpgroups in MOST for threads in THREADS]
    kinds: tuple[Kind, ...] = ("empty", "both")
    trips = (round_trips(kind, *case) for kind in kinds for case in cases)
    return chain(trips, (stream(*case) for case in cases))
