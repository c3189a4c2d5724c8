"""Outputs of Mamba-2's chunks (Triton).

https://github.com/state-spaces/mamba at e9594ce1c732d97440f0332fdc43170a2294dbfa,
mamba_ssm/ops/triton/ssd_chunk_scan.py: _chunk_scan_fwd_kernel, as triton 3.6 compiles it for sm_90a with tiles of
128 x 64 x 32 (the defaults) and of 128 x 64 x 64 (--set bk=64 --set registers=250); both have 4 stages and 4 warps.

Instructions: 591 in the loop with bk = 32, 925 in front, 388 behind; 1085, 1166 and 413 with bk = 64. Those of the loop
are written as so many for each of the elements of CB that a thread has, and so many more, which is the line through
both. A copy's own three issue slots are not counted again. CB, dA and dt are a group each in the kernel and waited for
together; here they are one, as more than eight groups in flight are called a deadlock. Words that are missing:
ld.global to registers and st.shared of them (C, S, X of the epilogue), which are cp.async, a wait and the stores'
instructions. S and X of a chunk and head come from HBM once: for the second tile, which has all blocks of X; the
first, which runs beside it, finds them in L2. Every block is multiplied, with a causal select in each.
"""

from fa3verify.schedule import Launch, kernel


def latency(c):
    """Wait for L2: 150 ns."""
    c.delay("l2_latency_ns")


@kernel
def chunk_scan(cta, tiles, *, bm=128, bn=64, bk=32, stages=4, state=128, registers=179):
    c_, s_ = cta.smem("C", bm * state * 2), cta.smem("S", bn * state * 2)
    cb = [cta.smem(f"CB{i}", bm * bk * 4) for i in range(stages - 1)]
    da = [cta.smem(f"dA{i}", bk * 4) for i in range(stages - 1)]
    dt = [cta.smem(f"dt{i}", bk * 4) for i in range(stages - 1)]
    x = [cta.smem(f"X{i}", bk * bn * 2) for i in range(stages)]
    scratch = cta.smem("scratch", bm * (bk + 2) * 2)
    out = cta.smem("out", bm * bn * 2, at=(c_, 0))
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    acc = c.fragment("Y", bn, rows=bm)
    p = [c.fragment(f"P{i}", bk, rows=bm, bits=16) for i in range(2)]
    elements = bm * bk // 128

    def copy_cb(block, blocks):  # Behind the last block a group is committed all the same, with nothing in it.
        c.cp_async([ring[block % (stages - 1)] for ring in (cb, da, dt)] if block < blocks else [])

    def copy_x(block, blocks, far):
        c.cp_async([x[block % stages]] if block < blocks else [], far=far)

    for tile in tiles:
        far = tile.blocks * bk > bm
        c.vector("chunk and head, dA of the rows", alu=130, fma=50, other=60, convert=6, mufu=3)
        latency(c)
        c.vector("addresses of C and S", alu=120, fma=40, other=80)
        c.cp_async([c_])
        c.cp_async([s_], far=far)
        c.cp_async_wait(0)
        c.vector("C and S to shared memory", alu=10, other=24, smem_bytes=(bm + bn) * state * 2)
        c.fence()
        c.bar_sync(sync)
        c.wgmma("C S", a=c_, b=s_, acc=acc, m=bm, n=bn, k=state)
        c.vector("descriptors", other=20)
        c.wgmma_wait(0)
        c.read(acc)
        c.vector("times exp(dA)", alu=10, fma=67, mufu=2, other=13)
        c.bar_sync(sync)
        c.write(acc)
        c.vector("addresses of the copies", alu=68, fma=47, other=40)
        for block in range(stages - 1):
            copy_cb(block, tile.blocks)
            copy_x(block, tile.blocks, far)
            c.bar_sync(sync)
        for block in range(tile.blocks):
            c.cp_async_wait(2 * (stages - 2))
            c.bar_sync(sync)
            for ring in (cb, da, dt):
                c.read(ring[block % (stages - 1)])
            c.vector(
                "decay, causal select, to bf16", elements, alu=5.84, fma=6.25, mufu=1, convert=0.5, other=0.75,
                smem_bytes=bm * bk * 8,
            )  # fmt: skip
            c.write(scratch)
            c.bar_sync(sync)
            c.read(scratch)
            c.write(p[block % 2])
            c.vector("masks, descriptors, layout of A", alu=10, fma=4, other=18)
            for _ in range(bk // 16):
                c.wgmma("P X", a=None, b=x[block % stages], acc=acc, m=bm, n=bn, k=16)
                c.wgmma_wait(bk // 16 - 1)
            c.vector("addresses of the next", alu=21, fma=8, other=16)
            copy_cb(block + stages - 1, tile.blocks)
            c.bar_sync(sync)
            copy_x(block + stages - 1, tile.blocks, far)
        c.wgmma_wait(0)
        c.cp_async_wait(0)
        c.bar_sync(sync)
        c.cp_async([out])
        c.cp_async_wait(0)
        c.read(acc)
        c.bar_sync(sync)
        c.read(out)
        for piece in range(4):  # X to the layout of Y, through shared memory in four pieces
            if piece:
                c.bar_sync(sync)
            c.vector("D X, Y to bf16", alu=26, fma=39, convert=8, other=20, smem_bytes=bm * bn * 2)
            c.bar_sync(sync)
        c.global_store(bm * bn * 2)


@chunk_scan.launch
def launch(batch=2, length=4096, heads=80, *, bm, bn, bk, state):
    chunk = 256
    chunks = batch * length // chunk
    tiles = [bm // bk * (1 + tile) for tile in range(chunk // bm)] * (chunks * heads)
    x, cb = batch * length * heads * bn, chunks * chunk * chunk
    moved = 2 * (2 * x + batch * length * state + chunks * heads * bn * state) + 4 * (cb + 2 * batch * length * heads)
    pairs = chunk * (chunk + 1) // 2
    flops = 2 * chunks * heads * (chunk * state * bn + pairs * bn)
    return Launch(tiles, flops=flops, hbm_bytes=moved, persistent=False, occupancy=0)
