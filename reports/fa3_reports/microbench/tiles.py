"""The parts of a tile and a step: softmax of one key block, alone and beside wgmma, a serial step, prologue, epilogue.

Bodies run a loop of :data:`STEPS` steps. "phases": a stamp after each phase of each step, which keeps ptxas from mixing
phases; "whole": the loop twice, the first time with a cold instruction cache, and no stamp within.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa3_reports.microbench.experiment import Experiment, one_cta
from fa3_reports.microbench.ptx import (
    COPIES,
    Body,
    bulk_load,
    bulk_store,
    bulk_store_wait,
    keep_accumulators,
    mbarrier_wait,
    repeat,
    stamp,
    stamp_entry,
    transpose,
    wgmma,
    wgmma_wait,
)
from fa3_reports.microbench.softmax import Dtype, Step, convert, exponentials, keep, maxima, pv, qk, rescale, setup

STEPS = 8
BUSY = 300  # times eight wgmma that outlast every softmax beside them: 160,000 cycles
# (keys, head_dim) -> most warpgroups whose lanes hold S and O: 168 registers each for three, else 255
SIZES = {
    (32, 64): 3,
    (64, 64): 3,
    (128, 64): 3,
    (176, 64): 3,
    (256, 64): 2,
    (32, 128): 3,
    (64, 128): 3,
    (128, 128): 3,
    (176, 128): 2,
    (224, 128): 2,
    (256, 128): 2,
    (64, 256): 2,
    (80, 256): 2,
}
SERIAL_SIZES: tuple[tuple[Dtype, int, int, int], ...] = (  # S, P and O of 128 x 128 do not fit 168 registers
    ("fp16", 64, 64, 3),
    ("fp16", 128, 64, 3),
    ("fp16", 64, 128, 3),
    ("fp16", 128, 128, 2),
    ("e4m3", 64, 128, 3),
    ("e4m3", 128, 128, 2),
)
OWN_SIZES = ((64, 64), (128, 64), (176, 64), (64, 128), (128, 128), (64, 256))


def _dtypes(n: int) -> tuple[Dtype, ...]:
    return ("fp16", "e4m3") if n % 32 == 0 else ("fp16",)  # k of wgmma is 32 for e4m3


def _whole(step: Step, text: str) -> Body:
    return repeat(stamp() + repeat(Body(text), STEPS), 2) + stamp() + keep(step)


def _phases(step: Step, *texts: str) -> Body:
    body = Body("")
    for text in texts:
        body = body + stamp() + Body(text)
    return repeat(body, STEPS) + stamp() + keep(step)


def _vector(step: Step) -> tuple[str, str, str]:
    """Maxima; exponentials, sums and conversion; rescaling: of a step without GEMMs."""
    return maxima(step), exponentials(step) + convert(step, carry=True), rescale(step)


def _busy(dtype: Dtype) -> Body:
    """wgmma of 128 columns that keep the tensor cores busy for longer than what runs beside them."""
    chain = repeat(wgmma(dtype, 128, 8, a_in_registers=True), BUSY)
    return stamp() + chain + stamp() + keep_accumulators(128)


def softmax_step() -> Iterator[Experiment]:
    """The vector part of one step by one to three warpgroups, idle tensor cores."""
    for (n, head_dim), most in SIZES.items():
        for dtype in _dtypes(n):
            step = Step(dtype, n, head_dim)
            variants = [(step, "whole", 3), (step, "phases", 1 + 3 * STEPS)]
            if dtype == "fp16":
                variants.append((replace(step, order="tree"), "whole", 3))
            for variant, stamps, count in variants:
                parts = _vector(variant)
                body = _whole(variant, "".join(parts)) if stamps == "whole" else _phases(variant, *parts)
                for groups in range(1, most + 1):
                    parameters = variant.parameters | {"steps": STEPS, "stamps": stamps, "warpgroups": groups}
                    yield one_cta("softmax_step", parameters, [body] * groups, stamps=[count] * groups)


def softmax_step_under_wgmma() -> Iterator[Experiment]:
    """The same by one and two warpgroups while one more keeps the tensor cores busy, A in registers."""
    for (n, head_dim), most in SIZES.items():
        for dtype in _dtypes(n):
            step = Step(dtype, n, head_dim)
            body = _whole(step, "".join(_vector(step)))
            for groups in range(1, most):
                parameters = step.parameters | {"steps": STEPS, "stamps": "whole", "warpgroups": groups}
                bodies = [_busy(dtype)] + [body] * groups
                stamps = [2] + [3] * groups
                yield one_cta("softmax_step_under_wgmma", parameters, bodies, stamps=stamps)


def softmax_step_own_wgmma() -> Iterator[Experiment]:
    """As the overlapped schedule does it: P V of the block before is issued, the softmax runs, then P V is waited for.

    P is converted and O rescaled after the wait: both are operands of the wgmma under way. Phases: issue, maxima,
    exponentials and sums; wait; conversion and rescaling.
    """
    for n, head_dim in OWN_SIZES:
        for dtype in _dtypes(n):
            step = Step(dtype, n, head_dim)
            during = pv(step, 8) + maxima(step) + exponentials(step)
            after = convert(step, carry=False) + rescale(step)
            phased = _phases(step, during, wgmma_wait(0).text, after)
            whole = _whole(step, during + wgmma_wait(0).text + after)
            for groups in (1, 2):
                for stamps, body, count in (("phases", phased, 1 + 3 * STEPS), ("whole", whole, 3)):
                    parameters = step.parameters | {"steps": STEPS, "stamps": stamps, "wgmma": 8, "warpgroups": groups}
                    yield one_cta("softmax_step_own_wgmma", parameters, [body] * groups, stamps=[count] * groups)


def serial_step() -> Iterator[Experiment]:
    """A step without overlap: Q K^T, wait, softmax, P V, wait; by warpgroups without tokens, operands stale.

    Phases: Q K^T and its wait; the vector part; P V and its wait.
    """
    for dtype, n, head_dim, most in SERIAL_SIZES:
        step = Step(dtype, n, head_dim)
        wait = wgmma_wait(0).text
        vector = maxima(step) + exponentials(step) + convert(step, carry=False) + rescale(step)
        texts = (qk(step) + wait, vector, pv(step) + wait)
        for groups in range(1, most + 1):
            for stamps, count in (("phases", 1 + 3 * STEPS), ("whole", 3)):
                body = _whole(step, "".join(texts)) if stamps == "whole" else _phases(step, *texts)
                parameters = step.parameters | {"steps": STEPS, "stamps": stamps, "warpgroups": groups}
                yield one_cta("serial_step", parameters, [body] * groups, stamps=[count] * groups)


def transposition() -> Iterator[Experiment]:
    """V^T of 128 keys of e4m3 by one warpgroup: alone, beside softmax steps, beside those and wgmma that outlast it.

    Eight times, cold and warm. Warpgroup 0 transposes, the next ones are busy, the last one issues wgmma.
    """
    for head_dim in (64, 128, 256):
        body = repeat(stamp() + repeat(transpose(head_dim, 4), STEPS), 2) + stamp()
        step = Step("e4m3", 128, 64)
        vector = stamp() + repeat(Body("".join(_vector(step))), 8 * STEPS) + stamp() + keep(step)
        for busy in (0, 1, 2):
            for beside in ([], [_busy("e4m3")]) if busy < 2 else ([],):
                parameters = {"head_dim": head_dim, "blocks": STEPS, "softmax": busy, "wgmma": bool(beside)}
                bodies = [body] + [vector] * busy + beside
                stamps = [3] + [2] * (busy + len(beside))
                yield one_cta("transposition", parameters, bodies, stamps=stamps)


def output_setup(size: int) -> str:
    """Where a warpgroup of ``size`` bytes of O stages it, ``%area``, and where in it a lane's matrices go, ``%to``."""
    return (
        ".reg .b32 %inverse<2>, %to, %area, %bar;\n.reg .b32 %h<4>;\n"
        f"add.u32 %bar, %group, 1;\nmul.lo.u32 %area, %group, {size};\nadd.u32 %area, %area, %base;\n"
        # rows of a warp, then 16 bytes of a lane
        f"add.u32 %area, %area, {COPIES};\nand.b32 %to, %id, 127;\nshr.u32 %offset, %to, 5;\n"
        f"mul.lo.u32 %offset, %offset, {size // 4};\nand.b32 %to, %to, 31;\nshl.b32 %to, %to, 4;\n"
        "add.u32 %to, %to, %offset;\nadd.u32 %to, %to, %area;\n"
    )


