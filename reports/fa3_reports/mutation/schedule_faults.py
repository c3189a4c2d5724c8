"""Barrier bugs that real kernels had, planted in the programs of the simulator, by their row in the museum.

A row 0 is of no report: a hazard that the programs themselves make possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import kernel_of
from fa3_simulator.program import Actor, Builder, Mbarrier, NamedBarrier, Op, Program, Slot
from fa3_simulator.schedules import TileBlocks

TILES = [TileBlocks(5), TileBlocks(3), TileBlocks(4)]


def actor_index(program: Program, name: str) -> int:
    return [actor.name for actor in program.actors].index(name)


def edited(program: Program, name: str, change: Callable[[list], list]) -> Program:
    """The program with the rows of one actor changed."""
    index = actor_index(program, name)
    actor = program.actors[index]
    rows = np.array(change(actor.ops.tolist()), np.int64).reshape(-1, 5)
    actors = list(program.actors)
    actors[index] = Actor(actor.name, actor.threads, actor.registers, rows)
    return replace(program, actors=tuple(actors))


def places(program: Program, name: str, text: str) -> list[int]:
    """Rows of an actor whose description begins with ``text``."""
    index = actor_index(program, name)
    count = len(program.actors[index].ops)
    found = [i for i in range(count) if program.describe(index, i).startswith(text)]
    assert found, f"{name} has no operation {text!r}"
    return found


def dropped(program: Program, name: str, text: str, which: int | slice = slice(None)) -> Program:
    """Without the ``which``-th such operation, or without those of a slice, which are all of them."""
    rows = places(program, name, text)
    gone = {rows[which]} if isinstance(which, int) else set(rows[which])
    return edited(program, name, lambda ops: [row for i, row in enumerate(ops) if i not in gone])


def moved(program: Program, name: str, text: str, before: str, which: int) -> Program:
    """With the ``which``-th such operation moved in front of the nearest earlier ``before``."""
    row = places(program, name, text)[which]
    target = max(i for i in places(program, name, before) if i < row)

    def change(ops: list) -> list:
        op = ops.pop(row)
        return [*ops[:target], op, *ops[target:]]

    return edited(program, name, change)


def replaced(program: Program, name: str, text: str, which: int, **columns: int) -> Program:
    row = places(program, name, text)[which]

    def change(ops: list) -> list:
        for column, value in columns.items():
            ops[row]["kxyzw".index(column)] = value
        return ops

    return edited(program, name, change)


def gluon(**changes) -> Program:
    return kernel_of(Config(**changes)).program(TILES)


def flash3(**changes) -> Program:
    return kernel_of(Config(family="flash3", **changes)).program(TILES)


def gradients(**changes) -> Program:
    return kernel_of(BackwardSchedule(**changes)).program([TileBlocks(4), TileBlocks(3)])


def upstream(head_dim: int) -> Program:
    """The gradients of FlashAttention-3, whose CTAs take one tile."""
    problem = AttentionProblem(1, 1, 1, 128, 128, head_dim, causal=True)
    return kernel_of(shipped_schedule(problem, "flash3")).program([TileBlocks(5, 2)])


def without_a_second_slot(program: Program) -> Program:
    """With one slot for dS nobody waits until the others have read that of the block before."""
    for name in ("consumer 0", "consumer 1"):
        # of each block the first of two, and not that of the epilogue
        program = dropped(program, name, "wait all warpgroups", slice(0, -1, 2))
    return program


def unmet(program: Program) -> Program:
    """O of one consumer goes to V's memory while the other may still read V: hopper/epilogue_fwd.hpp has a barrier."""
    program = dropped(program, "consumer 0", "wait all consumers")
    return dropped(program, "consumer 1", "wait all consumers", slice(0, None, 2))  # of each tile the first of two


def two_of_three() -> Program:
    """The third consumer does not meet the others in front of that write."""
    program = flash3(**WIDE)
    some = NamedBarrier("two consumers", 15, 256)
    grown = replace(program, named_barriers=(*program.named_barriers, some))
    for name in ("consumer 0", "consumer 1") * len(TILES):
        grown = replaced(grown, name, "wait all consumers", 0, x=len(program.named_barriers))
    return dropped(grown, "consumer 2", "wait all consumers", slice(0, None, 2))


def written_first(**changes) -> Program:
    """Each consumer meets the other behind its write to V's memory and not in front of it."""
    program = flash3(**changes)
    for name in ("consumer 0", "consumer 1"):
        for which in range(len(TILES)):
            program = moved(program, name, "write out", "wait all consumers", which)
    return program


WIDE = {"head_dim": 64, "tile_m": 192, "tile_n": 192, "pv_from_registers": False}
FP8 = {"dtype": "e4m3"}
FP8_TILE = {**FP8, "tile_n": 224}


