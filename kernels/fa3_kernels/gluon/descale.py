"""Dequantisation factors inside the e4m3 forward kernel: per row of Q, per key tile of K and V.

They are taken in the order of :mod:`fa3_kernels.twin.forward`. A score's factor is c = max(scale_log2 * q_descale *
k_descale, 2^-126). In each step O is multiplied by v_descale of the block before / v_descale of this block, and at the
end by v_descale of the last block. Factors that differ by block travel with K: the producer puts them into shared
memory, so that no consumer waits for global memory. The slot of K, with its barriers, guards them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, read_tile

P_OFFSET_LOG2 = gl.constexpr(8)  # P spans [0, 256], so that small weights survive e4m3
MIN_NORMAL = gl.constexpr(2.0**-126)


@aggregate
class Scaling:
    """Holds what the e4m3 kernel has beside the Program: transposed V, factors, descales in global memory.

    A descale is float32 (batch, heads, blocks) with strides; a block of K or V is one key tile, or all of them when its
    stride is 0. The decorator reads these annotations as types: no postponed annotations in this file.
    """

    vt_smem: gl.shared_memory_descriptor
    factor_smem: gl.shared_memory_descriptor  # per slot: descale of K, ratio of the descales of V; one value per row
    vt_full: gl.shared_memory_descriptor
    q_descale: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_block: gl.tensor
    q_block_rows: gl.tensor
    k_descale: gl.tensor
    k_batch: gl.tensor
    k_head: gl.tensor
    k_block: gl.tensor
    v_descale: gl.tensor
    v_batch: gl.tensor
    v_head: gl.tensor
    v_block: gl.tensor
    cap_factor: gl.tensor  # 2 / softcap
    cap_log2: gl.tensor  # softcap * log2(e)

    @gluon.constexpr_function
    def __init__(self, buffers, q, k, v, cap):
        self.vt_smem, self.factor_smem, self.vt_full = buffers
        self.q_descale, self.q_batch, self.q_head, self.q_block, self.q_block_rows = q
        self.k_descale, self.k_batch, self.k_head, self.k_block = k
        self.v_descale, self.v_batch, self.v_head, self.v_block = v
        self.cap_factor, self.cap_log2 = cap


@gluon.jit
def _key_descale(x, tile, block):
    """Return the descale of K in a key block."""
    return gl.load(x.k_descale + tile.batch * x.k_batch + tile.kv_head * x.k_head + block * x.k_block)


@gluon.jit
def value_descale(x, tile, block):
    """Return the descale of V in a key block."""
    return gl.load(x.v_descale + tile.batch * x.v_batch + tile.kv_head * x.v_head + block * x.v_block)


@gluon.jit
def load_factors(p, x, tile, block, first_visited):
    """Load, in the producer, the descales of K in a key block, of V in the block visited before it, and of V in this
    one.

    All three are loaded in every step. Triton 3.6 would carry only one of two values round a loop if one of them is
    what the other was a step before.
    """
    if p.variant.block_descales:
        before = value_descale(x, tile, gl.minimum(block + 1, first_visited))
        return _key_descale(x, tile, block), before, value_descale(x, tile, block)
    else:
        return 1.0, 1.0, 1.0


@gluon.jit
def store_factors(p, x, k_factor, v_before, v_this, slot):
    """Put, in the producer, the factors of a block beside its K; the ratio of V's descales is correctly rounded."""
    if p.variant.block_descales:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        ones = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, layout)
        x.factor_smem.index(2 * slot).store(ones * k_factor)
        x.factor_smem.index(2 * slot + 1).store(ones * gl.div_rn(v_before, v_this))


@gluon.jit
def row_factors(p, x, entry, LAYOUT: gl.constexpr, WARPGROUP: gl.constexpr):
    """Return the factor of the scores per row of the tile of a schedule entry.

    It has the descale of Q and the softmax scale, and the descale of K unless that differs by block. Rows that do not
    exist, and an entry that ends the schedule, get the factor of one that exists.
    """
    tile = read_tile(p, gl.maximum(entry, 0))
    row = gl.arange(0, WARPGROUP_ROWS, LAYOUT)
    position = tile.position + WARPGROUP * p.variant.warpgroup_positions + (row >> p.variant.pack_log2)
    position = gl.maximum(gl.minimum(position, tile.seqlen_q - 1), 0)
    head = row * 0 + tile.head
    if p.variant.pack > 1:
        head = tile.head * p.group + gl.minimum(row & (p.variant.pack - 1), p.group - 1)
    index = tile.batch * x.q_batch + head * x.q_head + position // x.q_block_rows * x.q_block
    factor = gl.load(x.q_descale + index) * p.scale_log2
    if not p.variant.block_descales:
        factor = gl.maximum(factor * _key_descale(x, tile, 0), MIN_NORMAL)
    return factor


@gluon.jit
def _read(buffer, LAYOUT: gl.constexpr):
    """Load factors from shared memory in front of the release of the slot.

    The volatile identity keeps the load there, because the release is volatile too. Without it LLVM moved the load to
    its use behind the release, when the producer may overwrite the slot (seen on an H200).
    """
    asm: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=f,f", [buffer.load(LAYOUT)], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def block_factors(p, x, row_factor, step):
    """Return, in a consumer, the factor of the scores of block ``step`` per row, and the factor by which O is
    multiplied.

    It is called between the wait for K, with which the factors travel, and the release of its slot, so that it runs
    beside the GEMM of the scores. Without factors by block the second one is 1.
    """
    if p.variant.block_descales:
        slot = step % p.variant.stages
        layout: gl.constexpr = row_factor.type.layout
        k_factor = _read(x.factor_smem.index(2 * slot), layout)
        ratio = _read(x.factor_smem.index(2 * slot + 1), layout)
        return gl.maximum(row_factor * k_factor, MIN_NORMAL), ratio
    else:
        return row_factor, 1.0
