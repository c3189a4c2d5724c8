"""GEMM by mma.sync with sums in fp16, HGEMM (CUDA): 128 x 128 x 32, two stages of cp.async, eight warps.

https://github.com/xlite-dev/HGEMM at eee72be829545bd6bd115a4b252b5068c9f61597,
kernels/hgemm/mma/swizzle/hgemm_mma_stage_tn_swizzle_x4.cu:
hgemm_mma_m16n8k16_mma2x4_warp4x4x2_stages_dsmem_tn_swizzle_x4_kernel, as nvcc 13.0 compiles it for sm_90a with B_PAD 0,
block and warp swizzle, 2 stages (the defaults) or 4 (--set stages=4 --set registers=112).

Warps are 2 x 4, of 64 x 32 each: 32 mma.sync and 12 ldmatrix.x4 a block of 32. Fragments of the second half are loaded
while the first is multiplied, those of the next block behind the barrier: there the warps wait for ldmatrix.
Instructions in the loop: 59 without mma.sync and copies; 189 in front, 290 behind, of which 96 are shuffles that do not
wait for each other. `stall` is what the stall counts that nvcc wrote sum to beyond the time that the instructions take
alone.
"""

from fa3verify.schedule import Launch, kernel


@kernel
def hgemm(cta, tiles, *, bm=128, bn=128, bk=32, stages=2, registers=114):
    a = [cta.smem(f"A{i}", bm * bk * 2) for i in range(stages)]
    b = [cta.smem(f"B{i}", bn * bk * 2) for i in range(stages)]
    sync = cta.named_barrier("syncthreads", 256, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=2)
    acc = c.fragment("C", bn, rows=bm, bits=16)
    fragments = 8 * 512  # bytes that eight warps load by one ldmatrix.x4 each

    def copy(block):
        c.cp_async([a[block % stages], b[block % stages]])

    def multiply(block):
        stage = block % stages
        c.mma_sync("first half", acc=acc, m=bm, n=bn, k=16, reads=[a[stage], b[stage]], waits=False)
        c.vector("second fragments", alu=18, fma=2, other=13, stall=1, smem_bytes=4 * fragments)
        c.mma_sync("second half", acc=acc, m=bm, n=bn, k=16, reads=[a[stage], b[stage]], waits=False)

    for tile in tiles:
        c.vector("addresses", alu=89, fma=44, other=42, stall=40)
        for block in range(stages - 1):
            copy(block)
        for block in range(stages - 1, tile.blocks):
            c.cp_async_wait(stages - 2)
            c.bar_sync(sync)
            c.read(a[(block - stages + 1) % stages])
            c.vector("first fragments", alu=13, fma=3, other=10, stall=39, smem_bytes=8 * fragments)
            copy(block)
            multiply(block - stages + 1)
        c.cp_async_wait(0)
        for block in range(tile.blocks - stages + 1, tile.blocks):
            c.bar_sync(sync)
            c.read(a[block % stages])
            c.vector("first fragments", alu=13, fma=3, other=10, stall=39, smem_bytes=8 * fragments)
            multiply(block)
        c.wgmma_wait(0)
        c.read(acc)
        c.vector("rows of C by shuffles", alu=23, fma=64, other=150, shuffle=8, stall=250)
        c.global_store(bm * bn * 2)


@hgemm.launch
def launch(n=4096, *, bm, bn, bk):
    tiles = [n // bk] * ((n // bm) * (n // bn))
    return Launch(tiles, flops=2 * n**3, hbm_bytes=6 * n * n, persistent=False, occupancy=0)
