"""Scores of decoding with grouped heads, SGLang (Triton): eight parts of the keys, four query heads to a key head.

https://github.com/sgl-project/sglang at 83ea222010e3f08f11a41d54010a72fb9b6ed6eb,
python/sglang/srt/layers/attention/triton_ops/decode_attention.py: _fwd_grouped_kernel_stage1 with head_dim 128, blocks
of 64 keys, scores in fp16 and keys in bf16, as triton 3.6 compiles it for sm_90a with 4 warps.

One block after another: indices of keys, then the keys themselves by ld.global, converted to fp16, stored to shared
memory and multiplied; scores leave through shared memory. Instructions: 113 in front of the loop, 286 in it without
mma.sync. `stall` is what the stall counts that ptxas wrote sum to beyond the time that the instructions take alone.
Keys are single rows of 256 bytes, which HBM gives at 0.95 of its rate (reports/h200/schedules/latencies.csv): hbm_bytes
counts so many more. smem_bytes of the product are those of ldmatrix.
"""

from fa3verify.schedule import Launch, kernel

GATHER = 0.95


@kernel
def scores(cta, tiles, *, bn=64, d=128, registers=56):
    q, k = cta.smem("Q", 16 * d * 2), cta.smem("K", bn * d * 2)
    out = cta.smem("out", 16 * bn * 2, at=(k, 0))
    sync = cta.named_barrier("syncthreads", 128, identity=0)
    c = cta.warpgroup("warps", registers=registers)
    s = c.fragment("S", bn, rows=16)
    for tile in tiles:
        c.vector("heads, lengths", alu=20, fma=16, convert=4, other=24, stall=34)
        c.delay("l2_latency_ns")
        c.global_load(16 * d * 2)
        c.vector("Q to shared memory", other=2, alu=24, fma=18, smem_bytes=16 * d * 2)
        c.write(q)
        for _ in range(tile.blocks):
            c.vector("indices", alu=24, fma=7, other=14, stall=30)
            c.global_load(bn * 4)
            c.vector("addresses of the keys", alu=23, fma=8, other=20, stall=31)
            c.global_load(bn * d * 2, far=True)
            c.bar_sync(sync)
            c.vector("keys to shared memory", other=9, stall=26, smem_bytes=bn * d * 2)
            c.write(k)
            c.bar_sync(sync)
            c.vector("to fp16", alu=32, fma=64, convert=32, other=17, stall=62, smem_bytes=16 * 4 * 512)
            c.mma_sync("Q K", acc=s, m=64, n=bn // 4, k=d, reads=[q, k])
            c.read(s)
            c.bar_sync(sync)
            c.vector("scale", fma=8, convert=4, other=5, stall=14)
            c.write(out)
            c.bar_sync(sync)
            c.read(out)
            c.vector("rows of scores", alu=9, fma=3, other=7, stall=28)
            c.global_store(4 * bn * 2)


@scores.launch
def launch(batch=32, keys=8192, heads=32, kv_heads=8, *, bn, d):
    splits = 8
    tiles = [keys // splits // bn] * (batch * kv_heads * splits)
    moved = 2 * batch * keys * (kv_heads * d / GATHER + heads)
    return Launch(tiles, flops=2 * batch * heads * keys * d, hbm_bytes=moved, persistent=False, occupancy=0)
