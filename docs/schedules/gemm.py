"""CUTLASS's GEMMs of Hopper, bf16, as descriptions: one tile for two consumers, a tile for each, and a cluster of two.

Source: NVIDIA/cutlass at 7107b055 (2026-08-20), include/cutlass: gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative
and _pingpong.hpp, gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp, epilogue/collective/
sm90_epilogue_tma_warpspecialized.hpp, pipeline/sm90_pipeline.hpp.
"""

from fa3verify.schedule import Launch, kernel

WARPGROUP = 128  # threads


def matrices(m, n, k, bm, bn, bk, **what):
    """The launch of one product: every tile has the whole of k, and HBM moves A, B and C once."""
    tiles = [k // bk] * (-(-m // bm) * -(-n // bn))
    return Launch(tiles, flops=2 * m * n * k, hbm_bytes=2 * (m * k + k * n + m * n), **what)


def produce(cta, ring, tiles, registers, multicast):
    """The producer's main loop; CTAs of a cluster load a part of B each, for all of them."""
    p = cta.warp("producer", registers=registers)
    for tile in tiles:
        for _ in range(tile.blocks):
            stage = p.acquire(ring)
            p.expect(stage.full, sum(slot.bytes for slot in stage.slots))
            p.load_only(stage.full, [stage["A"]])
            p.load_only(stage.full, [stage["B"]], multicast=multicast)


def multiply(c, ring, tile, acc, size, first=None):
    """The consumer's main loop: one product stays in flight, and the stage before it is released."""
    before = None
    for block in range(tile.blocks):
        stage = c.wait_full(ring, None if first is None else first + block)
        c.wgmma("A B", a=stage["A"], b=stage["B"], acc=acc, **size)
        if before:
            c.wgmma_wait(1)
            c.release(before)
        before = stage
    return before


def store(c, parts, barrier, acc, rows, columns):
    """The epilogue: part by part to shared memory in turn, and from there by TMA."""
    c.read(acc)
    for number in range(columns // 64):
        part = parts[number % len(parts)]
        c.store_wait(len(parts) - 1)
        c.bar_sync(barrier)
        c.write(part)
        c.vector("C to shared memory", rows * 64 // WARPGROUP, convert=0.5, other=0.25, smem_bytes=rows * 64 * 2)
        c.fence()
        c.delay("proxy_fence_cycles")
        c.bar_sync(barrier)
        c.tma_store(part)


@kernel
def cooperative(cta, tiles, *, bm=128, bn=256, bk=64, stages=3, parts=2, cluster=2):
    """KernelTmaWarpSpecializedCooperative: two consumers share a tile, each half of its rows; persistent."""
    consumers, rows = 2, bm // 2
    ring = cta.ring("AB", stages, {"A": bm * bk * 2, "B": bn * bk * 2}, consumers=consumers)
    for w in range(consumers):
        barrier = cta.named_barrier(f"epilogue {w}", WARPGROUP)
        out = [cta.smem(f"C.{w}[{i}]", rows * 64 * 2) for i in range(parts)]
        c = cta.warpgroup(f"consumer {w}", registers=232)
        acc = c.fragment("C", bn, rows=rows)
        for tile in tiles:
            last = multiply(c, ring, tile, acc, {"m": rows, "n": bn, "k": bk})
            c.wgmma_wait(0)
            c.release(last)
            store(c, out, barrier, acc, rows, bn)
        c.store_wait()
    produce(cta, ring, tiles, 40, cluster)


@cooperative.launch
def launch_cooperative(m=8192, n=8192, k=8192, *, bm, bn, bk, cluster):
    return matrices(m, n, k, bm, bn, bk, cluster=cluster, order="in turn")


@kernel
def pingpong(cta, tiles, *, bm=64, bn=256, bk=64, stages=4, parts=2, cluster=2):
    """KernelTmaWarpSpecializedPingpong: a tile for each consumer; main loops take turns, and so do epilogues."""
    ring = cta.ring("AB", stages, {"A": bm * bk * 2, "B": bn * bk * 2})
    turns = [[cta.mbarrier(f"{what} turn {w}") for w in range(2)] for what in ("main loop", "epilogue")]
    for w in range(2):
        barrier = cta.named_barrier(f"epilogue {w}", WARPGROUP)
        out = [cta.smem(f"C.{w}[{i}]", bm * 64 * 2) for i in range(parts)]
        c = cta.warpgroup(f"consumer {w}", registers=232)
        acc = c.fragment("C", bn, rows=bm)

        def take(turn, number, c=c, w=w):
            if number:
                c.wait(turn[w], (number - 1) // 2)

        def give(turn, c=c, w=w):
            c.arrive(turn[1 - w])

        use = 0
        for number, tile in enumerate(tiles):
            if number % 2 == w:
                take(turns[0], number)
                last = multiply(c, ring, tile, acc, {"m": bm, "n": bn, "k": bk}, use)
                give(turns[0])
                c.wgmma_wait(0)
                c.release(last)
                take(turns[1], number)
                store(c, out, barrier, acc, bm, bn)
                c.store_wait()
                give(turns[1])
            use += tile.blocks
    produce(cta, ring, tiles, 40, cluster)


@pingpong.launch
def launch_pingpong(m=8192, n=8192, k=8192, *, bm, bn, bk, cluster):
    return matrices(m, n, k, bm, bn, bk, cluster=cluster, order="in turn")


@kernel
def cluster(cta, tiles, *, bm=128, bn=256, bk=64, stages=3):
    """The cooperative main loop of both CTAs of a cluster, in one program: for its hazards, as time is that of one SM.

    Each CTA loads half of B for both, so that a stage is free when the consumers of both CTAs have released it.
    """
    rings = []
    for rank in range(2):
        cta.rank = f"CTA {rank} "
        rings.append(cta.ring("AB", stages, {"A": bm * bk * 2, "B0": bn * bk, "B1": bn * bk}, consumers=4, readers=2))
    for rank, ring in enumerate(rings):
        cta.rank = f"CTA {rank} "
        for w in range(2):
            c = cta.warpgroup(f"consumer {w}", registers=240)
            acc = c.fragment("C", bn)
            for tile in tiles:
                for _ in range(tile.blocks):
                    stage = c.wait_full(ring)
                    c.wgmma("A B", a=stage["A"], b=[stage["B0"], stage["B1"]], acc=acc, n=bn, k=bk)
                    c.wgmma_wait(0)
                    for both in rings:
                        c.arrive(both.empty[stage.index])
                c.read(acc)
                c.global_store(64 * bn * 2)
        p = cta.warp("producer", registers=40)
        for tile in tiles:
            for _ in range(tile.blocks):
                stage = p.acquire(ring)
                p.expect(stage.full, (bm + bn) * bk * 2)
                p.load_only(stage.full, [stage["A"]])
                for both in rings:
                    p.load_only(both.full[stage.index], [both.parts[f"B{rank}"][stage.index]], multicast=2)


@cluster.launch
def launch_cluster(m=8192, n=8192, k=8192, *, bm, bn, bk):
    return matrices(m, n, k, bm, bn, bk, cluster=2, order="in turn")
