"""What a kernel launch costs: a graph of launches back to back, by events and by the clocks of the SMs themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from fa3_simulator.microbench.experiment import REPETITIONS, Bench

LAUNCHES = 50
BARRIERS = 16
SLOT = 3  # 64-bit words per CTA: first clock, last clock, SM
_SMEM = (1024, 232448)  # little, and all that a CTA may have

# Registers: 168 per thread at the start. Warpgroup 0 gives 144, the two others take 72 each.
_PROLOGUE = (
    "setp.ne.u32 %skip, %id, 0;\nmov.u32 %bars, smem;\n@%skip bra initialised;\n"
    + "".join(f"mbarrier.init.shared::cta.b64 [%bars+{8 * i}], 1;\n" for i in range(BARRIERS))
    + "initialised:\nfence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
)
_REALLOCATE = (
    "setp.ge.u32 %skip, %id, 128;\n@%skip bra consumer;\nsetmaxnreg.dec.sync.aligned.u32 24;\nbra reallocated;\n"
    "consumer:\nsetmaxnreg.inc.sync.aligned.u32 240;\nreallocated:\n"
)


@dataclass(frozen=True, slots=True)
class LaunchProbe:
    """A kernel that does nothing, reads the clock, or does what FlashAttention-3 does before its first load.

    "prologue": mbarriers, fences, barrier of the CTA; with three warpgroups setmaxnreg as well.
    """

    kind: Literal["empty", "clock", "prologue"]
    ctas: int
    threads: int
    smem_bytes: int
    name: str = "launch"

    def ptx(self) -> str:
        head = (
            ".version 8.3\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
            f".visible .entry bench(.param .u64 out)\n.maxntid {self.threads}, 1, 1\n.minnctapersm 1\n{{\n"
        )
        if self.kind == "empty":
            return head + "ret;\n}\n"
        work = ""
        if self.kind == "prologue":
            work = _PROLOGUE + (_REALLOCATE if self.threads == 384 else "")
        return head + (
            ".reg .u64 %start, %end, %slot, %wide, %where;\n.reg .u32 %id, %cta, %sm, %bars;\n.reg .pred %skip;\n"
            "mov.u64 %start, %clock64;\nmov.u32 %id, %tid.x;\n"
            f"{work}mov.u64 %end, %clock64;\n"
            f"setp.ne.u32 %skip, %id, {self.threads - 128};\n@%skip bra done;\n"  # of the last warpgroup
            f"mov.u32 %cta, %ctaid.x;\nmul.wide.u32 %wide, %cta, {8 * SLOT};\nld.param.u64 %slot, [out];\n"
            "add.u64 %slot, %slot, %wide;\nmov.u32 %sm, %smid;\ncvt.u64.u32 %where, %sm;\n"
            "st.global.u64 [%slot], %start;\nst.global.u64 [%slot+8], %end;\nst.global.u64 [%slot+16], %where;\n"
            "done:\nret;\n}\n"
        )

    def rows(self, function: c_void_p, bench: Bench) -> Iterator[list]:
        """One row; cycles: from start to start of consecutive launches on one SM, and from start to end (medians)."""
        first = bench.out.value
        arguments = [(c_uint64(first + i * self.ctas * 8 * SLOT),) for i in range(LAUNCHES)]
        nanoseconds, cycles = [], []
        with bench.driver.graph(function, self.ctas, self.threads, self.smem_bytes, arguments) as graph:
            for _ in range(REPETITIONS):
                nanoseconds.append(graph.nanoseconds() / LAUNCHES)
                if self.kind != "empty":
                    cycles.append(intervals(bench.driver.read(bench.out, (LAUNCHES, self.ctas, SLOT))))
        parameters = {
            "kernel": self.kind, "ctas": self.ctas, "threads": self.threads, "smem_bytes": self.smem_bytes,
            "launches": LAUNCHES, "nanoseconds_per_launch": round(float(np.median(nanoseconds)), 1),
        }  # fmt: skip
        medians = np.median(cycles, axis=0) if cycles else []
        yield [self.name, json.dumps(parameters), 0, 0.0, " ".join(f"{x:g}" for x in medians)]


def intervals(stamps: np.ndarray) -> tuple[float, float]:
    """Median start to start of consecutive launches on the same SM, and start to end; NaN where no SM ran two in a row.

    ``stamps``: int64 (launches, ctas, 3) of first clock, last clock, SM. Clocks of different SMs are not compared.

    >>> intervals(np.array([[[100, 130, 7]], [[1100, 1130, 7]], [[5, 45, 3]]]))
    (1000.0, 30.0)
    """
    starts = [{int(sm): int(start) for start, _, sm in launch} for launch in stamps]
    steps = [
        after[sm] - before[sm] for before, after in pairwise(starts) for sm in sorted(before.keys() & after.keys())
    ]
    inside = float(np.median(stamps[:, :, 1] - stamps[:, :, 0]))
    return float(np.median(steps)) if steps else float("nan"), inside


def launches(multiprocessors: int) -> Iterator[LaunchProbe]:
    """All of them."""
    for kind in ("empty", "clock", "prologue"):
        for ctas in (1, multiprocessors):
            for threads in (128, 384):
                for smem_bytes in _SMEM:
                    yield LaunchProbe(kind, ctas, threads, smem_bytes)
