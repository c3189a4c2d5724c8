"""PTX of one timing kernel: every warpgroup runs a body of its own between two clock reads.

A kernel stores, per warpgroup, its stamps (64-bit clock reads) to ``out[cta][warpgroup][stamp]``. Bodies are made by
the functions below and may be chained. Shared memory holds operands of any value: no timing here depends on data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

K_STEP = {"fp16": 16, "bf16": 16, "e4m3": 32}
TYPES = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3"}
MAX_STAMPS = 256
OPERANDS = 0  # offsets in shared memory: operands of wgmma, then space for copies, then mbarriers
COPIES = 65536
MBARRIERS = 196608
SMEM_BYTES = MBARRIERS + 1024
SCRATCH_BYTES = 32768  # of a warpgroup, in global memory

_HEADER = """.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""


@dataclass(frozen=True, slots=True)
class Body:
    """PTX statements of one warpgroup, and the registers they declare."""

    text: str
    declares: str = ""

    def __add__(self, other: Body) -> Body:
        declares = self.declares if other.declares in self.declares else self.declares + other.declares
        return Body(self.text + other.text, declares)


def stamp() -> Body:
    """Read the clock and store it as the next stamp (thread 0 of the warpgroup)."""
    return Body("mov.u64 %now, %clock64;\n@%first st.global.u64 [%slot], %now;\nadd.u64 %slot, %slot, 8;\n")


def stamp_entry() -> Body:
    """Store the clock as it was at the kernel's first instruction as the next stamp."""
    return Body("@%first st.global.u64 [%slot], %entry;\nadd.u64 %slot, %slot, 8;\n")


def repeat(body: Body, times: int) -> Body:
    """The body ``times`` times in a loop with its own counter, opaque to any assembler; labels are local to braces."""
    head = f"{{ .reg .u32 %count; .reg .pred %again;\nadd.u32 %count, %zero, {times};\nloop:\n"
    tail = "sub.u32 %count, %count, 1;\nsetp.ne.u32 %again, %count, 0;\n@%again bra loop;\n}\n"
    return Body(head + body.text + tail, body.declares)


def matrix_descriptor(offset: int) -> str:
    """Matrix descriptor of a K-major tile with 128-byte swizzle: rows of 128 bytes, eight rows 1024 bytes apart."""
    return str((1 << 62) | (64 << 32) | (1 << 16) | (offset >> 4))


