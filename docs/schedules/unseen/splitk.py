"""Split-K GEMM in e4m3, applied-ai (Triton).

https://github.com/pytorch-labs/applied-ai at 4f8c39eb70d92e3848c65347ca077c8e723c74fd,
kernels/triton/inference/fp8/splitk_gemm_fp8.py: gemm_split_k_kernel, as triton 3.6 compiles it for sm_90a.

Two warpgroups have 32 columns each of the tile: one stream of two, whose product has the 128 x 32 that both compute.
Instructions: 640 in all, 404 in front of the loop, 139 in it, 97 behind it; a copy's own three issue slots are not
counted again. The atomic addition is `atom` with a fence of the GPU in front and behind; the language has `red` alone,
so that each of the two has the latency of L2 behind it. `far_b=1` is for m = 64, where each byte of B is loaded by one
CTA alone. There is no fence.proxy.async in the compiled loop, between cp.async and wgmma, so that there is none here.
"""

from fa3verify.schedule import Launch, kernel


def latency(c):
    """Wait for L2: 150 ns."""
    c.delay("l2_latency_ns")


@kernel
def splitk(cta, tiles, *, bm=64, bn=64, bk=512, stages=3, registers=76, far_b=0):
    memory = cta.smem("memory", stages * (bm + bn) * bk)
    a = [cta.smem(f"A{i}", bm * bk, at=(memory, i * bm * bk)) for i in range(stages)]
    b = [cta.smem(f"B{i}", bn * bk, at=(memory, (stages * bm + i * bn) * bk)) for i in range(stages)]
    scratch = cta.smem("scratch", bm * bn * 2, at=(memory, 0))
    sync = cta.named_barrier("syncthreads", 256, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=2)
    acc = c.fragment("C", bn // 2, rows=2 * bm)

    def copy(block):  # Behind the last block a group is committed all the same, with nothing in it.
        here = block < tile.blocks
        c.cp_async([a[block % stages]] if here else [])
        c.cp_async([b[block % stages]] if here else [], far=bool(far_b))

    for tile in tiles:
        c.vector("addresses", alu=165, fma=89, other=37, convert=4, mufu=2)
        for block in range(stages - 1):
            copy(block)
        for block in range(tile.blocks):
            c.cp_async_wait(2 * (stages - 2))
            c.bar_sync(sync)
            c.vector("stage, descriptors", alu=2, other=24)
            stage = block % stages
            c.wgmma("A B", a=a[stage], b=b[stage], acc=acc, m=2 * bm, n=bn // 2, k=bk, bits=8)
            c.vector("descriptors between the products", other=28)
            c.wgmma_wait(1)
            c.bar_sync(sync)
            c.vector("addresses of the next", alu=6, other=7)
            copy(block + stages - 1)
        c.wgmma_wait(0)
        c.cp_async_wait(0)
        c.read(acc)
        c.bar_sync(sync)
        c.vector("C to fp16, through shared memory", alu=20, fma=4, convert=8, other=6, smem_bytes=2 * bm * bn * 2)
        c.write(scratch)
        c.bar_sync(sync)
        c.read(scratch)
        c.vector("rows of C", alu=16, fma=3, other=12)
        for _ in range(2):
            c.vector("fences of the GPU", other=4)
            c.global_add(bm * bn)
            latency(c)


@splitk.launch
def launch(m=64, n=8192, k=8192, *, bm, bn, bk):
    splits = 4
    tiles = [-(-k // (bk * splits))] * (-(-m // bm) * -(-n // bn) * splits)
    return Launch(tiles, flops=2 * m * n * k, hbm_bytes=m * k + n * k + 2 * m * n, persistent=False, occupancy=0)
