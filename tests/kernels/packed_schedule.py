"""The schedule of packed sequences as a table: what the GPU's ``packed_order`` must make of the same lengths."""

from __future__ import annotations

import numpy as np

from fa3_kernels.plan.packed_order import PackedOrder, dealt_out
from fa3_kernels.plan.tile_order import END, HEAD_SHIFT, SPLIT_SHIFT, Shape, key_blocks


def visible_blocks(order: PackedOrder, seqlen_q: int, seqlen_k: int, m_block: int, split: int) -> int:
    """Key blocks of one split of a row tile."""
    shape = Shape((seqlen_q,), (seqlen_k,), 1, 1, order.left, order.right, chunk=order.chunk)
    last = min((m_block + 1) * order.positions, seqlen_q) - 1
    count = len(key_blocks(shape, 0, m_block * order.positions, last, order.tile_n))
    size = -(-count // order.num_splits)
    return max(0, min(size, count - split * size))


def packed_schedule(
    order: PackedOrder, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], num_ctas: int, max_seqlen_q: int = 0
) -> np.ndarray:
    """Make the schedule on the CPU, int64 (ctas, entries), as the GPU lays it out.

    ``max_seqlen_q`` is the longest query sequence there may be, by default the longest there is.
    """
    units = order.units_at_most(len(seqlens_q), sum(seqlens_q), max_seqlen_q or max(seqlens_q))
    ctas, width = order.table_shape(units, num_ctas)
    table = np.full((ctas, width), END, np.int64)
    for row, tiles in zip(table, dealt_out(order, seqlens_q, seqlens_k, ctas), strict=True):
        row[: len(tiles)] = [(head << HEAD_SHIFT) + (split << SPLIT_SHIFT) + m_block for head, m_block, split in tiles]
    return table
