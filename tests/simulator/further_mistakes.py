"""Twelve more mistakes of real kernels, written when the sixty of :mod:`tests.simulator.mistakes` had been tried.

Before the checker was asked, seven were predicted to be named, one to be not proven, three to be missed, and the copy
over what other warps read to be named by the barriers that an actor's own warps need, and by nothing before these.
"""

from __future__ import annotations

from tests.simulator.mistakes import Mistake, attention, gemm

FURTHER = (
    gemm(
        "cooperative",
        "setmaxnreg asks for more registers than an SM has",
        "66560 registers, an SM has 65536",
        'registers=232)\n        acc = c.fragment("C", bn, rows=rows)',
        'registers=240)\n        acc = c.fragment("C", bn, rows=rows)',
    ),
    gemm(
        "cooperative",
        "setmaxnreg of a number that is no multiple of eight",
        "236 registers",
        'registers=232)\n        acc = c.fragment("C", bn, rows=rows)',
        'registers=236)\n        acc = c.fragment("C", bn, rows=rows)',
    ),
    gemm(
        "cooperative",
        "empty counts warps, where one thread of a warpgroup arrives",
        "deadlock|AB_empty",
        '{"A": bm * bk * 2, "B": bn * bk * 2}, consumers=consumers)',
        '{"A": bm * bk * 2, "B": bn * bk * 2}, consumers=4 * consumers, readers=consumers)',
    ),
    Mistake(
        kernel="unseen2/hgemm.hgemm",
        what="a block is copied over the one that other warps still read by ldmatrix",
        words=("race: slot A",),
        old="            c.cp_async_wait(stages - 2)\n            c.bar_sync(sync)\n"
        "            c.read(a[(block - stages + 1) % stages])\n"
        '            c.vector("first fragments", alu=13, fma=3, other=10, stall=39, smem_bytes=8 * fragments)\n'
        "            copy(block)\n",
        new="            copy(block)\n            c.cp_async_wait(stages - 1)\n            c.bar_sync(sync)\n"
        "            c.read(a[(block - stages + 1) % stages])\n"
        '            c.vector("first fragments", alu=13, fma=3, other=10, stall=39, smem_bytes=8 * fragments)\n',
    ),
    gemm(
        "fast_queue",
        "the phase of a ring of one stage is never flipped",
        "deadlock|AB_empty[0]",
        '                stage = c.wait_full(ring)\n                c.vector("addresses"',
        '                stage = c.wait_full(ring, 0)\n                c.vector("addresses"',
        nth=1,
        values={"stages": 1},
    ),
    gemm(
        "cluster",
        "the other CTA's stage is released before wgmma has read it",
        "race: slot CTA 1 B0[0]",
        "                    c.wgmma_wait(0)\n                    for both in rings:\n"
        "                        c.arrive(both.empty[stage.index])\n",
        "                    c.arrive(rings[1 - rank].empty[stage.index])\n                    c.wgmma_wait(0)\n"
        "                    c.arrive(ring.empty[stage.index])\n",
    ),
    gemm(
        "cluster",
        "a CTA ends while the other may still load into it, as nobody drains the ring",
        "ends while",
        missed="a program does not say which of its actors are a CTA that may end",
    ),
    attention(
        "flash3",
        "O's store is not waited for before V's memory is given back",
        "ends while",
        "            c.store_wait()\n            c.arrive(stored)",
        "            c.arrive(stored)",
    ),
    gemm(
        "cooperative",
        "the epilogues of both consumers meet at one named barrier",
        "not proven: named barrier epilogue",
        'cta.named_barrier(f"epilogue {w}", WARPGROUP)',
        'cta.named_barrier("epilogue", WARPGROUP, 1)',
        nth=1,
    ),
    gemm(
        "fast_queue",
        "expect_tx of the last tile counts the half of it that exists",
        "slot A[",
        "        for _ in range(tile.blocks):\n            stage = p.acquire(ring)\n"
        "            p.expect(stage.full, (bm + bn) * BK * 2)",
        "        for block in range(tile.blocks):\n            stage = p.acquire(ring)\n"
        "            p.expect(stage.full, (bm + bn) * BK * (1 if block + 1 == tile.blocks else 2))",
        nth=1,
    ),
    attention(
        "flash3",
        "P is written to registers that P V still reads",
        "P of consumer",
        "                c.wgmma_wait(0)\n                c.release(v)\n                c.read(o)\n"
        "                exponentials(scores - first, outputs)\n",
        "                exponentials(scores - first, outputs)\n                c.wgmma_wait(0)\n"
        "                c.release(v)\n                c.read(o)\n",
        missed="a description does not say in which registers A is",
    ),
    Mistake(
        kernel="unseen/moe.moe",
        what="an empty group of copies is not committed, so that a wait leaves one in flight",
        words=("race: slot A",),
        old="            copy(block + stages - 1)\n",
        new="            if block + stages - 1 < tile.blocks:\n                copy(block + stages - 1)\n",
    ),
)
