"""Attention with qv, as absorbed latent attention calls it: scores are of 64 channels of K and 512 of V.

Two kernels that nobody has written, described for the decision whether to write one (reports/decisions/0031). Both have
a producer warp, blocks of K and V in two stages, and two warpgroups with 256 columns of O each.
"""

from fa3verify.schedule import Launch, kernel

ROWS = 64  # of Q and qv, 576 channels together
WARPGROUP = 128  # threads


def prepare(cta, tiles, bn, stages, readers):
    """Return Q, its barrier, the ring of what the scores alone need, and those of the two halves of V."""
    q, q_full = cta.smem("Q", ROWS * 576 * 2, readers=readers), cta.mbarrier("q_full")
    k = cta.ring("K", stages, bn * 64 * 2, consumers=readers)
    v = [cta.ring(f"V{half}", stages, bn * 256 * 2, consumers=max(readers, half + 1)) for half in range(2)]
    producer = cta.warp("producer", registers=24)
    producer.tma_load(q_full, q, far=True)
    for _ in range(tiles[0].blocks):
        for ring in (k, *v):
            producer.tma_load(producer.acquire(ring), far=True)
    return q, q_full, k, v


def softmax(w, scores, bn):
    w.read(scores)
    w.vector("row max", alu=bn // 2, shuffle=4)
    w.vector("exp2", fma=bn // 2, mufu=bn // 2, convert=bn // 4)


def rescale(w, o):
    w.read(o)
    w.vector("rescale O", fma=128)


def store(w, o):
    w.read(o)
    w.vector("O to bf16", 128, fma=1, convert=0.5)
    w.global_store(ROWS * 256 * 2)


@kernel
def one_softmax(cta, tiles, *, bn=64, stages=2):
    """Warpgroup 0 computes S and hands P to warpgroup 1 through shared memory, so that no product is computed twice."""
    q, q_full, k, v = prepare(cta, tiles, bn, stages, 1)
    p = cta.smem("P", ROWS * bn * 2)
    ready, taken = (cta.named_barrier(name, 2 * WARPGROUP) for name in ("P ready", "P taken"))
    w0, w1 = (cta.warpgroup(f"consumer {half}", registers=240) for half in range(2))
    s, _ = w0.fragment("S", bn), w0.fragment("P, 16 bits", bn, bits=16)
    o0, o1 = (w.fragment("O", 256) for w in (w0, w1))

    def scores():
        stages = [w0.wait_full(ring) for ring in (k, *v)]
        w0.wgmma("Q K^T", a=q, b=stages, acc=s, n=bn, k=576)
        return stages

    blocks = tiles[0].blocks
    w0.wait(q_full, 0)
    held = scores()
    w0.wgmma_wait(0)
    for block in range(blocks):
        is_last = block + 1 == blocks
        softmax(w0, s, bn)
        if block:
            w0.bar_sync(taken)
        w0.write(p)
        w0.vector("P to shared memory", other=bn // 8, smem_bytes=p.bytes)
        w0.fence()
        w0.bar_arrive(ready)
        rescale(w0, o0)
        w0.wgmma("P V", a=None, b=held[1], acc=o0, n=256, k=bn)
        following = [] if is_last else scores()
        w0.wgmma_wait(0 if is_last else 1)
        for stage in held:
            w0.release(stage)
        w0.wgmma_wait(0)
        held = following

        stage = w1.wait_full(v[1])
        w1.bar_sync(ready)
        rescale(w1, o1)
        w1.wgmma("P V", a=p, b=stage, acc=o1, n=256, k=bn)
        w1.wgmma_wait(0)
        if not is_last:
            w1.bar_arrive(taken)
        w1.release(stage)
    store(w0, o0)
    store(w1, o1)


@kernel
def two_softmaxes(cta, tiles, *, bn=64, stages=2):
    """Each warpgroup computes S, P and its half of O: nothing is handed over, and scores are computed twice."""
    q, q_full, k, v = prepare(cta, tiles, bn, stages, 2)
    for half in range(2):
        w = cta.warpgroup(f"consumer {half}", registers=240)
        s, o, _ = w.fragment("S", bn), w.fragment("O", 256), w.fragment("P, 16 bits", bn, bits=16)
        w.wait(q_full, 0)
        held = []
        for left in range(tiles[0].blocks, -1, -1):
            if held:
                softmax(w, s, bn)
                rescale(w, o)
                w.wgmma("P V", a=None, b=held[1 + half], acc=o, n=256, k=bn)
            following = [w.wait_full(ring) for ring in (k, *v)] if left else []
            if following:
                w.wgmma("Q K^T", a=q, b=following, acc=s, n=bn, k=576)
            w.wgmma_wait(1 if held and following else 0)
            for stage in held:
                w.release(stage)
            w.wgmma_wait(0)
            held = following
        store(w, o)


@one_softmax.launch
@two_softmaxes.launch
def launch(requests=132, heads=128, keys=8192, splits=1, *, bn):
    """One query of each request; its partial outputs, where keys are split, are not merged here."""
    tiles = [keys // splits // bn] * (requests * -(-heads // ROWS) * splits)
    flops = 2 * requests * heads * keys * (576 + 512)
    return Launch(tiles, flops, requests * keys * 576 * 2, persistent=False)
