"""Layer norm of Triton's tutorial, a CTA of eight warps for a row of 4096 or 8192 fp16.

https://github.com/triton-lang/triton at 545699290b851e70231ee3017481851170f1583d, python/tutorials/05-layer-norm.py:
_layer_norm_fwd_fused, as triton 3.6 compiles it for sm_90a. Columns 4096: --set columns=4096 --set registers=32.

A row is read three times: from HBM, and then twice from L1, for which there is no word, and whose latency is taken to
be that of shared memory; weights and biases are in L1 too. Sums go over a warp by five shuffles that wait for each
other, and over warps through shared memory, by three more. `stall` is what the stall counts that ptxas wrote sum to
beyond the time that the instructions take alone.
"""

from fa3verify.schedule import Launch, kernel

PARTS = {  # by columns: first pass and its sum, second pass and its sum, third pass
    4096: (
        {"alu": 18, "fma": 48, "other": 28, "stall": 114},
        {"alu": 26, "fma": 49, "other": 16, "stall": 28},
        {"fma": 20, "stall": 20},
        {"alu": 17, "fma": 101, "convert": 8, "other": 35, "stall": 80},
    ),
    8192: (
        {"alu": 25, "fma": 96, "other": 42, "stall": 191},
        {"alu": 50, "fma": 98, "other": 30, "stall": 62},
        {"fma": 36, "stall": 70},
        {"alu": 21, "fma": 202, "convert": 16, "other": 54, "stall": 175},
    ),
}


@kernel
def layer_norm(cta, tiles, *, columns=8192, registers=58):
    first, second, squares, third = PARTS[columns]
    sums = cta.smem("sums", 32)
    sync = cta.named_barrier("syncthreads", 256, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=2)

    def total(more):
        c.vector("sum of a warp", alu=6, fma=5, shuffle=5, other=10, **more)
        c.write(sums)
        c.bar_sync(sync)
        c.read(sums, own=True)
        c.vector("sum of the warps", alu=3, fma=4, shuffle=3, other=4, stall=20)
        c.write(sums)
        c.bar_sync(sync)
        c.read(sums)

    def from_l1(bytes_read):
        c.delay("shared_load_cycles")
        c.vector("L1", smem_bytes=bytes_read)

    for tile in tiles:
        for row in range(tile.blocks):
            if row:  # no CTA of a launch has another one
                c.bar_sync(sync)
            c.global_load(2 * columns, far=True)
            c.vector("first pass", **first)
            total({"stall": 24})
            c.vector("mean", fma=3, mufu=1, convert=1, other=5, stall=22)
            from_l1(2 * columns)
            c.vector("second pass", **second)
            c.vector("squares", **squares)
            c.bar_sync(sync)
            total({"stall": 40})
            c.vector("deviation", alu=4, fma=9, mufu=3, other=14, stall=58)
            c.global_store(8)
            from_l1(6 * columns)
            c.vector("third pass", **third)
            c.global_store(2 * columns)


@layer_norm.launch
def launch(rows=4096, *, columns):
    moved = 4 * rows * columns
    return Launch([1] * rows, flops=8 * rows * columns, hbm_bytes=moved, persistent=False, occupancy=0)