def wgmma(dtype: str, n: int, count: int, *, a_in_registers: bool = False, wait: bool = True) -> Body:
    """``count`` wgmma of 64 x n x (256 bits) in one group, accumulating; ``wait`` for all groups at the end."""
    accumulators = ", ".join(f"%acc{i}" for i in range(n // 2))
    scale = "1, 1" if dtype == "e4m3" else ("1, 1, 0" if a_in_registers else "1, 1, 0, 0")
    a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%desc_a"
    kind = TYPES[dtype]
    one = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{K_STEP[dtype]}.f32.{kind}.{kind} {{{accumulators}}}, {a}, %desc_b, "
        f"%one, {scale};\n"
    )
    declares = (
        f".reg .f32 %acc<{n // 2}>;\n.reg .b32 %a<4>;\n.reg .b64 %desc_a, %desc_b;\n.reg .pred %one;\n"
        "mov.b32 %a0, 0; mov.b32 %a1, 0; mov.b32 %a2, 0; mov.b32 %a3, 0;\nsetp.eq.u32 %one, 0, 0;\n"
        f"mov.b64 %desc_a, {matrix_descriptor(OPERANDS)};\nmov.b64 %desc_b, {matrix_descriptor(OPERANDS + 16384)};\n"
        + "".join(f"mov.f32 %acc{i}, 0f00000000;\n" for i in range(n // 2))
    )
    text = "wgmma.fence.sync.aligned;\n" + one * count + "wgmma.commit_group.sync.aligned;\n"
    return Body(text + (wgmma_wait(0).text if wait else ""), declares)


def keep_accumulators(n: int) -> Body:
    """A never-taken store that keeps the accumulators of :func:`wgmma` alive."""
    fold = "".join(f"add.rn.f32 %acc0, %acc0, %acc{i};\n" for i in range(1, n // 2))
    return Body(
        fold + "{ .reg .pred %never;\nsetp.eq.f32 %never, %acc0, 0f42F6E979;\n@%never st.global.f32 [%out], %acc0;\n}\n"
    )


def wgmma_wait(in_flight: int) -> Body:
    return Body(f"wgmma.wait_group.sync.aligned {in_flight};\n")


VECTOR = {
    "ex2": "ex2.approx.ftz.f32 %v{i}, %v{i};",
    "ffma": "fma.rn.f32 %v{i}, %v{i}, %scale, %shift;",
    "fadd": "add.rn.f32 %v{i}, %v{i}, %shift;",
    "fmul": "mul.rn.f32 %v{i}, %v{i}, %scale;",
    "fmnmx": "max.f32 %v{i}, %v{i}, %w{i};",
    "vimnmx3": "max.s32 %x{i}, %u{i}, %h{i};\nmax.s32 %u{i}, %x{i}, %id;",
    "f2fp_f16": "cvt.rn.f16x2.f32 %h{i}, %v{i}, %w{i};\nmov.b32 %v{i}, %h{i};",
    "f2fp_e4m3": "cvt.rn.satfinite.e4m3x2.f32 %q{i}, %v{i}, %w{i};\nmov.b32 %v{i}, {{%q{i}, %q{i}}};",
    "shfl": "shfl.sync.bfly.b32 %u{i}, %u{i}, 1, 31, 0xffffffff;",
    "prmt": "prmt.b32 %u{i}, %u{i}, %h{i}, 0x2540;",
}
_CHAINS = 8
_VECTOR_DECLARES = (
    f".reg .f32 %v<{_CHAINS}>, %w<{_CHAINS}>;\n.reg .b32 %h<{_CHAINS}>, %u<{_CHAINS}>, %x<{_CHAINS}>;\n"
    f".reg .b16 %q<{_CHAINS}>;\n"
    ".reg .f32 %scale, %shift;\ncvt.rn.f32.u32 %scale, %id;\nmul.rn.f32 %shift, %scale, 0f3F000000;\n"
    + "".join(
        f"mov.f32 %v{i}, %scale; add.rn.f32 %w{i}, %scale, 0f3F800000; mov.b32 %u{i}, %v{i}; mov.b32 %h{i}, %w{i};\n"
        for i in range(_CHAINS)
    )
)


def vector(operation: str, per_chain: int, chains: int = _CHAINS) -> Body:
    """``per_chain`` instructions on each of at most eight independent chains, round robin; see :data:`VECTOR`."""
    text = "".join(VECTOR[operation].format(i=i) + "\n" for _ in range(per_chain) for i in range(chains))
    return Body(text, _VECTOR_DECLARES)


def softmax_chunk() -> Body:
    """The instruction mix of eight scores of one lane: maximum, multiply-add, exponential, sum, conversion to
    fp16 (and four xor that keep the conversions).
    """
    text = ""
    for name in ("fmnmx", "ffma", "ex2", "fadd"):
        text += "".join(VECTOR[name].format(i=i) + "\n" for i in range(_CHAINS))
    text += "".join(
        f"cvt.rn.f16x2.f32 %h{i}, %v{i}, %v{i + 1};\nxor.b32 %u{i}, %u{i}, %h{i};\n" for i in range(0, _CHAINS, 2)
    )
    return Body(text, _VECTOR_DECLARES)


def sink() -> Body:
    """A never-taken store that keeps the results of :func:`vector` alive."""
    fold = "".join(f"add.rn.f32 %v0, %v0, %v{i};\nxor.b32 %u0, %u0, %u{i};\n" for i in range(1, _CHAINS))
    return Body(
        fold + "{ .reg .pred %never; .reg .b32 %bits;\nmov.b32 %bits, %v0;\nxor.b32 %bits, %bits, %u0;\n"
        "setp.eq.u32 %never, %bits, 0x12345;\n@%never st.global.u32 [%out], %bits;\n}\n",
        _VECTOR_DECLARES,
    )


def bar_sync(identity: int, threads: int) -> Body:
    return Body(f"bar.sync {identity}, {threads};\n")


def bar_arrive(identity: int, threads: int) -> Body:
    return Body(f"bar.arrive {identity}, {threads};\n")


def mbarrier_arrive(index: int) -> Body:
    """One arrival by the first thread of the warpgroup."""
    return Body(f"@%first mbarrier.arrive.shared::cta.b64 _, [%bars+{8 * index}];\n")


def mbarrier_wait(index: int) -> Body:
    """Wait for the next phase; parities alternate, kept in a register per barrier."""
    name = f"%parity{index}"
    return Body(
        "{ .reg .pred %done;\nagain:\n"
        f"mbarrier.try_wait.parity.shared::cta.b64 %done, [%bars+{8 * index}], {name};\n"
        f"@!%done bra again;\n}}\nxor.b32 {name}, {name}, 1;\n",
        f".reg .b32 {name};\nmov.b32 {name}, 0;\n",
    )


def bulk_load(index: int, size: int, slot: int) -> Body:
    """Bulk copy of ``size`` bytes into copy slot ``slot`` on mbarrier ``index``, from its CTA's part of the data."""
    return Body(
        f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+{8 * index}], {size};\n"
        f"@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%copies+{slot * 32768}], [%from], "
        f"{size}, [%bars+{8 * index}];\n"
        f"add.u64 %from, %from, {size};\n"
    )


def bulk_store(source: str, size: int) -> Body:
    """TMA bulk copy of ``size`` bytes from the address in a register to the warpgroup's scratch space, as one group."""
    return Body(
        f"@%first cp.async.bulk.global.shared::cta.bulk_group [%scratch], [{source}], {size};\n"
        "@%first cp.async.bulk.commit_group;\n"
    )


def bulk_store_wait(kind: str = "") -> Body:
    """Until every group is written, or with kind ".read" until its source is free."""
    return Body(f"@%first cp.async.bulk.wait_group{kind} 0;\n")


def matrix_store(count: int) -> Body:
    """``count`` stmatrix of four 8 x 8 matrices per warp."""
    line = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%mine], {%t0, %t1, %t2, %t3};\n"
    return Body(line * count, _MATRIX_DECLARES)


def matrix_load(count: int) -> Body:
    """``count`` transposing ldmatrix of four 8 x 8 matrices per warp, from their own places, which change every pass.

    Each is used by an exclusive or; see :func:`keep_loaded`. Otherwise ptxas leaves the loads out.
    """
    text = "".join(
        f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%t0, %t1, %t2, %t3}}, [%mine+{512 * i}];\n"
        "xor.b32 %kept, %kept, %t0;\n"
        for i in range(count)
    )
    declares = _MATRIX_DECLARES + ".reg .b32 %kept;\nmov.b32 %kept, 0;\n"
    return Body(text + "xor.b32 %mine, %mine, 32768;\n", declares)


def transpose(head_dim: int, passes: int) -> Body:
    """V^T of ``passes`` times 32 keys of e4m3 by a warpgroup, as the producer of our FP8 kernel does it.

    Per 64 channels and pass a warp loads four matrices, sorts them by four byte permutations and stores four; the proxy
    fence ends it.
    """
    text = ""
    for p in range(passes):
        units = range(head_dim // 64)
        for u in units:
            place = 512 * (p * len(units) + u)
            registers = ", ".join(f"%v{4 * u + i}" for i in range(4))
            text += f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{registers}}}, [%mine+{place}];\n"
        for u in units:
            for i in (0, 2):
                for j, order in enumerate(("0x6420", "0x7531")):
                    text += f"prmt.b32 %w{4 * u + i + j}, %v{4 * u + i}, %v{4 * u + i + 1}, {order};\n"
        for u in units:
            place = 65536 + 512 * (p * len(units) + u)
            registers = ", ".join(f"%w{4 * u + i}" for i in range(4))
            text += f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%mine+{place}], {{{registers}}};\n"
    count = head_dim // 16
    return Body(text, _MATRIX_DECLARES + f".reg .b32 %v<{count}>, %w<{count}>;\n") + fence_proxy()


