"""What warps wait for that load, multiply and synchronise in one stream, without a producer.

A chain of loads from shared memory follows addresses that were stored there; one from global memory adds what it
loaded, which is zero, to the next address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, product
from typing import Literal

import numpy as np

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import COPIES, Body, bar_sync, fence_proxy, repeat, stamp, stamp_entry

Origin = Literal["l2", "hbm"]
ORIGINS: tuple[Origin, ...] = ("l2", "hbm")
DEPENDENT = 32  # instructions of a chain in a pass of its loop
PASSES = 8
LOADS = 16  # of a chain from global memory
STRIDE = 8192  # bytes between them
WIDE = "{%p, %q, %r, %s}"
SHARED = {  # how each lane's next address is loaded
    "ld.b32": "ld.volatile.shared.b32 %p, [%p];\n",
    "ld.b128": f"ld.volatile.shared.v4.b32 {WIDE}, [%p];\n",
    "ldmatrix.x4": f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {WIDE}, [%p];\n",
}


def never(register: str) -> Body:
    """A store never taken that keeps a register alive: no address and no product is this word."""
    return Body(
        f"{{ .reg .pred %never;\nsetp.eq.u32 %never, {register}, 0x7B12345;\n"
        f"@%never st.global.u32 [%out], {register};\n}}\n"
    )


def shared_chain(kind: str) -> Body:
    """Load the next address from shared memory: a lane's own, by ldmatrix from the word that another lane's row has."""
    step = 4 if kind == "ld.b32" else 16
    declares = (
        ".reg .b32 %mine, %lane, %p, %q, %r, %s;\nand.b32 %lane, %id, 31;\nshr.u32 %mine, %id, 5;\n"
        f"mad.lo.u32 %mine, %mine, 512, %base;\nadd.u32 %mine, %mine, {COPIES};\nmad.lo.u32 %p, %lane, {step}, %mine;\n"
        f"mad.lo.u32 %q, %lane, {4 if kind == 'ldmatrix.x4' else step}, %mine;\n"
        "st.volatile.shared.b32 [%q], %p;\nbar.warp.sync 0xffffffff;\n"
    )
    return Body(SHARED[kind] * DEPENDENT, declares)


def mma_chain(through: Literal["sum", "rows"]) -> Body:
    """Each mma.sync adds to the sum of the one before, or takes it, converted, for its rows, as P V takes S."""
    rows = "" if through == "sum" else "cvt.rn.f16x2.f32 %a0, %d1, %d0;\ncvt.rn.f16x2.f32 %a1, %d3, %d2;\n"
    sums = "{%d0, %d1, %d2, %d3}"
    added = sums if through == "sum" else "{%c0, %c0, %c0, %c0}"
    one = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {sums}, {{%a0, %a1, %a0, %a1}}, {{%b0, %b1}}, {added};\n"
    declares = ".reg .f32 %d<4>, %c0;\n.reg .b32 %a<2>, %b<2>, %p;\nmov.f32 %c0, 0f00000000;\n"
    declares += "".join(f"mov.f32 %d{i}, 0f00000000;\n" for i in range(4))
    declares += "".join(f"add.u32 %{x}{i}, %id, {i};\n" for x, i in product("ab", range(2)))
    return Body((rows + one) * DEPENDENT, declares)


def in_shared_memory() -> Iterator[Experiment]:
    """Chains of loads and of products, by one and by two warps of each scheduler."""
    for kind, warpgroups in product(SHARED, (1, 2)):
        body = timed(repeat(shared_chain(kind), PASSES)) + never("%p")
        parameters = {"kind": kind, "count": DEPENDENT * PASSES, "warpgroups": warpgroups}
        yield one_cta("shared_latency", parameters, [body] * warpgroups, stamps=[2] * warpgroups)
    for through in ("sum", "rows"):
        body = timed(repeat(mma_chain(through), PASSES)) + Body("mov.b32 %p, %d0;\n") + never("%p")
        yield one_cta("mma_latency", {"through": through, "count": DEPENDENT * PASSES}, [body])


def trip(threads: int, kind: Literal["b32", "b128"], *, fences: bool) -> Body:
    """Store to shared memory, meet, and load what the next warp stored, which is stored in turn; two buffers."""
    size, value = (4, "%p") if kind == "b32" else (16, WIDE)
    word = "b32" if kind == "b32" else "v4.b32"
    declares = (
        ".reg .b32 %mine, %other, %p, %q, %r, %s;\nmov.b32 %p, %id; mov.b32 %q, 0; mov.b32 %r, 0; mov.b32 %s, 0;\n"
        f"add.u32 %other, %id, 32;\nand.b32 %other, %other, {threads - 1};\n"
        f"mad.lo.u32 %mine, %id, {size}, %base;\nmad.lo.u32 %other, %other, {size}, %base;\n"
    )
    text = ""
    for buffer in (COPIES, COPIES + size * threads):
        text += f"st.volatile.shared.{word} [%mine+{buffer}], {value};\n"
        text += fence_proxy().text * fences + bar_sync(1, threads).text
        text += f"ld.volatile.shared.{word} {value}, [%other+{buffer}];\n"
    return Body(text * 4, declares)


def meetings() -> Iterator[Experiment]:
    """Barriers alone; trips of words from warp to warp through shared memory; proxy fences behind stores."""
    for warpgroups in (1, 2, 3):
        threads = 128 * warpgroups
        body = timed(repeat(Body(bar_sync(1, threads).text * 8), PASSES))
        parameters = {"threads": threads, "count": 8 * PASSES}
        yield one_cta("bar_sync", parameters, [body] * warpgroups, stamps=[2] * warpgroups)
    for kind, warpgroups, fences in product(("b32", "b128"), (1, 2), (False, True)):
        body = timed(repeat(trip(128 * warpgroups, kind, fences=fences), PASSES)) + never("%p")
        parameters = {"kind": kind, "fences": fences, "count": 8 * PASSES, "warpgroups": warpgroups}
        yield one_cta("shared_trip", parameters, [body] * warpgroups, stamps=[2] * warpgroups)
    declares = trip(128, "b128", fences=False).declares
    for stores in (0, 1, 4, 8):
        text = "".join(f"st.volatile.shared.v4.b32 [%mine+{COPIES + 2048 * i}], {WIDE};\n" for i in range(stores))
        body = Body(text + fence_proxy().text, declares)
        yield one_cta("fence_latency", {"stores": stores, "count": 4 * PASSES}, [timed(repeat(body, 4 * PASSES))])


def placed(origin: Origin) -> str:
    """Point %at to a lane's word: of its CTA's part of what L2 holds, or of a MiB that nobody has read lately."""
    text = ".reg .u64 %at, %more;\n.reg .b32 %got, %kept, %row;\nmov.b32 %kept, 0;\nmov.u64 %at, %from;\n"
    if origin == "hbm":
        text += (
            "ld.param.u64 %at, [source];\nmov.u32 %row, %clock;\nshr.u32 %row, %row, 4;\nmov.u32 %got, %ctaid.x;\n"
            "mad.lo.u32 %row, %got, 9, %row;\nand.b32 %row, %row, 1023;\nmul.wide.u32 %more, %row, 1048576;\n"
            "add.u64 %at, %at, %more;\nld.volatile.global.u32 %got, [%at];\n"
            "cvt.u64.u32 %more, %got;\nadd.u64 %at, %at, %more;\n"
        )
    return text + "mul.wide.u32 %more, %id, 4;\nadd.u64 %at, %at, %more;\nadd.u64 %at, %at, 1024;\n"


def global_chain() -> Body:
    """Load words of which each is added to the next one's address; L1 keeps none."""
    return Body(
        "".join(
            f"ld.global.cg.u32 %got, [%at+{STRIDE * i}];\ncvt.u64.u32 %more, %got;\nadd.u64 %at, %at, %more;\n"
            for i in range(LOADS)
        )
    )


