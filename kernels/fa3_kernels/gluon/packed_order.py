"""The kernel that makes the tile schedule of packed sequences on the GPU, from ``cu_seqlens``, so that no call waits.

Each program makes the list of one CTA of the forward kernel: it finds the sequences of the CTA's units of work, decodes
the units into tiles, keeps the tiles that see a key, and writes zeros and -inf for the others.
:mod:`fa3_kernels.plan.packed_order` states the rule, and tests hold the kernel to ``tests/kernels/packed_schedule.py``,
entry by entry. It is written in Triton rather than Gluon: there is no layout to choose, and Triton's interpreter runs
it on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTEGERS = [
    "batch",
    "total_q",
    "total_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "width",
    "nheads",
    "tile_heads",
    "heads_per_kv",
    "tiles_per_unit",
    "positions",
    "tile_n",
    "left",
    "right",
    "num_splits",
    "kv_bytes",
    "head_dim",
]


@triton.jit
def _lengths(cu_seqlens, sequence, batch, total, longest):
    """Return the start and the length of sequences; starts that do not rise, or leave the tensor, are cut to what
    exists.

    Sequences from ``batch`` on have length 0, and none is longer than ``longest``.
    """
    exists = sequence < batch
    start = tl.load(cu_seqlens + sequence, mask=exists, other=0)
    stop = tl.load(cu_seqlens + sequence + 1, mask=exists, other=0)
    start = tl.minimum(tl.maximum(start, 0), total)
    length = tl.minimum(tl.minimum(stop, total) - start, longest)
    return start, tl.where(exists, tl.maximum(length, 0), 0)


@triton.jit
def _keys(seqlens, sequence, batch, total, longest, first_keys):
    """Return the start and the length of the keys of sequences.

    In a cache (``first_keys`` given) ``seqlens`` are the numbers of keys in it; those in front of the first key do not
    count. Otherwise ``seqlens`` are the starts of packed keys.
    """
    if first_keys is None:
        return _lengths(seqlens, sequence, batch, total, longest)
    else:
        exists = sequence < batch
        first = tl.load(first_keys + sequence, mask=exists, other=0)
        used = tl.load(seqlens + sequence, mask=exists, other=0)
        first = tl.minimum(tl.maximum(first, 0), longest)
        return first, tl.maximum(tl.minimum(used, longest) - first, 0)


@triton.jit
def _units(seqlen_q, positions, tiles_per_unit, tile_heads, num_splits):
    """Return the units of work of sequences, over all heads and splits; a unit is one row tile, or a pair of them."""
    return tl.cdiv(tl.cdiv(seqlen_q, positions), tiles_per_unit) * tile_heads * num_splits


@triton.jit
def _fill(
    out, lse, head, q_start, seqlen_q, first, positions, group, nheads, total_q, head_dim, HEAD_DIM: tl.constexpr
):
    """Write 0 and -inf for the rows of a tile that sees no key; a tile of packed heads has ``group`` of them."""
    ROWS: tl.constexpr = 16
    column = tl.arange(0, HEAD_DIM)
    for position in range(first, min(first + positions, seqlen_q), ROWS):
        row = position + tl.arange(0, ROWS)
        exists = row < min(first + positions, seqlen_q)
        for member in range(group):
            of_head = head * group + member
            index = ((q_start + row).to(tl.int64) * nheads + of_head) * head_dim
            zeros = tl.zeros([ROWS, HEAD_DIM], out.dtype.element_ty)
            tl.store(out + index[:, None] + column[None, :], zeros, mask=exists[:, None] & (column < head_dim)[None, :])
            tl.store(lse + of_head.to(tl.int64) * total_q + q_start + row, float("-inf"), mask=exists)


@triton.jit(do_not_specialize=[*_INTEGERS, "cu_seqlens_q", "cu_seqlens_k", "first_keys", "chunk"])
def packed_order(
    cu_seqlens_q,
    cu_seqlens_k,
    sequences,
    schedule,
    out,
    lse,
    batch,
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    width,
    nheads,
    tile_heads,
    heads_per_kv,
    tiles_per_unit,
    positions,
    tile_n,
    left,
    right,
    num_splits,
    kv_bytes,
    head_dim,
    L2_BYTES: tl.constexpr,
    SORTED: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    first_keys=None,
    KEEPS_EMPTY: tl.constexpr = False,
    LETS_NEXT: tl.constexpr = False,
    chunk=None,
):
    """Make one row of the schedule; the grid is the CTAs of the forward kernel.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,)
        For a cache the second one is the number of its keys, int32 (batch,).
    sequences : int32 (batch, 4)
        Written by program 0: q_start, seqlen_q, k_start, seqlen_k.
    schedule : int64 (ctas, width)
        Written: the entries of each CTA, then -1.
    out, lse : outputs of the forward, (total_q, nheads, head_dim) and float32 (nheads, total_q)
        Rows of tiles without a key are written here, unless the keys are split.
    max_seqlen_q, max_seqlen_k : int
        Longer sequences are cut to them: the schedule has room for no more.
    tile_heads, heads_per_kv, tiles_per_unit, positions, tile_n, left, right, num_splits
        As :class:`fa3_kernels.plan.packed_order.PackedOrder`.
    kv_bytes : int
        Bytes of K and V per key and head, as the schedule counts them.
    SORTED : bool
        Whether the sequences are sorted by their keys.
    ENTRIES, CHUNK : int
        How many entries, and how many sequences, are looked at together; powers of two.
    HEAD_DIM : int
        Power of two that holds head_dim.
    first_keys : int32 (batch,), optional
        Of a cache: where the keys of each sequence begin.
    KEEPS_EMPTY : bool
        Whether tiles that see no key are kept.
    LETS_NEXT : bool
        Whether the next grid may start at once; it then waits for this one's results itself.
    chunk : int, optional
        Keys of a chunk outside which a row sees nothing.
    """
    if LETS_NEXT:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    lane = tl.arange(0, CHUNK)

    # Program 0 writes the lengths; every program counts the units and looks for the sequence with the fewest keys.
    total = 0
    shortest = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for first in range(0, batch, CHUNK):
        sequence = first + lane
        q_start, seqlen_q = _lengths(cu_seqlens_q, sequence, batch, total_q, max_seqlen_q)
        k_start, seqlen_k = _keys(cu_seqlens_k, sequence, batch, total_k, max_seqlen_k, first_keys)
        total += tl.sum(_units(seqlen_q, positions, tiles_per_unit, tile_heads, num_splits))
        has_tile = (seqlen_q > 0) & ((seqlen_k > 0) | KEEPS_EMPTY)
        rank = tl.where(has_tile, (seqlen_k.to(tl.int64) << 32) + sequence, 0x7FFFFFFFFFFFFFFF)
        shortest = tl.minimum(shortest, tl.min(rank))
        if cta == 0:
            row = sequences + 4 * sequence
            tl.store(row, q_start, mask=sequence < batch)
            tl.store(row + 1, seqlen_q, mask=sequence < batch)
            tl.store(row + 2, k_start, mask=sequence < batch)
            tl.store(row + 3, seqlen_k, mask=sequence < batch)

    written = 0
    for first_entry in range(0, width - 1, ENTRIES):
        index = first_entry + tl.arange(0, ENTRIES)
        turn = index // tiles_per_unit
        unit = turn * ctas + tl.where(turn % 2 == 1, ctas - 1 - cta, cta)

        # The sequence of each unit, where its units start, and its lengths. Each unit belongs to one sequence, so a sum
        # over all sequences picks the values of that one.
        owner = tl.zeros([ENTRIES], tl.int32)
        of_owner = tl.zeros([ENTRIES], tl.int32)
        own_q_start = tl.zeros([ENTRIES], tl.int32)
        own_q = tl.zeros([ENTRIES], tl.int32)
        own_k = tl.zeros([ENTRIES], tl.int32)
        before = 0
        for first in range(0, batch, CHUNK):
            sequence = first + lane
            q_start, seqlen_q = _lengths(cu_seqlens_q, sequence, batch, total_q, max_seqlen_q)
            _, seqlen_k = _keys(cu_seqlens_k, sequence, batch, total_k, max_seqlen_k, first_keys)
            units = _units(seqlen_q, positions, tiles_per_unit, tile_heads, num_splits)
            if SORTED:
                start = tl.zeros([CHUNK], tl.int32)
                for other_first in range(0, batch, CHUNK):
                    other = other_first + lane
                    _, other_q = _lengths(cu_seqlens_q, other, batch, total_q, max_seqlen_q)
                    _, other_k = _keys(cu_seqlens_k, other, batch, total_k, max_seqlen_k, first_keys)
                    is_longer = other_k[None, :] > seqlen_k[:, None]
                    is_earlier = (other_k[None, :] == seqlen_k[:, None]) & (other[None, :] < sequence[:, None])
                    others = _units(other_q, positions, tiles_per_unit, tile_heads, num_splits)
                    start += tl.sum(tl.where(is_longer | is_earlier, others[None, :], 0), axis=1)
            else:
                start = before + tl.cumsum(units) - units
                before += tl.sum(units)
            hit = (start[None, :] <= unit[:, None]) & (unit[:, None] < (start + units)[None, :])
            owner += tl.sum(tl.where(hit, sequence[None, :], 0), axis=1)
            of_owner += tl.sum(tl.where(hit, start[None, :], 0), axis=1)
            own_q_start += tl.sum(tl.where(hit, q_start[None, :], 0), axis=1)
            own_q += tl.sum(tl.where(hit, seqlen_q[None, :], 0), axis=1)
            own_k += tl.sum(tl.where(hit, seqlen_k[None, :], 0), axis=1)

        # Which heads are in flight together, which of them this unit is of, and its tile.
        tiles = tl.cdiv(own_q, positions)
        pairs = tl.maximum(tl.cdiv(tiles, tiles_per_unit), 1)
        at_once = tl.maximum(L2_BYTES // tl.maximum(own_k.to(tl.int64) * kv_bytes, 1), 1).to(tl.int32) * heads_per_kv
        at_once = tl.minimum(at_once, tile_heads)
        place = unit - of_owner
        first_head = place // (at_once * pairs * num_splits) * at_once
        place -= first_head * pairs * num_splits
        heads = tl.maximum(tl.minimum(at_once, tile_heads - first_head), 1)
        pair = place // (heads * num_splits)
        place -= pair * heads * num_splits
        head = first_head + place // num_splits
        split = place % num_splits
        is_second = index % tiles_per_unit == 1
        m_block = tl.where(is_second, pair, tiles - 1 - pair)
        exists = (unit < total) & ~(is_second & (pair == tiles - 1 - pair))

        # The key blocks of the tile, as in fa3_kernels.gluon.geometry.key_blocks.
        offset = own_k - own_q
        last = tl.minimum((m_block + 1) * positions, own_q) - 1 + offset
        stop = tl.where(right < 0, own_k, tl.minimum(own_k, last + right + 1))
        start_key = tl.where(left < 0, 0, tl.maximum(m_block * positions + offset - left, 0))
        if chunk is not None:
            stop = tl.minimum(stop, tl.where(last < 0, 0, last // chunk * chunk + chunk))
            start_key = tl.maximum(start_key, tl.maximum(m_block * positions + offset, 0) // chunk * chunk)
        count = tl.maximum(tl.cdiv(tl.maximum(stop, 0), tile_n) - start_key // tile_n, 0)
        size = tl.cdiv(count, num_splits)
        sees_key = (split * size < count) | KEEPS_EMPTY

        keep = exists & sees_key
        kept = keep.to(tl.int32)
        entry = (owner * tile_heads + head).to(tl.int64) * (1 << 32) + split.to(tl.int64) * (1 << 20) + m_block
        tl.store(schedule + cta * width + written + tl.cumsum(kept) - kept, entry, mask=keep)
        written += tl.sum(kept)

        dropped = exists & ~sees_key & (num_splits == 1)
        if tl.sum(dropped.to(tl.int32)) > 0:
            for i in range(ENTRIES):
                mine = dropped & (tl.arange(0, ENTRIES) == i)
                if tl.sum(mine.to(tl.int32)) > 0:
                    _fill(
                        out,
                        lse,
                        tl.sum(tl.where(mine, head, 0)),
                        tl.sum(tl.where(mine, own_q_start, 0)),
                        tl.sum(tl.where(mine, own_q, 0)),
                        tl.sum(tl.where(mine, m_block, 0)) * positions,
                        positions,
                        nheads // tile_heads,
                        nheads,
                        total_q,
                        head_dim,
                        HEAD_DIM,
                    )

    # A CTA without a tile repeats the shortest one, whose bits are the same each time.
    if written == 0:
        spare = tl.full([], 0, tl.int64)
        if shortest == 0x7FFFFFFFFFFFFFFF:  # no tile sees a key: an empty sequence beside one key
            if cta == 0:
                tl.debug_barrier()
                row = tl.arange(0, 4)
                if KEEPS_EMPTY:  # the key may be in no page
                    tl.store(sequences + row, tl.zeros([4], tl.int32))
                else:
                    tl.store(sequences + row, (row == 3).to(tl.int32))
        else:
            sequence = (shortest & 0xFFFFFFFF).to(tl.int32)
            _, seqlen_q = _lengths(cu_seqlens_q, sequence, batch, total_q, max_seqlen_q)
            spare = (sequence * tile_heads).to(tl.int64) * (1 << 32) + tl.cdiv(seqlen_q, positions) - 1
        tl.store(schedule + cta * width, spare)
        written += 1
    tl.store(schedule + cta * width + written, -1)