def normalise(head_dim: int) -> str:
    """O / l to fp16, to shared memory."""
    text = "".join(f"rcp.approx.ftz.f32 %inverse{r}, %sum{r};\n" for r in (0, 1))
    for matrix in range(head_dim // 16):
        for i in range(8 * matrix, 8 * matrix + 8):
            text += f"mul.rn.f32 %o{i}, %o{i}, %inverse{i // 2 % 2};\n"
        for j in range(4):
            i = 8 * matrix + 2 * j
            text += f"cvt.rn.f16x2.f32 %h{j}, %o{i + 1}, %o{i};\n"
        text += f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%to+{512 * matrix}], {{%h0, %h1, %h2, %h3}};\n"
    return text


def epilogue() -> Iterator[Experiment]:
    """O / l to fp16, to shared memory and by TMA to global memory, three times; the first is cold.

    Phases: normalise, convert, stmatrix, proxy fence; barrier of the warpgroup; bulk store by one thread until its
    source is free; a second barrier.
    """
    for head_dim in (64, 128, 256):
        step = Step("fp16", 32, head_dim)
        size = 64 * head_dim * 2
        store = normalise(head_dim)
        bulk = (bulk_store("%area", size) + bulk_store_wait(".read")).text
        phases = (store + "fence.proxy.async.shared::cta;\n", "bar.sync %bar, 128;\n", bulk, "bar.sync %bar, 128;\n")
        body = Body("")
        for phase in phases:
            body = body + stamp() + Body(phase)
        body = Body((repeat(body, 3) + stamp() + keep(step)).text, setup(step) + output_setup(size))
        for groups in (1, 2, 3):
            parameters = {"head_dim": head_dim, "passes": 3, "warpgroups": groups}
            yield one_cta("epilogue", parameters, [body] * groups, stamps=[13] * groups)


