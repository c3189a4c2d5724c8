"""fast.cu's ladder of GEMMs on Hopper, bf16: from one warpgroup that does everything to clusters and TMA stores.

Source: pranjalssh/fast.cu at 38eb642e (2025-09-18), examples/matmul/matmul_2.cuh to matmul_11.cuh. C is stored column
by column, two bytes a thread: a warp writes halves of the 32-byte sectors of four columns, and twice the bytes move.
Registers, and the instructions for ``addresses`` between a wait and the first wgmma, are counted in what nvcc 13.3
makes of the source; those for C, of each element that a thread has, in what nvcc 13.0 makes of kernels 3, 5, 7 and 9.
"""

from fa3verify.schedule import Launch, kernel

WARPGROUP = 128  # threads
BK = 64
HALF_SECTORS = 2  # bytes that st.global moves for each byte of C


def store(c, elements, **counts):
    """Convert and store C, of which a thread has so many elements, by st.global of two bytes."""
    for _ in range(8):
        c.vector("rows of C", elements // 8, **counts)
        c.global_store(HALF_SECTORS * 2 * WARPGROUP * elements // 8, width=2 * HALF_SECTORS)


def matrices(n, bm, bn, **what):
    """A product of square matrices: every tile has the whole of k, and HBM moves A, B and C once."""
    return Launch([n // BK] * (n // bm * n // bn), flops=2 * n**3, hbm_bytes=6 * n * n, **what)


@kernel
def one_warpgroup(cta, tiles, *, bm=128, bn=128, registers=200, addresses=38):
    """Kernels 2 (64 x 64) and 3: each of 128 threads arrives at two ``cuda::barrier``, then all multiply and wait."""
    a, b = cta.smem("sA", bm * BK * 2), cta.smem("sB", bn * BK * 2)
    full = {slot: cta.mbarrier(f"bar{slot.name[1:]}", 2) for slot in (a, b)}
    everyone = cta.named_barrier("__syncthreads", WARPGROUP, 0)
    w = cta.warpgroup("warpgroup", registers=registers)
    acc = w.fragment("d", bn, rows=bm)
    for tile in tiles:
        w.vector("memset d", bm * bn // WARPGROUP, other=0.5)
        for step in range(tile.blocks):
            for slot, barrier in full.items():
                w.tma_load(barrier, slot)
            for barrier in full.values():
                w.arrive(barrier)
            for barrier in full.values():
                w.wait(barrier, step)
            w.bar_sync(everyone)
            w.vector("addresses", other=addresses)
            w.wgmma("A B", a=a, b=b, acc=acc, m=bm, n=bn, k=BK)
            w.wgmma_wait(0)
        w.read(acc)
        store(w, bm * bn // WARPGROUP, alu=3.8, fma=2.27, convert=0.5, other=1.05)


@one_warpgroup.launch
def launch_one_warpgroup(n=4096, *, bm, bn):
    return matrices(n, bm, bn, persistent=False, occupancy=0)


@kernel
def queue(cta, tiles, *, bn=256, stages=3, consumers=2, registers=240, addresses=8):
    """Kernels 4 (128 x 128, one consumer, five stages), 5 (not persistent) and 6: a producer and a queue of stages.

    The queue's barriers are ``cuda::barrier``, at which each thread of a consumer arrives: at "full" before it waits
    there, and at "empty" behind its products.
    """
    bm = 128
    ring = cta.ring(
        "AB", stages, {"A": bm * BK * 2, "B": bn * BK * 2}, consumers=consumers, full_arrivals=1 + consumers
    )
    rows = bm // consumers
    for w in range(consumers):
        c = cta.warpgroup(f"consumer {w}", registers=registers)
        acc = c.fragment("d", bn, rows=rows)
        use = 0
        for tile in tiles:
            c.vector("memset d", rows * bn // WARPGROUP, other=0.5)
            for _ in range(tile.blocks):
                c.arrive(ring.full[use % stages])
                stage = c.wait_full(ring)
                use += 1
                c.vector("addresses", other=addresses)
                c.wgmma("A B", a=stage["A"], b=stage["B"], acc=acc, m=rows, n=bn, k=BK)
                c.wgmma_wait(0)
                c.release(stage)
            c.read(acc)
            store(c, rows * bn // WARPGROUP, alu=0.64, fma=0.54, convert=0.5, other=1.04, stall=16)
    p = cta.warp("producer", registers=24)
    for tile in tiles:
        for _ in range(tile.blocks):
            p.tma_load(p.acquire(ring))


@queue.launch
def launch_queue(n=4096, persistent=True, *, bn):
    return matrices(n, 128, bn, persistent=persistent, ctas=128 * persistent, order="in turn")


@kernel
def fast_queue(cta, tiles, *, bm=128, bn=256, stages=3, cluster=1, clears=True, addresses=33):
    """Kernels 7, 8 (clusters of two) and 9 (``clears=False``): one thread of a consumer arrives at mbarriers of PTX.

    In a cluster the first CTA loads B for both.
    """
    ring = cta.ring("AB", stages, {"A": bm * BK * 2, "B": bn * BK * 2}, consumers=2)
    rows = bm // 2
    for w in range(2):
        c = cta.warpgroup(f"consumer {w}", registers=240)
        acc = c.fragment("d", bn, rows=rows)
        for tile in tiles:
            if clears:
                c.vector("memset d", rows * bn // WARPGROUP, other=0.5)
            for _ in range(tile.blocks):
                stage = c.wait_full(ring)
                c.vector("addresses", other=addresses)
                c.wgmma("A B", a=stage["A"], b=stage["B"], acc=acc, m=rows, n=bn, k=BK)
                c.wgmma_wait(0)
                c.release(stage)
            c.read(acc)
            alu, fma = (2.61, 0.38) if clears else (4.63, 0.74)
            store(c, rows * bn // WARPGROUP, alu=alu, fma=fma, convert=0.5, other=1.12, stall=22 if clears else 47)
    p = cta.warp("producer", registers=24)
    for tile in tiles:
        for _ in range(tile.blocks):
            stage = p.acquire(ring)
            p.expect(stage.full, (bm + bn) * BK * 2)
            p.load_only(stage.full, [stage["A"]])
            p.load_only(stage.full, [stage["B"]], multicast=cluster)


@fast_queue.launch
def launch_fast_queue(n=4096, *, bm, bn, cluster):
    return matrices(n, bm, bn, ctas=128, cluster=cluster, order="in turn")


@kernel
def stored_by_tma(cta, tiles, *, bm=128, bn=256, stages=3, cluster=2, mended=True, addresses=25):
    """Kernels 10 and 11 (tiles along a Hilbert curve): C leaves through shared memory, by one TMA store of both halves.

    As published (``mended=False``) no fence stands in front of the store, only the thread that started it waits for it
    before all write the next tile, and no thread waits for the last one. A warp stores two bytes a lane, to four
    columns whose banks are the same: four wavefronts of 128 bytes for 64.
    """
    ring = cta.ring("AB", stages, {"A": bm * BK * 2, "B": bn * BK * 2}, consumers=2)
    rows = bm // 2
    both = cta.named_barrier("bar 10", 2 * WARPGROUP)
    out = cta.smem("sC", bm * bn * 2)
    halves = [cta.smem(f"sC.{w}", rows * bn * 2, at=(out, w * rows * bn * 2)) for w in range(2)]
    for w in range(2):
        c = cta.warpgroup(f"consumer {w}", registers=240)
        acc = c.fragment("d", bn, rows=rows)
        for tile in tiles:
            for _ in range(tile.blocks):
                stage = c.wait_full(ring)
                c.vector("addresses", other=addresses)
                c.wgmma("A B", a=stage["A"], b=stage["B"], acc=acc, m=rows, n=bn, k=BK)
                c.wgmma_wait(0)
                c.release(stage)
            c.read(acc)
            c.store_wait()
            if mended:
                c.bar_sync(both)
            c.write(halves[w])
            c.vector("C to shared memory", rows * bn // WARPGROUP, convert=0.5, other=1.5, smem_bytes=8 * rows * bn * 2)
            if mended:
                c.fence()
            c.bar_sync(both)
            if w == 0:
                c.tma_store(out)
        if mended:
            c.store_wait()
    p = cta.warp("producer", registers=24)
    for tile in tiles:
        for _ in range(tile.blocks):
            stage = p.acquire(ring)
            p.expect(stage.full, (bm + bn) * BK * 2)
            p.load_only(stage.full, [stage["A"]])
            p.load_only(stage.full, [stage["B"]], multicast=cluster)


@stored_by_tma.launch
def launch_stored_by_tma(n=4096, *, bm, bn, cluster):
    return matrices(n, bm, bn, ctas=128, cluster=cluster, order="in turn")
