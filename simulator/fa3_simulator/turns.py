"""The turns of a deterministic backward: in which order key tiles add their parts of dQ to a row block.

Every order is a rank of the key tiles that see a row block; a CTA may add when the one before has, visibly. It is read
as a program whose actors are CTAs, so that the engine times it, and finds the deadlock of an order that has one, and
:mod:`fa3_simulator.hazards` finds the addition that is signalled before it is there.

No order deadlocks in which a tile waits only for tiles that are handed out before it: of all tiles that are not done
take the one that was handed out first. The CTA that has it has done all it was given before, so it runs; those that it
may wait for are done; so it goes on. ``ascending`` and ``descending`` are such orders, with tiles handed out alike. In
``shift`` the tiles of a head begin at different row blocks, each one behind the tile of the keys before it, and wait
for tiles that were handed out later: all tiles of a group must be on CTAs of their own at the same time. Then a step
waits only for smaller steps, and for equal ones of smaller keys. Tiles of equal length, which go to the CTAs in turn,
are on CTAs of their own in groups of at most as many as there are CTAs; tiles under a mask or of packed sequences are
not, and there shifting is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_kernels.plan.tile_order import assign
from fa3_simulator import interpreter
from fa3_simulator.backward_launch import KeyTile
from fa3_simulator.costs import costs
from fa3_simulator.machine import Machine
from fa3_simulator.program import Builder, Mbarrier, Program, Slot, Work

RowBlock = tuple[int, int]  # head and row block
# what a CTA takes for a row block, for a tile beside its row blocks, and to add and signal one part of dQ
StepCycles = tuple[float, float, float]
MOST_STEPS = 100_000  # of a program; a longer launch is that of its first heads, and so much longer
MOST_OF_A_HEAD = 1 << 18  # which take half a minute


def visits(tile: KeyTile, turns: str) -> list[int]:
    """Row blocks of a tile in the order they are visited.

    >>> visits(KeyTile(0, 2, 0, 4, 0), "shift")
    [2, 3, 0, 1]
    """
    begin = tile.n_block % tile.blocks if turns == "shift" else 0
    return [tile.first + (begin + step) % tile.blocks for step in range(tile.blocks)]


def ranks(tiles: Sequence[KeyTile], turns: str, group: int) -> dict[tuple[KeyTile, int], int]:
    """The turn of every tile at every row block it visits, from 0; ``group`` tiles of a head shift together."""
    order: dict[RowBlock, list[tuple[tuple[int, ...], KeyTile]]] = {}
    for tile in tiles:
        for step, block in enumerate(visits(tile, turns)):
            shifted = (tile.n_block // group, step) if turns == "shift" else ()
            sign = -1 if turns == "descending" else 1
            order.setdefault((tile.head, block), []).append(((*shifted, sign * tile.n_block), tile))
    return {(tile, block): i for (_, block), those in order.items() for i, (_, tile) in enumerate(sorted(those))}


def _steps(tiles: Sequence[KeyTile], turns: str) -> Iterator[tuple[KeyTile, int, bool]]:
    """Row blocks of a CTA one after the other, and whether a tile begins with them."""
    for tile in tiles:
        for number, block in enumerate(visits(tile, turns)):
            yield tile, block, number == 0


def turns_program(
    assigned: Sequence[Sequence[KeyTile]], turns: str, cycles: StepCycles, group: int | None = None
) -> Program:
    """Program of all CTAs with the tiles each was given: one actor computes, one adds a part behind it.

    ``group``: tiles of a head that shift together, by default as many as there are CTAs.
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
        for step, (tile, block, is_first) in enumerate(_steps(mine, turns)):
            if is_first:
                compute.vector(tile_work)
            compute.vector(block_work)
            if step:
                compute.wait(empty, step - 1)
            compute.arrive(full)
            add.wait(full, step)
            turn = turn_of[tile, block]
            if turn:
                add.wait(_signal(tile.head, block, turn), 0)
            add.vector(add_work)
            add.write(Slot(f"dQ {tile.head}.{block}", 0))
            if (tile.head, block, turn + 1) in awaited:
                add.arrive(_signal(tile.head, block, turn + 1))
            add.arrive(empty)
    return builder.build()


def makespan(tiles: Sequence[KeyTile], turns: str, cycles: StepCycles, machine: Machine) -> float:
    """Cycles to the end of the last CTA; ``tiles`` as they are handed out, each to the CTA that is free first.

    Raises
    ------
    DeadlockError
        For an order that has one.
    ValueError
        For heads of more than :data:`MOST_OF_A_HEAD` steps.
    """
    total = sum(tile.blocks for tile in tiles)
    steps = 0
    heads = set()
    for tile in tiles:
        if tile.head not in heads and steps >= MOST_STEPS:
            break
        steps += tile.blocks
        heads.add(tile.head)
    kept = [tile for tile in tiles if tile.head in heads]
    of_a_head = sum(tile.blocks for tile in kept) // max(1, len(heads))
    if of_a_head > MOST_OF_A_HEAD:
        raise ValueError(f"turns are simulated for at most {MOST_OF_A_HEAD} steps of a head, got {of_a_head}")
    assigned, _ = assign([tile.blocks for tile in kept], int(machine["sms"]))
    program = turns_program([[kept[i] for i in mine] for mine in assigned], turns, cycles)
    return interpreter.simulate(program, costs(program, machine)).cycles * total / sum(tile.blocks for tile in kept)


def _signal(head: int, block: int, turn: int) -> Mbarrier:
    """Says that the parts before ``turn`` of a row block have been added."""
    return Mbarrier(f"turn {turn} of row block {head}.{block}", 1)
