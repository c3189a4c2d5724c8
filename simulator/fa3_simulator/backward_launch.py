"""A backward launch: the key tiles of a problem in the order in which they are handed out, and the time of the small
kernels around the main one. :mod:`fa3_simulator.run` estimates the launch; one CTA is in
:mod:`fa3_simulator.backward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from fa3_kernels.plan.choose import H200_SMS
from fa3_kernels.plan.key_tiles import (
    HEADS_AT_A_TIME,
    L2_BYTES as OUR_L2_BYTES,
    sections_to_join,
    visited_rows,
)
from fa3_kernels.plan.tiles import mask_of
from fa3_reference.problem import AttentionProblem, Sequence
from fa3_reference.rules import require
from fa3_simulator.backward_schedule import BackwardSchedule, Turns
from fa3_simulator.launch import check_launch
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks

# Bytes of L2 for Q, dO and fp32 dQ of the heads in flight, as upstream's scheduler counts (hopper/tile_scheduler.hpp).
L2_BYTES = 40 * 2**20
DQ_BYTES = 4
# Rate of writes to HBM over that of reads: 134 MB of zeros for dQ took 38.6 to 42.7 us of a launch on an H200, 3.1 to
# 3.5 TB/s.
WRITE_RATE = 0.72


class KeyTile(NamedTuple):
    """One key tile of a head of a sequence: the row blocks from ``first`` to ``first + blocks - 1`` see keys of it."""

    head: int  # counted over the whole batch
    n_block: int
    first: int
    blocks: int
    masked: int  # how many of the blocks run the code for masks

    @property
    def work(self) -> TileBlocks:
        return TileBlocks(self.blocks, self.masked)


# By which tiles are handed out in a section.
_RANKS: dict[Turns, Callable[[KeyTile], tuple[int, ...]]] = {
    "free": lambda tile: (-tile.blocks,),
    "ascending": lambda tile: (tile.n_block,),
    "descending": lambda tile: (-tile.n_block,),
    "shift": lambda tile: (tile.head, tile.n_block),
}


def check_problem(problem: AttentionProblem, schedule: BackwardSchedule) -> None:
    """Raise ValueError for a problem that no backward program is written for, for an order that may deadlock, and where
    :func:`fa3_simulator.launch.check_launch` does.
    """
    require(not problem.softcap, "the backward is simulated without softcap")
    require(
        schedule.turns != "shift" or not (problem.is_varlen or problem.causal or problem.window != (-1, -1)),
        "turns shift is for dense problems of one length: two shifted tiles on one CTA may deadlock",
    )
    check_launch(problem, "key")


def _of_sequence(
    problem: AttentionProblem, schedule: BackwardSchedule, sequence: Sequence
) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each key tile of one head its n_block, first row block, number of row blocks, and how many of these run
    the code for masks. Tiles that no row sees are left out.
    """
    queries = sequence.seqlen_q
    mask = mask_of(problem, queries, sequence.seqlen_k)
    tile_m = schedule.tile_m
    tile_n = schedule.tile_n
    for n_block in range(-(-sequence.seqlen_k // tile_n)):
        rows = visited_rows(mask, queries, n_block, tile_m, tile_n)
        if not rows:
            continue
        begin = rows.start
        end = rows.stop
        # the rows on whose diagonals the first and the last key of the tile lie
        first = n_block * tile_n - mask.offset
        last = min((n_block + 1) * tile_n, sequence.seqlen_k) - 1 - mask.offset
        # From block ``above`` on every row is late enough to see all keys of the tile; before block ``below`` every row
        # is early enough.
        above = min(end, max(begin, -(-(last - mask.right) // tile_m))) if mask.right >= 0 else begin
        latest = first + mask.left
        below = min(end, max(begin, (latest + 1) // tile_m)) if mask.left >= 0 and latest < queries - 1 else end
        plain = max(0, below - above)
        yield n_block, begin, end - begin, schedule.masks(end - begin, end - begin - plain)


@lru_cache(maxsize=4)
def key_tiles(problem: AttentionProblem, schedule: BackwardSchedule) -> list[KeyTile]:
    """Return the key tiles of all heads in the order in which they are handed out.

    In our kernel a head is one of K and V, and a tile has the row blocks of every query head that shares it. Where key
    tiles add in turn a head is one of Q in our kernel too, as turns are only defined for one head's row blocks.

    Heads are handed out in sections, as many heads at a time as L2 holds. Upstream takes one at a time where the mask
    is not causal; our kernel, where its turns are free, takes one without a mask and at most 16 with one, and joins the
    last sections as its plan does. In a section the tiles with most row blocks come first. Where key tiles take turns,
    their order is that of the turns, so that no tile waits for one that is handed out behind it. Persistent CTAs take
    the longest heads first.
    """
    check_problem(problem, schedule)
    group = problem.group if schedule.is_ours and schedule.turns == "free" else 1
    heads: list[tuple[int, list[KeyTile]]] = []  # bytes in L2, and tiles
    for batch, sequence in enumerate(problem.sequences()):
        blocked = list(_of_sequence(problem, schedule, sequence))
        size = sequence.seqlen_q * schedule.head_dim * (2 * 2 + DQ_BYTES) * group
        some = problem.nheads // group
        tiles = [(n_block, first, blocks * group, masked * group) for n_block, first, blocks, masked in blocked]
        heads += [(size, [KeyTile(head, *x) for x in tiles]) for head in range(batch * some, (batch + 1) * some)]
    if schedule.is_ours:
        heads.sort(key=lambda head: -sum(tile.blocks for tile in head[1]))
    is_ours_free = schedule.is_ours and schedule.turns == "free"
    is_masked = problem.causal or (is_ours_free and problem.window != (-1, -1))
    room = OUR_L2_BYTES if is_ours_free else L2_BYTES
    limit = room if is_masked or (schedule.is_ours and not is_ours_free) else 0
    most = HEADS_AT_A_TIME if is_ours_free else len(heads)
    sections: list[list[KeyTile]] = [[]]
    held = count = 0
    for size, tiles in heads:
        if sections[-1] and (held + size > limit or count == most):
            sections.append([])
            held = count = 0
        sections[-1] += tiles
        held += size
        count += 1
    if is_ours_free:
        last = sections_to_join([[(tile.head, tile.blocks) for tile in some] for some in sections], H200_SMS)
        sections[-last:] = [[tile for some in sections[-last:] for tile in some]]
    return [tile for some in sections for tile in sorted(some, key=_RANKS[schedule.turns])]


def moved_bytes(problem: AttentionProblem, schedule: BackwardSchedule) -> float:
    """Return the least bytes that the main kernel moves, every tensor once: Q, dO and fp32 dQ; K, V, dK and dV."""
    rows, keys = _rows(problem)
    gradients = DQ_BYTES if schedule.adds_gradients(problem.group) else 2
    return schedule.head_dim * (rows * (2 + 2 + DQ_BYTES) + keys * 2 * (2 + gradients))


def around_cycles(problem: AttentionProblem, schedule: BackwardSchedule, machine: Machine, clock_mhz: float) -> float:
    """Return the cycles of the kernels in front of and behind the main one, which only move memory.

    Those in front compute D from O and dO, take lse to log2 units and write zeros for dQ. Those behind convert dQ to 16
    bits, and dK and dV too where several heads add to them.
    """
    rows, keys = _rows(problem)
    read = rows * (schedule.head_dim * (2 + 2 + DQ_BYTES) + 4)
    written = rows * (schedule.head_dim * (DQ_BYTES + 2) + 2 * 4)
    launches = 2
    if schedule.adds_gradients(problem.group):
        read += 2 * keys * schedule.head_dim * DQ_BYTES
        written += 2 * keys * schedule.head_dim * (DQ_BYTES + 2)
        launches += 2
    rate = machine["hbm_bytes_per_ns"] * machine["sms"]
    return (read + written / WRITE_RATE) / rate * clock_mhz / 1000 + launches * machine["launch_cycles"]


def _rows(problem: AttentionProblem) -> tuple[int, int]:
    """Return the number of rows of Q over all heads, and of rows of K."""
    return prod(problem.q_shape[:-1]), prod(problem.k_shape[:-1])
