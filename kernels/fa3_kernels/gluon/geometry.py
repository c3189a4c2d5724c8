"""The geometry of a forward tile: entries of the schedule, key blocks, masks, and where rows lie for TMA and for
pointers.

The rules are those of :mod:`fa3_kernels.plan.tiles`, which states them and which the twin follows; the backward has
:mod:`fa3_kernels.gluon.backward_geometry`. ``p`` is the :class:`fa3_kernels.gluon.pipeline.Program`.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon import softmax

WARPGROUP_ROWS = gl.constexpr(64)
RAGGED_ROWS = gl.constexpr(1 << 30)  # extent of the row dimension of a ragged descriptor, see fa3_kernels.plan.call


@aggregate
class Tile:
    """One decoded entry of the schedule: a row tile of a head. ``head`` counts kv heads with PackGQA, else query heads.

    The decorator reads these annotations as types: no postponed annotations in this file.
    """

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    split: gl.tensor
    position: gl.tensor  # of the first row in its query sequence
    q_start: gl.tensor  # first row of the sequence in packed tensors, else 0
    k_start: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, where, starts, lengths):
        self.batch, self.head, self.kv_head, self.split, self.position = where
        self.q_start, self.k_start = starts
        self.seqlen_q, self.seqlen_k = lengths


@aggregate
class KeyBlocks:
    """Key blocks of a tile, [first, stop), visited from the right, and which of them need a mask."""

    first: gl.tensor
    stop: gl.tensor
    right_unmasked: gl.tensor  # blocks below this one end before the right limit of every row
    left_masked: gl.tensor  # blocks below this one start before the left limit of some row

    @gluon.constexpr_function
    def __init__(self, first, stop, right_unmasked, left_masked):
        self.first = first
        self.stop = stop
        self.right_unmasked = right_unmasked
        self.left_masked = left_masked


@gluon.constexpr_function
def _rows(shape):
    """Return the product of all dimensions but the last."""
    return math.prod(shape[:-1])


@gluon.jit
def matrix(buffer):
    """Return a shared tile of any rank as a matrix: the last dimension are its columns, all others its rows."""
    rows: gl.constexpr = _rows(buffer.shape)
    return buffer.reshape([rows, buffer.shape[-1]])


@gluon.jit
def read_tile(p, entry):
    """Decode a schedule entry: m_block in its lowest 20 bits, the split in 12, sequence and head in the upper half.

    The layout is that of :mod:`fa3_kernels.plan.tile_order`. Lengths of packed sequences are read from memory.
    """
    position = (entry & 0xFFFFF).to(gl.int32) * p.variant.tile_positions
    split = ((entry >> 20) & 0xFFF).to(gl.int32)
    row_head = (entry >> 32).to(gl.int32)
    if p.variant.pack > 1:
        heads = p.nheads // p.group
        head = row_head % heads
        kv_head = head
    else:
        heads = p.nheads
        head = row_head % heads
        kv_head = head // p.group
    batch = row_head // heads
    q_start = batch * 0
    k_start = q_start
    seqlen_q = p.seqlen_q
    seqlen_k = p.seqlen_k
    if p.variant.is_varlen:
        lengths = p.sequences + 4 * batch
        q_start = gl.load(lengths)
        seqlen_q = gl.load(lengths + 1)
        k_start = gl.load(lengths + 2)
        seqlen_k = gl.load(lengths + 3)
    return Tile((batch, head, kv_head, split, position), (q_start, k_start), (seqlen_q, seqlen_k))


@gluon.jit
def read_tile_again(p, entry):
    """Decode an entry as :func:`read_tile`, at a point where its values are needed again.

    The volatile identity hides that the entry is the same, so that the compiler decodes it anew instead of holding the
    tile in registers.
    """
    entry = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [entry], dtype=gl.int64, is_pure=False, pack=1)
    return read_tile(p, entry)


@gluon.jit
def _chunk_of(p, diagonal):
    """Return the first key of the chunk that holds a diagonal; that of a row in front of the first key has no key."""
    chunk = p.chunk[0]
    return gl.where(diagonal < 0, -chunk, diagonal // chunk * chunk)


@gluon.jit
def key_blocks(p, tile):
    """Return the key blocks that some row of the tile sees; with split-KV those of this split.

    A tile that sees no key may still be worked on (``keeps_empty``). It gets one block, the one behind the last key:
    TMA fills it with zeros, and the mask hides all of it.
    """
    tile_n: gl.constexpr = p.tile_n
    offset = tile.seqlen_k - tile.seqlen_q
    last = gl.minimum(tile.position + p.variant.tile_positions, tile.seqlen_q) - 1 + offset
    stop = tile.seqlen_k
    unmasked = tile.seqlen_k
    if p.variant.is_right_limited:
        stop = gl.minimum(stop, last + p.right + 1)
        unmasked = gl.minimum(unmasked, gl.maximum(tile.position + offset + p.right + 1, 0))
    first = tile.seqlen_k * 0
    left_masked = first
    if p.variant.is_left_limited:
        first = gl.maximum(tile.position + offset - p.left, 0) // tile_n
        left_masked = gl.cdiv(gl.maximum(last - p.left, 0), tile_n)
    if p.variant.is_chunked:
        chunk = p.chunk[0]
        of_first = _chunk_of(p, tile.position + offset)
        of_last = _chunk_of(p, last)
        stop = gl.minimum(stop, of_last + chunk)
        unmasked = gl.minimum(unmasked, of_first + chunk)
        first = gl.maximum(first, of_first // tile_n)
        left_masked = gl.maximum(left_masked, gl.cdiv(of_last, tile_n))
    stop = gl.cdiv(stop, tile_n)
    if p.variant.keeps_empty:
        stop = gl.maximum(stop, first)
    if p.variant.is_split:
        size = gl.cdiv(stop - first, p.num_splits)
        first = first + tile.split * size
        stop = gl.minimum(first + size, stop)
    if p.variant.keeps_empty:
        is_empty = first >= stop
        beyond = gl.cdiv(tile.seqlen_k, tile_n)
        first = gl.where(is_empty, beyond, first)
        stop = gl.where(is_empty, beyond + 1, stop)
    return KeyBlocks(first, stop, unmasked // tile_n, left_masked)


@gluon.jit
def visible_scores(p, s, tile, first_key, WARPGROUP: gl.constexpr):
    """Set the scores of a warpgroup's rows to -inf for keys that the window hides or that lie beyond the sequence.

    ``s`` is (64, tile_n); ``first_key`` is the key of its first column.
    """
    rows = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, s.type.layout)) >> p.variant.pack_log2
    position = tile.position + WARPGROUP * p.variant.warpgroup_positions
    diagonal = position + tile.seqlen_k - tile.seqlen_q
    if p.variant.is_right_limited:
        stop = gl.minimum(rows + (diagonal + p.right + 1), tile.seqlen_k) - first_key
    else:
        stop = rows * 0 + (tile.seqlen_k - first_key)
    if p.variant.is_chunked:
        of_row = _chunk_of(p, rows + diagonal) - first_key
        stop = gl.minimum(stop, of_row + p.chunk[0])
        return softmax.visible(s, stop, gl.maximum(rows + (diagonal - p.left - first_key), of_row))
    elif p.variant.is_left_limited:
        return softmax.visible(s, stop, rows + (diagonal - p.left - first_key))
    else:
        return softmax.visible(s, stop)


@gluon.jit
def query_coordinates(p, tile, WARPGROUP: gl.constexpr):
    """Return the coordinates of a warpgroup's first row of Q and O, in the dense, ragged or packed descriptor."""
    row = tile.position + WARPGROUP * p.variant.warpgroup_positions
    if p.variant.is_varlen:
        ragged_row = RAGGED_ROWS - tile.seqlen_q + row
        stop = tile.q_start + tile.seqlen_q
        if p.variant.pack > 1:
            return [RAGGED_ROWS, stop, ragged_row, tile.head * p.group, 0]
        else:
            return [RAGGED_ROWS, stop, tile.head, ragged_row, 0]
    elif p.variant.pack > 1:
        return [tile.batch, tile.head, row, 0, 0]
    else:
        return [tile.batch, tile.head, row, 0]


