"""What a kernel launch costs: a graph of launches back to back, by events and by the clocks of the SMs themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from fa3_reports.microbench.experiment import REPETITIONS, SOURCE_BYTES, Bench

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


# One thread of the last warpgroup: copies from global memory that it waits for, then bulk stores whose sources it waits
# for, as the consumers of a persistent kernel end. Every launch has memory of its own.
_MOVED = 32768
_MOVES = (
    ".reg .u64 %from, %to;\nsetp.ne.u32 %skip, %id, {thread};\n@%skip bra moved;\n"
    "ld.param.u64 %from, [source];\nld.param.u64 %to, [target];\nmov.u32 %cta, %ctaid.x;\n"
    "mul.wide.u32 %wide, %cta, {own};\nadd.u64 %from, %from, %wide;\nadd.u64 %to, %to, %wide;\nmov.u32 %bars, smem;\n"
)


@dataclass(frozen=True, slots=True)
class LaunchProbe:
    """A kernel that does nothing, reads the clock, or does what FlashAttention-3 does before its first load.

    "prologue": mbarriers, fences, barrier of the CTA; with three warpgroups setmaxnreg as well. "moves": then so many
    ``loads`` and ``stores`` of 32 KiB, of other memory in every launch.
    """

    kind: Literal["empty", "clock", "prologue", "moves"]
    ctas: int
    threads: int
    smem_bytes: int
    name: str = "launch"
    loads: int = 0
    stores: int = 0

    def ptx(self) -> str:
        head = (
            ".version 8.3\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
            f".visible .entry bench(.param .u64 out{self._more_parameters})\n.maxntid {self.threads}, 1, 1\n"
            ".minnctapersm 1\n{\n"
        )
        if self.kind == "empty":
            return head + "ret;\n}\n"
        work = ""
        if self.kind in ("prologue", "moves"):
            work = _PROLOGUE + (_REALLOCATE if self.threads == 384 else "")
        if self.kind == "moves":
            work += self._moves()
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

    @property
    def _more_parameters(self) -> str:
        return ", .param .u64 source, .param .u64 target" if self.kind == "moves" else ""

    @property
    def _own_bytes(self) -> int:
        return _MOVED * max(self.loads, self.stores, 1)

    def _moves(self) -> str:
        text = _MOVES.format(thread=self.threads - 128, own=self._own_bytes)
        for i in range(self.loads):
            text += (
                f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+{8 * i}], {_MOVED};\n"
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                f"[%bars+{1024 + i % 2 * _MOVED}], [%from+{i * _MOVED}], {_MOVED}, [%bars+{8 * i}];\n"
            )
        for i in range(self.loads):
            text += (
                f"{{ .reg .pred %done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [%bars+{8 * i}], 0;\n"
                "@!%done bra again;\n}\n"
            )
        for i in range(self.stores):
            text += (
                f"cp.async.bulk.global.shared::cta.bulk_group [%to+{i * _MOVED}], [%bars+{1024 + i % 2 * _MOVED}], "
                f"{_MOVED};\ncp.async.bulk.commit_group;\n"
            )
        return text + "cp.async.bulk.wait_group.read 0;\nmoved:\n"

    def _arguments(self, first: int, bench: Bench) -> list[tuple[c_uint64, ...]]:
        outs = [c_uint64(first + i * self.ctas * 8 * SLOT) for i in range(LAUNCHES)]
        if self.kind != "moves":
            return [(out,) for out in outs]
        step = self.ctas * self._own_bytes
        half = SOURCE_BYTES // 2
        places = [bench.source.value + i * step % (half - step) // 128 * 128 for i in range(LAUNCHES)]
        return [(out, c_uint64(at), c_uint64(at + half)) for out, at in zip(outs, places, strict=True)]

    def rows(self, function: c_void_p, bench: Bench) -> Iterator[list]:
        """One row; cycles: from start to start of consecutive launches on one SM, and from start to end (medians)."""
        first = bench.out.value
        arguments = self._arguments(first, bench)
        nanoseconds = []
        cycles = []
        with bench.driver.graph(function, self.ctas, self.threads, self.smem_bytes, arguments) as graph:
            for _ in range(REPETITIONS):
                nanoseconds.append(graph.nanoseconds() / LAUNCHES)
                if self.kind != "empty":
                    cycles.append(intervals(bench.driver.read(bench.out, (LAUNCHES, self.ctas, SLOT))))
        parameters = {
            "kernel": self.kind,
            "ctas": self.ctas,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "launches": LAUNCHES,
            "nanoseconds_per_launch": round(float(np.median(nanoseconds)), 1),
        } | ({"loads": self.loads, "stores": self.stores} if self.kind == "moves" else {})
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
    for loads, stores in ((0, 0), (1, 0), (3, 0), (6, 0), (0, 1), (0, 3), (0, 6), (3, 3)):
        yield LaunchProbe("moves", multiprocessors, 384, _SMEM[1], "launch_moves", loads, stores)
