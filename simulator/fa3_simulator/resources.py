"""What the warps of one CTA of a forward share: the slots, mbarriers and named barriers of a configuration.

Those of a backward are in :mod:`fa3_simulator.backward_consumer`.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from fa3_kernels.plan.barriers import WARPGROUP_THREADS, NamedBarrier as NamedBarrierId, slot_threads
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import SWIZZLED_BYTES, buffers
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.program import Mbarrier, NamedBarrier, Slot
from fa3_simulator.schedules import copies_queries


def slots(name: str, count: int, size: int) -> tuple[Slot, ...]:
    """Return the ``count`` slots of a ring, ``size`` bytes each, one behind the other in the ring's memory."""
    return tuple(Slot(f"{name}[{i}]", size, name, (i * size,)) for i in range(count))


def filled(name: str, count: int, arrivals: int = 1) -> tuple[Mbarrier, ...]:
    """Return the barriers of a ring that tell that a slot has been filled, by ``arrivals`` arrivals."""
    return tuple(Mbarrier(f"{name}_full[{i}]", arrivals) for i in range(count))


def emptied(
    name: str, count: int, config: Config | BackwardSchedule, first: int, warps: int = 1
) -> tuple[Mbarrier | NamedBarrier, ...]:
    """Return the barriers through which a ring's slots are handed back to a producer of so many ``warps``.

    They are mbarriers, or named ones with identities from ``first`` on.
    """
    if not config.traits.named_rings:
        return tuple(Mbarrier(f"{name}_empty[{i}]", config.consumers) for i in range(count))
    threads = slot_threads(config.consumers, warps)
    return tuple(NamedBarrier(f"{name}_empty[{i}]", first + i, threads) for i in range(count))


def _outputs_in_v(config: Config, v_bytes: int) -> tuple[Slot, ...]:
    """Return O of each consumer in V's memory, as upstream lays it out (hopper/epilogue_fwd.hpp).

    O begins where V does, but where O is larger both end at the same byte. O is cut into panels of the channels of a
    swizzled row. A panel holds the rows of all consumers, one consumer behind the other, and the next panel follows.
    """
    width = gcd(config.head_dim_v, SWIZZLED_BYTES // 2)
    part = WARPGROUP_ROWS * width * 2
    panels = config.head_dim_v // width
    begin = min(0, v_bytes - config.consumers * panels * part)
    return tuple(
        Slot(
            f"out.{w}",
            panels * part,
            "v",
            tuple(begin + (panel * config.consumers + w) * part for panel in range(panels)),
        )
        for w in range(config.consumers)
    )


class Resources:
    """Slots and barriers that the warps of a forward kernel share."""

    def __init__(self, config: Config) -> None:
        s = self.config = config
        each = range(s.consumers)
        stages = s.num_stages
        q_stages = s.query_slots
        self.bytes_of = {name: size for name, (_, size) in buffers(s).items()}  # bytes of one buffer of each kind
        first = int(NamedBarrierId.K_EMPTY)  # identities of the rings, and behind them those of the turns
        turns = first + 2 * stages + q_stages if s.traits.named_rings else first
        of_v = self.bytes_of["v"]
        # one slot for each warpgroup's rows; one ring slot after the other
        self.q = tuple(Slot(f"q[{i}].{w}", self.bytes_of["q"]) for i in range(q_stages) for w in each)
        self.k = slots("k", stages, self.bytes_of["k"])
        self.v = slots("v", stages, of_v)
        self.v_raw = slots("v_raw", stages, self.bytes_of["v_raw"]) if s.transposes_v else ()  # before the transpose
        # one slot for each warpgroup's rows; none where O leaves through Q's slots
        self.out = tuple(Slot(f"out.{w}", self.bytes_of["out"]) for w in each if "out" in self.bytes_of)
        if s.traits.output_in_v:
            self.out = _outputs_in_v(s, stages * of_v)
        self.q_full = filled("q", q_stages, s.consumers if copies_queries(s) else 1)
        self.k_full = filled("k", stages)
        self.v_full = self.v_ready = filled("v", stages)
        if s.transposes_v:
            self.v_ready = tuple(Mbarrier(f"v_ready[{i}]", 1) for i in range(stages))
        warps = 4 if s.transposes_v else 1
        self.empty = {
            "k": emptied("k", stages, s, first, warps),
            "v": emptied("v", stages, s, first + stages, warps),
            "q": emptied("q", q_stages, s, first + 2 * stages, warps),
        }
        self.turn = tuple(NamedBarrier(f"turn[{w}]", turns + w, 2 * WARPGROUP_THREADS) for w in each)
        self.epilogue = tuple(NamedBarrier(f"warps[{w}]", w + (w > 0), WARPGROUP_THREADS) for w in each)
        if not s.warp_specialized:  # the only barrier that such a kernel has
            self.epilogue = (NamedBarrier("all warps", 0, WARPGROUP_THREADS * s.consumers),) * s.consumers
        self.producer = NamedBarrier(
            "warps of the producer", 1 + s.consumers, WARPGROUP_THREADS
        )  # over the warps that transpose
        self.stored = Mbarrier("o_stored", 1)  # O has left V's memory
        # over all consumers: when all have read V, and again when O of each is in V's memory
        self.together = NamedBarrier("all consumers", 1, WARPGROUP_THREADS * s.consumers)


resources_of = lru_cache(maxsize=64)(Resources)
