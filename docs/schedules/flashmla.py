"""FlashMLA's dense decoding kernel on Hopper, 16 bits, as a description.

Source: deepseek-ai/FlashMLA at 9241ae3e (2026-04-29), csrc/sm90/decode/dense/splitkv_mla.cuh and traits.h. Names of
barriers and buffers are the kernel's.
"""

from fa3verify.schedule import Launch, kernel

WARPGROUP = 128  # threads
TILE = 64 * 64 * 2  # bytes of 64 rows and 64 channels


@kernel
def flashmla(cta, tiles, *, statistics=60):
    """Two warpgroups, each with half of O's 512 columns, and no producer: each loads the tiles that it is done with.

    A pair of blocks of 64 keys is a step. Each warpgroup computes the scores of one block of a pair, and multiplies
    both with its half of V, which is the first 512 of K's 576 channels. P of the second block lies where Q's last tile
    was, which is in registers by then; O leaves through the memory of the first block.
    """
    q, q_full = cta.smem("sQ", 9 * TILE, readers=1), cta.mbarrier("barrier_Q")
    queries = [cta.smem(f"sQ[{i}]", TILE, at=(q, i * TILE)) for i in range(9)]
    blocks = [cta.smem(f"sK{n}", 9 * TILE) for n in range(2)]
    kv = [[cta.smem(f"sK{n}[{i}]", TILE, at=(blocks[n], i * TILE)) for i in range(9)] for n in range(2)]
    full = [[cta.mbarrier(f"barriers_K{n}[{i}]") for i in range(9)] for n in range(2)]
    p = [cta.smem("sP0", TILE), cta.smem("sP1", TILE, at=(q, 8 * TILE))]
    out = cta.smem("sO", 8 * TILE, at=(blocks[0], 0))
    halves = [cta.smem(f"sO.{w}", 4 * TILE, at=(out, w * 4 * TILE)) for w in range(2)]
    maxima, sums = cta.smem("sM", 256), [cta.smem(f"sL_reduction_wksp.{w}", 256) for w in range(2)]
    scales = [cta.smem(f"sScale{n}", 256) for n in range(2)]
    everyone = cta.named_barrier("__syncthreads", 2 * WARPGROUP, 5)
    scale_ready = [cta.named_barrier(f"sScale{n}Ready", 2 * WARPGROUP, n) for n in range(2)]
    p0_ready = cta.named_barrier("sP0Ready", 2 * WARPGROUP, 2)
    issued = cta.named_barrier("rO1sP0sV0RIssued", 2 * WARPGROUP, 3)
    initialised = cta.named_barrier("sMInitialized", WARPGROUP, 4)
    w0, w1 = both = [cta.warpgroup(f"warpgroup {w}", registers=255) for w in range(2)]
    s, o = [w.fragment("P", 64) for w in both], [w.fragment("O", 256) for w in both]
    for w in both:
        w.fragment("P, 16 bits", 64, bits=16)
        w.fragment("Q, last tile", 64, bits=16)

    def load(w, n, first, last):
        for i in range(first, last):
            w.load_only(full[n][i], [kv[n][i]], is_far=True)

    def scores(w, n, order, use):
        for i in order:
            w.expect(full[n][i], TILE)
            w.wait(full[n][i], use)
            w.wgmma("Q K^T", a=None if i == 8 else queries[i], b=kv[n][i], acc=s[n], n=64, k=64)

    def softmax(w, n):
        w.read(s[n])
        w.vector("row max", 32, alu=1)
        w.vector("row reduction", shuffle=4)
        w.read(maxima)
        w.vector("statistics", other=statistics, mufu=2)
        w.write(maxima)
        w.write(scales[n])
        w.read(o[n])
        w.vector("rescale O", 128, fma=1)
        w.vector("exp2", 32, fma=2, mufu=1, convert=0.5)

    def publish(w, n):
        w.write(p[n])
        w.vector("P to shared memory", 32, other=0.125, smem_bytes=TILE)

    def fence(w):
        w.fence()
        w.delay("proxy_fence_cycles")

    def step_of_first(left, use):
        softmax(w0, 0)
        w0.bar_arrive(scale_ready[0])
        w0.wgmma("P V", a=None, b=kv[0][:4], acc=o[0], n=256, k=64)
        w0.wgmma_wait(0)
        w0.bar_sync(scale_ready[1])
        if left > 2:
            load(w0, 0, 0, 4)
        w0.read(scales[1])
        w0.vector("rescale P", 32, fma=1, convert=0.5)
        publish(w0, 0)
        fence(w0)
        w0.bar_arrive(p0_ready)
        if left > 1:
            w0.bar_sync(issued)
            w0.vector("rescale O", 128, fma=1)
            w0.wgmma("P V", a=p[1], b=kv[1][:4], acc=o[0], n=256, k=64)
        if left > 2:
            scores(w0, 0, range(4), use)
        if left > 3:
            w0.wgmma_wait(4)
            load(w0, 1, 0, 4)
        if left > 2:
            scores(w0, 0, range(4, 9), use)
        w0.wgmma_wait(0)

    def step_of_second(left, use):
        w1.bar_sync(scale_ready[0])
        w1.read(scales[0])
        softmax(w1, 1)
        w1.bar_arrive(scale_ready[1])
        if left > 1:
            publish(w1, 1)
            w1.wgmma("P V", a=None, b=kv[1][4:8], acc=o[1], n=256, k=64)
            fence(w1)
        w1.bar_sync(p0_ready)
        w1.wgmma("P V", a=p[0], b=kv[0][4:8], acc=o[1], n=256, k=64)
        if left > 1:
            w1.bar_arrive(issued)
        if left > 3:
            w1.wgmma_wait(1)
            load(w1, 1, 4, 9)
        if left > 2:
            w1.wgmma_wait(0)
            load(w1, 0, 4, 9)
        if left > 3:
            scores(w1, 1, (4, 5, 6, 7, 8, 0, 1, 2, 3), use)
        w1.wgmma_wait(0)

    uses = [0, 0]  # how often each block's barriers have completed
    w0.tma_load(q_full, q, far=True)
    for number, tile in enumerate(tiles):
        load(w0, 0, 0, 9)
        if tile.blocks > 1:
            load(w0, 1, 4, 9)
            load(w0, 1, 0, 4)
        w0.write(maxima)
        for w in both:
            w.delay("cold_code_cycles")
            w.wait(q_full, number)
            w.read(queries[8])
            w.vector("Q's last tile to registers", 16, other=1, smem_bytes=TILE)
        for i in range(9):
            w0.expect(full[0][i], TILE)
            w0.wait(full[0][i], uses[0])
        w0.wgmma("Q K^T", a=queries, b=kv[0], acc=s[0], n=64, k=576)
        w0.bar_sync(initialised)
        w0.wgmma_wait(0)
        if tile.blocks > 1:
            scores(w1, 1, (4, 5, 6, 7, 8, 0, 1, 2, 3), uses[1])
            w1.wgmma_wait(0)
        for left in range(tile.blocks, 0, -2):
            uses = [uses[0] + 1, uses[1] + (left > 1)]
            step_of_first(left, uses[0])
            step_of_second(left, uses[1])
        for n, w in enumerate(both):
            w.vector("row reduction", shuffle=4)
            w.write(sums[n])
            w.bar_sync(everyone)
            w.read(sums[1 - n])
            if n == 0 and number + 1 < len(tiles):
                w.tma_load(q_full, q, far=True)
            w.read(o[n])
            w.vector("normalise O", 128, fma=1, convert=0.5)
            w.write(halves[n])
            w.vector("O to shared memory", 128, other=0.125, smem_bytes=4 * TILE)
            fence(w)
            w.bar_sync(everyone)
            if n == 0:
                w.tma_store(out)
                w.store_wait()
            if number + 1 < len(tiles):
                w.bar_sync(everyone)


@flashmla.launch
def launch(requests=132, heads=128, keys=8192):
    tiles = [keys // 64] * (requests * heads // 64)
    flops = 2 * requests * heads * keys * (576 + 512)
    return Launch(tiles, flops, requests * keys * 576 * 2, order="in turn")
