"""FlashMLA's dense decoding kernel on Hopper, 16 bits, as a description.

Source: deepseek-ai/FlashMLA at 9241ae3e (2026-04-29), csrc/sm90/decode/dense/splitkv_mla.cuh and traits.h. Names of
barriers and buffers are the kernel's.
"""

from fa3verify.schedule import Launch, kernel

WARPGROUP = 128  # threads
TILE = 64 * 64 * 2  # bytes of 64 rows and 64 channels
SECOND = (4, 5, 6, 7, 8, 0, 1, 2, 3)  # the order of the tiles of a second block
BARRIERS = ("sScale0Ready", "sScale1Ready", "sP0Ready", "rO1sP0sV0RIssued", "__syncthreads")


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
    halves = [cta.smem(f"sO.{w}", 4 * TILE, at=(blocks[0], w * 4 * TILE)) for w in range(2)]
    maxima, *scales = (cta.smem(name, 256) for name in ("sM", "sScale0", "sScale1"))
    sums = [cta.smem(f"sL_reduction_wksp.{w}", 256) for w in range(2)]
    *scale_ready, p0_ready, issued, everyone = (cta.named_barrier(name, 2 * WARPGROUP) for name in BARRIERS)
    initialised = cta.named_barrier("sMInitialized", WARPGROUP)
    w0, w1 = both = [cta.warpgroup(f"warpgroup {w}", registers=255) for w in range(2)]
    s, o = [w.fragment("P", 64) for w in both], [w.fragment("O", 256) for w in both]
    _ = [w.fragment(name, 64, bits=16) for w in both for name in ("P, 16 bits", "Q, last tile")]

    def load(w, n, order):
        for i in order:
            w.load_only(full[n][i], [kv[n][i]], is_far=True)

    def scores(w, n, order, use):
        for i in order:
            w.expect(full[n][i], TILE)
            w.wait(full[n][i], use)
            w.wgmma("Q K^T", a=None if i == 8 else queries[i], b=kv[n][i], acc=s[n], n=64, k=64)

    def softmax(w, n):
        w.read(s[n])
        w.vector("row max", chunks=8, alu=32, shuffle=4)
        w.read(maxima, own=True)
        w.vector("statistics", other=statistics, mufu=2)
        w.write(maxima)
        w.write(scales[n])
        w.read(o[n])
        w.vector("rescale O and exp2", chunks=40, fma=128 + 64, mufu=32, convert=16)

    def write(w, slot, elements, **counts):
        w.write(slot)
        w.vector("to shared memory", elements, other=0.125, smem_bytes=slot.bytes, **counts)

    def fence(w):
        w.fence()
        w.delay("proxy_fence_cycles")

    uses = [0, 0]  # how often each block's barriers have completed
    w0.tma_load(q_full, q, far=True)
    for number, tile in enumerate(tiles):
        load(w0, 0, range(9))
        if tile.blocks > 1:
            load(w0, 1, SECOND)
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
            scores(w1, 1, SECOND, uses[1])
            w1.wgmma_wait(0)
        for left in range(tile.blocks, 0, -2):
            uses = [uses[0] + 1, uses[1] + (left > 1)]
            softmax(w0, 0)
            w0.bar_arrive(scale_ready[0])
            w0.wgmma("P V", a=None, b=kv[0][:4], acc=o[0], n=256, k=64)
            w0.wgmma_wait(0)
            w0.bar_sync(scale_ready[1])
            if left > 2:
                load(w0, 0, range(4))
            w0.read(scales[1])
            write(w0, p[0], 32, fma=1, convert=0.5)
            fence(w0)
            w0.bar_arrive(p0_ready)
            if left > 1:
                w0.bar_sync(issued)
                w0.vector("rescale O", 128, fma=1)
                w0.wgmma("P V", a=p[1], b=kv[1][:4], acc=o[0], n=256, k=64)
            if left > 2:
                scores(w0, 0, range(4), uses[0])
                if left > 3:
                    w0.wgmma_wait(4)
                    load(w0, 1, range(4))
                scores(w0, 0, range(4, 9), uses[0])
            w0.wgmma_wait(0)

            w1.bar_sync(scale_ready[0])
            w1.read(scales[0])
            softmax(w1, 1)
            w1.bar_arrive(scale_ready[1])
            if left > 1:
                write(w1, p[1], 32)
                w1.wgmma("P V", a=None, b=kv[1][4:8], acc=o[1], n=256, k=64)
                fence(w1)
            w1.bar_sync(p0_ready)
            w1.wgmma("P V", a=p[0], b=kv[0][4:8], acc=o[1], n=256, k=64)
            if left > 1:
                w1.bar_arrive(issued)
            if left > 3:
                w1.wgmma_wait(1)
                load(w1, 1, range(4, 9))
            if left > 2:
                w1.wgmma_wait(0)
                load(w1, 0, range(4, 9))
            if left > 3:
                scores(w1, 1, SECOND, uses[1])
            w1.wgmma_wait(0)
        for n, w in enumerate(both):
            w.vector("row reduction", shuffle=4)
            w.write(sums[n])
            w.bar_sync(everyone)
            w.read(sums[1 - n])
            if n == 0 and number + 1 < len(tiles):
                w.tma_load(q_full, q, far=True)
            w.read(o[n])
            write(w, halves[n], 128, fma=1, convert=0.5)
            fence(w)
            w.bar_sync(everyone)
            for half in halves if n == 0 else ():
                w.tma_store(half)
            w.store_wait()
            w.bar_sync(everyone)


@flashmla.launch
def launch(requests=132, heads=128, keys=8192):
    tiles = [keys // 64] * (requests * heads // 64)
    flops = 2 * requests * heads * keys * (576 + 512)
    return Launch(tiles, flops, requests * keys * 576 * 2, order="in turn")