@gluon.jit
def key_coordinates(p, tile, row):
    """Return the coordinates of the key tile of K or V whose first key is ``row``."""
    if p.variant.is_varlen:
        stop = tile.k_start + tile.seqlen_k
        return [RAGGED_ROWS, stop, tile.kv_head, RAGGED_ROWS - tile.seqlen_k + row, 0]
    else:
        return [tile.batch, tile.kv_head, row, 0]


@gluon.jit
def output_rows(p, tile, layout: gl.constexpr, WARPGROUP: gl.constexpr):
    """Return, for each of a warpgroup's rows, its index into lse, its row of a (rows, nheads) output, and whether it
    exists.
    """
    row = gl.arange(0, WARPGROUP_ROWS, layout)
    position = tile.position + WARPGROUP * p.variant.warpgroup_positions + (row >> p.variant.pack_log2)
    exists = position < tile.seqlen_q
    if p.variant.pack > 1:
        member = row & (p.variant.pack - 1)
        head = tile.head * p.group + member
        exists = exists & (member < p.group)
    else:
        head = row * 0 + tile.head
    if p.variant.is_varlen:
        first_row = tile.q_start
        lse_index = head * p.seqlen_q + (first_row + position)  # p.seqlen_q: rows of all sequences
    else:
        first_row = tile.batch * p.seqlen_q
        lse_index = (tile.batch * p.nheads + head) * p.seqlen_q + position
    return lse_index, (first_row + position) * p.nheads + head, exists
