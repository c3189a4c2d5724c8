"""The geometry of a backward tile: keys of an entry, the row blocks that it visits, its mask, and where its rows lie.

The rules are those of :mod:`fa3_kernels.plan.key_tiles`, which states them and which the twin follows; the forward has
:mod:`fa3_kernels.gluon.geometry`. ``p`` is the :class:`fa3_kernels.gluon.backward_pipeline.Program`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.geometry import RAGGED_ROWS, WARPGROUP_ROWS
from fa3_kernels.plan import key_tiles


@gluon.jit
def opaque(x):
    """Return ``x`` as a value new to the compiler, so that what is computed from it is not kept in registers across
    steps.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class KeyTile:
    """One decoded entry of the schedule: a key block of a kv head of a sequence."""

    batch: gl.tensor
    kv_head: gl.tensor
    block: gl.tensor  # of the keys of its sequence
    first_key: gl.tensor
    q_start: gl.tensor  # first row of the sequence in packed tensors, else 0
    k_start: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    first_block: gl.tensor  # of the sequence's row blocks among those of a head

    @gluon.constexpr_function
    def __init__(self, where, starts, lengths, first_block):
        self.batch, self.kv_head, self.block, self.first_key = where
        self.q_start, self.k_start = starts
        self.seqlen_q, self.seqlen_k = lengths
        self.first_block = first_block


@gluon.jit
def key_tile(p, entry):
    """Decode an entry: the key block in its lower half, sequence and kv head in the upper one."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = p.k_desc.block_type.shape[-2]
    block = (entry & 0x7FFFFFFF).to(gl.int32)
    row_head = (entry >> 32).to(gl.int32)
    heads = p.nheads // p.group
    batch = row_head // heads
    q_start = batch * 0
    k_start = q_start
    seqlen_q = p.seqlen_q
    seqlen_k = p.seqlen_k
    first_block = batch * gl.cdiv(seqlen_q, tile_m)
    if p.variant.is_varlen:
        q_start = gl.load(p.starts_q + batch)
        k_start = gl.load(p.starts_k + batch)
        seqlen_q = gl.minimum(gl.load(p.starts_q + batch + 1) - q_start, seqlen_q)
        seqlen_k = gl.minimum(gl.load(p.starts_k + batch + 1) - k_start, seqlen_k)
        first_block = q_start // tile_m + batch
    where = (batch, row_head % heads, block, block * tile_n)
    return KeyTile(where, (q_start, k_start), (seqlen_q, seqlen_k), first_block)


SPACING_OF_WIDE = gl.constexpr(key_tiles.SPACING_OF_WIDE)


@gluon.constexpr_function
def _spacing(variant, tile_m, tile_n):
    """Return the row blocks between neighbouring tiles of a gang, see :func:`fa3_kernels.plan.key_tiles.spacing_of`."""
    return SPACING_OF_WIDE.value if variant.is_wide else tile_n // tile_m


@gluon.jit
def _gang(p, tile):
    """Return how many key tiles of a sequence go round together: a shorter packed sequence has room for fewer."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = p.k_desc.block_type.shape[-2]
    spacing: gl.constexpr = _spacing(p.variant, tile_m, tile_n)
    gang = p.gang
    if p.variant.is_varlen:
        rounds = gl.cdiv(tile.seqlen_q, tile_m) // spacing
        while gang > gl.maximum(rounds, 1):
            gang = gang // 2
    return gang


@aggregate
class RowBlocks:
    """Row blocks that see a key of a tile: ``count`` from ``first`` on, visited from ``start`` on and round."""

    first: gl.tensor
    count: gl.tensor
    start: gl.tensor
    right_unmasked: gl.tensor  # rows from this one on see every key of the tile that the right limit could hide
    left_unmasked: gl.tensor  # rows before this one see every key of the tile that the left limit could hide

    @gluon.constexpr_function
    def __init__(self, first, count, start, right_unmasked, left_unmasked):
        self.first = first
        self.count = count
        self.start = start
        self.right_unmasked = right_unmasked
        self.left_unmasked = left_unmasked


@gluon.jit
def row_blocks(p, tile):
    """Return the row blocks that a tile visits; all of them are masked where its keys reach beyond the sequence.

    1 << 30 stands for a limit behind all rows. A tile whose keys all lie beyond the sequence visits none.
    """
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = p.k_desc.block_type.shape[-2]
    offset = tile.seqlen_k - tile.seqlen_q
    last_key = gl.minimum(tile.first_key + tile_n, tile.seqlen_k) - 1
    first = tile.seqlen_q * 0
    stop = tile.seqlen_q
    right_unmasked = first
    left_unmasked = first + (1 << 30)
    if p.variant.is_right_limited:
        first = gl.maximum(tile.first_key - offset - p.right, 0) // tile_m
        right_unmasked = gl.maximum(last_key - offset - p.right, 0)
    if p.variant.is_left_limited:
        stop = gl.minimum(stop, last_key - offset + p.left + 1)
        left_unmasked = tile.first_key - offset + p.left + 1
    if p.variant.has_key_tail:
        right_unmasked = gl.where(last_key == tile.first_key + tile_n - 1, right_unmasked, 1 << 30)
    count = gl.maximum(gl.cdiv(gl.maximum(stop, 0), tile_m) - first, 0)
    count = gl.where(last_key >= tile.first_key, count, 0)
    start = first * 0
    if p.variant.goes_round:
        start = tile.block % _gang(p, tile) * _spacing(p.variant, tile_m, tile_n)
    if p.variant.folds:
        cut = gl.minimum(gl.maximum(p.turn - first, 0), gl.maximum(count - 1, 0))
        start = gl.where(tile.block < p.fold, cut, 0)
    return RowBlocks(first, count, start, right_unmasked, left_unmasked)


