"""The tile schedule of packed sequences, whose lengths only the GPU knows: the rule of ``gluon/packed_order.py``.

Sequences go longest keys first, but for batches of more than 512. A unit of work is a row tile of one head; with a
causal mask, where there are enough of them, a pair, the tile with the most keys and the one with the fewest, so that
all units of a sequence take about as long. Units are dealt out in turn, forwards and backwards. Heads are taken a few
at a time, so that their K and V stay in L2. A CTA that gets nothing repeats the shortest tile, whose bits are the same
each time. No bit of the output depends on the order. Beside the greedy schedule that knows the lengths, the longest CTA
has 0 to 5 % more key blocks (31 batches of equal, mixed and single long sequences, 8 to 32 heads, 132 CTAs).
"""

from __future__ import annotations

from typing import NamedTuple

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
