"""The turns of a deterministic backward: in which order key tiles add their parts of dQ to a row block.

:func:`in_turn` is what a launch asks for; the rest is for it and for tests of the orders.

Every order ranks the key tiles that see a row block. A CTA may add its part when the part before is visible in memory.
An order is written as a program whose actors are CTAs: :mod:`fa3_simulator.engine` times it and finds the deadlock
of an order that has one, and :mod:`fa3_simulator.hazards` finds an addition that is signalled before it is visible.

An order in which a tile waits only for tiles that are handed out before it cannot deadlock. For of all tiles that are
not done take the one that was handed out first: its CTA has done everything that it was given before, so the tile runs;
all tiles that it may wait for are done; so it goes on. ``ascending`` and ``descending`` are such orders, where tiles
are handed out in the same order.

In ``shift`` key tile n begins at row block n mod blocks and may wait for tiles that are handed out later. So all tiles
of a group must be on CTAs of their own at the same time. Then a tile in its i-th step waits only for tiles in an
earlier step, or in their i-th step with smaller keys. Tiles of equal length go to the CTAs in turn, so that a group of
at most as many tiles as there are CTAs has a CTA for each. Tiles under a mask or of packed sequences differ in length,
and shifting is refused there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_kernels.plan.tile_order import assign
from fa3_reference.problem import AttentionProblem
from fa3_simulator import engine
from fa3_simulator.backward_launch import KeyTile, key_tiles
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.costs import costs
from fa3_simulator.machine import Machine
from fa3_simulator.program import Builder, Mbarrier, Program, Slot, Work
from fa3_simulator.schedules import TileBlocks

RowBlock = tuple[int, int]  # head and row block
# Cycles of a CTA in three places: for one row block; for a tile beside its row blocks; to add and signal a part of dQ.
StepCycles = tuple[float, float, float]
MOST_STEPS = 100_000  # steps of a program; of a longer launch the first heads are run, and the time is scaled up
MOST_OF_A_HEAD = 1 << 18  # steps of one head, which take half a minute


def visits(tile: KeyTile, turns: str) -> list[int]:
    """Return the row blocks of a tile in the order in which they are visited.

    >>> visits(KeyTile(0, 2, 0, 4, 0), "shift")
    [2, 3, 0, 1]
    """
    begin = tile.n_block % tile.blocks if turns == "shift" else 0
    return [tile.first + (begin + step) % tile.blocks for step in range(tile.blocks)]


def ranks(tiles: Sequence[KeyTile], turns: str, group: int) -> dict[tuple[KeyTile, int], int]:
    """Return the turn of every tile at every row block that it visits, from 0; ``group`` tiles of a head shift
    together."""
    order: dict[RowBlock, list[tuple[tuple[int, ...], KeyTile]]] = {}
    for tile in tiles:
        for step, block in enumerate(visits(tile, turns)):
            shifted = (tile.n_block // group, step) if turns == "shift" else ()
            sign = -1 if turns == "descending" else 1
            order.setdefault((tile.head, block), []).append(((*shifted, sign * tile.n_block), tile))
    return {(tile, block): i for (_, block), those in order.items() for i, (_, tile) in enumerate(sorted(those))}


def turns_program(
    assigned: Sequence[Sequence[KeyTile]], turns: str, cycles: StepCycles, group: int | None = None
) -> Program:
    """Return a program of all CTAs, each with its tiles of ``assigned``: one actor computes, one adds a part behind it.

    ``group`` is how many tiles of a head shift together; None stands for as many as there are CTAs.
    """
    turn_of = ranks([tile for tiles in assigned for tile in tiles], turns, group or len(assigned))
    awaited = {(tile.head, block, turn) for (tile, block), turn in turn_of.items()}
    builder = Builder(f"turns {turns}")
    block_work, tile_work, add_work = (
        Work(name, 1, stall=round(size)) for name, size in zip(("row block", "tile", "add"), cycles, strict=True)
    )
    for cta, mine in enumerate(assigned):
        compute = builder.actor(f"CTA {cta}", WARPGROUP_THREADS, 0)
        add = builder.actor(f"CTA {cta} adding", WARP_THREADS, 0)
        full = Mbarrier(f"full {cta}", 1)
        empty = Mbarrier(f"empty {cta}", 1)
        visited = [(tile, number, block) for tile in mine for number, block in enumerate(visits(tile, turns))]
        for step, (tile, number, block) in enumerate(visited):
            compute.work(*([] if number else [tile_work]), block_work)
            if step:
                compute.wait(empty, step - 1)
            compute.arrive(full)
            add.wait(full, step)
            turn = turn_of[tile, block]
            if turn:
                add.wait(_signal(tile.head, block, turn), 0)
            add.work(add_work)
            add.write(Slot(f"dQ {tile.head}.{block}", 0))
            if (tile.head, block, turn + 1) in awaited:
                add.arrive(_signal(tile.head, block, turn + 1))
            add.arrive(empty)
    return builder.build()


def in_turn(
    problem: AttentionProblem,
    schedule: BackwardSchedule,
    machine: Machine,
    clock_mhz: float,
    block: float,
    start: float,
    _tiles: Sequence[TileBlocks],
    _cycles: float,
) -> tuple[float, float]:
    """Return the cycles of the last CTA where key tiles take turns, with what it waits, and 0 cycles beside these.

    A CTA that never waits takes ``block`` cycles for a row block and ``start`` for a tile beside them.
    """
    size = 4 * schedule.tile_m * schedule.head_dim
    # Trips to L2: to read the turn, and for the sum to become visible. Upstream passes the turn on when shared memory
    # has been read, as its bulk wait with .read guarantees no more (FlashAttention issue 2244).
    waits = 2 if schedule.is_ours else 1
    added = (size / machine["reduce_bytes_per_ns"] + waits * machine["l2_latency_ns"]) * clock_mhz / 1000
    return makespan(key_tiles(problem, schedule), schedule.turns, (block, start, added), machine), 0.0


def makespan(tiles: Sequence[KeyTile], turns: str, cycles: StepCycles, machine: Machine) -> float:
    """Return the cycles to the end of the last CTA; ``tiles`` go in this order to the CTA that is free first.

    Which one is free is decided by :func:`~fa3_kernels.plan.tile_order.assign`, at its default price of a tile beside
    its blocks and not by ``cycles``. Of a long launch only the first heads are simulated (:data:`MOST_STEPS`).

    Raises
    ------
    DeadlockError
        If the order deadlocks.
    ValueError
        For heads of more than :data:`MOST_OF_A_HEAD` steps.
    """
    total = sum(tile.blocks for tile in tiles)
    steps = 0
    heads: Counter[int] = Counter()  # steps of each head that is simulated
    for tile in tiles:
        if tile.head in heads or steps < MOST_STEPS:
            steps += tile.blocks
            heads[tile.head] += tile.blocks
    first = [tile for tile in tiles if tile.head in heads]
    of_a_head = max(heads.values(), default=0)
    if of_a_head > MOST_OF_A_HEAD:
        raise ValueError(f"turns are simulated for at most {MOST_OF_A_HEAD} steps of a head, got {of_a_head}")
    assigned, _ = assign([tile.blocks for tile in first], int(machine["sms"]))
    program = turns_program([[first[i] for i in mine] for mine in assigned], turns, cycles)
    return engine.simulate(program, costs(program, machine)).cycles * total / steps


def _signal(head: int, block: int, turn: int) -> Mbarrier:
    """Return the barrier that says that the parts before ``turn`` of a row block have been added."""
    return Mbarrier(f"turn {turn} of row block {head}.{block}", 1)
