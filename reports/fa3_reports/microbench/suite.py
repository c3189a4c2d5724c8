"""The microbenchmarks: what is run, and the table of stamps they leave.

    python -m fa3_reports.microbench.suite OUT.csv [--only NAME ...]

Every experiment runs on one CTA unless it says otherwise, so that power does not limit the clock; cycles are SM clocks.
Columns: experiment, its parameters, warpgroup, and the differences of consecutive stamps (median over repetitions).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fa3_reports.microbench import (
    additions,
    arrivals,
    copies,
    latency,
    sharing,
    steps,
    tiles,
    warp_latency,
    warp_mma,
    warp_streams,
)
from fa3_reports.microbench.experiment import COLUMNS, Bench, Experiment, digest, one_cta, timed
from fa3_reports.microbench.launch import LaunchProbe, launches
from fa3_reports.microbench.ptx import (
    VECTOR,
    Body,
    bar_arrive,
    bar_sync,
    bulk_load,
    fence_proxy,
    keep_accumulators,
    keep_loaded,
    matrix_load,
    matrix_store,
    mbarrier_arrive,
    mbarrier_wait,
    repeat,
    sink,
    softmax_chunk,
    stamp,
    vector,
    wgmma,
    wgmma_wait,
)
from fa3verify.files import csv_lines

PER_STAMP = 32  # instructions of a lane between two stamps of a burst


def wgmma_chains() -> Iterator[Experiment]:
    """Slope and tail: groups of 4, 12 and 36 instructions, by one and by two warpgroups."""
    widths = {"fp16": (64, 80, 96, 128, 160, 176, 192, 256), "bf16": (128,), "e4m3": (64, 128, 224, 256)}
    for dtype, sizes in widths.items():
        for n in sizes:
            for registers in (False, True):
                for count in (4, 12, 20 if registers else 36):  # more would not fit the registers of A
                    for groups in (1, 2) if dtype == "fp16" and n in (64, 128, 256) else (1,):
                        body = timed(wgmma(dtype, n, count, a_in_registers=registers)) + keep_accumulators(n)
                        parameters = {"dtype": dtype, "n": n, "rs": registers, "count": count, "warpgroups": groups}
                        yield Experiment("wgmma", parameters, [body] * groups, stamps=[2] * groups)


def wgmma_issue() -> Iterator[Experiment]:
    """When the issuing warp goes on: stamps after issue and after the wait."""
    for count in (1, 2, 4, 6, 8, 12, 16, 24):
        for n in (64, 128, 256):
            body = stamp() + wgmma("fp16", n, count, wait=False) + stamp() + wgmma_wait(0) + stamp()
            yield Experiment("wgmma_issue", {"n": n, "count": count}, [body + keep_accumulators(n)], stamps=[3])


def vector_rates() -> Iterator[Experiment]:
    """One operation on eight chains, by one to three warpgroups (one to three warps per sub-core)."""
    for name in VECTOR:
        for groups in (1, 2, 3):
            body = timed(repeat(vector(name, 8), 16)) + sink()
            yield Experiment(
                "vector", {"op": name, "count": 1024, "warpgroups": groups}, [body] * groups, stamps=[2] * groups
            )
    for groups in (1, 2, 3):
        body = timed(repeat(softmax_chunk(), 64)) + sink()
        yield Experiment("softmax", {"chunks": 64, "warpgroups": groups}, [body] * groups, stamps=[2] * groups)


def vector_under_wgmma() -> Iterator[Experiment]:
    """The same while another warpgroup keeps the tensor cores busy, or the own one does."""
    operations = {name: vector(name, 8) for name in VECTOR} | {"softmax": softmax_chunk() + softmax_chunk()}
    for dtype, n, registers in (("fp16", 128, False), ("fp16", 128, True), ("e4m3", 128, True)):
        busy = wgmma(dtype, n, 8, a_in_registers=registers)
        for name, body in operations.items():
            for others in (1, 2):
                load = stamp() + repeat(busy, 48 if others == 1 else 80) + stamp() + keep_accumulators(n)
                work = timed(repeat(body, 8)) + sink()
                parameters = {"op": name, "count": 512, "dtype": dtype, "n": n, "rs": registers, "warpgroups": others}
                yield Experiment("under_wgmma", parameters, [load] + [work] * others, stamps=[2] * (1 + others))
            own = stamp() + wgmma(dtype, n, 16, a_in_registers=registers, wait=False)
            own = own + body + stamp() + wgmma_wait(0) + stamp() + sink() + keep_accumulators(n)
            parameters = {"op": name, "count": 64, "dtype": dtype, "n": n, "rs": registers}
            yield Experiment("own_wgmma", parameters, [own], stamps=[3])


def wgmma_under_vector() -> Iterator[Experiment]:
    """What a chain of wgmma loses to vector work of other warpgroups that outlasts it; "none": the chain alone."""
    operations = {name: vector(name, 8) for name in ("ex2", "ffma", "fmul", "fmnmx", "f2fp_f16", "shfl")}
    for n in (64, 128, 256):
        for registers in (False, True):
            load = stamp() + repeat(wgmma("fp16", n, 8, a_in_registers=registers), 64) + stamp() + keep_accumulators(n)
            parameters = {"n": n, "rs": registers, "count": 512}
            yield one_cta("wgmma_under_vector", parameters | {"op": "none", "warpgroups": 0}, [load])
            for name, body in operations.items():
                # Passes of 64 instructions, which last longer than 512 wgmma of 128 cycles.
                passes = 150_000 // 64 // (8 if name == "ex2" else 1)
                work = stamp() + repeat(body, passes) + stamp() + sink()
                for groups in (1, 2) if n < 256 else (1,):
                    more = parameters | {"op": name, "warpgroups": groups}
                    yield one_cta("wgmma_under_vector", more, [load] + [work] * groups, stamps=[2] * (1 + groups))


def after_wgmma() -> Iterator[Experiment]:
    """How long a slow-down outlasts the last wgmma: a train of short bursts while a chain of another warpgroup ends."""
    for name in ("ex2", "ffma", "fmnmx"):
        train = Body("")
        for _ in range(64):
            train = train + stamp() + vector(name, PER_STAMP // 8)
        train = train + stamp() + sink()
        load = stamp() + wgmma("fp16", 128, 24, a_in_registers=True) + stamp() + keep_accumulators(128)
        parameters = {"op": name, "per_stamp": PER_STAMP}
        yield Experiment("after_wgmma", parameters, [load, train], stamps=[2, 65])


def barriers() -> Iterator[Experiment]:
    """Round trips between two warpgroups, and polls of a phase that is complete."""
    rounds = 64
    there = repeat(bar_arrive(1, 256) + bar_sync(2, 256), rounds)
    back = repeat(bar_sync(1, 256) + bar_arrive(2, 256), rounds)
    yield Experiment("named_barrier", {"rounds": rounds}, [timed(there), timed(back)], stamps=[2, 2])
    there = repeat(mbarrier_arrive(0) + mbarrier_wait(1), rounds)
    back = repeat(mbarrier_wait(0) + mbarrier_arrive(1), rounds)
    yield Experiment("mbarrier", {"rounds": rounds}, [timed(there), timed(back)], (1, 1), stamps=[2, 2])
    poll = repeat(mbarrier_arrive(0) + mbarrier_wait(0), rounds)
    yield Experiment("mbarrier_alone", {"rounds": rounds}, [timed(poll)], (1,))
    yield Experiment("stamp", {}, [stamp() + stamp() + stamp()], stamps=[3])
    yield Experiment("bar_sync_alone", {"rounds": rounds}, [timed(repeat(bar_sync(1, 128), rounds))])


def shared_memory() -> Iterator[Experiment]:
    """Matrix stores and transposing loads, alone and against wgmma with both operands in shared memory."""
    works = {"stmatrix": (matrix_store(16), Body("")), "ldmatrix_trans": (matrix_load(16), keep_loaded())}
    for name, (work, end) in works.items():
        body = timed(repeat(work, 16)) + end
        for groups in (1, 2):
            yield Experiment(name, {"count": 256, "warpgroups": groups}, [body] * groups, stamps=[2] * groups)
        for n in (64, 128, 256):
            busy = stamp() + wgmma("fp16", n, 32) + stamp() + keep_accumulators(n)
            yield Experiment(f"{name}_under_wgmma", {"n": n, "count": 256}, [busy, body], stamps=[2, 2])
    for n in (64, 128, 256):
        stream = repeat(bulk_load(0, 16384, 0) + mbarrier_wait(0), 8)
        busy = stamp() + wgmma("fp16", n, 64) + stamp() + keep_accumulators(n)
        yield Experiment("copy_under_wgmma", {"n": n, "bytes": 8 * 16384}, [busy, timed(stream)], (1,), stamps=[2, 2])
    for count in (0, 8, 16):
        body = stamp() + matrix_store(count) + fence_proxy() + stamp()
        yield Experiment("fence_proxy", {"stores": count}, [body])


def arbitration() -> Iterator[Experiment]:
    """Two warpgroups issue groups of eight without tokens: stamps after each group show who is served."""
    for dtype, n in (("fp16", 128), ("fp16", 256), ("e4m3", 128)):
        body = stamp()
        for _ in range(12):
            body = body + wgmma(dtype, n, 8, a_in_registers=True) + stamp()
        body = body + keep_accumulators(n)
        yield Experiment("arbitration", {"dtype": dtype, "n": n, "count": 8}, [body, body], stamps=[13, 13])


def late_group() -> Iterator[Experiment]:
    """A group of eight wgmma is issued; then another warpgroup issues eight: whether those that queue already go first.

    Stamps of both: before the issue, after it, after the wait. "none": the first warpgroup alone.
    """
    for n in (64, 128, 256):
        for registers in (False, True):
            issue = wgmma("fp16", n, 8, a_in_registers=True, wait=False)
            first = stamp() + issue + bar_arrive(1, 256) + stamp() + wgmma_wait(0) + stamp()
            other = (
                stamp() + wgmma("fp16", n, 8, a_in_registers=registers, wait=False) + stamp() + wgmma_wait(0) + stamp()
            )
            rounds = repeat(bar_sync(2, 256) + first, 4) + keep_accumulators(n)
            late = repeat(bar_sync(2, 256) + bar_sync(1, 256) + other, 4) + keep_accumulators(n)
            alone = repeat(bar_sync(2, 256) + bar_sync(1, 256) + stamp() + stamp() + stamp(), 4)
            for what, body in (("wgmma", late), ("none", alone)):
                yield Experiment("late_group", {"n": n, "rs": registers, "late": what}, [rounds, body], stamps=[12, 12])


def experiments(multiprocessors: int) -> Iterator[Experiment | LaunchProbe]:
    """All of them."""
    for group in (
        wgmma_chains,
        wgmma_issue,
        vector_rates,
        vector_under_wgmma,
        wgmma_under_vector,
        after_wgmma,
        barriers,
        shared_memory,
        arbitration,
        late_group,
    ):
        yield from group()
    yield from copies.all_copies(multiprocessors)
    yield from additions.additions(multiprocessors)
    yield from tiles.tiles(multiprocessors)
    yield from steps.steps()
    yield from sharing.sharing()
    yield from latency.latencies(multiprocessors)
    yield from arrivals.arrivals()
    yield from warp_mma.warp_mma()
    yield from warp_latency.warp_latencies(multiprocessors)
    yield from warp_streams.warp_streams(multiprocessors)
    yield from launches(multiprocessors)


def chosen(multiprocessors: int, names: list[str] | None) -> list[Experiment | LaunchProbe]:
    """Those with one of the names, or all.

    Raises
    ------
    ValueError
        For a name that no experiment has.
    """
    suite = list(experiments(multiprocessors))
    known = {experiment.name for experiment in suite}
    if unknown := set(names or ()) - known:
        raise ValueError(f"no experiment is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return [experiment for experiment in suite if not names or experiment.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="fa3_reports.microbench.suite")
    parser.add_argument("target", type=Path, metavar="OUT.csv")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments by the first column of the table")
    options = parser.parse_args()
    begin = time.time()
    bench = Bench.open()
    suite = chosen(bench.driver.multiprocessors, options.only)
    with options.target.open("w", newline="") as file, ThreadPoolExecutor() as pool:
        file.write(csv_lines([COLUMNS]))
        functions = list(pool.map(lambda e: bench.driver.load(e.ptx()), suite))  # assembled outside Python's lock
        for experiment, function in zip(suite, functions, strict=True):  # and all of them before any is timed
            file.write(csv_lines([*row, digest(experiment.ptx())] for row in experiment.rows(function, bench)))
            file.flush()
    print(f"{len(suite)} experiments on {bench.driver.name} in {time.time() - begin:.0f} s -> {options.target}")


if __name__ == "__main__":
    main()
