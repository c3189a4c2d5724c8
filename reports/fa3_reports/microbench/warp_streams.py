"""At which rate warps gather rows by ``cp.async`` and by loads, by the bytes that are in flight; TMA beside them.

And how long ``st.global`` holds a warp up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import Body, bulk_load, mbarrier_wait, repeat, stamp
from fa3_reports.microbench.warp_latency import Origin, cp_async_trips, never

STREAM = 1 << 21  # bytes of a CTA
WARPGROUPS = 2
STEP = 16 * 128 * WARPGROUPS  # bytes of one cp.async of all threads
REACH = {"l2": 1 << 24, "hbm": 1 << 30}  # bytes in which rows lie, all CTAs'
ROWS = (128, 256, 0)  # bytes of a row, 0: one behind the other
SPREAD = 0x9E3779B1  # odd, so that no row comes twice
GROUPS = (1, 2, 4, 8, 16, 24)  # of STEP bytes each in flight
ROOM = 1 << 17  # of shared memory, so that no two copies in flight go to the same place


def _declares(row: int) -> str:
    """Declare the thread's counter of rows, and point %start to its place in the first row."""
    size = row or 128
    ctas_rows = STREAM // size
    return (
        ".reg .u64 %at, %more, %start;\n.reg .b32 %counter, %row, %inside, %mine, %place, %to, %kept;\n"
        "mov.b32 %kept, 0;\nmov.b32 %place, 0;\nld.param.u64 %start, [source];\nmov.u32 %row, %ctaid.x;\n"
        f"shr.u32 %counter, %id, {(size // 16).bit_length() - 1};\n"
        f"mad.lo.u32 %counter, %row, {ctas_rows}, %counter;\nand.b32 %inside, %id, {size // 16 - 1};\n"
        "mul.wide.u32 %more, %inside, 16;\nadd.u64 %start, %start, %more;\nmad.lo.u32 %mine, %id, 16, %copies;\n"
    )


def _next(origin: Origin, row: int) -> str:
    size = row or 128
    return (
        f"mul.lo.u32 %row, %counter, {SPREAD if row else 1};\nand.b32 %row, %row, {REACH[origin] // size - 1};\n"
        f"mul.wide.u32 %more, %row, {size};\nadd.u64 %at, %start, %more;\nadd.u32 %counter, %counter, {STEP // size};\n"
    )


