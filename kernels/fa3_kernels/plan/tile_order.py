"""The static tile schedule of the forward: which row tiles each CTA of a persistent launch works on, in which order.

Plans (:mod:`fa3_kernels.plan.plan`) put it into GPU memory. Packed sequences are scheduled on the GPU instead
(:mod:`fa3_kernels.plan.packed_order`), and the backward by :mod:`fa3_kernels.plan.key_tiles`.

The longest tile goes to the CTA that would be free first if every key block cost 1 and every tile ``TILE_COST``. That
is what a dynamic scheduler would do, but it is decided before the launch and therefore deterministic. Heads are taken a
few at a time, so that their K and V stay in L2; of the last heads more are taken together, as many as the CTAs need to
end at one time. No bit of the output depends on the schedule.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.problem import AttentionProblem

TILE_COST = 0.6  # prologue and epilogue of a tile, in key blocks; measured on an H200: 0 to 1.5 are within 2 %
L2_BYTES = (
    16 * 2**20
)  # K and V of the heads in flight; measured on an H200: 8 and 16 MiB alike, 32 MiB 1 to 2 % slower at 1k
BALANCED = 1.02  # the last CTA's time over the mean, and what a better balance must win to be worth L2
CTAS_PER_HEAD = 3  # at least, of the heads that are taken together for it: measured on an H200 at head_dim 256, all of
# 7 heads of 12000 keys won 9 %, of 128 of 1024 keys, each read by one CTA at a time, lost 20 %
UNLIMITED = 1 << 30  # more keys than a sequence has
END = -1  # entry behind the last tile of a CTA
# where the parts of an entry begin: m_block is in the lowest bits, then the split, then sequence and head
SPLIT_SHIFT = 20
HEAD_SHIFT = 32
MAX_M_BLOCKS = 1 << 20
MAX_SPLITS = 1 << 12
MAX_HEADS = 1 << 31


class Shape(NamedTuple):
    """Holds everything that the schedule depends on: a length per sequence, limits as in a window, -1 for none, and the
    keys of a chunk outside which a row sees nothing, 0 for none.

    With chunks both limits are set, :data:`UNLIMITED` where nothing else limits that side.
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    nheads: int
    nheads_kv: int
    left: int = -1
    right: int = -1
    pack_gqa: bool = False
    num_splits: int = 1
    chunk: int = 0

    @property
    def group(self) -> int:
        """Return how many query heads share a kv head."""
        return self.nheads // self.nheads_kv

    @property
    def tile_heads(self) -> int:
        """Return how many heads have tiles of their own: kv heads with PackGQA, query heads otherwise."""
        return self.nheads_kv if self.pack_gqa else self.nheads


def shape_of(problem: AttentionProblem, *, pack_gqa: bool = False, num_splits: int = 1) -> Shape:
    """Return what the schedule needs of a problem; a limit that hides no key becomes -1."""
    left, right = problem.window
    right = 0 if problem.causal else right
    seqlens_q = problem.seqlens_q or (problem.seqlen_q,) * problem.batch
    seqlens_k = problem.seqlens_k or (problem.seqlen_k,) * problem.batch
    sees_early = right != 0 and max(seqlens_q) > 1 and (problem.is_varlen or problem.seqlen_q > problem.seqlen_k)
    left = -1 if left >= max(seqlens_k) - 1 else left
    right = -1 if right >= max(seqlens_q) - 1 else right
    chunk = min(problem.attention_chunk, max(seqlens_k))
    if chunk == max(seqlens_k) and not sees_early:  # else it hides all keys from rows in front of the first one
        chunk = 0
    if chunk:
        left, right = (UNLIMITED if limit < 0 else limit for limit in (left, right))
    return Shape(seqlens_q, seqlens_k, problem.nheads, problem.nheads_kv, left, right, pack_gqa, num_splits, chunk)


