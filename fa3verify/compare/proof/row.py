"""The part of a plan that decides the bits of a row, as a value: if it is equal in two calls, so are the bits.

The row has the same operands in both calls, so that neighbours, batch and schedule act on it through this value alone.
That holds for finite operands: a key block that only other rows of the tile see adds 0 times V to this row, which is
NaN where V is NaN or Inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import Mask, mask_of, row_tiles, split_ranges
from fa3_reference.problem import AttentionProblem

Part = tuple[int, int, int]  # number of a part of the keys, its first key block, and the one behind its last


@dataclass(frozen=True, slots=True)
class RowBits:
    """Holds what decides the bits of a row of one kernel and one head_dim.

    Parameters
    ----------
    tile_n : int
        Keys of a tile, counted from the first key of the sequence; 0 where all keys that the row sees are in one.
    promotion_interval : int
        Keys after which e4m3 sums of P V are promoted; 0 where they are chained, or one sum takes all keys.
    parts : tuple of (int, int, int)
        The parts of the keys in which the row sees any key, in order.
    is_merged : bool
        Whether parts are merged. Which thread adds a part follows from its number alone. The merge of a single part
        changes the sign of a zero at most.
    """

    tile_n: int
    promotion_interval: int
    parts: tuple[Part, ...]
    is_merged: bool = False

    def told(self) -> str:
        """Return in words how the row's keys are cut into tiles and parts.

        >>> RowBits(128, 0, ((0, 0, 8), (1, 8, 15)), True).told()
        '8 + 7 tiles of 128 keys'
        >>> RowBits(96, 96, ((0, 0, 21),)).told()
        '21 tiles of 96 keys, promoted every 96'
        >>> RowBits(0, 0, ((0, 0, 1),)).told()
        'one tile'
        """
        promoted = f", promoted every {self.promotion_interval}" if self.promotion_interval else ""
        if not self.tile_n:
            return f"one tile{promoted}"
        counts = [stop - first for _, first, stop in self.parts]
        runs = [(size, len(list(group))) for size, group in groupby(counts)]
        parts = " + ".join(f"{n} x {size}" if n > 1 else str(size) for size, n in runs)
        return f"{parts} tiles of {self.tile_n} keys{promoted}"


Rows = tuple[frozenset[RowBits], ...]  # one set for each query, with the different values of a group's heads


def bits_of_rows(
    problem: AttentionProblem, config: Config, lengths: tuple[int, int], num_splits: int, rows: range
) -> Rows:
    """Return what decides the bits of some queries of a sequence.

    Parameters
    ----------
    problem : AttentionProblem
        Only its mask and heads are used, not its lengths.
    config : Config
        Configuration of the launch.
    lengths : (int, int)
        Queries and keys of the sequence.
    num_splits : int
        Parts into which the keys of this sequence are cut.
    rows : range
        The queries, as places in the sequence.
    """
    mask = mask_of(problem, *lengths)
    if config.traits.order.diagonal == "top_left":
        mask = Mask(mask.seqlen_k, 0, mask.left, mask.right)
    return _bits(mask, config, lengths[0], problem.group, num_splits, rows)


@lru_cache(maxsize=1 << 12)
def _bits(mask: Mask, config: Config, seqlen_q: int, group: int, num_splits: int, rows: range) -> Rows:
    if num_splits == 1:
        return tuple(frozenset({_row(mask, config, n)}) for n in rows)
    values: dict[int, set[RowBits]] = {n: set() for n in rows}
    packing = {"tile_m": config.tile_m, "pack_gqa": config.pack_gqa, "pads_group": config.traits.pads_group}
    every = range(-(-mask.seqlen_k // config.tile_n))
    for tile in row_tiles(seqlen_q, group, **packing):
        cut = mask.blocks(tile.positions, config.tile_n) if config.traits.order.splits_visible else every
        for n in set(tile.positions.tolist()) & values.keys():
            values[n].add(_row(mask, config, n, split_ranges(cut, num_splits)))
    return tuple(map(frozenset, values.values()))


def _row(mask: Mask, config: Config, position: int, parts: list[range] | None = None) -> RowBits:
    """Return the value of one query whose tile has these parts of the keys; None means that keys are not cut."""
    own = mask.blocks(np.array([position]), config.tile_n)
    cut = [range(max(x.start, own.start), min(x.stop, own.stop)) for x in parts or [own]]
    seen = tuple((number, part.start, part.stop) for number, part in enumerate(cut) if part)
    diagonal = position + mask.offset
    stop = min(mask.seqlen_k, diagonal + mask.right + 1) if mask.right >= 0 else mask.seqlen_k
    first = max(0, diagonal - mask.left) if mask.left >= 0 else 0
    is_one = len(own) <= 1
    interval = config.promotion_interval
    # All keys that the row sees are promoted together: their sum is one chain.
    is_chain = is_one and interval > 0 and first // interval == max(first, stop - 1) // interval
    where = tuple((number, 0, 1) for number, _, _ in seen) if is_one else seen
    return RowBits(0 if is_one else config.tile_n, 0 if is_chain else interval, where, parts is not None)
