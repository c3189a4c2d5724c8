"""The schedule of packed sequences, made on the CPU: what the GPU's ``packed_order`` must make of the same lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from fa3_kernels.plan.packed_order import MAX_SORTED, PackedOrder
from fa3_kernels.plan.tile_order import END, HEAD_SHIFT, L2_BYTES, SPLIT_SHIFT, Shape, key_blocks


def heads_at_once(order: PackedOrder, seqlen_k: int) -> int:
    """Heads of a sequence whose K and V fit L2 together; all that share one K and V count as one."""
    return max(1, L2_BYTES // max(1, 4 * seqlen_k * order.head_dim)) * order.heads_per_kv


def visible_blocks(order: PackedOrder, seqlen_q: int, seqlen_k: int, m_block: int, split: int) -> int:
    """Key blocks of one split of a row tile."""
    shape = Shape((seqlen_q,), (seqlen_k,), 1, 1, order.left, order.right)
    last = min((m_block + 1) * order.positions, seqlen_q) - 1
    count = len(key_blocks(shape, 0, m_block * order.positions, last, order.tile_n))
    size = -(-count // order.num_splits)
    return max(0, min(size, count - split * size))


def packed_schedule(
    order: PackedOrder, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], num_ctas: int, max_seqlen_q: int = 0
) -> np.ndarray:
    """Make the schedule on the CPU.

    Parameters
    ----------
    order : PackedOrder
    seqlens_q, seqlens_k : tuple of int
        Lengths of the packed sequences.
    num_ctas : int
        CTAs there may be.
    max_seqlen_q : int
        The longest query sequence there may be, by default the longest there is.

    Returns
    -------
    int64 (ctas, entries)
        As :func:`fa3_kernels.plan.tile_order.static_schedule`, but that a CTA without a tile of its own repeats the
        last tile of the first head of the shortest sequence. Where no tile sees a key, every CTA has tile 0, for which
        the launch's first sequence stands empty beside one key.
    """
    batch = len(seqlens_q)
    units = order.units_at_most(batch, sum(seqlens_q), max_seqlen_q or max(seqlens_q))
    ctas, width = order.table_shape(units, num_ctas)
    lists: list[list[int]] = [[] for _ in range(ctas)]
    for number, (b, pair, head, split) in enumerate(_units(order, seqlens_q, seqlens_k)):
        turn, lane = divmod(number, ctas)
        tiles = -(-seqlens_q[b] // order.positions)
        for m_block in dict.fromkeys((tiles - 1 - pair, pair)[: order.tiles_per_unit]):
            if order.keeps_empty or visible_blocks(order, seqlens_q[b], seqlens_k[b], m_block, split):
                lists[ctas - 1 - lane if turn % 2 else lane].append(entry(b * order.tile_heads + head, split, m_block))
    visible = [b for b in range(batch) if seqlens_q[b] and (seqlens_k[b] or order.keeps_empty)]
    spare = 0
    if visible:
        b = min(visible, key=lambda b: (seqlens_k[b], b))
        spare = entry(b * order.tile_heads, 0, -(-seqlens_q[b] // order.positions) - 1)
    table = np.full((ctas, width), END, np.int64)
    for row, entries in zip(table, lists, strict=True):
        entries = entries or [spare]
        row[: len(entries)] = entries
    return table


def _units(
    order: PackedOrder, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the units of work as they are dealt out: sequence, number of the pair of tiles, head, and split."""
    batch = len(seqlens_q)
    for b in sorted(range(batch), key=lambda b: -seqlens_k[b]) if batch <= MAX_SORTED else range(batch):
        tiles = -(-seqlens_q[b] // order.positions)
        of_head = -(-tiles // order.tiles_per_unit)
        at_once = heads_at_once(order, seqlens_k[b])
        for first in range(0, order.tile_heads, at_once):
            heads = range(first, min(first + at_once, order.tile_heads))
            yield from product((b,), range(of_head), heads, range(order.num_splits))


def entry(head: int, split: int, m_block: int) -> int:
    """One tile as a schedule names it; ``head`` counts the heads of all sequences."""
    return (head << HEAD_SHIFT) + (split << SPLIT_SHIFT) + m_block
