"""Attention forward with int8 Q K and fp16 V, SageAttention (Triton).

https://github.com/thu-ml/SageAttention at d1a57a546c3d395b1ffcbeecc66d81db76f3b4b5,
sageattention/triton/attn_qk_int8_per_block.py: _attn_fwd, as triton 3.6 compiles it for sm_90a.

d = 128 has two warpgroups of 64 rows and 4 stages (the defaults), d = 64 one of 128 rows and 3 stages:
--set d=64 --set warpgroups=1 --set stages=3 --set registers=254.
Instructions: d = 128 has 496 in the loop, 423 in front and 361 behind; d = 64 has 726, 408 and 378. For s scores and o
outputs that a thread has, and r rows: I2FP s, FMNMX s + 2 r, FFMA and FADD 3 s + 3 r, MUFU s + r, F2FP s / 2, SHFL 4 r;
then HADD2.F32 o, which makes fp16 sums fp32 and is counted as fma, and FFMA o, which rescales and adds. A copy's own
three issue slots are not counted again. Q is ld.global and st.shared, for which there is no word: a cp.async, a wait,
and the stores' instructions. K, its scale and V are a group each in the kernel, waited for together; here they are one,
as more than eight groups in flight are called a deadlock. There is no fence.proxy.async behind these copies.
"""

from fa3verify.schedule import Launch, kernel


@kernel
def sage(cta, tiles, *, bm=128, bn=64, d=128, stages=4, warpgroups=2, registers=177):
    threads = 128 * warpgroups
    scores, outputs, rows = bm * bn // threads, bm * d // threads, 2 * bm // (64 * warpgroups)
    memory = cta.smem("memory", bm * d + stages * bn * d * 3 + (stages - 1) * 16)
    q = cta.smem("Q", bm * d, at=(memory, 0))
    k = [cta.smem(f"K{i}", bn * d, at=(memory, bm * d + i * bn * d)) for i in range(stages)]
    v = [cta.smem(f"V{i}", bn * d * 2, at=(memory, (bm + (stages + 2 * i) * bn) * d)) for i in range(stages)]
    end = (bm + 3 * stages * bn) * d
    scale = [cta.smem(f"scale{i}", 16, at=(memory, end + 16 * i)) for i in range(stages - 1)]
    scratch = cta.smem("scratch", bm * d * 2, at=(memory, 0))
    sync = cta.named_barrier("syncthreads", threads, identity=0)
    c = cta.warpgroup("warps", registers=registers, warpgroups=warpgroups)
    s = c.fragment("S", bn, rows=bm)
    p = c.fragment("P", bn, rows=bm, bits=16, reuses="S")
    pv = c.fragment("P V", d, rows=bm, bits=16)
    c.fragment("O", d, rows=bm)

    def copy(block):  # Behind the last block a group is committed all the same, with nothing in it.
        here = block < tile.blocks
        c.cp_async([ring[block % len(ring)] for ring in (k, scale, v)] if here else [])

    for tile in tiles:
        c.vector("addresses", alu=120, fma=30, other=40)
        c.cp_async([q])
        c.cp_async_wait(0)
        c.vector("Q to shared memory", alu=10, other=12, smem_bytes=bm * d)
        c.fence()
        c.vector("addresses of K and V", alu=41, fma=25, other=40)
        for block in range(stages - 1):
            copy(block)
        for block in range(tile.blocks):
            c.cp_async_wait(stages - 2)
            c.bar_sync(sync)
            c.read(scale[block % (stages - 1)])
            c.vector("stage, scale", alu=10, fma=1, other=20)
            c.wgmma("Q K", a=q, b=k[block % stages], acc=s, m=bm, n=bn, k=d, bits=8)
            c.wgmma_wait(0)
            c.read(s)
            c.vector(
                "softmax", fma=3 * scores + 3 * rows, alu=scores + 2 * rows + 4, mufu=scores + rows,
                convert=1.5 * scores, shuffle=4 * rows, other=10,
            )  # fmt: skip
            c.write(p)
            c.wgmma("P V", a=None, b=v[block % stages], acc=pv, m=bm, n=d, k=bn)
            c.wgmma_wait(0)
            c.bar_sync(sync)
            c.vector("addresses of the next", alu=28, fma=4, other=20)
            copy(block + stages - 1)
            c.read(pv)
            c.vector("add to O", fma=2 * outputs)
        c.cp_async_wait(0)
        c.vector("O / l", fma=3 * outputs, alu=20, mufu=rows, other=4)
        c.bar_sync(sync)
        c.vector(
            "O to fp16, through shared memory", convert=outputs / 2, alu=20, fma=10, other=16, smem_bytes=4 * bm * d
        )
        c.write(scratch)
        c.bar_sync(sync)
        c.read(scratch)
        c.vector("rows of O", alu=22, fma=18, other=8)
        c.global_store(bm * d * 2)


@sage.launch
def launch(b=4, h=16, n=4096, *, bm, bn, d):
    tiles = [n // bn] * (b * h * n // bm)
    return Launch(tiles, flops=4 * b * h * n * n * d, hbm_bytes=b * h * n * d * 6, persistent=False, occupancy=0)
