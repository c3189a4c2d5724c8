"""The tile schedule of packed sequences, whose lengths only the GPU knows: the rule of ``gluon/packed_order.py``.

Sequences go longest keys first, but for batches of more than 512. A unit of work is a row tile of one head; with a
causal mask, where there are enough of them, a pair, the tile with the most keys and the one with the fewest, so that
all units of a sequence take about as long. Units are dealt out in turn, forwards and backwards. Heads are taken a few
at a time, so that their K and V stay in L2. A CTA that gets nothing repeats the shortest tile, whose bits are the same
each time. No bit of the output depends on the order. Beside the greedy schedule that knows the lengths, the longest CTA
has 0 to 5 % more key blocks (31 batches of equal, mixed and single long sequences, 8 to 32 heads, 132 CTAs).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.tile_order import END, HEAD_SHIFT, L2_BYTES, SPLIT_SHIFT, Shape, key_blocks

MAX_SORTED = 512  # sequences; more of them are taken as they come, for sorting takes the square of their number


class PackedOrder(NamedTuple):
    """Holds what the schedule depends on beside the lengths.

    ``tiles_per_unit`` is 1 or 2, ``positions`` are the query positions of a row tile, ``tile_heads`` the heads that
    have tiles of their own, of which ``heads_per_kv`` share K and V; ``left`` and ``right`` limit the keys as in a
    window, -1 for none. With ``keeps_empty`` tiles that see no key are worked on like the others.
    """

    tiles_per_unit: int
    positions: int
    tile_n: int
    tile_heads: int
    heads_per_kv: int
    left: int
    right: int
    num_splits: int
    head_dim: int
    keeps_empty: bool = False

    def units_at_most(self, batch: int, total_q: int, max_seqlen_q: int) -> int:
        """Upper bound of the units of ``batch`` sequences with ``total_q`` query rows in all, without their lengths.

        >>> PackedOrder(2, 128, 128, 2, 1, -1, 0, 1, 128).units_at_most(3, 1000, 700)
        12
        """
        tiles = min(
            (total_q + batch * (self.positions - 1)) // self.positions, batch * -(-max_seqlen_q // self.positions)
        )
        units = tiles if self.tiles_per_unit == 1 else min((tiles + batch) // 2, tiles)
        return units * self.tile_heads * self.num_splits

    def pays_in_pairs(self, tiles: int, num_ctas: int) -> bool:
        """Tell whether a unit should be two tiles: a mask makes tiles differ, and every CTA gets a pair."""
        return self.right >= 0 and tiles >= 2 * num_ctas

    def table_shape(self, units: int, num_ctas: int) -> tuple[int, int]:
        """CTAs, and entries of each with the end mark, for at most ``units`` units."""
        ctas = max(1, min(units, num_ctas))
        return ctas, self.tiles_per_unit * -(-units // ctas) + 1

    def heads_at_once(self, seqlen_k: int) -> int:
        """Heads of a sequence whose K and V fit L2 together; all that share one K and V count as one."""
        return max(1, L2_BYTES // max(1, 4 * seqlen_k * self.head_dim)) * self.heads_per_kv

    def blocks(self, seqlen_q: int, seqlen_k: int, m_block: int, split: int) -> int:
        """Key blocks of one split of a row tile."""
        shape = Shape((seqlen_q,), (seqlen_k,), 1, 1, self.left, self.right)
        last = min((m_block + 1) * self.positions, seqlen_q) - 1
        count = len(key_blocks(shape, 0, m_block * self.positions, last, self.tile_n))
        size = -(-count // self.num_splits)
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
            if order.keeps_empty or order.blocks(seqlens_q[b], seqlens_k[b], m_block, split):
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
        at_once = order.heads_at_once(seqlens_k[b])
        for first in range(0, order.tile_heads, at_once):
            heads = range(first, min(first + at_once, order.tile_heads))
            yield from product((b,), range(of_head), heads, range(order.num_splits))


def entry(head: int, split: int, m_block: int) -> int:
    """One tile as a schedule names it; ``head`` counts the heads of all sequences."""
    return (head << HEAD_SHIFT) + (split << SPLIT_SHIFT) + m_block
