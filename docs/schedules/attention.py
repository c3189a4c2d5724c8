"""Attention kernels of others, forward, 16 bits, as descriptions.

Sources: Dao-AILab/flash-attention at 0251105a (2026-08-15), hopper/ for FlashAttention-3 and csrc/flash_attn/src/ for
FlashAttention-2; triton-lang/triton 3.6, python/tutorials/06-fused-attention.py; HazyResearch/ThunderKittens at
0b55588d (2026-04-25), kernels/attention/mha_h100/mha_h100.cu.
"""

from fa3verify.schedule import Launch, Stage, TileBlocks, kernel

WARPGROUP = 128  # threads


def attention(batch, heads, seqlen, d, bm, bn, causal, **what):
    """The launch of all row tiles, of one head behind another, and of a head from its first row on."""
    last = [min(seqlen, row) if causal else seqlen for row in range(bm, seqlen + bm, bm)]
    rows = [TileBlocks(-(-keys // bn), causal * -(-bm // bn)) for keys in last]
    flops = 4 * batch * heads * seqlen**2 * d / (2 if causal else 1)
    return Launch(rows * (batch * heads), flops=flops, hbm_bytes=8 * batch * heads * seqlen * d, **what)


@kernel
def flash3(cta, tiles, *, d=128, bm=128, bn=176, stages=2, early=0.28, addresses=69):
    """FlashAttention-3 (mainloop_fwd_sm90_tma_gmma_ws.hpp): consumers in turns, P V under the next softmax.

    ``early`` is the fraction of the exponentials in front of the wait for P V, and ``addresses`` the instructions for
    addresses, both as ptxas leaves them. O leaves through the memory of V, behind a barrier of all consumers.
    """
    consumers, scores, outputs = bm // 64, bn // 2, d // 2
    first = round(scores * early)
    registers = {2: (240, 24), 3: (160, 32)}[consumers]
    query = [cta.smem(f"Q.{w}", 64 * d * 2, readers=1) for w in range(consumers)]
    q_full, q_empty = cta.mbarrier("Q_full"), cta.mbarrier("Q_empty", consumers)
    keys = cta.ring("K", stages, bn * d * 2, consumers=consumers)
    values = cta.ring("V", stages, bn * d * 2, consumers=consumers)
    turn = [cta.named_barrier(f"turn {w}", 2 * WARPGROUP) for w in range(consumers)]
    read, written = (cta.named_barrier(f"O {what}", consumers * WARPGROUP) for what in ("may be written", "is written"))
    stored = cta.mbarrier("O_stored")
    out = [cta.smem(f"O.{w}", 64 * d * 2, at=(values.parts["V"][0], w * 64 * d * 2)) for w in range(consumers)]
    for w in range(consumers):
        c = cta.warpgroup(f"consumer {w}", registers=registers[0])
        s, o, _ = c.fragment("S", bn), c.fragment("O", d), c.fragment("P", bn, bits=16)

        def multiply(first, c=c, w=w, s=s, o=o):
            k = c.wait_full(keys)
            c.bar_sync(turn[w])
            c.wgmma("Q K^T", a=query[w], b=k.slot, acc=s, n=bn, k=d)
            v = None if first else c.wait_full(values)
            if v:
                c.wgmma("P V", a=None, b=v.slot, acc=o, n=d, k=bn)
            c.bar_arrive(turn[(w + 1) % consumers])
            return k, v

        def row_max(masked, c=c, s=s):
            c.read(s)
            if masked:
                c.vector("mask", scores, alu=2)
            c.vector("row max", chunks=-(-scores // 4), alu=scores + 4)
            c.vector("row reduction", shuffle=4)

        def exponentials(count, rescales=0, c=c):
            fma, mufu = 2 * count + rescales + 6, count + 2
            c.vector("exp2", chunks=-(-count // 4), fma=fma, mufu=mufu, convert=scores // 2)

        if w == consumers - 1:
            c.bar_arrive(turn[0])
        for number, tile in enumerate(tiles):
            c.wait(q_full, number)
            k, _ = multiply(first=True)
            c.delay("cold_code_cycles")
            c.vector("tile change", stall=345)
            c.wgmma_wait(0)
            c.release(k)
            row_max(tile.masked > 0)
            exponentials(scores)
            for block in range(1, tile.blocks):
                c.delay("warp_skew_cycles")
                k, v = multiply(first=False)
                c.vector("addresses", chunks=1, other=addresses)
                c.wgmma_wait(1)
                c.release(k)
                row_max(block < tile.masked)
                c.vector("exp2", chunks=-(-first // 4), fma=2 * first, mufu=first)
                c.wgmma_wait(0)
                c.release(v)
                c.read(o)
                exponentials(scores - first, outputs)
            c.arrive(q_empty)
            v = c.wait_full(values)
            c.wgmma("P V", a=None, b=v.slot, acc=o, n=d, k=bn)
            c.wgmma_wait(0)
            c.delay("cold_code_cycles")
            c.vector("tile change", stall=345)
            c.release(v)
            c.read(o)
            c.vector("normalise O", outputs, fma=1, convert=0.5)
            c.bar_sync(read)
            c.write(out[w])
            c.vector("O to shared memory", chunks=d // 16, alu=d // 16, smem_bytes=64 * d * 2)
            c.fence()
            if w < consumers - 1:
                c.bar_arrive(written)
                continue
            c.bar_sync(written)
            for slot in out:
                c.tma_store(slot)
            c.store_wait()
            c.arrive(stored)
    p = cta.warp("producer", registers=registers[1])
    for number, tile in enumerate(tiles):
        if number:
            p.wait(q_empty, number - 1)
        p.tma_load(q_full, query, far=True)
        for block in range(tile.blocks):
            p.tma_load(p.acquire(keys))
            if number and block == 0:
                p.wait(stored, number - 1)
            p.tma_load(p.acquire(values))


@flash3.launch
def launch_flash3(batch=4, heads=16, seqlen=8448, causal=False, *, d, bm, bn):
    return attention(batch, heads, seqlen, d, bm, bn, causal)


@kernel
def flash2(cta, tiles, *, d=128, bm=128, bn=64, unfused=True):
    """FlashAttention-2 (flash_fwd_kernel.h) on Hopper: four warps, cp.async, ldmatrix and mma.sync; two CTAs an SM.

    While a fragment is multiplied the next is read from shared memory. ``unfused``: as PyTorch builds it, which keeps
    the scaling of a score and the subtraction of the maximum apart.
    """
    scores, outputs, warps = bm * bn // WARPGROUP, bm * d // WARPGROUP, 4
    q, k, v = cta.smem("sQ", bm * d * 2), cta.smem("sK", bn * d * 2), cta.smem("sV", bn * d * 2)
    everyone = cta.named_barrier("__syncthreads", WARPGROUP, 0)
    w = cta.warpgroup("warps", registers=255)
    s, o, _ = w.fragment("S", bn, rows=bm), w.fragment("O", d, rows=bm), w.fragment("P", bn, rows=bm, bits=16)

    def multiply(name, acc, reads, n, depth, size):
        """Multiply in steps of 16 along the depth: all but the first read their fragments beside a product."""
        steps = depth // 16
        loads = size // 16 // WARPGROUP
        w.vector(f"ldmatrix {name}", other=loads / steps, smem_bytes=size // steps)
        w.mma_sync(name, acc=acc, reads=reads, m=bm, n=n, k=depth, waits=False)
        w.vector(f"ldmatrix {name}", chunks=steps, other=loads, smem_bytes=size - size // steps)
        w.wgmma_wait(0)

    def arrived():
        w.cp_async_wait(0)
        w.bar_sync(everyone)

    for tile in tiles:
        w.delay("cold_code_cycles")
        w.cp_async([q, k], far=True)
        for block in range(tile.blocks):
            arrived()
            w.cp_async(v)
            multiply("Q K^T", s, [q, k], bn, d, bm * d * 2 + warps * bn * d * 2)
            w.read(s)
            if block < tile.masked:
                w.vector("mask", scores, alu=2)
            arrived()
            if block + 1 < tile.blocks:
                w.cp_async(k)
            w.vector("row max", scores, alu=1)
            w.vector("row reduction", shuffle=4 * bm // 64)
            w.vector("rescale O", outputs, fma=1)
            w.vector("exp2", scores, fma=2 if unfused else 1, mufu=1)
            w.vector("row sum", scores, fma=1, convert=0.5)
            multiply("P V", o, v, d, bn, warps * bn * d * 2)
        w.read(o)
        w.vector("normalise O", outputs, fma=1, convert=0.5)
        w.write(q)
        w.vector("O to shared memory", outputs, other=0.5, smem_bytes=bm * d * 2)
        w.bar_sync(everyone)
        w.read(q)
        w.vector("O to registers", outputs, other=0.125, smem_bytes=bm * d * 2)
        w.global_store(bm * d * 2)


@flash2.launch
def launch_flash2(batch=4, heads=16, seqlen=8448, causal=False, *, d, bm, bn):
    return attention(batch, heads, seqlen, d, bm, bn, causal, persistent=False, occupancy=0)


# of a thread, for the tutorial's d, bm and bn, as ptxas allocates them; more than four warps are for 128 x 128 alone,
# which with four warps spills
REGISTERS = {
    128: {(64, 32): 120, (64, 64): 144, (64, 128): 192, (128, 32): 216, (128, 64): 255, (128, 128): 192},
    64: {(64, 32): 88, (64, 64): 112, (128, 32): 144, (128, 64): 192},
}


@kernel
def tutorial(cta, tiles, *, d=128, bm=128, bn=64, stages=2):
    """Triton's tutorial as Triton 3.6 compiles it for Hopper: all warps load, multiply and exponentiate.

    P V is started and Q K^T of the next block behind it, then both are waited for. One thread loads the block that
    comes ``stages - 1`` blocks later, behind a barrier, as by then all have read what was in its slot.
    """
    warpgroups = 1 + (bm * bn >= 128 * 128)
    threads, rows = WARPGROUP * warpgroups, bm // warpgroups
    scores, outputs = rows * bn // WARPGROUP, rows * d // WARPGROUP
    q, q_full = cta.smem("Q", bm * d * 2), cta.mbarrier("Q_full")
    out = [cta.smem(f"O.{w}", rows * d * 2, at=(q, w * rows * d * 2)) for w in range(warpgroups)]
    keys, values = (cta.ring(name, stages, bn * d * 2, consumers=warpgroups) for name in "KV")
    everyone = cta.named_barrier("__syncthreads", threads, 0)
    for w in range(warpgroups):
        c = cta.warpgroup(f"warpgroup {w}", registers=REGISTERS[d][bm, bn])
        s, o, _ = c.fragment("S", bn, rows=rows), c.fragment("O", d, rows=rows), c.fragment("P", bn, rows, 16, "S")
        before = 0

        def load(ring, use, wanted, c=c, w=w):
            if w == 0 and wanted:
                c.tma_load(Stage(ring, use))

        for number, tile in enumerate(tiles):
            c.delay("cold_code_cycles")
            if w == 0:
                c.tma_load(q_full, q, far=True)
            c.wait(q_full, number)
            for block in range(min(stages - 1, tile.blocks)):
                load(keys, before + block, True)
                load(values, before + block, True)
            for block in range(tile.blocks):
                k = c.wait_full(keys)
                c.vector("addresses", other=20)
                c.wgmma("Q K^T", a=q, b=k.slot, acc=s, m=rows, n=bn, k=d)
                c.wgmma_wait(0)
                c.bar_sync(everyone)
                c.read(s)
                v = c.wait_full(values)
                if block >= tile.blocks - tile.masked:
                    c.vector("mask", scores, alu=2, fma=1)
                c.vector("row max", scores, alu=1)
                c.vector("row reduction", shuffle=4 * rows // 64)
                c.vector("exp2", scores, fma=1, mufu=1)
                c.vector("row sum", scores, fma=1)
                c.vector("row reduction", shuffle=4 * rows // 64)
                c.read(o)
                c.vector("rescale O", outputs, fma=1)
                c.vector("P to 16 bits", scores, convert=0.5)
                c.vector("addresses", other=40)
                c.wgmma("P V", a=None, b=v.slot, acc=o, m=rows, n=d, k=bn)
                c.vector("addresses", other=40)
                ahead = block + stages - 1
                for ring in (keys, values):
                    c.bar_sync(everyone)
                    load(ring, before + ahead, ahead < tile.blocks)
            before += tile.blocks
            c.wgmma_wait(0)
            c.read(o)
            c.delay("cold_code_cycles")
            c.vector("normalise O", outputs, fma=1, convert=0.5)
            c.bar_sync(everyone)
            c.write(out[w])
            c.vector("O to shared memory", outputs, other=0.125, smem_bytes=rows * d * 2)
            c.fence()
            c.bar_sync(everyone)
            if w == 0:
                c.tma_store(q)
                c.store_wait()
            c.bar_sync(everyone)


@tutorial.launch
def launch_tutorial(batch=4, heads=16, seqlen=8448, causal=False, *, d, bm, bn):
    return attention(batch, heads, seqlen, d, bm, bn, causal, persistent=False, occupancy=0)


@kernel
def thunderkittens(cta, tiles, *, d=128, bm=192, bn=128, stages=2):
    """ThunderKittens' mha_h100: three consumers without turns, each product waited for where it is started.

    P takes the registers of S. O leaves through the memory of Q.
    """
    consumers, scores, outputs = bm // 64, bn // 2, d // 2
    q, q_full = [cta.smem(f"q_smem[{w}]", 64 * d * 2, readers=1) for w in range(consumers)], cta.mbarrier("qsmem")
    slots = {x: [cta.smem(f"{x}_smem[{i}]", bn * d * 2) for i in range(stages)] for x in "kv"}
    arrived = {x: [cta.mbarrier(f"{x}_smem_arrived[{i}]") for i in range(stages)] for x in "kv"}
    done = [cta.mbarrier(f"compute_done[{i}]", consumers) for i in range(stages)]
    sums = [cta.smem(f"l_smem[{w}]", 64 * 4) for w in range(consumers)]
    for w in range(consumers):
        own = cta.named_barrier(f"warpgroup {w}", WARPGROUP)
        c = cta.warpgroup(f"consumer {w}", registers=160)
        s, o, _ = (
            c.fragment("att_block", bn),
            c.fragment("o_reg", d),
            c.fragment("att_block_mma", bn, 64, 16, "att_block"),
        )
        for tile in tiles:
            c.delay("cold_code_cycles")
            c.wait(q_full, 0)
            for j in range(tile.blocks):
                i, phase = j % stages, j // stages
                c.wait(arrived["k"][i], phase)
                c.wgmma("Q K^T", a=q[w], b=slots["k"][i], acc=s, n=bn, k=d)
                c.wgmma_wait(0)
                c.read(s)
                c.vector("row max", scores, alu=1)
                c.vector("row reduction", shuffle=4)
                c.vector("exp2", scores, fma=2, mufu=1)
                c.vector("row sum", scores, fma=2, convert=0.5)
                c.vector("row reduction", shuffle=4)
                c.read(o)
                c.vector("rescale O", outputs, fma=1)
                c.vector("addresses", other=60)
                c.wait(arrived["v"][i], phase)
                c.wgmma("P V", a=None, b=slots["v"][i], acc=o, n=d, k=bn)
                c.wgmma_wait(0)
                c.arrive(done[i])
            c.read(o)
            c.vector("normalise O", outputs, fma=1, convert=0.5)
            for out, size in ((q[w], 64 * d * 2), (sums[w], 64 * 4)):
                c.write(out)
                c.vector("to shared memory", outputs, other=0.25, smem_bytes=size)
                c.fence()
                c.bar_sync(own)
                c.tma_store(out)
            c.store_wait()
    p = cta.warp("producer", registers=32)

    def load(j):
        for x in "kv":
            p.tma_load(arrived[x][j % stages], slots[x][j % stages])

    for tile in tiles:
        p.tma_load(q_full, q, far=True)
        for j in range(min(stages - 1, tile.blocks)):
            load(j)
        for j in range(stages - 1, tile.blocks):
            load(j)
            if j + 1 < tile.blocks:
                p.wait(done[(j - stages + 1) % stages], (j - stages + 1) // stages)


@thunderkittens.launch
def launch_thunderkittens(batch=4, heads=16, seqlen=8448, causal=False, *, d, bm, bn):
    return attention(batch, heads, seqlen, d, bm, bn, causal, persistent=False)


@kernel
def decode(cta, tiles, *, d=128, bn=176, stages=2):
    """FlashAttention-3 for one query of grouped heads over a part of a long cache: two consumers, O in fp32.

    Their turns are left out, as HBM binds: only four of the tile's 128 rows are heads of a group.
    """
    rows, scores, outputs = 64, bn // 2, d // 2
    q = [cta.smem(f"Q.{w}", rows * d * 2, readers=1) for w in range(2)]
    q_full, q_empty = cta.mbarrier("Q_full"), cta.mbarrier("Q_empty", 2)
    keys, values = (cta.ring(name, stages, bn * d * 2, consumers=2) for name in "KV")
    for w in range(2):
        c = cta.warpgroup(f"consumer {w}", registers=240)
        s, o, _ = c.fragment("S", bn), c.fragment("O", d), c.fragment("P", bn, bits=16)
        for number, tile in enumerate(tiles):
            c.delay("cold_code_cycles")
            c.wait(q_full, number)
            for block in range(tile.blocks):
                k = c.wait_full(keys)
                c.wgmma("Q K^T", a=q[w], b=k.slot, acc=s, n=bn, k=d)
                v = c.wait_full(values) if block else None
                if v:
                    c.wgmma("P V", a=None, b=v.slot, acc=o, n=d, k=bn)
                c.wgmma_wait(1 if v else 0)
                c.release(k)
                c.read(s)
                c.vector("row max", scores, alu=1)
                c.vector("row reduction", shuffle=4)
                c.vector("exp2", scores, fma=2, mufu=1, convert=0.5)
                if v:
                    c.wgmma_wait(0)
                    c.release(v)
                    c.read(o)
                    c.vector("rescale O", outputs, fma=1)
            c.arrive(q_empty)
            v = c.wait_full(values)
            c.wgmma("P V", a=None, b=v.slot, acc=o, n=d, k=bn)
            c.wgmma_wait(0)
            c.release(v)
            c.read(o)
            c.vector("normalise O", outputs, fma=1)
            c.global_store(4 * d * 4 * (w == 0))
    p = cta.warp("producer", registers=24)
    for number, tile in enumerate(tiles):
        if number:
            p.wait(q_empty, number - 1)
        p.tma_load(q_full, q, far=True)
        for _ in range(tile.blocks):
            p.tma_load(p.acquire(keys), far=True)
            p.tma_load(p.acquire(values), far=True)


@decode.launch
def launch_decode(batch=32, kv_heads=8, keys=8192, parts=1, *, d, bn):
    """``parts`` are those of hopper/heuristics.h: 4 for four sequences of 65536, 15 for one. A second kernel merges
    them, which takes a launch and some latencies."""
    tiles = [-(-keys // (bn * parts))] * (batch * kv_heads * parts)
    merge = 4000 if parts > 1 else 0
    return Launch(tiles, hbm_bytes=4 * batch * kv_heads * keys * d, around_cycles=merge)