@gluon.jit
def advanced(p, rows, cursor):
    """Return the row block to visit next, counted from the first one; behind the last one of a head it is the start
    again.

    A tile that folds goes up from its start to the end, then down from in front of its start to 0.
    """
    if p.variant.folds:
        onward = gl.where(cursor >= rows.start, cursor + 1, cursor - 1)
        onward = gl.where(onward == rows.count, rows.start - 1, onward)
        return gl.where(onward < 0, rows.start, onward)
    else:
        return gl.where(cursor + 1 == rows.count, 0, cursor + 1)


@gluon.jit
def visible_scores(p, s, tile, first_row, WARPGROUP: gl.constexpr):
    """Set transposed scores of a warpgroup's keys to -inf where the window hides or the sequence ends.

    A column is a row of Q, so each key has a range of columns that see it. 1 << 30 stands for no limit.
    """
    key = tile.first_key + WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, s.type.layout))
    key = opaque(key)
    diagonal = key - (tile.seqlen_k - tile.seqlen_q) - first_row
    stop = key * 0 + (1 << 30)
    start = key * 0 - (1 << 30)
    if p.variant.is_left_limited:
        stop = diagonal + p.left + 1
    if p.variant.is_right_limited:
        start = diagonal - p.right
    start = gl.where(key < tile.seqlen_k, start, 1 << 30)
    return softmax.visible(s, stop, start)


@gluon.jit
def key_coordinates(p, tile, row):
    """Return the coordinates of a row of K, V, dK or dV."""
    if p.variant.is_varlen:
        return [RAGGED_ROWS, tile.k_start + tile.seqlen_k, tile.kv_head, RAGGED_ROWS - tile.seqlen_k + row, 0]
    else:
        return [tile.batch, tile.kv_head, row, 0]


@gluon.jit
def query_coordinates(p, tile, head, row):
    """Return the coordinates of a row of Q or dO of a query head."""
    if p.variant.is_varlen:
        return [RAGGED_ROWS, tile.q_start + tile.seqlen_q, head, RAGGED_ROWS - tile.seqlen_q + row, 0]
    else:
        return [tile.batch, head, row, 0]


@gluon.jit
def block_index(p, tile, head, block):
    """Return the index of a row block among those of all heads."""
    return head * p.num_blocks + tile.first_block + block


@gluon.jit
def dq_coordinates(p, tile, head, block, part, BOX: gl.constexpr):
    """Return where a part of a staged box of dQ lies in the sums, which are (rows of all heads, channels)."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    rows: gl.constexpr = p.dq_desc.block_type.shape[0]
    channels: gl.constexpr = p.dq_desc.block_type.shape[1]
    row = block_index(p, tile, head, block) * tile_m
    if p.variant.splits_channels:
        return [row, (BOX * p.variant.dq_parts + part) * channels]
    else:
        return [row + BOX * rows, part * channels]


@gluon.jit
def parts_before(p, tile, block):
    """Return how many tiles add to a row block's dQ before this one, in deterministic mode.

    The order is that of :meth:`fa3_kernels.plan.key_tiles.Walk.parts`.
    """
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = p.k_desc.block_type.shape[-2]
    spacing: gl.constexpr = _spacing(p.variant, tile_m, tile_n)
    stride: gl.constexpr = spacing * tile_m // tile_n
    blocks = gl.cdiv(tile.seqlen_k, tile_n)
    if p.variant.goes_round:
        gang = _gang(p, tile)
        first = tile.block // gang * gang
        size = gl.minimum(blocks - first, gang)
        nearest = gl.minimum(block // spacing, size - 1)
        distance = nearest - (tile.block - first)
        return first + gl.where(distance < 0, distance + size, distance)
    else:
        last = blocks - 1
        if p.variant.is_right_limited:
            last_row = gl.minimum((block + 1) * tile_m, tile.seqlen_q) - 1
            last_key = last_row + (tile.seqlen_k - tile.seqlen_q) + p.right
            last = gl.minimum(last, last_key // tile_n)
        if p.variant.folds and stride == 1:
            short = gl.maximum(last + 1 - p.fold, 0)
            return gl.where(tile.block < p.fold, short + tile.block, last - tile.block)
        elif p.variant.folds:
            # the place in the tile's own gang, and all tiles of the gangs before it
            is_long = tile.block < p.fold
            gang = gl.where(is_long, tile.block, blocks - 1 - tile.block) % stride
            count = gl.where(is_long, tile.block, last - tile.block) // stride
            for other in gl.static_range(stride):
                # distance of the short tiles of gang ``other`` from a multiple of the stride
                offset = (blocks - 1 - other) % stride
                short = (gl.maximum(last, p.fold - 1) - offset + stride) // stride
                short = short - (p.fold - 1 - offset + stride) // stride
                long = (gl.minimum(last, p.fold - 1) - other + stride) // stride
                count = count + gl.where((other < gang) | ((other == gang) & is_long), short, 0)
                count = count + gl.where(other < gang, long, 0)
            return count
        else:
            return last - tile.block
