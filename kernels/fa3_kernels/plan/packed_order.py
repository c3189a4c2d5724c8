"""The tile schedule of packed sequences, whose lengths only the GPU knows: its rule and its upper bounds.

The kernel :mod:`fa3_kernels.gluon.packed_order` makes the schedule by this rule; :mod:`fa3_kernels.plan.plan` sizes its
table. Other problems are scheduled on the host, by :mod:`fa3_kernels.plan.tile_order`.

Sequences with the most keys come first, unless a batch has more than 512 of them. A unit of work is a row tile of one
head. With a causal mask, and enough tiles, it is a pair of them, the tile with the most keys and the one with the
fewest, so that all units of a sequence take about equally long. Units are dealt out in turn, forwards and backwards.
Heads are taken a few at a time, so that their K and V stay in L2. A CTA that gets nothing repeats the shortest tile,
whose bits are the same each time. No bit of the output depends on the order. Compared with the greedy schedule that
knows the lengths, the longest CTA has 0 to 5 % more key blocks (31 batches of equal, mixed and single long sequences, 8
to 32 heads, 132 CTAs).
"""

from __future__ import annotations

from typing import NamedTuple

MAX_SORTED = 512  # sequences that are sorted at most, as the time for it grows with the square of their number


class PackedOrder(NamedTuple):
    """Holds what the schedule depends on beside the lengths.

    ``tiles_per_unit`` is 1 or 2. ``positions`` are the query positions of a row tile. ``tile_heads`` heads have tiles
    of their own, and ``heads_per_kv`` of them share K and V. ``left`` and ``right`` limit the keys as in a window, -1
    for none. With ``keeps_empty`` tiles that see no key are worked on like the others.
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
        """Return the most units that ``batch`` sequences with ``total_q`` query rows in all can have.

        The lengths are not known, so this is an upper bound.

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
        """Return the shape of the schedule for at most ``units`` units: CTAs, and entries of each with the end mark."""
        ctas = max(1, min(units, num_ctas))
        return ctas, self.tiles_per_unit * -(-units // ctas) + 1
