"""The backward's key tiles: which CTA works on which, in what order, and in which order dQ takes their parts.

Every key block of a kv head is a tile, longest first to the CTA that is free first, a few heads at a time, so that
their Q, dO and dQ stay in L2. In deterministic mode every row block takes the parts of its dQ in a fixed order, and a
CTA waits for its turn:

* Dense problems: key blocks come in gangs, of as many as fit the row blocks and the CTAs. Tile ``i`` of a gang starts
  at the row block beside its own keys and goes round, so that no two tiles of a gang are at the same rows at one time.
  A row block takes gang after gang, and of each first the tile that starts there, then those before it, cyclically.
* With a mask the rows of a tile start at the diagonal: a row block takes its tiles from right to left.

No wait can go in a circle. Tiles go out in waves of at most as many tiles as CTAs, one tile a CTA; a gang lies inside a
wave, and masked tiles are handed out from right to left. So what a tile waits for is of an earlier wave, or runs beside
it; and within a gang a part is added at a step that is later than that of every part before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from fa3_kernels.plan.tile_order import END, HEAD_SHIFT, assign
from fa3_kernels.plan.tiles import Mask, mask_of
from fa3_reference.problem import AttentionProblem

TILE_COST = 2.0  # prologue and epilogue of a tile, in row blocks
L2_BYTES = 32 * 2**20


def gang_size(problem: AttentionProblem, tile_m: int, tile_n: int, num_ctas: int) -> int:
    """Key tiles of a head that go round together; 0 of a problem with a mask. A power of two of packed sequences.

    >>> gang_size(AttentionProblem(1, 1, 1, 1024, 4096, 64), 64, 128, 132)
    8
    """
    mask = mask_of(problem, problem.seqlen_q, problem.seqlen_k)
    if mask.left >= 0 or mask.right >= 0:
        return 0
    largest = max(1, min(_rounds(problem.seqlen_q, tile_m, tile_n), num_ctas))
    if problem.is_varlen:
        return 1 << (largest.bit_length() - 1)
    return min(largest, -(-problem.seqlen_k // tile_n))


def gang_of_sequence(gang: int, seqlen_q: int, tile_m: int, tile_n: int) -> int:
    """The gang of one packed sequence: those of shorter ones nest in that of the longest.

    >>> gang_of_sequence(8, 300, 64, 128)
    2
    """
    while gang > max(1, _rounds(seqlen_q, tile_m, tile_n)):
        gang //= 2
    return gang


def _rounds(seqlen_q: int, tile_m: int, tile_n: int) -> int:
    """Key tiles whose own rows all differ."""
    return -(-seqlen_q // tile_m) // (tile_n // tile_m)


def visited_rows(mask: Mask, seqlen_q: int, block: int, tile_m: int, tile_n: int) -> range:
    """Row blocks that some key of a block is visible to.

    >>> visited_rows(Mask(256, 0, -1, 0), 256, 1, 64, 128)
    range(2, 4)
    """
    last_key = min((block + 1) * tile_n, mask.seqlen_k) - 1
    first, stop = 0, seqlen_q
    if mask.right >= 0:
        first = max(block * tile_n - mask.offset - mask.right, 0) // tile_m
    if mask.left >= 0:
        stop = min(stop, last_key - mask.offset + mask.left + 1)
    return range(first, max(first, -(-max(stop, 0) // tile_m)))


def row_order(rows: range, block: int, gang: int, ratio: int) -> list[int]:
    """The row blocks of a tile as it visits them; ``ratio`` is row blocks per key block, ``gang`` 0 does not go round.

    >>> row_order(range(4), 1, 2, 2)
    [2, 3, 0, 1]
    """
    start = min(block % gang * ratio, max(0, len(rows) - 1)) if gang else 0
    return [*rows[start:], *rows[:start]]


def order_of_parts(blocks: int, row_block: int, gang: int, ratio: int) -> list[int]:
    """Key blocks in the order in which a row block's dQ takes their parts in deterministic mode.

    Parameters
    ----------
    blocks : int
        Key blocks of the sequence, or with a mask those up to the last that the row block sees.
    row_block : int
    gang : int
        Tiles that go round together; 0 is right to left.
    ratio : int
        Row blocks per key block.

    >>> order_of_parts(5, 2, 3, 1), order_of_parts(5, 2, 0, 1)
    ([2, 1, 0, 4, 3], [4, 3, 2, 1, 0])
    """
    if not gang:
        return list(reversed(range(blocks)))
    order: list[int] = []
    for first in range(0, blocks, gang):
        size = min(gang, blocks - first)
        nearest = min(row_block // ratio, size - 1)
        order += [first + (nearest - i) % size for i in range(size)]
    return order


def _tiles(problem: AttentionProblem, tile_m: int, tile_n: int) -> tuple[list[int], int]:
    """Row blocks that each key block of the longest sequence visits, and how many heads are worked on at a time."""
    mask = mask_of(problem, problem.seqlen_q, problem.seqlen_k)
    blocks = range(-(-problem.seqlen_k // tile_n))
    visits = [len(visited_rows(mask, problem.seqlen_q, n, tile_m, tile_n)) * problem.group for n in blocks]
    of_a_head = problem.seqlen_q * problem.group * problem.head_dim * 8  # Q, dO and the sums of dQ
    return visits, max(1, L2_BYTES // max(1, of_a_head))


def _waves(gangs: Iterator[list[tuple[int, int]]], num_ctas: int) -> Iterator[list[tuple[int, int]]]:
    wave: list[tuple[int, int]] = []
    for gang in gangs:
        if len(wave) + len(gang) > num_ctas:
            yield wave
            wave = []
        wave = wave + gang
    if wave:
        yield wave


def _in_turns(problem: AttentionProblem, visits: list[int], gang: int, num_ctas: int) -> list[list[int]]:
    """Entries of every CTA in deterministic mode."""
    heads = problem.batch * problem.nheads_kv
    blocks = list(range(len(visits)))
    if not gang:
        blocks.reverse()
    size = gang or num_ctas
    gangs = (
        [((head << HEAD_SHIFT) + n, visits[n]) for n in blocks[i : i + size]]
        for head in range(heads)
        for i in range(0, len(blocks), size)
    )
    mine: list[list[int]] = [[] for _ in range(min(num_ctas, heads * len(blocks)))]
    loads = [0.0] * len(mine)
    for wave in _waves(gangs, len(mine)):
        free = sorted(range(len(mine)), key=loads.__getitem__)
        for cta, (entry, cost) in zip(free, sorted(wave, key=lambda x: -x[1]), strict=False):
            mine[cta].append(entry)
            loads[cta] += cost + TILE_COST
    return mine


@lru_cache(maxsize=64)
def key_tile_schedule(
    problem: AttentionProblem, num_ctas: int, *, tile_m: int, tile_n: int, gang: int, is_deterministic: bool
) -> np.ndarray:
    """Assign every key block of every kv head to a CTA; of packed sequences as if each were the longest.

    Returns
    -------
    int64 (ctas, tiles + 1)
        (sequence * nheads_kv + kv_head) * 2^32 + key block, in order of execution, then -1; (0, 1) without a key.

    >>> problem = AttentionProblem(1, 1, 1, 256, 256, 128, causal=True)
    >>> key_tile_schedule(problem, 1, tile_m=64, tile_n=128, gang=0, is_deterministic=True).tolist()
    [[0, 1, -1]]
    """
    visits, at_a_time = _tiles(problem, tile_m, tile_n)
    if is_deterministic:
        mine = _in_turns(problem, visits, gang, num_ctas)
    else:
        heads = problem.batch * problem.nheads_kv
        tiles: list[tuple[int, int]] = []
        for first in range(0, heads, at_a_time):
            some = range(first, min(first + at_a_time, heads))
            tiles += [((head << HEAD_SHIFT) + n, cost) for n, cost in enumerate(visits) for head in some]
        given, _ = assign([cost for _, cost in tiles], num_ctas, TILE_COST)
        mine = [[tiles[i][0] for i in indices] for indices in given]
    table = np.full((len(mine), max(map(len, mine), default=0) + 1), END, np.int64)
    for row, entries in zip(table, mine, strict=True):
        row[: len(entries)] = entries
    return table
