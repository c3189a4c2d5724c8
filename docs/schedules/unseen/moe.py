"""First GEMM of a layer of experts, applied-ai (Triton).

https://github.com/pytorch-labs/applied-ai at 4f8c39eb70d92e3848c65347ca077c8e723c74fd,
kernels/triton/inference/col_major_moe_gemm/v2_moe_fused.py: fused_moe_kernel, as triton 3.6 compiles it for sm_90a.

Instructions: 448 in all, 278 in front of the loop, 71 in it, 99 behind it. A copy's own three issue slots are not
counted again. Words that are missing: ld.global to registers (count, token ids and expert: one behind another, 4 bytes
each), which is written as the latency of L2 for each of the dependent loads. There is no fence.proxy.async in the
compiled loop, between cp.async and wgmma, so that there is none here.
"""

from fa3verify.schedule import Launch, kernel


def latency(c):
    """Wait for L2: 150 ns."""
    c.delay("l2_latency_ns")


@kernel
def moe(cta, tiles, *, bm=64, bn=64, bk=32, stages=3, registers=62):
    memory = cta.smem("memory", stages * (bm + bn) * bk * 2)
    a = [cta.smem(f"A{i}", bm * bk * 2, at=(memory, i * bm * bk * 2)) for i in range(stages)]
    b = [cta.smem(f"B{i}", bn * bk * 2, at=(memory, (stages * bm + i * bn) * bk * 2)) for i in range(stages)]
    scratch = cta.smem("scratch", bm * bn * 2, at=(memory, 0))
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    acc = c.fragment("C", bn, rows=bm)

    def copy(block):  # Behind the last block a group is committed all the same, with nothing in it.
        for ring in (a, b):
            c.cp_async([ring[block % stages]] if block < tile.blocks else [])

    for tile in tiles:
        # How many tokens there are, loaded before anything else: padding tiles return here.
        c.vector("tile of the CTA", alu=35, fma=15, other=15, convert=4, mufu=2)
        latency(c)
        if not tile.blocks:
            continue
        # Eight ld.global of token ids, then that of the expert, then addresses.
        c.vector("token ids", alu=50, fma=20, other=20)
        latency(c)
        c.vector("expert", other=2)
        latency(c)
        c.vector("addresses", alu=43, fma=13, other=30, convert=2, mufu=1)
        for block in range(stages - 1):
            copy(block)
        for block in range(tile.blocks):
            c.cp_async_wait(2 * (stages - 2))
            c.bar_sync(sync)
            c.vector("stage, descriptors", alu=7, fma=4, other=12)
            stage = block % stages
            c.wgmma("A B", a=a[stage], b=b[stage], acc=acc, m=bm, n=bn, k=bk)
            c.wgmma_wait(1)
            c.bar_sync(sync)
            c.vector("addresses of the next", alu=7, fma=4, other=16)
            copy(block + stages - 1)
        c.wgmma_wait(0)
        c.cp_async_wait(0)
        c.read(acc)
        c.bar_sync(sync)
        c.vector("C to fp16, through shared memory", alu=20, fma=10, convert=16, other=8, smem_bytes=2 * bm * bn * 2)
        c.write(scratch)
        c.bar_sync(sync)
        c.read(scratch)
        c.vector("rows of C", alu=13, fma=6, other=5)
        c.global_store(bm * bn * 2)


@moe.launch
def launch(tokens=1792, n=4096, k=4096, *, bm, bn, bk):
    experts, pairs = 8, 2 * tokens
    grid_m, grid_n = -(-(pairs + experts * 63) // bm), -(-n // bn)
    tiles = [k // bk if pid % grid_n * bm < pairs else 0 for pid in range(grid_m * grid_n)]
    moved = 2 * (tokens * k + experts * n * k + pairs * n)
    return Launch(tiles, flops=2 * pairs * n * k, hbm_bytes=moved, persistent=False, occupancy=0)
