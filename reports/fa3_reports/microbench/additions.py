"""Additions to fp32 in global memory, as dQ is: by TMA and from registers, of one SM and of all."""

from __future__ import annotations

from collections.abc import Iterator

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import Body, bulk_store_wait, repeat, stamp

PASSES = 16  # of a stream, each over the same place, as row blocks are
ROUND_BYTES = 128 * 16  # that a warpgroup adds with one instruction of four values a lane


def bulk_add(size: int) -> Body:
    """Add ``size`` bytes of copies to the warpgroup's scratch space by TMA, as one group."""
    return Body(
        f"@%first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%scratch], [%copies], {size};\n"
        "@%first cp.async.bulk.commit_group;\n"
    )


def vector_add(size: int) -> Body:
    """Add ``size`` bytes of registers to the warpgroup's scratch space, 16 bytes of each lane at a time."""
    text = "".join(
        f"red.global.add.v4.f32 [%place+{ROUND_BYTES * i}], {{%one, %one, %one, %one}};\n"
        for i in range(size // ROUND_BYTES)
    )
    declares = (
        ".reg .u64 %place;\n.reg .b32 %rank;\n.reg .f32 %one;\nmov.f32 %one, 0f3F800000;\n"
        "and.b32 %rank, %id, 127;\nmul.wide.u32 %place, %rank, 16;\nadd.u64 %place, %place, %scratch;\n"
    )
    return Body(text, declares)


def additions(multiprocessors: int) -> Iterator[Experiment]:
    """By TMA once: stamps start, issued, source free, visible. Streams of two warpgroups: :data:`PASSES` in turn."""
    for size in (8192, 16384, 32768):
        once = stamp() + bulk_add(size) + stamp() + bulk_store_wait(".read") + stamp() + bulk_store_wait() + stamp()
        stream = timed(repeat(bulk_add(size) + bulk_store_wait(".read"), PASSES) + bulk_store_wait())
        threads = timed(repeat(vector_add(size), PASSES))
        for ctas in (1, multiprocessors):
            parameters = {"bytes": size, "ctas": ctas}
            yield one_cta("bulk_add", parameters | {"what": "once"}, [once + once], ctas=ctas, stamps=[8])
            for name, body in (("bulk_add", stream), ("vector_add", threads)):
                fields = parameters | {"what": "stream", "passes": PASSES}
                yield one_cta(name, fields, [body] * 2, ctas=ctas, stamps=[2, 2])
