"""Flash decoding of grouped heads, lightllm (Triton): parts of 128 keys, and the kernel that merges them.

https://github.com/ModelTC/lightllm at fc72ffab9a3455cfb571f22d45ab777cc29de0de, in lightllm/models/llama/triton_kernel:
gqa_flash_decoding_stage1.py (decode) and gqa_flash_decoding_stage2.py (merge), as triton 3.6 compiles them for sm_90a.

Two warps, each a stream: 8 of 16 keys for Q K^T, 64 of 128 columns for P V. K and V have one buffer each, of which a
warp copies half. Instructions of stage 1: 256 in the loop, 251 in front and 349 behind; ldmatrix and mma.sync are left
to mma_sync, and a copy's own three issue slots to cp_async. Of stage 2: 93 for four parts, whose loads are together.
Words that are missing: ld.global to registers (lengths, indices, Q, results of stage 1), which is the latency of L2
(Q: a cp.async). Ten CTAs fit an SM by registers and are stated. O has bytes of its own, where the kernel uses those of
K.
"""

from fa3verify.schedule import Launch, kernel


def latency(c):
    """Wait for L2: 150 ns."""
    c.delay("l2_latency_ns")


@kernel
def decode(cta, tiles, *, bn=16, d=128, registers=96):
    q = [cta.smem(f"Q{w}", 16 * d) for w in range(2)]
    k = [cta.smem(f"K{w}", bn * d) for w in range(2)]
    v = [cta.smem(f"V{w}", bn * d) for w in range(2)]
    p = [cta.smem(f"P{w}", 16 * bn) for w in range(2)]
    top = [cta.smem(f"max{w}", 64) for w in range(2)]
    total = [cta.smem(f"sum{w}", 64) for w in range(2)]
    out = [cta.smem(f"out{w}", 16 * d) for w in range(2)]
    sync = cta.named_barrier("syncthreads", 64, identity=0)

    def warp(c, w):
        s = c.fragment("S", bn // 2, rows=16)
        acc = c.fragment("O", d // 2, rows=16)

        def exchange(what):
            c.write(what[w])
            c.bar_sync(sync)
            for of_warp in what:
                c.read(of_warp)
            c.vector("of both warps", shuffle=1, other=3, alu=2)
            c.bar_sync(sync)

        def copy():  # Indices are loaded first, and waited for.
            c.vector("indices", alu=8, fma=6, other=8)
            latency(c)
            c.vector("addresses of K and V", alu=14, fma=9, other=3)
            c.cp_async([k[w]], far=True)
            c.cp_async([v[w]], far=True)

        for tile in tiles:
            c.vector("length and request", alu=40, fma=16, other=40)
            latency(c)
            c.cp_async([q[w]])
            c.cp_async_wait(0)
            c.vector("Q to shared memory", alu=30, fma=10, other=40, smem_bytes=16 * d)
            copy()
            for block in range(tile.blocks):
                c.cp_async_wait(0)
                c.bar_sync(sync)
                c.mma_sync("Q K", acc=s, m=16, n=bn // 2, k=d, reads=[*q, *k])
                c.read(s)
                c.vector("scale, bounds, row max", alu=16, fma=6, shuffle=4, other=2)
                exchange(top)
                c.vector("exp, row sum", alu=16, fma=31, mufu=6, convert=2, shuffle=2, other=10)
                c.bar_sync(sync)
                c.write(p[w])
                c.bar_sync(sync)
                c.vector("rescale O", fma=32, shuffle=2)
                c.bar_sync(sync)
                c.mma_sync("P V", acc=acc, m=16, n=d // 2, k=bn, reads=[*p, *v])
                exchange(total)
                if block + 1 < tile.blocks:
                    copy()
            c.read(acc)
            c.bar_sync(sync)
            c.vector("O / sum, logarithm", alu=67, fma=150, mufu=2, convert=2, shuffle=2, other=20, smem_bytes=16 * d)
            c.write(out[w])
            c.bar_sync(sync)
            for rows in out:
                c.read(rows)
            c.vector("rows of mid", alu=40, fma=30, other=16, smem_bytes=16 * d)
            c.global_store(4 * d * 4 // 2)

    for w in range(2):
        warp(cta.warp(f"warp {w}", registers=registers), w)


@decode.launch
def launch(batch=8, keys=8192, heads=32, kv_heads=8, *, bn, d):
    mid = batch * heads * (keys // 128 + 1) * d
    tiles = [128 // bn] * (batch * kv_heads * (keys // 128))
    moved = 4 * batch * keys * kv_heads * d + 4 * mid
    flops = 4 * batch * heads * keys * d
    return Launch(tiles, flops=flops, hbm_bytes=moved, persistent=False, occupancy=65536 // (96 * 64))


@kernel
def merge(cta, tiles, *, registers=30):
    c = cta.warpgroup("warps", registers=registers)
    for tile in tiles:
        c.vector("addresses", alu=34, fma=16, mufu=2, other=27)
        latency(c)
        for _ in range(tile.blocks // 4):
            latency(c)
            c.vector("four parts", alu=30, fma=46, mufu=8, other=9)
        c.vector("O / sum", alu=4, fma=5, mufu=1, convert=1, other=10)
        c.global_store(256)


@merge.launch
def launch_merge(batch=8, keys=8192, heads=32, d=128):
    mid = batch * heads * (keys // 128 + 1) * d
    return Launch([keys // 128] * (batch * heads), flops=0, hbm_bytes=4 * mid, persistent=False, occupancy=0)