def keep_loaded() -> Body:
    """A store never taken that keeps what :func:`matrix_load` loads alive: shared memory never holds this word."""
    return Body(
        "{ .reg .pred %never;\nsetp.eq.u32 %never, %kept, 0x7B12345;\n@%never st.global.u32 [%out], %kept;\n}\n"
    )


_MATRIX_DECLARES = (
    ".reg .b32 %t<4>, %mine, %lane;\nmov.b32 %t0, 0; mov.b32 %t1, 0; mov.b32 %t2, 0; mov.b32 %t3, 0;\n"
    f"mov.u32 %lane, %tid.x;\nshl.b32 %mine, %lane, 4;\nadd.u32 %mine, %mine, %base;\nadd.u32 %mine, %mine, {COPIES};\n"
)


def fence_proxy() -> Body:
    return Body("fence.proxy.async.shared::cta;\n")


def kernel(
    bodies: list[Body], mbarrier_arrivals: tuple[int, ...] = (), *, shared: bool = False, directives: str = ""
) -> str:
    """PTX module with one entry ``bench(out, source, zero, scratch)``; warpgroup i runs ``bodies[i]``.

    ``source`` is read by bulk loads: every CTA starts 4 MiB after the one before, modulo 32 MiB. ``scratch`` is written
    by bulk stores: :data:`SCRATCH_BYTES` of every warpgroup. ``shared``: equal bodies that follow each other are one
    piece of code, instead of one each.
    """
    threads = 128 * len(bodies)
    init = "".join(
        f"@%p0 mbarrier.init.shared::cta.b64 [%bars+{8 * i}], {count};\n" for i, count in enumerate(mbarrier_arrivals)
    )
    parts = [
        _HEADER,
        ".visible .entry bench(.param .u64 out, .param .u64 source, .param .u32 zero, .param .u64 scratch)\n",
        f".maxntid {threads}, 1, 1\n{directives}{{\n",
        ".reg .u64 %out, %slot, %now, %from, %wide, %scratch, %entry;\n",
        ".reg .u32 %id, %group, %base, %bars, %copies, %cta, %offset, %zero;\n",
        ".reg .pred %first, %p0, %is;\nmov.u64 %entry, %clock64;\nmov.u32 %base, smem;\n",
        f"add.u32 %bars, %base, {MBARRIERS};\nadd.u32 %copies, %base, {COPIES};\n",
        "mov.u32 %id, %tid.x;\nshr.u32 %group, %id, 7;\nand.b32 %offset, %id, 127;\nsetp.eq.u32 %first, %offset, 0;\n",
        "setp.eq.u32 %p0, %id, 0;\nmov.u32 %cta, %ctaid.x;\nld.param.u64 %out, [out];\n"
        "ld.param.u64 %from, [source];\nld.param.u32 %zero, [zero];\n",
        "and.b32 %offset, %cta, 7;\nmul.wide.u32 %wide, %offset, 4194304;\nadd.u64 %from, %from, %wide;\n",
        f"mul.lo.u32 %cta, %cta, {len(bodies)};\nadd.u32 %cta, %cta, %group;\n",
        f"mul.wide.u32 %wide, %cta, {8 * MAX_STAMPS};\nadd.u64 %slot, %out, %wide;\n",
        f"ld.param.u64 %scratch, [scratch];\nmul.wide.u32 %wide, %cta, {SCRATCH_BYTES};\n"
        "add.u64 %scratch, %scratch, %wide;\n",
        init,
        "fence.proxy.async.shared::cta;\nbar.sync 0;\n",
    ]
    runs = [(body, len(list(same))) for body, same in groupby(bodies)] if shared else [(body, 1) for body in bodies]
    stop = 0
    for i, (body, members) in enumerate(runs):
        stop += members  # those before have returned
        parts.append(
            f"setp.lt.u32 %is, %group, {stop};\n@!%is bra next{i};\n{{\n{body.declares}{body.text}}}\nret;\nnext{i}:\n"
        )
    parts.append("ret;\n}\n")
    return "".join(parts)
