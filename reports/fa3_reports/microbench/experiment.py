"""One experiment: bodies of warpgroups, how it is launched, and the rows of the table that its stamps become."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from ctypes import c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fa3_reports.microbench.driver import Driver
from fa3_reports.microbench.ptx import MAX_STAMPS, SCRATCH_BYTES, SMEM_BYTES, Body, kernel, stamp

REPETITIONS = 7
SOURCE_BYTES = 1280 << 20
# of 128 bytes
MAP_ROWS = 131072
MAP_BOX_ROWS = 128
COLUMNS = ("experiment", "parameters", "warpgroup", "start_after_first_cycles", "cycles", "ptx_sha256")
ONE_CTA = ".minnctapersm 1\n"
_WARPGROUPS = 4  # of a CTA, at most


@dataclass(frozen=True, slots=True)
class Bench:
    """A device and buffers: stamps, what loads read, a tensor map of its first part behind, what bulk stores write."""

    driver: Driver
    out: c_uint64
    source: c_uint64
    scratch: c_uint64

    @classmethod
    def open(cls) -> Bench:
        driver = Driver()
        ctas = driver.multiprocessors * _WARPGROUPS
        sizes = (ctas * 8 * MAX_STAMPS, SOURCE_BYTES + 128, ctas * SCRATCH_BYTES)
        out, source, scratch = (driver.allocate(size) for size in sizes)
        driver.write(c_uint64(source.value + SOURCE_BYTES), driver.tensor_map(source, MAP_ROWS, MAP_BOX_ROWS))
        return cls(driver, out, source, scratch)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Bodies of the warpgroups of a CTA.

    ``shared``: equal neighbours run the same code instead of a copy each; ``directives``: of the kernel. With
    :data:`ONE_CTA`, ptxas gives a lane up to 255 registers, 168 with three warpgroups; without, it spills a few to fit
    more CTAs.
    """

    name: str
    parameters: dict
    bodies: list[Body]
    mbarrier_arrivals: tuple[int, ...] = ()
    ctas: int = 1
    stamps: list[int] = field(default_factory=lambda: [2])  # per warpgroup
    shared: bool = False
    directives: str = ""

    def ptx(self) -> str:
        return kernel(self.bodies, self.mbarrier_arrivals, shared=self.shared, directives=self.directives)

    def rows(self, function: c_void_p, bench: Bench) -> Iterator[list]:
        """Run, and see :meth:`table`; ``spilled_bytes`` joins parameters if the assembler ran out of registers."""
        groups = len(self.bodies)
        found = []
        for _ in range(REPETITIONS + 1):
            arguments = (bench.out, bench.source, c_uint(0), bench.scratch)
            bench.driver.run(function, self.ctas, 128 * groups, SMEM_BYTES, *arguments)
            found.append(bench.driver.read(bench.out, (self.ctas, groups, MAX_STAMPS)))
        spilled = bench.driver.local_bytes(function)
        extra = {"spilled_bytes": spilled} if spilled else {}
        yield from self.table(np.stack(found[1:]), extra)  # the first run is a warm-up

    def table(self, stamps: np.ndarray, extra: dict) -> Iterator[list]:
        """Per warpgroup: differences of stamps (median over repetitions, maximum of CTAs), and start after warpgroup 0.

        ``stamps``: int64 (repetitions, ctas, warpgroups, MAX_STAMPS).
        """
        origin = stamps[:, :, 0, 0]
        for group, count in enumerate(self.stamps):
            mine = stamps[:, :, group, :count]
            steps = np.median(np.diff(mine, axis=2), axis=0).max(axis=0)
            lag = float(np.median(mine[:, :, 0] - origin))
            yield [
                self.name,
                json.dumps(self.parameters | extra),
                group,
                lag,
                " ".join(f"{x:g}" for x in steps),
            ]


one_cta = partial(Experiment, shared=True, directives=ONE_CTA)


def digest(ptx: str) -> str:
    """What a row belongs to: the first half of the hash of the PTX that was run."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:32]


def timed(body: Body) -> Body:
    """The body between two stamps."""
    return stamp() + body + stamp()