def other_trip_count(name: str, changes: dict) -> Program:
    """One actor runs a tile with another number of blocks."""
    program = kernel_of(Config(**changes)).program(TILES)
    other = kernel_of(Config(**changes)).program([TileBlocks(5), TileBlocks(2), TileBlocks(4)])
    return edited(program, name, lambda _: other.actors[actor_index(other, name)].ops.tolist())


def shared_identity() -> Program:
    program = gluon()
    turn = next(b.identity for b in program.named_barriers if b.name == "turn[1]")
    barriers = [b._replace(identity=turn) if b.name == "warps[0]" else b for b in program.named_barriers]
    return replace(program, named_barriers=tuple(barriers))


def one_arrival_more() -> Program:
    program = flash3()
    mbarriers = [m._replace(arrivals=m.arrivals + 1) if m.name == "k_empty[0]" else m for m in program.mbarriers]
    return replace(program, mbarriers=tuple(mbarriers))


def overlapping_buffers() -> Program:
    """O is staged in the second slot of K."""
    program = gluon()
    names = [slot.name for slot in program.slots]
    k = names.index("k[1]")
    out = names.index("out.0")
    rows = places(program, "consumer 0", "write out.0") + places(program, "consumer 0", "store")

    def change(ops: list) -> list:
        for i in rows:
            column = 1 if ops[i][0] == Op.WRITE else 2
            if ops[i][column] == out:
                ops[i][column] = k
        return ops

    return edited(program, "consumer 0", change)


def one_row_short() -> Program:
    program = gluon()
    slots = [slot._replace(bytes=slot.bytes - 256) if slot.name == "k[1]" else slot for slot in program.slots]
    return replace(program, slots=tuple(slots))


def split_participants() -> Program:
    """Consumer 1 releases k[0] on a copy of the barrier."""
    program = gluon()
    names = [b.name for b in program.named_barriers]
    copy = program.named_barriers[names.index("k_empty[0]")]._replace(name="copy", identity=15)
    grown = replace(program, named_barriers=(*program.named_barriers, copy))
    return replaced(grown, "consumer 1", "arrive k_empty[0]", 1, x=len(names))


def mailbox(*, waits: bool) -> Program:
    """A scheduler hands tile numbers to two consumers through one slot."""
    builder = Builder("mailbox")
    slot = Slot("mailbox", 16)
    full = Mbarrier("full", 1)
    empty = Mbarrier("empty", 2)
    scheduler = builder.actor("scheduler", 32, 24)
    for tile in range(4):
        if tile and waits:
            scheduler.wait(empty, tile - 1)
        scheduler.write(slot)
        scheduler.arrive(full)
    for name in ("consumer 0", "consumer 1"):
        consumer = builder.actor(name, 128, 240)
        for tile in range(4):
            consumer.wait(full, tile)
            consumer.read(slot)
            consumer.arrive(empty)
    return builder.build()


