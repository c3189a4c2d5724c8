"""Copies by TMA from L2 and from HBM, bulk and by a tensor map: latency, bandwidth, and what issuing them takes."""

from __future__ import annotations

from collections.abc import Iterator

from fa3_reports.microbench.experiment import SOURCE_BYTES, Experiment, one_cta, timed
from fa3_reports.microbench.ptx import Body, bulk_load, mbarrier_wait, repeat, stamp
from fa3_reports.microbench.softmax import Step, convert, exponentials, keep, maxima, rescale, setup


def copies(multiprocessors: int) -> Iterator[Experiment]:
    """TMA bulk copies: latency by size, and bandwidth with two in flight, of one SM and of all."""
    for size in (1024, 2048, 4096, 8192, 16384, 32768):
        first = timed(bulk_load(0, size, 0) + mbarrier_wait(0))
        again = Body(f"sub.u64 %from, %from, {size};\n") + first
        yield Experiment("copy_latency", {"bytes": size}, [first + again + again], (1,), stamps=[6])
        body = bulk_load(0, size, 0) + bulk_load(1, size, 1)
        step = mbarrier_wait(0) + bulk_load(0, size, 0) + mbarrier_wait(1) + bulk_load(1, size, 1)
        stream = timed(body + repeat(step, 31) + mbarrier_wait(0) + mbarrier_wait(1))
        for ctas in (1, multiprocessors):
            yield Experiment("copy_stream", {"bytes": size, "copies": 64, "ctas": ctas}, [stream], (1, 1), ctas=ctas)


def far_copies(multiprocessors: int) -> Iterator[Experiment]:
    """Bulk copies from HBM: a CTA reads its own 8 MiB, all more than L2 holds; and such a copy in front of one from L2.

    "stream": 64 copies, two in flight. "mixed", four times, copies of ``bytes``: stamps when one from HBM and then one
    from L2 are issued, when that from L2 is there, and when the other is.
    """
    own = Body(  # from a place of 128 that the clock chooses, so that no repetition finds the one before in L2
        "mov.u32 %offset, %ctaid.x;\nmul.wide.u32 %wide, %offset, 8388608;\nadd.u64 %from, %from, %wide;\n"
        "mov.u32 %offset, %clock;\nshr.u32 %offset, %offset, 4;\nand.b32 %offset, %offset, 127;\n"
        "mul.wide.u32 %wide, %offset, 65536;\nadd.u64 %from, %from, %wide;\n",
        (mbarrier_wait(1) + mbarrier_wait(0)).declares,
    )
    for size in (16384, 32768):
        first = bulk_load(1, size, 1) + bulk_load(0, size, 0)
        step = mbarrier_wait(1) + bulk_load(1, size, 1) + mbarrier_wait(0) + bulk_load(0, size, 0)
        stream = own + timed(first + repeat(step, 31) + mbarrier_wait(1) + mbarrier_wait(0))
        near = Body(".reg .u64 %near, %far;\nld.param.u64 %near, [source];\nmov.u64 %far, %from;\n")
        swap = Body("mov.u64 %far, %from;\nmov.u64 %from, %near;\n"), Body("mov.u64 %from, %far;\n")
        warm = swap[0] + bulk_load(1, size, 1) + mbarrier_wait(1) + swap[1]
        pair = stamp() + bulk_load(0, size, 0) + swap[0] + bulk_load(1, size, 1) + swap[1] + stamp()
        mixed = own + near + warm + repeat(pair + mbarrier_wait(1) + stamp() + mbarrier_wait(0) + stamp(), 4)
        for ctas in (1, multiprocessors):
            yield Experiment("far_copy", {"bytes": size, "what": "stream", "ctas": ctas}, [stream], (1, 1), ctas=ctas)
            parameters = {"bytes": size, "what": "mixed", "ctas": ctas}
            yield Experiment("far_copy", parameters, [mixed], (1, 1), ctas=ctas, stamps=[16])


def _tensor_copy(index: int) -> str:
    """A copy of 16 KiB by the tensor map, and its next row: the uniform registers it names have to be read by then."""
    bar = f"[%bars+{8 * index}]"
    return (
        "@%first cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%copies+{16384 * index}], [%map, {{%zero, %row, %zero, %zero}}], {bar};\nadd.u32 %row, %row, 128;\n"
    )


def tensor_copy() -> Iterator[Experiment]:
    """Four copies, bulk or by a tensor map, twice: a stamp behind each.

    "joins": as our FP8 producer starts those of K and V, its four warps meeting in front of and behind each.
    ``beside``: softmax steps of so many other warpgroups.
    """
    step = Step("e4m3", 128, 64)
    size = 16384
    near = (
        f".reg .u64 %map;\nld.param.u64 %map, [source];\nadd.u64 %map, %map, {SOURCE_BYTES};\n"
        ".reg .b32 %row;\nmov.u32 %row, %zero;\n"
    )
    waits = "".join(mbarrier_wait(i).text for i in range(4))
    declares = near + "".join(mbarrier_wait(i).declares for i in range(4))
    for kind in ("bulk", "tensor", "joins"):
        text = ""
        for i in range(4):
            expect = f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+{8 * i}], {size};\n"
            join = "bar.sync 13, 128;\n" if kind == "joins" else ""
            copy = bulk_load(i, size, 0).text if kind == "bulk" else join + expect + join + _tensor_copy(i)
            text += copy + join + stamp().text
        body = repeat(Body(stamp().text + text + waits, declares), 2)
        softmax = maxima(step) + exponentials(step) + convert(step, carry=True) + rescale(step)
        busy = Body("", setup(step)) + stamp() + repeat(Body(softmax), 16) + stamp() + keep(step)
        for beside in (0, 2):
            parameters = {"kind": kind, "bytes": size, "beside": beside}
            stamps = [10] + [2] * beside
            yield one_cta("tensor_copy", parameters, [body] + [busy] * beside, (1, 1, 1, 1), stamps=stamps)


def all_copies(multiprocessors: int) -> Iterator[Experiment]:
    """All of them."""
    yield from copies(multiprocessors)
    yield from far_copies(multiprocessors)
    yield from tensor_copy()