def copied(origin: Origin, row: int, groups: int) -> Body:
    """Copy a CTA's stream by cp.async, with so many groups in flight."""
    place = f"add.u32 %to, %mine, %place;\nadd.u32 %place, %place, {STEP};\nand.b32 %place, %place, {ROOM - 1};\n"
    one = _next(origin, row) + place + "cp.async.cg.shared.global [%to], [%at], 16;\ncp.async.commit_group;\n"
    first = Body(one * groups, _declares(row))
    more = Body(f"cp.async.wait_group {groups - 1};\n" + one)
    return timed(first + repeat(more, STREAM // STEP - groups) + Body("cp.async.wait_group 0;\n")) + never("%kept")


def loaded(origin: Origin, row: int, batch: int) -> Body:
    """Load a CTA's stream into registers, so many loads of 16 bytes a thread before any is used."""
    words = [[f"%v{4 * i + j}" for j in range(4)] for i in range(batch)]
    text = "".join(_next(origin, row) + f"ld.global.v4.b32 {{{', '.join(four)}}}, [%at];\n" for four in words)
    text += "".join(f"xor.b32 %kept, %kept, {word};\n" for four in words for word in four)
    body = Body(text, _declares(row) + f".reg .b32 %v<{4 * batch}>;\n")
    return timed(repeat(body, STREAM // STEP // batch)) + never("%kept")


def streams(multiprocessors: int) -> Iterator[Experiment]:
    """By all SMs; ``bytes`` are in flight. Single rows of 128 and 256 bytes, and whole streams (0)."""
    origins: tuple[Origin, ...] = ("hbm", "l2")
    for origin, row in product(origins, ROWS):
        parameters = {"origin": origin, "row": row, "ctas": multiprocessors}
        for groups in GROUPS:
            body = copied(origin, row, groups)
            said = parameters | {"way": "cp.async", "bytes": groups * STEP}
            yield one_cta("warp_stream", said, [body] * WARPGROUPS, ctas=multiprocessors, stamps=[2] * WARPGROUPS)
        for batch in (1, 2, 4, 8):
            body = loaded(origin, row, batch)
            said = parameters | {"way": "ld.global", "bytes": batch * STEP}
            yield one_cta("warp_stream", said, [body] * WARPGROUPS, ctas=multiprocessors, stamps=[2] * WARPGROUPS)
    for origin, size in product(origins, (2048, 4096, 8192, 16384, 32768)):
        own = Body(
            f"mov.u32 %offset, %ctaid.x;\nmul.wide.u32 %wide, %offset, {STREAM};\n"
            f"and.b64 %wide, %wide, {REACH[origin] - 1};\nld.param.u64 %from, [source];\nadd.u64 %from, %from, %wide;\n"
        )
        step = mbarrier_wait(0) + bulk_load(0, size, 0) + mbarrier_wait(1) + bulk_load(1, size, 1)
        first = bulk_load(0, size, 0) + bulk_load(1, size, 1)
        body = own + timed(first + repeat(step, STREAM // size // 2 - 1) + mbarrier_wait(0) + mbarrier_wait(1))
        said = {"origin": origin, "row": 0, "ctas": multiprocessors, "way": "tma", "bytes": 2 * size}
        yield one_cta("warp_stream", said, [body], (1, 1), ctas=multiprocessors)


def beside(multiprocessors: int) -> Iterator[Experiment]:
    """Copies of what is in L2, waited for by one warpgroup, while another streams from HBM: stamps of one copy each."""
    for copies, groups in product((1, 4, 16), (1, 4, 8)):
        alone, stream = cp_async_trips("l2", copies, trips=8), copied("hbm", 0, groups)
        said = {"copies": copies, "bytes_beside": groups * STEP // 2, "ctas": multiprocessors}
        yield one_cta("cp_async_beside", said, [alone, stream], ctas=multiprocessors, stamps=[24, 2])


Kind = Literal["coalesced", "sectors"]


def stored(multiprocessors: int) -> Iterator[Experiment]:
    """So many ``st.global`` of 16 bytes a thread, three times; stamps before, behind the issue, and when all see them.

    "sectors": as sums of mma.sync are stored, eight bytes by each of four threads, so 32 bytes of a row at a time.
    """
    kinds: tuple[Kind, ...] = ("coalesced", "sectors")
    for kind, stores, ctas in product(kinds, (1, 4, 16, 64), (1, multiprocessors)):
        size = 16 if kind == "coalesced" else 8
        word = "v4.b32" if kind == "coalesced" else "v2.b32"
        values = ", ".join(["%zero"] * (size // 4))
        places = (4096 * i if kind == "coalesced" else 8192 * (i // 8) + 32 * (i % 8) for i in range(stores))
        text = "".join(f"st.global.{word} [%at+{place}], {{{values}}};\n" for place in places)
        one = stamp() + Body(text) + stamp() + Body("membar.gl;\n") + stamp()
        own = "mul.wide.u32 %wide, %id, 16;\n"
        if kind == "sectors":  # eight rows of a warp, 256 bytes apart
            own = (
                "shr.u32 %offset, %id, 2;\nmul.wide.u32 %wide, %offset, 256;\nadd.u64 %at, %at, %wide;\n"
                "and.b32 %offset, %id, 3;\nmul.wide.u32 %wide, %offset, 8;\n"
            )
        declares = (
            ".reg .u64 %at;\nld.param.u64 %at, [source];\nmov.u32 %offset, %ctaid.x;\n"
            "mul.wide.u32 %wide, %offset, 8388608;\nadd.u64 %at, %at, %wide;\n" + own + "add.u64 %at, %at, %wide;\n"
        )
        body = Body("", declares) + one + one + one
        said = {"kind": kind, "stores": stores, "bytes": size, "ctas": ctas}
        yield one_cta("store_issue", said, [body], ctas=ctas, stamps=[9])


def warp_streams(multiprocessors: int) -> Iterator[Experiment]:
    """All of them."""
    yield from streams(multiprocessors)
    yield from beside(multiprocessors)
    yield from stored(multiprocessors)