def tile_chain(multiprocessors: int) -> Iterator[Experiment]:
    """From the CTA's first instruction to its first accumulators: Q (two copies of 16 KiB), K (32 KiB), eight wgmma.

    Stamps: entry of the kernel, barriers initialised, copies issued, Q there, K there, accumulators there. By one
    warpgroup that does all, and by a producer (the first three stamps) and two consumers (all but the third).
    """
    load = bulk_load(0, 16384, 0) + bulk_load(0, 16384, 1) + bulk_load(1, 32768, 2)
    step = Step("fp16", 128, 128)
    first = mbarrier_wait(0) + stamp() + mbarrier_wait(1) + stamp() + Body(qk(step)) + wgmma_wait(0) + stamp()
    first = first + keep(step, scores_only=True)
    begin = stamp_entry() + stamp()
    for ctas in (1, multiprocessors):
        alone = [begin + load + stamp() + first]
        yield one_cta("tile_chain", {"warpgroups": 1, "ctas": ctas}, alone, (2, 1), ctas, [6])
        apart = [begin + load + stamp(), begin + first, begin + first]
        yield one_cta("tile_chain", {"warpgroups": 3, "ctas": ctas}, apart, (2, 1), ctas, [3, 5, 5])


def tiles(multiprocessors: int) -> Iterator[Experiment]:
    """All of them."""
    for group in (softmax_step, softmax_step_under_wgmma, softmax_step_own_wgmma, serial_step, transposition, epilogue):
        yield from group()
    yield from tile_chain(multiprocessors)