def cp_async_trips(origin: Origin, copies: int, trips: int = 3) -> Body:
    """Copy 16 bytes a thread so many times as one group, and wait for it: three stamps a trip.

    From HBM each trip has bytes of its own.
    """
    issue = "".join(f"cp.async.cg.shared.global [%to+{2048 * i}], [%at+{2048 * i}], 16;\n" for i in range(copies))
    one = stamp() + Body(issue + "cp.async.commit_group;\n") + stamp() + Body("cp.async.wait_group 0;\n") + stamp()
    to = ".reg .b32 %to;\nmad.lo.u32 %to, %id, 16, %copies;\n"
    to += "mul.wide.u32 %more, %id, 12;\nadd.u64 %at, %at, %more;\n"
    onwards = Body("" if origin == "l2" else f"add.u64 %at, %at, {2048 * copies};\n")
    body = Body("", placed(origin) + to) + one
    for _ in range(1, trips):
        body = body + onwards + one
    return body + never("%kept")


def from_memory(multiprocessors: int) -> Iterator[Experiment]:
    """Chains of loads from L2 and HBM, a coalesced word a thread; and copies of 16 bytes a thread, waited for.

    From L2 the second time counts. Stamps of a copy: before it is issued, behind that, and when it is there.
    """
    for origin, ctas in product(ORIGINS, (1, multiprocessors)):
        declares = placed(origin)
        begin = Body("", declares) + stamp()
        further = Body("" if origin == "l2" else f"add.u64 %at, %at, {LOADS * STRIDE};\n")
        body = begin + global_chain() + stamp() + further + global_chain() + stamp() + never("%got")
        parameters = {"origin": origin, "count": LOADS, "ctas": ctas}
        yield one_cta("global_latency", parameters, [body], ctas=ctas, stamps=[3])
        for copies in (1, 4, 16):
            parameters = {"origin": origin, "copies": copies, "ctas": ctas}
            body = cp_async_trips(origin, copies)
            yield one_cta("cp_async_latency", parameters, [body], ctas=ctas, stamps=[9])


