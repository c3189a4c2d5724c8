"""The tile schedule of packed sequences, whose lengths only the GPU knows: its rule and its upper bounds.

The kernel :mod:`fa3_kernels.gluon.packed_order` makes the schedule by this rule; :mod:`fa3_kernels.plan.plan` sizes its
table. :func:`dealt_out` makes the same on a CPU, for who knows the lengths, as the simulator does.
Other problems are scheduled on the host, by :mod:`fa3_kernels.plan.tile_order`.

Sequences with the most keys come first, unless a batch has more than 512 of them. A unit of work is a row tile of one
head. With a causal mask, and enough tiles, it is a pair of them, the tile with the most keys and the one with the
fewest, so that all units of a sequence take about equally long. Units are dealt out in turn, forwards and backwards.
Heads are taken a few at a time, so that their K and V stay in L2. A CTA that gets nothing repeats the shortest tile,
whose bits are the same each time. No bit of the output depends on the order. Compared with the greedy schedule that
knows the lengths, the longest CTA has 0 to 5 % more key blocks (31 batches of equal, mixed and single long sequences, 8
to 32 heads, 132 CTAs).
"""

from __future__ import annotations

from itertools import count, product
from typing import NamedTuple

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tile_order import L2_BYTES, Shape, items
from fa3_kernels.plan.tiles import power_of_two

CHUNK = 32  # sequences that the kernel looks at together
MAX_SORTED = 512  # sequences that are sorted at most, as the time for it grows with the square of their number


class PackedOrder(NamedTuple):
    """Holds what the schedule depends on beside the lengths.

    ``tiles_per_unit`` is 1 or 2. ``positions`` are the query positions of a row tile. ``tile_heads`` heads have tiles
    of their own, and ``heads_per_kv`` of them share K and V. ``left`` and ``right`` limit the keys as in a window, -1
    for none, and ``chunk`` is how many keys a chunk has outside which a row sees nothing, 0 for none. With
    ``keeps_empty`` tiles that see no key are worked on like the others.
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
    chunk: int = 0

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
        """Tell whether a unit should be two tiles: a mask makes tiles differ, every CTA gets a pair, and none gets more
        tiles than if they were dealt one by one.

        >>> order = PackedOrder(1, 128, 128, 24, 3, -1, 0, 1, 128)
        >>> order.pays_in_pairs(512, 132), order.pays_in_pairs(384, 132)  # 4 tiles either way; 4 instead of 3
        (True, False)
        """
        of_pairs = -(-((tiles + 1) // 2) // num_ctas)
        return self.right >= 0 and tiles >= 2 * num_ctas and 2 * of_pairs <= -(-tiles // num_ctas)

    def table_shape(self, units: int, num_ctas: int) -> tuple[int, int]:
        """Return the shape of the schedule for at most ``units`` units: CTAs, and entries of each with the end mark."""
        ctas = max(1, min(units, num_ctas))
        return ctas, self.tiles_per_unit * -(-units // ctas) + 1

    def of_launch(
        self, batch: int, total_q: int, max_seqlen_q: int, num_ctas: int
    ) -> tuple[PackedOrder, tuple[int, int]]:
        """Return the order in units of one tile or of two, as a launch has it, and :meth:`table_shape`."""
        units = self.units_at_most(batch, total_q, max_seqlen_q)
        if not self.pays_in_pairs(units, num_ctas):
            return self, self.table_shape(units, num_ctas)
        two = self._replace(tiles_per_unit=2)
        return two, two.table_shape(two.units_at_most(batch, total_q, max_seqlen_q), num_ctas)


def order_of(shape: Shape, config: Config, *, keeps_empty: bool) -> PackedOrder:
    """Return the order of a launch in units of one tile; ``shape`` has the longest lengths that there may be."""
    return PackedOrder(
        tiles_per_unit=1,
        positions=config.tile_m // (power_of_two(shape.group) if shape.pack_gqa else 1),
        tile_n=config.tile_n,
        tile_heads=shape.tile_heads,
        heads_per_kv=1 if shape.pack_gqa else shape.group,
        left=shape.left,
        right=shape.right,
        num_splits=config.num_splits,
        head_dim=config.head_dim,
        keeps_empty=keeps_empty,
        chunk=shape.chunk,
    )


def dealt_out(
    order: PackedOrder, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], ctas: int
) -> list[list[tuple[int, int, int]]]:
    """Return the tiles of every CTA as the kernel deals them out to so many, of which each gets one at least.

    A tile is its head, counted over all sequences, its row tile and its split. A CTA without a tile of its own repeats
    the last tile of the first head of the shortest sequence. Where no tile sees a key, every CTA has tile 0, for which
    the launch's first sequence stands empty beside one key.
    """
    ranked = sorted(range(len(seqlens_q)), key=lambda b: -seqlens_k[b])
    lists: list[list[tuple[int, int, int]]] = [[] for _ in range(ctas)]
    shape = Shape(seqlens_q, seqlens_k, 1, 1, order.left, order.right, num_splits=order.num_splits, chunk=order.chunk)
    number = count()
    for b in ranked if len(ranked) <= MAX_SORTED else sorted(ranked):
        seen = {(item.m_block, item.split) for item in items(shape, b, order.positions, order.tile_n)}
        tiles = -(-seqlens_q[b] // order.positions)
        pairs = -(-tiles // order.tiles_per_unit)
        at_once = max(1, L2_BYTES // max(1, 4 * seqlens_k[b] * order.head_dim)) * order.heads_per_kv
        for first in range(0, order.tile_heads, at_once):
            for pair, head, split in product(
                range(pairs), range(first, min(first + at_once, order.tile_heads)), range(order.num_splits)
            ):
                turn, lane = divmod(next(number), ctas)
                lists[ctas - 1 - lane if turn % 2 else lane] += [
                    (b * order.tile_heads + head, m_block, split)
                    for m_block in dict.fromkeys((tiles - 1 - pair, pair)[: order.tiles_per_unit])
                    if order.keeps_empty or (m_block, split) in seen
                ]
    working = (b for b in sorted(ranked) if seqlens_q[b] and (seqlens_k[b] or order.keeps_empty))
    b = min(working, key=lambda b: seqlens_k[b], default=-1)
    spare = (b * order.tile_heads, -(-seqlens_q[b] // order.positions) - 1, 0) if b >= 0 else (0, 0, 0)
    return [each or [spare] for each in lists]
