"""Outputs of chunks of linear attention, flash-linear-attention (Triton), chunks of 64, 128 channels, with decay.

https://github.com/fla-org/flash-linear-attention at bc3b101dcb713ddc5bd8924b66754eb68b5ccf89,
fla/ops/common/chunk_o.py: chunk_fwd_kernel_o, as triton 3.6 compiles it for sm_90a with two tiles of its list: `whole`
with 128 x 128 channels and 8 warps, and `halves` with 64 x 64, 3 stages and 4 warps, whose loop goes over halves of the
channels of Q and K and of which two CTAs share a chunk.

Instructions of `whole`: 902, in the sections between its barriers and waits; of `halves`: 181 in front of the loop, 92
in it, 648 behind it. `stall` is what the stall counts that ptxas wrote sum to beyond the time that the instructions
take alone. Two warpgroups of `whole` have half of the columns of each product: one stream of two.
"""

from fa3verify.schedule import Launch, kernel


@kernel
def whole(cta, tiles, *, bt=64, d=128, registers=140):
    q, k = cta.smem("Q", bt * d * 2), cta.smem("K", bt * d * 2)
    h = cta.smem("H", d * d * 2)
    v = cta.smem("V", bt * d * 2, at=(k, 0))
    scratch = cta.smem("scratch", bt * d * 2, at=(h, 0))
    sync = cta.named_barrier("syncthreads", 256, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=2)
    o, a = c.fragment("O", d // 2, rows=2 * bt), c.fragment("A", bt // 2, rows=2 * bt)
    p = c.fragment("P", bt, rows=2 * bt, bits=16)
    for tile in tiles:
        for chunk in range(tile.blocks):
            if chunk:  # no CTA of a launch has another one
                c.bar_sync(sync)
            c.vector("addresses", alu=65, fma=37, other=105, stall=100)
            c.global_load(2 * bt * d * 2 + d * d * 2, far=True)
            c.vector("Q, K, H to shared memory", other=16, smem_bytes=(2 * bt + d) * d * 2)
            for slot in (q, k, h):
                c.write(slot)
            c.fence()
            c.bar_sync(sync)
            c.wgmma("Q H", a=q, b=h, acc=o, m=2 * bt, n=d // 2, k=d)
            c.vector("masks", alu=77, fma=1, other=7)
            c.wgmma_wait(0)
            c.wgmma("Q K", a=q, b=k, acc=a, m=2 * bt, n=bt // 2, k=d)
            c.wgmma("Q K again", a=q, b=k, acc=a, m=2 * bt, n=bt // 2, k=d)
            c.vector("addresses of g and V", alu=38, fma=8, other=39, stall=58)
            c.global_load(bt * 4 * 4, waits=False)
            c.wgmma_wait(0)
            c.cp_async_wait(0)
            c.global_load(bt * 4 * 4)
            c.global_load(bt * d * 2, far=True, waits=False)
            c.read(o)
            c.read(a)
            c.vector("decay, causal select, to bf16", alu=149, fma=75, mufu=30, convert=15, other=26, stall=258)
            c.bar_sync(sync)
            c.cp_async_wait(0)
            c.write(v)
            c.write(p)
            c.vector("V to shared memory", alu=50, fma=3, other=15, stall=10, smem_bytes=2 * bt * (d + bt))
            c.fence()
            c.bar_sync(sync)
            c.wgmma("P V", a=None, b=v, acc=o, m=2 * bt, n=d // 2, k=bt)
            c.vector("scale", alu=5, fma=37, mufu=2, other=6, stall=11)
            c.wgmma_wait(0)
            c.read(o)
            c.vector("O to bf16", fma=64, convert=16, alu=1, other=7, stall=7, smem_bytes=bt * d * 4)
            c.bar_sync(sync)
            c.write(scratch)
            c.bar_sync(sync)
            c.read(scratch)
            c.vector("rows of O", alu=8, fma=8, other=10, stall=29)
            c.global_store(bt * d * 2)


@kernel
def halves(cta, tiles, *, bt=64, d=128, bk=64, bv=64, stages=3, registers=138):
    q, k, h = ([cta.smem(f"{name}{i}", 64 * 64 * 2) for i in range(stages)] for name in "QKH")
    scratch = cta.smem("scratch", bt * bv * 2, at=(q[0], 0))
    v = cta.smem("V", bt * bv * 2, at=(k[0], 0))
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    o, a = c.fragment("O", bv, rows=bt), c.fragment("A", bt, rows=bt)
    p = c.fragment("P", bt, rows=bt, bits=16)

    def copy(block, steps):  # H is of one CTA alone; Q and K are another's too, which runs at the same time.
        for ring, far in ((q, True), (k, True), (h, True)):
            c.cp_async([ring[block % stages]] if block < steps else [], far=far)

    for tile in tiles:
        for chunk in range(tile.blocks):
            if chunk:  # no CTA of a launch has another one
                c.bar_sync(sync)
            steps = d // bk
            c.vector("addresses", alu=77, fma=43, other=61, stall=14)
            for block in range(stages - 1):
                copy(block, steps)
            for block in range(steps):
                c.cp_async_wait(3)
                c.bar_sync(sync)
                c.vector("stage, descriptors", alu=12, fma=8, other=39, stall=12)
                stage = block % stages
                c.wgmma("Q H", a=q[stage], b=h[stage], acc=o, m=bt, n=bv, k=bk)
                c.wgmma("Q K", a=q[stage], b=k[stage], acc=a, m=bt, n=bt, k=bk)
                c.wgmma_wait(2)
                c.bar_sync(sync)
                c.vector("addresses of the next", alu=17, fma=7, other=9, stall=22)
                copy(block + stages - 1, steps)
            c.wgmma_wait(0)
            c.cp_async_wait(0)
            c.bar_sync(sync)
            c.vector("addresses of g and V", alu=33, fma=2, other=5)
            c.global_load(bt * 4 * 4)
            c.global_load(bt * bv * 2, far=True, waits=False)
            c.read(o)
            c.read(a)
            c.vector("decay, causal select, to bf16", alu=270, fma=70, mufu=31, convert=15, other=53, stall=277)
            c.cp_async_wait(0)
            c.write(v)
            c.write(p)
            c.fence()
            c.bar_sync(sync)
            c.wgmma("P V", a=None, b=v, acc=o, m=bt, n=bv, k=bt)
            c.vector("scale", alu=16, fma=40, mufu=1, other=6, stall=7)
            c.wgmma_wait(0)
            c.read(o)
            c.vector("O to bf16", fma=64, convert=16, alu=1, other=7, stall=7, smem_bytes=bt * bv * 4)
            c.bar_sync(sync)
            c.write(scratch)
            c.bar_sync(sync)
            c.read(scratch)
            c.vector("rows of O", alu=10, other=10, stall=28)
            c.global_store(bt * bv * 2)


def chunks(b, t, heads, d, parts):
    count = b * heads * (t // 64)
    moved = count * 2 * (4 * 64 * d + d * d) + 4 * count * 64
    flops = count * 2 * (64 * d * d + 2 * 64 * 64 * d)
    return Launch([1] * (count * parts), flops=flops, hbm_bytes=moved, persistent=False, occupancy=0)


@whole.launch
def launch_whole(b=8, t=4096, heads=16, *, d):
    return chunks(b, t, heads, d, 1)


@halves.launch
def launch_halves(b=8, t=4096, heads=16, *, d, bv):
    return chunks(b, t, heads, d, d // bv)
