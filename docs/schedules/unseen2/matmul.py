"""GEMM of Triton's tutorial.

https://github.com/triton-lang/triton at 7649d87cce6c12361bb9da234b9b227b2880b499,
python/tutorials/03-matrix-multiplication.py: matmul_kernel, as triton 3.6 compiles it for sm_90a with two tiles of its
list: 128 x 256 x 64 with 3 stages and 8 warps (the defaults), and 128 x 128 x 32 with 4 stages and 4 warps (--set
bn=128 --set bk=32 --set stages=4 --set warpgroups=1 --set registers=174).

Instructions: 504 in front of the loop, 117 in it, 201 behind it; 463, 94 and 229 of the smaller tile. A copy's own
three issue slots are not counted again. `stall` is what the stall counts that ptxas wrote sum to beyond the time that
the instructions take alone. There is no fence.proxy.async in the compiled loop, so that there is none here.
"""

from fa3verify.schedule import Launch, kernel

PARTS = {  # by the columns of the tile
    256: {
        "tile": {"alu": 163, "fma": 108, "mufu": 4, "convert": 8, "other": 73, "stall": 63},
        "zeros": {"alu": 57, "fma": 8, "other": 83, "stall": 84},
        "front": {"alu": 24, "fma": 8, "other": 35, "stall": 8},
        "behind": {"alu": 14, "fma": 13, "other": 7, "stall": 21},
        "half": {"alu": 8, "fma": 5, "convert": 32, "other": 16},
        "rows": {"alu": 31, "fma": 21, "other": 26, "stall": 21},
    },
    128: {
        "tile": {"alu": 134, "fma": 98, "mufu": 4, "convert": 8, "other": 76, "stall": 90},
        "zeros": {"alu": 26, "fma": 10, "other": 107, "stall": 111},
        "front": {"alu": 9, "fma": 5, "other": 32, "stall": 25},
        "behind": {"alu": 19, "fma": 7, "other": 10, "stall": 44},
        "half": {"alu": 31, "fma": 19, "convert": 32, "other": 20, "stall": 20},
        "rows": {"alu": 2, "other": 22, "stall": 57},
    },
}


@kernel
def matmul(cta, tiles, *, bm=128, bn=256, bk=64, stages=3, warpgroups=2, registers=207):
    parts = PARTS[bn]
    memory = cta.smem("memory", stages * (bm + bn) * bk * 2)
    a = [cta.smem(f"A{i}", bm * bk * 2, at=(memory, i * bm * bk * 2)) for i in range(stages)]
    b = [cta.smem(f"B{i}", bn * bk * 2, at=(memory, (stages * bm + i * bn) * bk * 2)) for i in range(stages)]
    scratch = cta.smem("scratch", bm * bn, at=(memory, 0))
    sync = cta.named_barrier("syncthreads", 128 * warpgroups, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=warpgroups)
    acc = c.fragment("C", bn, rows=bm)

    def copy(block):  # Behind the last block a group is committed all the same, with nothing in it.
        for ring in (a, b):
            c.cp_async([ring[block % stages]] if block < tile.blocks else [])

    for tile in tiles:
        c.vector("tile, addresses", **parts["tile"])
        for block in range(stages - 1):
            copy(block)
        c.vector("zeros", **parts["zeros"])
        for block in range(tile.blocks):
            c.cp_async_wait(2 * (stages - 2))
            c.bar_sync(sync)
            c.vector("stage, descriptors", **parts["front"])
            c.wgmma("A B", a=a[block % stages], b=b[block % stages], acc=acc, m=bm, n=bn, k=bk)
            c.wgmma_wait(1)
            c.bar_sync(sync)
            c.vector("addresses of the next", **parts["behind"])
            copy(block + stages - 1)
        c.wgmma_wait(0)
        c.cp_async_wait(0)
        c.read(acc)
        c.bar_sync(sync)
        for _ in range(2):
            c.vector("half of C to fp16, through shared memory", smem_bytes=2 * bm * bn, **parts["half"])
            c.write(scratch)
            c.bar_sync(sync)
            c.read(scratch)
            c.bar_sync(sync)
        c.vector("rows of C", **parts["rows"])
        c.global_store(bm * bn * 2)


@matmul.launch
def launch(m=4096, n=4096, k=4096, *, bm, bn, bk):
    tiles = [-(-k // bk)] * (-(-m // bm) * -(-n // bn))
    moved = 2 * (m * k + k * n + m * n)
    return Launch(tiles, flops=2 * m * n * k, hbm_bytes=moved, persistent=False, occupancy=0)
