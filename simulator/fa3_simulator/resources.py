"""Names that the actors of one CTA share: slots, mbarriers and named barriers of a schedule.

``gluon`` hands slots back through named barriers, ``flash3`` through mbarriers.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3_kernels.plan.barriers import NamedBarrier as NamedBarrierId
from fa3_kernels.plan.barriers import slot_threads
from fa3_simulator.program import Mbarrier, NamedBarrier, Slot
from fa3_simulator.schedules import WARPGROUP, Schedule


@dataclass(frozen=True, slots=True)
class Parts:
    """Names shared by the actors of one CTA."""

    schedule: Schedule
    q: tuple[Slot, ...]  # of one warpgroup each; one ring slot after the other
    k: tuple[Slot, ...]
    v: tuple[Slot, ...]
    v_raw: tuple[Slot, ...]  # as loaded, before the transpose
    q_full: tuple[Mbarrier, ...]
    k_full: tuple[Mbarrier, ...]
    v_full: tuple[Mbarrier, ...]
    v_ready: tuple[Mbarrier, ...]  # transposed; v_full itself without a transpose
    empty: dict[str, tuple]  # of NamedBarrier (gluon) or Mbarrier (flash3), by ring
    turn: tuple[NamedBarrier, ...]
    epilogue: tuple[NamedBarrier, ...]  # over one warpgroup
    producer: NamedBarrier  # gluon: over the warps of a producer that transposes
    stored: Mbarrier  # flash3: O has left V's memory
    together: NamedBarrier  # flash3: O of all consumers is there

    @property
    def q_stages(self) -> int:
        return len(self.q_full)


def parts_of(schedule: Schedule) -> Parts:
    s, stages = schedule, schedule.num_stages
    row = s.head_dim * s.bits // 8
    q_stages = 2 if s.kernel == "gluon" and s.head_dim <= 128 and s.warp_specialized else 1
    threads = slot_threads(s.consumers, 4 if s.v_transpose else 1)

    def full(name: str, count: int = stages) -> tuple[Mbarrier, ...]:
        return tuple(Mbarrier(f"{name}_full[{i}]", 1) for i in range(count))

    def empty(name: str, first: int, count: int = stages) -> tuple:
        if s.kernel == "flash3":
            return tuple(Mbarrier(f"{name}_empty[{i}]", s.consumers) for i in range(count))
        return tuple(NamedBarrier(f"{name}_empty[{i}]", first + i, threads) for i in range(count))

    def ring(name: str, size: int) -> tuple[Slot, ...]:
        return tuple(Slot(f"{name}[{i}]", size) for i in range(stages))

    first = int(NamedBarrierId.K_EMPTY)  # where our kernels' rings fit two slots; deeper rings follow on
    turns = first if s.kernel == "flash3" else first + 2 * stages + q_stages
    transposes = s.v_transpose
    v_full = full("v")
    return Parts(
        schedule,
        tuple(Slot(f"q[{i}].{w}", 64 * row) for i in range(q_stages) for w in range(s.consumers)),
        ring("k", s.tile_n * row),
        ring("v", s.tile_n * row),
        ring("v_raw", s.tile_n * row) if transposes else (),
        full("q", q_stages),
        full("k"),
        v_full,
        tuple(Mbarrier(f"v_ready[{i}]", 1) for i in range(stages)) if transposes else v_full,
        {
            "k": empty("k", first),
            "v": empty("v", first + stages),
            "q": empty("q", first + 2 * stages, q_stages),
        },
        tuple(NamedBarrier(f"turn[{w}]", turns + w, 2 * WARPGROUP) for w in range(s.consumers)),
        tuple(NamedBarrier(f"epilogue[{w}]", w + (w > 0), WARPGROUP) for w in range(s.consumers)),
        NamedBarrier("producer", 1 + s.consumers, WARPGROUP),
        Mbarrier("o_stored", 1),
        NamedBarrier("epilogue", 1, WARPGROUP * s.consumers),
    )
