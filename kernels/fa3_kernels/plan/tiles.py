"""Which tiles a forward kernel visits and what it masks in them: pure functions of the shape.

The twin computes with these rules, and :mod:`fa3_kernels.gluon.geometry` repeats them on the GPU.
:mod:`fa3_kernels.plan.tile_order` says which CTA works on which tile. The backward's tiles are those of
:mod:`fa3_kernels.plan.key_tiles`.

Key blocks are visited right to left. A tile of rows visits every block that any of its rows can see; single elements
are masked inside. With PackGQA the rows of a tile are (query position, head in group), head fastest, and the group is
padded to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fa3_reference.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class RowTile:
    """Rows of one output tile: ``positions`` in the query sequence and ``heads`` inside the kv group, int64 (rows,)."""

    positions: np.ndarray
    heads: np.ndarray


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``; tensors of the kernels' compiler have such sizes.

    With PackGQA each query position has so many rows of a tile, and TMA clips the rows beyond the group.

    >>> [power_of_two(n) for n in (1, 3, 96)]
    [1, 4, 128]
    """
    return 1 << (n - 1).bit_length()


def row_tiles(seqlen_q: int, group: int, *, tile_m: int, pack_gqa: bool, pads_group: bool = True) -> list[RowTile]:
    """Cut the rows of one kv head into tiles; the last one may be short.

    With PackGQA and a padded group the padding takes room in a tile, but its rows are not listed. In a family that does
    not pad the group (``pads_group`` False) tiles may begin inside a group.

    Raises
    ------
    ValueError
        If a packed position does not fit a tile.

    >>> [t.positions.tolist() for t in row_tiles(3, 2, tile_m=64, pack_gqa=True)]
    [[0, 0, 1, 1, 2, 2]]
    """
    if pack_gqa:
        rows = np.arange(seqlen_q * group)
        size = tile_m
        if pads_group:
            padded = power_of_two(group)
            if tile_m % padded:
                raise ValueError(f"pack_gqa needs tile_m to be a multiple of the padded group {padded}, got {tile_m}")
            size = tile_m // padded * group
        return [
            RowTile(rows[start : start + size] // group, rows[start : start + size] % group)
            for start in range(0, rows.size, size)
        ]
    positions = np.arange(seqlen_q)
    return [
        RowTile(part := positions[start : start + tile_m], np.full(part.size, head))
        for head in range(group)
        for start in range(0, seqlen_q, tile_m)
    ]


@dataclass(frozen=True, slots=True)
class Mask:
    """The visible band, as the kernel computes it: row i sees keys i + offset - left to i + offset + right.

    ``offset`` aligns the diagonal; seqlen_k - seqlen_q is bottom right. -1 in ``left`` or ``right`` is unlimited. With
    ``chunk`` a row sees no key outside the chunk of so many keys that holds its diagonal; the chunks begin ``phase``
    keys in front of the first key.
    """

    seqlen_k: int
    offset: int
    left: int
    right: int
    chunk: int = 0
    phase: int = 0

    def chunk_of(self, diagonal: np.ndarray) -> np.ndarray:
        """Return the first key of the chunk that holds a diagonal; it may lie in front of the keys."""
        return (diagonal + self.phase) // self.chunk * self.chunk - self.phase

    def blocks(self, positions: np.ndarray, tile_n: int) -> range:
        """Return the key blocks, left to right, that some row of the tile can see; half-open."""
        stop = self.seqlen_k
        if self.right >= 0:
            stop = min(stop, int(positions.max()) + self.offset + self.right + 1)
        if self.chunk:
            stop = min(stop, int(self.chunk_of(positions.max() + self.offset)) + self.chunk)
        n_min = self.first_key(positions) // tile_n
        n_max = -(-max(stop, 0) // tile_n)
        return range(n_min, max(n_min, n_max))

    def first_key(self, positions: np.ndarray) -> int:
        """Return the first key that the left limit leaves some row of the tile; it may lie beyond the keys."""
        first = int(positions.min()) + self.offset
        of_chunk = int(self.chunk_of(np.int64(first))) if self.chunk else 0  # pyright: ignore[reportArgumentType]
        return max(0, first - self.left if self.left >= 0 else 0, of_chunk)

    def from_key(self, start: int) -> Mask:
        """Return the mask of the keys from ``start`` on, which are then counted from 0."""
        keys = max(0, self.seqlen_k - start)
        return replace(self, seqlen_k=keys, offset=self.offset - start, phase=self.phase + start)

    def hidden(self, positions: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
        """Return the elements of a tile that are hidden, bool (rows, columns); None when every one is visible."""
        first = int(columns[0])
        last = int(columns[-1])
        diagonal = positions + self.offset
        hidden = None
        if last >= self.seqlen_k:
            hidden = np.broadcast_to(columns >= self.seqlen_k, (positions.size, columns.size))
        if self.right >= 0 and last > int(diagonal.min()) + self.right:
            beyond = columns[None, :] > (diagonal + self.right)[:, None]
            hidden = beyond if hidden is None else hidden | beyond
        if self.left >= 0 and first < int(diagonal.max()) - self.left:
            before = columns[None, :] < (diagonal - self.left)[:, None]
            hidden = before if hidden is None else hidden | before
        if self.chunk:
            of_row = self.chunk_of(diagonal)[:, None]
            outside = (columns[None, :] < of_row) | (columns[None, :] >= of_row + self.chunk)
            hidden = outside if hidden is None else hidden | outside
        return hidden


def mask_of(problem: AttentionProblem, seqlen_q: int, seqlen_k: int) -> Mask:
    """Return the mask of one sequence; a causal mask is a window with nothing to the right."""
    left, right = problem.window
    if problem.causal:
        right = 0
    return Mask(seqlen_k, seqlen_k - seqlen_q, left, right, problem.attention_chunk)


def split_ranges(blocks: range, num_splits: int) -> list[range]:
    """Cut the key blocks of a tile into ``num_splits`` contiguous parts, the last ones possibly empty.

    >>> split_ranges(range(0, 5), 2)
    [range(0, 3), range(3, 5)]
    """
    size = -(-len(blocks) // num_splits) if len(blocks) else 0
    cuts = [min(blocks.start + i * size, blocks.stop) for i in range(num_splits + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]