class Lives(Experiment):
    """CTAs that take each other's place on an SM: median and largest time from an end to the next first
    instruction."""

    def table(self, stamps: np.ndarray, extra: dict) -> Iterator[list]:
        gaps = []
        for launch in stamps[:, :, 0]:
            for sm in np.unique(launch[:, 1]):
                begun, _, ended = np.sort(launch[launch[:, 1] == sm][:, :3], axis=0).T
                gaps += (begun[1:] - ended[:-1]).tolist()
        yield [self.name, json.dumps(self.parameters | extra), 0, 0.0, f"{np.median(gaps):g} {max(gaps):g}"]


def lives(multiprocessors: int) -> Iterator[Experiment]:
    """Each SM has as many CTAs, one behind another, as there is room for stamps."""
    sm = Body(
        ".reg .u32 %sm;\n.reg .u64 %where;\nmov.u32 %sm, %smid;\ncvt.u64.u32 %where, %sm;\n"
        "@%first st.global.u64 [%slot], %where;\nadd.u64 %slot, %slot, 8;\n"
    )
    for warpgroups in (1, 2):
        ctas = multiprocessors * 4 // warpgroups
        body = stamp_entry() + sm + repeat(bar_sync(1, 128 * warpgroups), 32) + stamp()
        parameters = {"threads": 128 * warpgroups, "ctas": ctas}
        yield Lives("cta_start", parameters, [body] * warpgroups, ctas=ctas, stamps=[3] * warpgroups, shared=True)


def warp_latencies(multiprocessors: int) -> Iterator[Experiment]:
    """All of them."""
    return chain(in_shared_memory(), meetings(), from_memory(multiprocessors), lives(multiprocessors))
