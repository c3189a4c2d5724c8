"""Kinds of mistakes that earlier descriptions of these kernels had planted, in the pages of today."""

from __future__ import annotations

from tests.simulator.mistakes import BIG, attention, gemm

LISTED = (
    gemm(
        "cooperative",
        "a stage is not released",
        "AB_empty",
        "            c.release(last)\n            store(c",
        "            store(c",
    ),
    gemm(
        "fast_queue",
        "a stage is released before wgmma has read it",
        "slot A[",
        "                c.wgmma_wait(0)\n                c.release(stage)\n",
        "                c.release(stage)\n                c.wgmma_wait(0)\n",
        nth=2,
    ),
    gemm(
        "fast_queue",
        "a wait leaves one group in flight",
        "slot d of",
        "                c.wgmma_wait(0)\n",
        "                c.wgmma_wait(1)\n",
        nth=2,
    ),
    gemm(
        "cooperative",
        "empty counts one consumer of two",
        "AB_empty",
        '{"A": bm * bk * 2, "B": bn * bk * 2}, consumers=consumers)',
        '{"A": bm * bk * 2, "B": bn * bk * 2})',
    ),
    gemm(
        "cooperative",
        "expect_tx counts A and not B",
        "B[",
        "sum(slot.bytes for slot in stage.slots)",
        'stage["A"].bytes',
    ),
    gemm("cooperative", "no proxy fence in front of the TMA store", "slot C.|fence", "        c.fence()\n", ""),
    gemm(
        "cooperative",
        "no barrier of the warpgroup in front of the TMA store",
        "slot C.|barrier over the warpgroup",
        "        c.bar_sync(barrier)\n        c.tma_store(part)\n",
        "        c.tma_store(part)\n",
    ),
    gemm(
        "cooperative", "C is staged where a store still reads", "slot C.", "        c.store_wait(len(parts) - 1)\n", ""
    ),
    gemm(
        "cooperative",
        "the CTA ends while its store reads",
        "ends while",
        "        c.store_wait()\n    produce",
        "    produce",
    ),
    gemm(
        "cooperative",
        "the producer does not wait for empty",
        "slot A[",
        "p.acquire(ring)",
        'p._next(ring, "acquire", None)',
        nth=1,
    ),
    gemm(
        "pingpong",
        "the first turn is never given",
        "main loop turn",
        "            if number:\n                c.wait(turn[w], (number - 1) // 2)",
        "            c.wait(turn[w], number // 2)",
    ),
    gemm(
        "pingpong",
        "the consumers meet behind each tile, where their number may be odd",
        "deadlock|meet",
        "                c.store_wait()\n                give(turns[1])\n",
        "                c.store_wait()\n                c.bar_sync(cta.named_barrier('meet', 2 * WARPGROUP, 9))\n"
        "                give(turns[1])\n",
    ),
    gemm(
        "pingpong",
        "a wait leaves the store that reads the part",
        "slot C.",
        "        c.store_wait(len(parts) - 1)\n",
        "        c.store_wait(len(parts))\n",
    ),
    gemm(
        "pingpong",
        "the other consumer's stages are not counted",
        "A[",
        "            use += tile.blocks\n",
        "                use += tile.blocks\n",
    ),
    gemm(
        "pingpong",
        "the stage that wgmma reads is released",
        "AB_empty",
        "            c.release(before)\n",
        "            c.release(stage)\n",
    ),
    attention(
        "flash3",
        "Q is waited for in the wrong phase",
        "Q_full",
        "            c.wait(q_full, number)\n            k, _",
        "            c.wait(q_full, 0)\n            k, _",
    ),
    attention(
        "flash3",
        "Q is loaded while it is read",
        "slot Q.",
        "        if number:\n            p.wait(q_empty, number - 1)\n        p.tma_load(q_full, query",
        "        p.tma_load(q_full, query",
    ),
    attention(
        "flash3",
        "V is loaded over O before it is stored",
        "slot V[0]|O.",
        "            if number and block == 0:\n                p.wait(stored, number - 1)\n",
        "",
    ),
    attention(
        "flash3",
        "V is released before P V has read it",
        "slot V[",
        "                c.wgmma_wait(0)\n                c.release(v)\n                c.read(o)\n                exp",
        "                c.release(v)\n                c.wgmma_wait(0)\n                c.read(o)\n                exp",
    ),
    attention(
        "flash3",
        "S is read under Q K^T",
        "S of",
        "                c.wgmma_wait(1)\n                c.release(k)\n                row_max",
        "                c.wgmma_wait(2)\n                c.release(k)\n                row_max",
    ),
    attention(
        "flash3",
        "a consumer passes the turn to itself",
        "turn ",
        "c.bar_arrive(turn[(w + 1) % consumers])",
        "c.bar_arrive(turn[w])",
    ),
    attention(
        "flash3",
        "V is not waited for",
        "slot V[",
        "v = None if first else c.wait_full(values)",
        'v = None if first else c._next(values, "wait_full", None)',
    ),
    attention("flash3", "256 keys: registers", "registers", values={"bn": 256, "d": 64}),
    attention("flash3", "224 keys: shared memory", "shared memory", values={"bn": 224}),
    attention(
        "flash3", "a turn counts one warpgroup of two", "turn ", 'f"turn {w}", 2 * WARPGROUP', 'f"turn {w}", WARPGROUP'
    ),
    attention(
        "flash3",
        "two named barriers with one id",
        "share id",
        'f"O {what}", consumers * WARPGROUP',
        'f"O {what}", consumers * WARPGROUP, 1',
    ),
    attention(
        "flash3", "no fence behind O", "fence|O.", "            c.fence()\n            if w <", "            if w <"
    ),
    attention(
        "tutorial",
        "a slot is loaded before all have read it, as the barrier counts half of them",
        "__syncthreads",
        '"__syncthreads", threads, 0',
        '"__syncthreads", WARPGROUP, 0',
        values=BIG,
    ),
    attention(
        "tutorial", "a block is loaded one too early", "K_full", "ahead = block + stages - 1", "ahead = block + stages"
    ),
    attention(
        "flash2", "a copy is left in flight", "slot s", "        w.cp_async_wait(0)\n", "        w.cp_async_wait(1)\n"
    ),
    attention(
        "flash2",
        "no barrier behind the wait for copies",
        "slot s",
        "        w.cp_async_wait(0)\n        w.bar_sync(everyone)\n",
        "        w.cp_async_wait(0)\n",
    ),
    attention(
        "thunderkittens",
        "a stage is done before wgmma has read V",
        "slot v_smem",
        "                c.wgmma_wait(0)\n                c.arrive(done[i])\n",
        "                c.arrive(done[i])\n                c.wgmma_wait(0)\n",
    ),
    attention(
        "thunderkittens",
        "done counts two of three consumers",
        "compute_done",
        'f"compute_done[{i}]", consumers)',
        'f"compute_done[{i}]", consumers - 1)',
    ),
    attention(
        "thunderkittens",
        "the producer waits for another stage",
        "k_smem",
        "p.wait(done[(j - stages + 1) % stages], (j - stages + 1) // stages)",
        "p.wait(done[j % stages], (j - stages) // stages)",
    ),
    attention(
        "decode",
        "a second tile's Q is loaded while it is read",
        "slot Q.",
        "        if number:\n            p.wait(q_empty, number - 1)\n        p.tma_load(q_full, q,",
        "        p.tma_load(q_full, q,",
    ),
    attention("flashmla", "no fence behind P of the second block", "sP1|fence", "                fence(w1)\n", ""),
    attention("flashmla", "the left of the second V is loaded over", "sK1[0]", "w0.wgmma_wait(4)", "w0.wgmma_wait(5)"),
    attention(
        "flashmla",
        "P of the second block is read before it is written",
        "sP1",
        "                w0.bar_sync(issued)\n",
        "",
    ),
    attention(
        "flashmla",
        "the right of the first V is loaded over",
        "sK0[4]",
        "                w1.wgmma_wait(0)\n                load(w1, 0",
        "                load(w1, 0",
    ),
    attention(
        "flashmla",
        "the next block is waited for in the wrong phase",
        "barriers_K0[0]",
        "scores(w0, 0, range(4), uses[0])",
        "scores(w0, 0, range(4), uses[0] - 1)",
    ),
)
