"""Attention forward, FlagAttention (Triton), with the tile that it takes on Hopper: 32 x 32, 1 stage, 4 warps.

https://github.com/FlagOpen/FlagAttention at ee91638dec6da8c00c4113d179f469e0ffcd5852, src/flag_attn/flash.py:
_fwd_kernel, as triton 3.6 compiles it for sm_90a, dense, with whole tiles. d = 64: --set d=64 --set registers=75.

K and V are loaded to registers and stored to shared memory. Four warps have 16 of 32 rows and half of the columns each:
one stream of 64 rows and half of the columns. Rows of S are reduced over two warps: four exchanges through shared
memory a block. LOOP has the instructions of a block from one barrier to the next, of which there are ten; `stall` is
what the stall counts that ptxas wrote sum to beyond their own time, and `shuffle` counts those that wait for each
other. Others: 159 in front and 275 behind (d = 64: 301 and 241, and a product with the identity). smem_bytes of a
product are those of ldmatrix.
"""

from fa3verify.schedule import Launch, kernel

LOOP = {
    128: (
        {"fma": 4, "other": 9, "stall": 11},
        {"fma": 4, "other": 13, "stall": 46},
        {"alu": 8, "shuffle": 2, "other": 5, "stall": 12},
        {"alu": 4, "other": 7, "stall": 18},
        {"alu": 2, "shuffle": 2, "other": 3, "stall": 18},
        {"alu": 4, "fma": 20, "mufu": 8, "shuffle": 2, "other": 11, "stall": 67},
        {"fma": 4, "other": 5, "stall": 15},
        {"fma": 2, "shuffle": 2, "other": 3, "stall": 13},
        {"fma": 4, "mufu": 1, "convert": 4, "other": 5, "stall": 8},
        {"fma": 5, "mufu": 1, "other": 2, "stall": 9},
        {"alu": 1, "fma": 39, "mufu": 2, "other": 5, "stall": 20},
    ),
    64: (
        {"alu": 8, "other": 3, "stall": 3},
        {"other": 7, "stall": 20},
        {"alu": 8, "shuffle": 2, "other": 7, "stall": 12},
        {"alu": 4, "other": 5, "stall": 13},
        {"alu": 2, "shuffle": 2, "other": 3, "stall": 18},
        {"alu": 4, "fma": 14, "mufu": 6, "shuffle": 1, "other": 7, "stall": 28},
        {"fma": 10, "mufu": 2, "shuffle": 1, "other": 9, "stall": 43},
        {"fma": 2, "shuffle": 2, "other": 3, "stall": 13},
        {"fma": 3, "convert": 4, "other": 5, "stall": 11},
        {"fma": 1, "mufu": 2, "other": 2},
        {"alu": 1, "fma": 28, "mufu": 2, "other": 5, "stall": 20},
    ),
}


@kernel
def flag(cta, tiles, *, d=128, rows=32, bn=32, registers=110):
    part = LOOP[d]
    q = cta.smem("Q", rows * d * 2)
    k, v = cta.smem("K", bn * d * 2), cta.smem("V", bn * d * 2)
    scratch = cta.smem("scratch", 512, at=(k, 0))
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    s, o = c.fragment("S", bn // 2), c.fragment("O", d // 2)

    def multiply(name, acc, n, depth, reads, what, size):
        c.mma_sync(name, acc=acc, n=n, k=depth, reads=reads, waits=False)
        c.vector("ldmatrix", other=size // 2048, smem_bytes=size)
        c.wgmma_wait(0)
        c.read(acc)
        c.vector(what[0], **what[1])

    for tile in tiles:
        c.vector("addresses", alu=60, fma=24, other=75, stall=50)
        c.global_load(rows * d * 2, far=True)
        c.vector("Q to shared memory", other=4, smem_bytes=rows * d * 2)
        c.write(q)
        for _ in range(tile.blocks):
            c.global_load(bn * d * 2, waits=False)
            c.vector("addresses of K and V", **part[0])
            c.bar_sync(sync)
            c.global_load(bn * d * 2, waits=False)
            c.cp_async_wait(0)
            c.vector("K and V to shared memory", smem_bytes=2 * bn * d * 2, **part[1])
            c.write(k)
            c.write(v)
            c.bar_sync(sync)
            multiply("Q K", s, bn // 2, d, [q, k], ("row max of a warp", part[2]), d * 320)
            c.bar_sync(sync)
            for name, step in zip(
                ("max out", "of two", "exp", "sum out", "of two", "P", "P out"), part[3:10], strict=True
            ):
                if name in ("of two", "exp", "P"):
                    c.read(scratch, own=name == "of two")
                c.vector(name, **step)
                if name not in ("exp", "P"):
                    c.write(scratch)
                c.bar_sync(sync)
            multiply("P V", o, d // 2, bn, [scratch, v], ("rescale O", part[10]), 8192 + 64 * d)
        c.bar_sync(sync)
        c.vector("O / l, logarithm", alu=57, fma=79, mufu=3, convert=4, other=14)
        c.bar_sync(sync)
        c.vector("to fp16", alu=8, fma=39, mufu=1, convert=12, other=8)
        for _ in range(d // 32):
            c.bar_sync(sync)
            c.vector("O through shared memory", alu=2, convert=1, other=5, stall=8, smem_bytes=rows * 64)
            c.write(scratch)
            c.bar_sync(sync)
            c.read(scratch)
        c.vector("rows of O", alu=9, fma=2, other=9, stall=16)
        c.global_store(rows * d * 2)


@flag.launch
def launch(b=4, h=16, n=4096, *, d, rows, bn):
    tiles = [n // bn] * (b * h * n // rows)
    return Launch(tiles, flops=4 * b * h * n * n * d, hbm_bytes=8 * b * h * n * d, persistent=False, occupancy=0)
