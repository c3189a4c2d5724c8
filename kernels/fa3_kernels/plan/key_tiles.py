"""The backward's key tiles: which CTA works on which, in what order, and in which order dQ takes their parts.

The plan (:mod:`fa3_kernels.plan.backward`) makes its schedule here, the twin adds in the order of :class:`Walk`, and
:mod:`fa3_kernels.gluon.backward_geometry` repeats the rules on the GPU. The forward's tiles are those of
:mod:`fa3_kernels.plan.tiles`.

Every key block of a kv head is a tile, and each tile goes to the CTA that is free first. Where all tiles have equally
many rows they are taken head by head; otherwise the longest ones of a few heads come first. CTAs that run side by side
then share rows of Q and dO, and sums of dQ, that are in L2. The last heads are taken together where CTAs would
otherwise end at very different times (:func:`sections_to_join`). In deterministic mode every row block takes the parts
of its dQ in a fixed order, and a CTA waits for its turn:

* Dense problems: key blocks come in gangs, of as many tiles as fit the row blocks and the CTAs. Tile ``i`` of a gang
  starts ``i`` spacings down the rows and goes round, so that at any time no two tiles of a gang are nearer to each
  other than a spacing. A row block takes gang after gang. Of each it takes first the tile that starts there, then the
  tiles before that one, cyclically.
* With a mask the rows of a tile start at the diagonal, and a row block takes its tiles from right to left.
* Causal problems fold: a CTA works on the n-th tile from the right, which has few rows, then on the n-th from the left.
  This second tile first visits the rows that short tiles see, ascending, then its other rows, descending. So the tiles
  of a gang are at different rows again. A row block takes gang after gang, and of each the short tiles from right to
  left, then the others from left to right. With a stride of two a gang has every other pair of tiles.

Tiles of 64 rows and 64 keys, as from head_dim 160 on, have a spacing of two row blocks. A turn may then be passed
one row block later than its part was added, so that the warp that adds need not wait for that part to be in memory. In
all other kernels neighbouring tiles are as far apart as their keys reach. The first gangs of all heads go out before
the second gang of any head, which would only wait for the first one of its own head.

No wait can go in a circle. Gangs go out in waves with at most as many units of work as there are CTAs, and each CTA
gets one unit. Masked tiles that do not fold go out from right to left. So a tile waits only for tiles of an earlier
wave, or for ones that run beside it. Within a gang a part is added at a later step, by the spacing, than every part
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.tile_order import BALANCED, CTAS_PER_HEAD, END, HEAD_SHIFT, assign, ends_at
from fa3_kernels.plan.tiles import Mask, mask_of
from fa3_reference.problem import AttentionProblem

SPACING_OF_WIDE = 2  # row blocks between tiles of a gang where a row block has as many rows as a key block has keys
TILE_COST = 2.0  # prologue and epilogue of a tile, in row blocks
L2_BYTES = 32 * 2**20  # that Q, dO and dQ of the heads in flight may take
HEADS_AT_A_TIME = 16  # at most; with all heads that fit L2, 512 and 1k causal keys took up to 7 % longer on an H200
# What a better balance must win to be worth L2: of causal launches on an H200 a predicted 6 % won nothing (18 x 892, 48
# heads on 8), 11 % won 10 % (2 x 5877, 8 on 4, head_dim 256) and 36 % won 17 % (6 x 2554, 32 on 2).
WORTH_L2 = 1.08
Unit = tuple[float, list[int]]  # tiles that one CTA works on one after another: their cost, and their entries


def visited_rows(mask: Mask, seqlen_q: int, block: int, tile_m: int, tile_n: int) -> range:
    """Return the row blocks to which some key of a key block is visible.

    >>> visited_rows(Mask(256, 0, -1, 0), 256, 1, 64, 128)
    range(2, 4)
    """
    last_key = min((block + 1) * tile_n, mask.seqlen_k) - 1
    first = 0
    stop = seqlen_q
    if mask.right >= 0:
        first = max(block * tile_n - mask.offset - mask.right, 0) // tile_m
    if mask.left >= 0:
        stop = min(stop, last_key - mask.offset + mask.left + 1)
    return range(first, max(first, -(-max(stop, 0) // tile_m)))


def spacing_of(tile_m: int, tile_n: int) -> int:
    """Return how many row blocks lie between neighbouring tiles of a gang.

    >>> spacing_of(128, 128), spacing_of(64, 128), spacing_of(64, 64)
    (1, 2, 2)
    """
    return SPACING_OF_WIDE if tile_n == WARPGROUP_ROWS else tile_n // tile_m


def stride_of(tile_m: int, tile_n: int) -> int:
    """Return the least distance, in key blocks, of tiles of a gang that folds.

    >>> stride_of(128, 128), stride_of(64, 128), stride_of(64, 64)
    (1, 1, 2)
    """
    return spacing_of(tile_m, tile_n) * tile_m // tile_n


@dataclass(frozen=True, slots=True)
class Walk:
    """Says in which order the tiles of a head visit row blocks, and in which order row blocks take parts.

    It holds for one sequence.

    Parameters
    ----------
    spacing : int
        Row blocks between neighbouring tiles of a gang.
    gang : int
        Key tiles that go round together; 0 where a mask hides keys.
    fold : int
        Key block from which on causal tiles count as short; the tiles before it turn back. 0 is a walk without folds.
    turn : int
        First row block that the short tiles visit, where the other tiles start.
    stride : int
        Key blocks between neighbouring tiles of a gang, where tiles fold.
    """

    spacing: int
    gang: int = 0
    fold: int = 0
    turn: int = 0
    stride: int = 1

    def rows(self, visited: range, block: int) -> list[int]:
        """Return the row blocks of a tile, ``visited``, in the order in which the tile visits them.

        >>> Walk(2, gang=2).rows(range(4), 1), Walk(1, fold=2, turn=2).rows(range(4), 0)
        ([2, 3, 0, 1], [2, 3, 1, 0])
        """
        if block < self.fold:
            cut = min(max(self.turn, visited.start), max(visited.start, visited.stop - 1))
            return [*range(cut, visited.stop), *range(cut - 1, visited.start - 1, -1)]
        start = visited.start + (block % self.gang * self.spacing if self.gang else 0)
        return [*range(start, visited.stop), *range(visited.start, start)]

    def parts(self, blocks: int, row_block: int) -> list[int]:
        """Return the key blocks of a sequence in the order in which a row block's dQ takes their parts.

        The order holds in deterministic mode. Blocks that the row block does not see are listed, too.

        >>> Walk(1, gang=3).parts(5, 2), Walk(1).parts(5, 2), Walk(1, fold=3, turn=3).parts(5, 2)
        ([2, 1, 0, 4, 3], [4, 3, 2, 1, 0], [4, 3, 0, 1, 2])
        >>> Walk(2, fold=3, turn=3, stride=2).parts(6, 2)
        [5, 3, 0, 2, 4, 1]
        """
        order: list[int] = []
        if not self.gang:
            for first in range(self.stride):
                order += [
                    *range(blocks - 1 - first, self.fold - 1, -self.stride),
                    *range(first, self.fold, self.stride),
                ]
            return order
        for first in range(0, blocks, self.gang):
            size = min(self.gang, blocks - first)
            nearest = min(row_block // self.spacing, size - 1)
            order += [first + (nearest - i) % size for i in range(size)]
        return order


def walk_of(problem: AttentionProblem, tile_m: int, tile_n: int, num_ctas: int, seqlen_q: int, seqlen_k: int) -> Walk:
    """Return the walk over one sequence.

    Gangs of packed sequences are powers of two, so that those of shorter ones nest.

    >>> walk_of(AttentionProblem(1, 1, 1, 1024, 4096, 64), 64, 128, 132, 1024, 4096)
    Walk(spacing=2, gang=8, fold=0, turn=0, stride=1)
    """
    mask = mask_of(problem, seqlen_q, seqlen_k)
    spacing = spacing_of(tile_m, tile_n)
    blocks = -(-seqlen_k // tile_n)
    if mask.left < 0 and mask.right < 0:
        gang = max(1, min(-(-seqlen_q // tile_m) // spacing, num_ctas))
        return Walk(spacing, gang=1 << (gang.bit_length() - 1) if problem.is_varlen else max(1, min(gang, blocks)))
    if mask.left >= 0 or problem.is_varlen or not 1 < blocks <= 2 * num_ctas:
        return Walk(spacing)
    fold = blocks - blocks // 2
    turn = visited_rows(mask, seqlen_q, fold, tile_m, tile_n).start
    return Walk(spacing, fold=fold, turn=turn, stride=stride_of(tile_m, tile_n))


def _tiles(problem: AttentionProblem, tile_m: int, tile_n: int) -> tuple[list[int], int]:
    """Return how many row blocks each key block of the longest sequence visits, over the heads of a group.

    The second value is how many kv heads are worked on at a time.
    """
    mask = mask_of(problem, problem.seqlen_q, problem.seqlen_k)
    blocks = range(-(-problem.seqlen_k // tile_n))
    visits = [len(visited_rows(mask, problem.seqlen_q, n, tile_m, tile_n)) * problem.group for n in blocks]
    if len(set(visits)) == 1:
        return visits, 1
    of_a_head = problem.seqlen_q * problem.group * problem.head_dim * 8  # Q, dO and the sums of dQ
    return visits, min(max(1, L2_BYTES // max(1, of_a_head)), HEADS_AT_A_TIME)


def sections_to_join(sections: Sequence[Sequence[tuple[int, int]]], num_ctas: int) -> int:
    """Return how many of the last sections of heads are handed out as one: 1, 2, 4, 8, ..., as few as balance the CTAs.

    Where heads have few tiles, of very unlike lengths, as with large groups under a causal mask, the last section may
    begin so late that the CTA with its longest tile ends long after the others.

    Parameters
    ----------
    sections : sequence of sequence of (int, int)
        Head and row blocks of every tile. In a section the longest tiles go out first.
    num_ctas : int
    """
    ends: dict[int, float] = {}
    for last in sorted({min(1 << i, len(sections)) for i in range(len(sections).bit_length() + 1)} | {1}):
        joined = [tile for some in sections[-last:] for tile in some]
        if ends and CTAS_PER_HEAD * len({head for head, _ in joined}) > num_ctas:
            break
        longest_first = (sorted((n for _, n in some), reverse=True) for some in [*sections[:-last], joined])
        ends[last] = ends_at([n for some in longest_first for n in some], max(1, num_ctas), TILE_COST)
    fewest = next(last for last, end in ends.items() if end <= BALANCED * min(ends.values()))
    return fewest if ends[1] > WORTH_L2 * ends[fewest] else 1


def _waves(gangs: Iterator[list[Unit]], num_ctas: int) -> Iterator[list[Unit]]:
    """Yield whole gangs together, as many as the CTAs have room for at one time."""
    wave: list[Unit] = []
    for gang in gangs:
        if len(wave) + len(gang) > num_ctas:
            yield wave
            wave = []
        wave = wave + gang
    if wave:
        yield wave


def _gangs(walk: Walk, visits: list[int], heads: int, num_ctas: int) -> Iterator[list[Unit]]:
    """Yield gangs, whose units must run side by side, each on one CTA.

    A unit is a tile; with a fold it is a short tile and then a long one.
    """
    last = len(visits) - 1
    if walk.fold:
        units = [[last - i, i] if last - i > i else [i] for i in range(walk.fold)]
    else:
        units = [[n] for n in (range(last + 1) if walk.gang else range(last, -1, -1))]
    size = walk.gang or max(1, num_ctas)  # without a key there is no CTA
    for first_of_stride in range(walk.stride):
        some = units[first_of_stride :: walk.stride]
        for first in range(0, len(some), size):
            for head in range(heads):
                yield [
                    (sum(visits[n] + TILE_COST for n in unit), [(head << HEAD_SHIFT) + n for n in unit])
                    for unit in some[first : first + size]
                ]


def _in_turns(walk: Walk, visits: list[int], heads: int, num_ctas: int) -> list[list[int]]:
    """Return the entries of every CTA in deterministic mode.

    The CTA with the least work gets the longest unit of each wave.
    """
    mine: list[list[int]] = [[] for _ in range(min(num_ctas, heads * len(visits)))]
    loads = [0.0] * len(mine)
    for wave in _waves(_gangs(walk, visits, heads, len(mine)), len(mine)):
        free = sorted(range(len(mine)), key=loads.__getitem__)
        for cta, (cost, entries) in zip(free, sorted(wave, key=lambda unit: -unit[0]), strict=False):
            mine[cta] += entries
            loads[cta] += cost
    return [entries for entries in mine if entries]


@lru_cache(maxsize=64)
def key_tile_schedule(
    problem: AttentionProblem, num_ctas: int, *, tile_m: int, tile_n: int, walk: Walk, is_deterministic: bool
) -> np.ndarray:
    """Assign every key block of every kv head to a CTA; every packed sequence counts as long as the longest.

    Returns
    -------
    int64 (ctas, tiles + 1)
        (sequence * nheads_kv + kv_head) * 2^32 + key block, in order of execution, then -1; (0, 1) without a key.

    >>> problem = AttentionProblem(1, 1, 1, 256, 256, 128, causal=True)
    >>> key_tile_schedule(problem, 1, tile_m=64, tile_n=128, walk=Walk(2), is_deterministic=True).tolist()
    [[1, 0, -1]]
    """
    visits, at_a_time = _tiles(problem, tile_m, tile_n)
    heads = problem.batch * problem.nheads_kv
    if is_deterministic:
        mine = _in_turns(walk, visits, heads, num_ctas)
    else:
        parts = [range(first, min(first + at_a_time, heads)) for first in range(0, heads, at_a_time)]
        last = sections_to_join([[(head, n) for head in some for n in visits] for some in parts], num_ctas)
        parts[-last:] = [range(parts[-last].start, heads)] if parts else []
        tiles = [((head << HEAD_SHIFT) + n, cost) for some in parts for n, cost in enumerate(visits) for head in some]
        given, _ = assign([cost for _, cost in tiles], num_ctas, TILE_COST)
        mine = [[tiles[i][0] for i in indices] for indices in given]
    table = np.full((len(mine), max(map(len, mine), default=0) + 1), END, np.int64)
    for row, entries in zip(table, mine, strict=True):
        row[: len(entries)] = entries
    return table
