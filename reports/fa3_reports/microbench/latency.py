"""Latencies: dependent instructions, code that no cache holds yet, bulk stores, register reallocation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as joined

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import (
    VECTOR,
    Body,
    bar_sync,
    bulk_store,
    bulk_store_wait,
    repeat,
    sink,
    stamp,
    vector,
)

INSTRUCTION_BYTES = 16
DEPENDENT = 512  # instructions of a chain
PER_PASS = 128  # instructions of a lane per pass of the loop: 2 KiB of code, which ptxas does not unroll


def chain() -> Iterator[Experiment]:
    """One operation on 1, 2, 4, 8 independent chains, by one to three warps of each scheduler, idle tensor cores.

    :data:`DEPENDENT` instructions per chain, twice: the first time the code is cold.
    """
    for name in VECTOR:
        for chains in (1, 2, 4, 8):
            loop = repeat(vector(name, PER_PASS // chains, chains), DEPENDENT * chains // PER_PASS)
            body = repeat(stamp() + loop, 2) + stamp() + sink()
            for groups in (1, 2, 3):
                parameters = {"op": name, "chains": chains, "count": DEPENDENT, "warpgroups": groups}
                yield one_cta("chain", parameters, [body] * groups, stamps=[3] * groups)


def cold_code() -> Iterator[Experiment]:
    """Straight-line multiply-adds on eight chains, three passes: what the first takes longer is instruction fetch.

    By one warpgroup, by three on the same code, by two on a copy each.
    """
    for kibibytes in (2, 8, 16, 32, 64):
        count = kibibytes * 1024 // INSTRUCTION_BYTES
        body = stamp() + repeat(vector("ffma", count // 8) + stamp(), 3) + sink()
        for groups, copies in ((1, 1), (3, 1), (2, 2)):
            parameters = {"kibibytes": kibibytes, "instructions": count, "warpgroups": groups, "copies": copies}
            yield one_cta("cold_code", parameters, [body] * groups, stamps=[4] * groups, shared=copies == 1)


def tma_store(multiprocessors: int) -> Iterator[Experiment]:
    """Bulk store, three times. Stamps: start, issued, source free (wait_group.read), written (wait_group)."""
    for size in (4096, 8192, 16384, 32768):
        for ctas in (1, multiprocessors):
            one = stamp() + bulk_store("%copies", size) + stamp() + bulk_store_wait(".read") + stamp()
            one = one + bulk_store_wait() + stamp()
            parameters = {"bytes": size, "ctas": ctas, "passes": 3}
            yield one_cta("tma_store", parameters, [one + one + one], ctas=ctas, stamps=[12])


def setmaxnreg() -> Iterator[Experiment]:
    """Registers from one warpgroup (168 to 24) to two others (168 to 240): stamps before and after.

    "free": the two ask 2000 cycles after the release, "together": at once.
    """
    release = timed(Body("setmaxnreg.dec.sync.aligned.u32 24;\n"))
    claim = timed(Body("setmaxnreg.inc.sync.aligned.u32 240;\n"))
    pause = Body(
        "{ .reg .u64 %until, %clock; .reg .pred %early;\nmov.u64 %until, %clock64;\nadd.u64 %until, %until, 2000;\n"
        "again:\nmov.u64 %clock, %clock64;\nsetp.lt.u64 %early, %clock, %until;\n@%early bra again;\n}\n"
    )
    for order, wait in (("together", Body("")), ("free", pause)):
        start = bar_sync(1, 384)
        bodies = [start + release, start + wait + claim, start + wait + claim]
        yield one_cta("setmaxnreg", {"order": order}, bodies, stamps=[2] * 3)


def latencies(multiprocessors: int) -> Iterator[Experiment]:
    """All of them."""
    return joined(chain(), cold_code(), tma_store(multiprocessors), setmaxnreg())