def key_blocks(shape: Shape, batch: int, first_position: int, last_position: int, tile_n: int) -> range:
    """Return the key blocks that some query position in [first, last] sees.

    >>> shape = Shape((200,), (300,), 1, 1, right=0)
    >>> key_blocks(shape, 0, 0, 127, 128)  # row 127 sees keys up to 227
    range(0, 2)
    """
    seqlen_k = shape.seqlens_k[batch]
    offset = seqlen_k - shape.seqlens_q[batch]
    stop = seqlen_k if shape.right < 0 else min(seqlen_k, last_position + offset + shape.right + 1)
    start = 0 if shape.left < 0 else max(0, first_position + offset - shape.left)
    if shape.chunk:
        start = max(start, (first_position + offset) // shape.chunk * shape.chunk)
        stop = min(stop, (last_position + offset) // shape.chunk * shape.chunk + shape.chunk)
    first = start // tile_n
    return range(first, max(first, -(-max(stop, 0) // tile_n)))


class Item(NamedTuple):
    """One unit of work of a head: a row tile, or one split of it, and how many key blocks that visits."""

    m_block: int
    split: int
    blocks: int


def items(shape: Shape, batch: int, tile_m: int, tile_n: int) -> list[Item]:
    """Return the tiles of one head of a sequence that see a key, one item per non-empty split."""
    seqlen_q = shape.seqlens_q[batch]
    positions = tile_m // power_of_two(shape.group) if shape.pack_gqa else tile_m
    found = []
    for m_block in range(-(-seqlen_q // positions)):
        last = min((m_block + 1) * positions, seqlen_q) - 1
        count = len(key_blocks(shape, batch, m_block * positions, last, tile_n))
        size = -(-count // shape.num_splits)
        found += [
            Item(m_block, split, min(size, count - split * size)) for split in range(-(-count // size) if size else 0)
        ]
    return found


def count_items(shape: Shape, tile_m: int) -> int:
    """Return how many items there would be if every tile saw a key in every split."""
    positions = tile_m // power_of_two(shape.group) if shape.pack_gqa else tile_m
    return sum(-(-n // positions) for n in shape.seqlens_q) * shape.tile_heads * shape.num_splits


Order = list[tuple[int, Item]]  # sequence * tile_heads + head, and a tile of it


def head_groups(shape: Shape, tile_m: int, tile_n: int, head_dim: int) -> list[Order]:
    """Return groups of tiles: those of heads whose K and V fit L2 together, sequences with the most keys first."""
    ranked = sorted(range(len(shape.seqlens_q)), key=lambda b: -shape.seqlens_k[b])
    of_sequence: dict[tuple[int, int], list[Item]] = {}
    groups: list[Order] = []
    group: Order = []
    group_bytes = 0
    heads_per_kv = shape.nheads // shape.nheads_kv if not shape.pack_gqa else 1
    for b in ranked:
        key = (shape.seqlens_q[b], shape.seqlens_k[b])
        work = of_sequence.setdefault(key, items(shape, b, tile_m, tile_n))
        for head in range(shape.tile_heads):
            if head % heads_per_kv == 0:
                kv_bytes = 4 * shape.seqlens_k[b] * head_dim
                if group and group_bytes + kv_bytes > L2_BYTES:
                    groups.append(group)
                    group = []
                    group_bytes = 0
                group_bytes += kv_bytes
            group += [(b * shape.tile_heads + head, item) for item in work]
    return [*groups, group]


def handed_out(shape: Shape, tile_m: int, tile_n: int, head_dim: int, num_ctas: int | None = None) -> Order:
    """Return pairs (sequence * tile_heads + head, item) in the order in which they are handed out.

    Within a group of heads the longest tiles come first. The last group may start so late that the CTAs with its
    longest tiles end after the others. Then the last 2, 4, 8, ... groups are joined, as few as balance the CTAs.
    Without ``num_ctas`` no groups are joined; kernels whose timings are on record had that order.
    """
    groups = head_groups(shape, tile_m, tile_n, head_dim)
    apart = _in_order(groups, 1)
    blocks = [item.blocks for _, item in apart]
    if num_ctas is None or len(set(blocks)) <= 1:
        return apart
    least = max((sum(blocks) + TILE_COST * len(blocks)) / num_ctas, max(blocks) + TILE_COST)
    before = ends_at(blocks, num_ctas)
    best = apart
    end = before
    last = 1
    per_kv = 1 if shape.pack_gqa else shape.group
    while end > BALANCED * least and last < len(groups):
        last = min(2 * last, len(groups))
        if CTAS_PER_HEAD * len({head // per_kv for group in groups[-last:] for head, _ in group}) > num_ctas:
            break
        order = _in_order(groups, last)
        ends = ends_at([item.blocks for _, item in order], num_ctas)
        if ends < end:
            best = order
            end = ends
    return best if before > BALANCED * end else apart


def _in_order(groups: list[Order], last: int) -> Order:
    """Return the tiles of all groups, each longest first, with the ``last`` groups joined to one."""
    parts = [*groups[:-last], [pair for group in groups[-last:] for pair in group]]
    return [pair for part in parts for pair in sorted(part, key=lambda pair: -pair[1].blocks)]


def ends_at(blocks: Sequence[int], num_ctas: int, tile_cost: float = TILE_COST) -> float:
    """Return when the last CTA ends, in key blocks, if every tile goes to the CTA that is free first."""
    free_at = [0.0] * num_ctas
    for count in blocks:
        heapq.heapreplace(free_at, free_at[0] + count + tile_cost)
    return max(free_at)


def assign(blocks: Sequence[int], num_ctas: int, tile_cost: float = TILE_COST) -> tuple[list[list[int]], int]:
    """Give every tile, in order, to the CTA that is free first.

    Parameters
    ----------
    blocks : sequence of int
        Key blocks of every tile.
    num_ctas : int
        Fewer are used where there are fewer tiles.
    tile_cost : float
        What a tile costs beside its blocks, in blocks.

    Returns
    -------
    list of list of int
        Indices of tiles by CTA.
    int
        The CTA that ends last; -1 without a tile.

    >>> assign([3, 2, 2, 1], 2)
    ([[0, 3], [1, 2]], 1)
    """
    free_at = [(0.0, cta) for cta in range(min(num_ctas, len(blocks)))]
    tiles: list[list[int]] = [[] for _ in free_at]
    for index, count in enumerate(blocks):
        time, cta = heapq.heappop(free_at)
        tiles[cta].append(index)
        heapq.heappush(free_at, (time + count + tile_cost, cta))
    return tiles, max(free_at, default=(0.0, -1))[1]


def check_entries(seqlen_q: int, num_splits: int, batch: int, nheads: int) -> None:
    """Raise ValueError for sizes whose indices may not fit the 20, 12 or 31 bits that an entry has for them.

    Rows are counted rather than their tiles, so that the rule depends on no tile.
    """
    if seqlen_q > MAX_M_BLOCKS or num_splits > MAX_SPLITS or batch * nheads > MAX_HEADS:
        raise ValueError(
            f"at most {MAX_M_BLOCKS} query rows per sequence, {MAX_SPLITS} splits and {MAX_HEADS} heads fit a "
            f"schedule entry, got {seqlen_q}, {num_splits} and {batch} x {nheads}"
        )


@lru_cache(maxsize=64)
def static_schedule(shape: Shape, num_ctas: int, *, tile_m: int, tile_n: int, head_dim: int) -> np.ndarray:
    """Assign every tile, or split of a tile, that sees a key to a CTA.

    Returns
    -------
    int64 (ctas, tiles + 1)
        (sequence * tile_heads + head) * 2^32 + split * 2^20 + m_block, in order of execution, then -1. Every CTA has at
        least one tile, so ``ctas`` may be smaller than ``num_ctas``; (0, 1) when no tile sees a key.

    Raises
    ------
    ValueError
        If an index does not fit its 20, 12 or 31 bits.

    >>> static_schedule(Shape((256,), (256,), 1, 1, right=0), 1, tile_m=128, tile_n=128, head_dim=128).tolist()
    [[1, 0, -1]]
    """
    check_entries(max(shape.seqlens_q), shape.num_splits, len(shape.seqlens_q), shape.nheads)
    order = handed_out(shape, tile_m, tile_n, head_dim, num_ctas)
    tiles, _ = assign([item.blocks for _, item in order], num_ctas, TILE_COST)
    entries = [(head << HEAD_SHIFT) + (item.split << SPLIT_SHIFT) + item.m_block for head, item in order]
    width = max(map(len, tiles), default=0) + 1
    table = np.full((len(tiles), width), END, np.int64)
    for row, mine in zip(table, tiles, strict=True):
        row[: len(mine)] = [entries[i] for i in mine]
    return table