def wrong_parity() -> Program:
    """A ring of one slot waits as if it had two."""
    program = flash3(num_stages=1)
    for which, row in enumerate(places(program, "consumer 0", "wait k_full[0]")):
        del row
        program = replaced(program, "consumer 0", "wait k_full[0]", which, y=which // 2 & 1)
    return program


# (museum row, what is wrong, the program)
PLANTED: tuple[tuple[int, str, Callable[[], Program]], ...] = (
    (33, "no barrier between writing O and its TMA store", lambda: dropped(gluon(), "consumer 0", "wait warps")),
    (34, "no such barrier in one tile only", lambda: dropped(flash3(), "consumer 1", "wait all consumers", 3)),
    (
        35,
        "a consumer sees an uninitialised mbarrier",
        lambda: replaced(gluon(), "consumer 0", "wait k_full[0]", 0, y=1),
    ),
    (36, "no proxy fence before V^T is handed over", lambda: dropped(flash3(**FP8), "producer", "fence", 2)),
    (37, "two users of one named barrier", shared_identity),
    (38, "an mbarrier counts one arrival too many", one_arrival_more),
    (
        39,
        "K is released before wgmma has read it",
        lambda: moved(gluon(intra_wg_overlap=False), "consumer 1", "arrive k_empty", "wait wgmma", 3),
    ),
    (
        39,
        "V is released before wgmma has read it",
        lambda: moved(flash3(), "consumer 0", "arrive v_empty", "wait wgmma", 2),
    ),
    (
        39,
        "three stages: V is released before wgmma has read it",
        lambda: moved(gluon(softmax_stages=3, tile_n=96), "consumer 0", "arrive v_empty", "wait wgmma", 1),
    ),
    (
        40,
        "three stages: V of two blocks before is not waited for",
        lambda: dropped(flash3(softmax_stages=3, pingpong=False), "consumer 1", "wait v_full", 2),
    ),
    (
        0,
        "three stages: the scores of the next block are read while Q K^T runs",
        lambda: moved(gluon(softmax_stages=3, tile_n=96), "consumer 0", "read S[0] of consumer 0", "wait wgmma", 1),
    ),
    (
        0,
        "a part of P V is added to O while it is summed",
        lambda: moved(gluon(**FP8, promotion_interval=64), "consumer 0", "read O[1] of consumer 0", "wait wgmma", 0),
    ),
    (40, "a full barrier is not waited for", lambda: dropped(gluon(), "consumer 0", "wait v_full", 4)),
    (41, "a wait for a parity that has passed", wrong_parity),
    (
        42,
        "no fence between P in shared memory and P V",
        lambda: dropped(flash3(head_dim=64, tile_m=192, pv_from_registers=False), "consumer 2", "fence", 1),
    ),
    (43, "two buffers overlap", overlapping_buffers),
    (44, "a buffer is one row too small", one_row_short),
    (45, "TMA overwrites K while it is read", lambda: dropped(gluon(), "producer", "wait k_empty", 3)),
    (45, "TMA overwrites Q while it is read", lambda: dropped(flash3(), "producer", "wait q_empty", 0)),
    (
        48,
        "the producer loads a tile that nobody reads",
        lambda: edited(flash3(), "producer", lambda ops: ops + ops[-4:]),
    ),
    (49, "a skipped block does not advance the ring", lambda: dropped(gluon(), "consumer 0", "arrive k_empty", 5)),
    (50, "warpgroups disagree about the number of blocks", lambda: other_trip_count("consumer 1", {})),
    (51, "arrive where a wait is needed", lambda: replaced(gluon(), "producer", "wait v_empty", 2, k=Op.BAR_ARRIVE)),
    (52, "the producer has another key range", lambda: other_trip_count("producer", {"family": "flash3"})),
    (53, "a race that one delay would show", lambda: dropped(gluon(pingpong=False), "consumer 1", "wait k_full", 6)),
    (54, "a mailbox is overwritten before all have read it", lambda: mailbox(waits=False)),
    (55, "the participants of a barrier are split", split_participants),
    (
        28,
        "V is overwritten before it is transposed",
        lambda: moved(flash3(**FP8), "producer", "load v_raw_full", "read v_raw", 4),
    ),
    (
        45,
        "the backward overwrites K while dK is stored from it",
        lambda: dropped(gradients(), "producer", "wait kv_empty", 0),
    ),
    (
        46,
        "dQ is staged while the one before is still being added",
        lambda: dropped(gradients(), "dQ warp", "wait store", 0),
    ),
    (46, "dQ is computed from half of dS", lambda: dropped(gradients(), "consumer 1", "wait all warpgroups", 1)),
    (46, "dS is overwritten while dQ reads it", lambda: without_a_second_slot(gradients(ds_stages=1))),
    (46, "the dQ warp adds what is not there yet", lambda: dropped(upstream(128), "dQ warp", "wait dq_full[1]", 2)),
    (
        46,
        "dQ is staged while the warp still adds the one before",
        lambda: dropped(upstream(128), "consumer 1", "wait dq_empty[1]", 2),
    ),
    (46, "the dQ warp hands back a buffer that it reads", lambda: dropped(upstream(128), "dQ warp", "wait store")),
    (46, "P is read by wgmma without a proxy fence", lambda: dropped(upstream(256), "consumer 0", "fence")),
    (47, "delta is read before it is there", lambda: dropped(gradients(), "consumer 0", "wait dout_full", 1)),
    (56, "dQ is read before its GEMM is done", lambda: dropped(gradients(), "consumer 1", "wait wgmma", 2)),
    (0, "a CTA ends while its store reads shared memory", lambda: dropped(gluon(), "consumer 0", "wait store", -1)),
    (
        0,
        "O is rescaled while P V runs",
        lambda: moved(gluon(), "consumer 0", "read O[0] of", "wait wgmma", 1),
    ),
    (0, "O is written to V's memory while another consumer reads V", lambda: unmet(flash3())),
    (0, "two of three consumers have read V when O is written to its memory", two_of_three),
    (0, "O is written to V's memory in front of the barrier", written_first),
    (0, "O that reaches into V's second stage is written in front of the barrier", lambda: written_first(**FP8_TILE)),
    (
        0,
        "O is staged when one thread knows that its store has read the buffer",
        lambda: dropped(gluon(), "consumer 0", "meet", 1),
    ),
    (
        0,
        "V is loaded when one thread of the transposing producer has read it",
        lambda: dropped(flash3(**FP8), "producer", "meet", 2),
    ),
    (0, "V is loaded while O leaves from its memory", lambda: dropped(flash3(), "producer", "wait o_stored")),
    (
        0,
        "V may be loaded when O's store has been started",
        lambda: moved(flash3(), "consumer 1", "arrive o_stored", "wait store", 0),
    ),
)
