"""GEMM of fp32 on the vector units with two buffers, SGEMM_CUDA (CUDA).

https://github.com/siboehm/SGEMM_CUDA at 60cba6f9b20a198116c76f18de8047f44df8c8b8,
src/kernels/12_kernel_double_buffering.cuh: runSgemmDoubleBuffering2 with tiles of 128 x 128 x 16 and 128 threads, as
nvcc 13.0 compiles it for sm_90a.

Instructions: 138 for a k-step (128 FFMA, 6 LDS.128), 16 k-steps a block; around them 120 for the copies of the next
block; 32 loops of 8 around each of four cp.async.bulk, one for each thread of a warp; 32 float4 of C read, fused and
written. Words that are missing: cp.async of 4 bytes (16 a thread, here as 16-byte ones and instructions of their own)
and cp.async.mbarrier.arrive (here a group, waited for in front of the arrival). The 512 cp.async.bulk of 16 bytes of
a block are one copy, and the time to issue one for each of a warp's other 127, one behind another as its loops have
them. The latency of shared memory of a k-step, which the loop does not hide, is 30 cycles, the usual figure; LDS.128
is given the bytes of its lanes, broadcast or not.
"""

from fa3verify.schedule import Launch, kernel


@kernel
def sgemm(cta, tiles, *, bm=128, bn=128, bk=16, registers=196, bulk_copies=128, smem_latency=30):
    memory = cta.smem("memory", 2 * (bm + bn) * bk * 4)
    a = [cta.smem(f"A{i}", bm * bk * 4, at=(memory, i * bm * bk * 4)) for i in range(2)]
    b = [cta.smem(f"B{i}", bn * bk * 4, at=(memory, (2 * bm + i * bn) * bk * 4)) for i in range(2)]
    barriers = [cta.mbarrier(f"barrier {i}", 2) for i in range(2)]
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    c.fragment("C", bn, rows=bm)
    uses = 0

    def copy(block):
        c.vector("addresses", alu=52, fma=22, other=34)
        c.cp_async([a[block % 2]])
        c.vector("loops around the bulk copies", alu=2 * bulk_copies, other=6 * bulk_copies)
        for _ in range(bulk_copies - 1):
            c.delay("tma_issue_cycles")
        c.tma_load(barriers[block % 2], [b[block % 2]])

    def multiply(block, in_flight):
        c.cp_async_wait(in_flight)
        c.arrive_and_wait(barriers[block % 2], block // 2)
        c.read(a[block % 2])
        c.read(b[block % 2])
        c.vector(
            "k-steps", fma=128 * bk, alu=bk, other=9 * bk, smem_bytes=6 * 16 * 128 * bk, stall=smem_latency * bk
        )  # fmt: skip

    for tile in tiles:
        c.vector("addresses, barriers", alu=50, fma=5, other=40)
        copy(uses)
        for block in range(uses, uses + tile.blocks - 1):
            copy(block + 1)
            multiply(block, 1)
            c.bar_sync(sync)
        uses += tile.blocks
        multiply(uses - 1, 0)
        c.vector("alpha A B + beta C", fma=256, alu=42, other=20)
        for _ in range(2):  # halves of C
            c.global_load(bm * bn * 2)
        c.global_store(bm * bn * 4)


@sgemm.launch
def launch(n=2048, *, bm, bn, bk):
    tiles = [n // bk] * ((n // bm) * (n // bn))
    return Launch(tiles, flops=2.0 * n**3, hbm_bytes=16.0 * n * n, persistent=False, occupancy=0)
