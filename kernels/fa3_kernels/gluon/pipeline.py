"""Roles and rings of the forward kernels: named barriers, what a tile is, and the TMA producer warp.

Data arrives on mbarriers (``*_full``). Slots are handed back through named barriers: each of the 256 consumer threads
arrives, the producer warp waits; that costs a consumer one instruction instead of a barrier over its warpgroup.
Pingpong: a warpgroup issues its GEMMs only when the other one has issued its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

WARPGROUP_ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)  # warpgroups
TILE_M = gl.constexpr(128)
STAGES = gl.constexpr(2)  # slots of each ring: Q, K, V

# Named barriers 0..3 belong to Triton (default, worker switch, one per worker); one id per slot, then one per warpgroup.
K_EMPTY = gl.constexpr(4)
V_EMPTY = gl.constexpr(6)
Q_EMPTY = gl.constexpr(8)
TURN = gl.constexpr(10)
EMPTY_THREADS = gl.constexpr(32 + 256)
TURN_THREADS = gl.constexpr(256)


@gluon.constexpr_function
def _barrier_asm(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def _slot_barrier(OPERATION: gl.constexpr, FIRST: gl.constexpr, slot):
    asm: gl.constexpr = _barrier_asm(OPERATION, "$1", EMPTY_THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [slot + FIRST], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(FIRST: gl.constexpr, slot):
    """A consumer thread has read a slot for the last time."""
    _slot_barrier("arrive", FIRST, slot)


@gluon.jit
def acquire(FIRST: gl.constexpr, slot):
    """The producer warp waits until every consumer thread has released a slot."""
    _slot_barrier("sync", FIRST, slot)


@gluon.jit
def _turn(OPERATION: gl.constexpr, WARPGROUP: gl.constexpr):
    asm: gl.constexpr = _barrier_asm(OPERATION, TURN + WARPGROUP, TURN_THREADS)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(p, WARPGROUP: gl.constexpr):
    if p.PINGPONG:
        _turn("sync", WARPGROUP)


@gluon.jit
def pass_turn(p, WARPGROUP: gl.constexpr):
    if p.PINGPONG:
        _turn("arrive", (WARPGROUP + 1) % CONSUMERS)


@aggregate
class Program:
    """What every partition of the kernel sees. Descriptors are (batch, nheads, seqlen, head_dim).

    The decorator reads these annotations as types: no postponed annotations in this file.
    """

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    tiles: gl.tensor  # pointer to this CTA's row of the schedule
    nheads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    scale_log2: gl.tensor
    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    out_smem: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    CAUSAL: gl.constexpr
    EVEN_K: gl.constexpr
    PINGPONG: gl.constexpr
    OVERLAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, descriptors, lse_ptr, tiles, sizes, buffers, switches):
        self.q_desc, self.k_desc, self.v_desc, self.out_desc = descriptors
        self.lse_ptr = lse_ptr
        self.tiles = tiles
        self.nheads, self.group, self.seqlen_q, self.seqlen_k, self.scale_log2 = sizes
        self.q_smem, self.k_smem, self.v_smem, self.out_smem, self.q_full, self.k_full, self.v_full = buffers
        self.CAUSAL, self.EVEN_K, self.PINGPONG, self.OVERLAP = (gl.constexpr(x) for x in switches)


@gluon.jit
def decode(p, entry):
    """m_block, batch and head of a schedule entry."""
    row_head = entry >> 16
    return entry & 65535, row_head // p.nheads, row_head % p.nheads


@gluon.jit
def key_blocks(p, m_block):
    """Key blocks that some row of a tile sees, and how many of them (from the left) need no mask."""
    tile_n: gl.constexpr = p.k_desc.block_type.shape[2]
    stop = p.seqlen_k
    unmasked = p.seqlen_k // tile_n
    if p.CAUSAL:
        offset = p.seqlen_k - p.seqlen_q
        stop = gl.minimum((m_block + 1) * TILE_M, p.seqlen_q) + offset
        unmasked = gl.minimum(unmasked, gl.maximum(m_block * TILE_M + offset + 1, 0) // tile_n)
    return gl.cdiv(stop, tile_n), unmasked


@gluon.jit
def _load_queries(p, batch, head, m_block, tile):
    slot = tile % STAGES
    if tile >= STAGES:
        acquire(Q_EMPTY, slot)
    full = p.q_full.index(slot)
    mbarrier.expect(full, CONSUMERS * p.q_desc.block_type.nbytes)
    for w in gl.static_range(CONSUMERS):
        row = m_block * TILE_M + w * WARPGROUP_ROWS
        tma.async_copy_global_to_shared(p.q_desc, [batch, head, row, 0], full, p.q_smem.index(slot * CONSUMERS + w))


@gluon.jit
def _load_keys(desc, smem, full, EMPTY: gl.constexpr, coordinates, step):
    slot = step % STAGES
    if step >= STAGES:
        acquire(EMPTY, slot)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coordinates, full.index(slot), smem.index(slot))


@gluon.jit
def produce(p):
    """The producer warp: Q, then K and V from right to left, of every tile of this CTA."""
    tile_n: gl.constexpr = p.k_desc.block_type.shape[2]
    tile = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        m_block, batch, head = decode(p, entry)
        entry = gl.load(p.tiles + tile + 1)
        blocks, _ = key_blocks(p, m_block)
        _load_queries(p, batch, head, m_block, tile)
        for j in range(blocks):
            row = (blocks - 1 - j) * tile_n
            _load_keys(p.k_desc, p.k_smem, p.k_full, K_EMPTY, [batch, head // p.group, row, 0], step)
            _load_keys(p.v_desc, p.v_smem, p.v_full, V_EMPTY, [batch, head // p.group, row, 0], step)
            step += 1
        tile += 1
