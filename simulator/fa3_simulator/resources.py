"""What the warps of one CTA share: slots, mbarriers and named barriers of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from fa3_kernels.plan.barriers import WARPGROUP_THREADS, slot_threads
from fa3_kernels.plan.barriers import NamedBarrier as NamedBarrierId
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import SWIZZLED_BYTES, buffers
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.program import Mbarrier, NamedBarrier, Slot
from fa3_simulator.schedules import copies_queries


@dataclass(frozen=True, slots=True)
class Resources:
    """Names shared by the warps of one CTA."""

    config: Config
    bytes_of: dict[str, int]  # of one buffer, by name
    q: tuple[Slot, ...]  # of one warpgroup each; one ring slot after the other
    k: tuple[Slot, ...]
    v: tuple[Slot, ...]
    v_raw: tuple[Slot, ...]  # as loaded, before the transpose
    out: tuple[Slot, ...]  # of one warpgroup each; none where O leaves through Q's slots
    q_full: tuple[Mbarrier, ...]
    k_full: tuple[Mbarrier, ...]
    v_full: tuple[Mbarrier, ...]
    v_ready: tuple[Mbarrier, ...]  # transposed; v_full itself without a transpose
    empty: dict[str, tuple]  # of NamedBarrier or Mbarrier, by ring
    turn: tuple[NamedBarrier, ...]
    epilogue: tuple[NamedBarrier, ...]  # over one warpgroup
    producer: NamedBarrier  # over the warps of a producer that transposes
    stored: Mbarrier  # O has left V's memory
    together: NamedBarrier  # of all consumers: they have read V, and then O of each is in its memory


def slots(name: str, count: int, size: int) -> tuple[Slot, ...]:
    """Return a ring's slots of so many bytes, one behind the other in the ring's memory."""
    return tuple(Slot(f"{name}[{i}]", size, name, (i * size,)) for i in range(count))


def filled(name: str, count: int, arrivals: int = 1) -> tuple[Mbarrier, ...]:
    """Return the barriers of a ring that say that a slot has been filled."""
    return tuple(Mbarrier(f"{name}_full[{i}]", arrivals) for i in range(count))


def emptied(
    name: str, count: int, config: Config | BackwardSchedule, first: int
) -> tuple[Mbarrier | NamedBarrier, ...]:
    """Return the barriers through which a ring's slots are handed back: named ones from ``first`` on, or mbarriers."""
    if not config.traits.named_rings:
        return tuple(Mbarrier(f"{name}_empty[{i}]", config.consumers) for i in range(count))
    threads = slot_threads(config.consumers, 4 if isinstance(config, Config) and config.transposes_v else 1)
    return tuple(NamedBarrier(f"{name}_empty[{i}]", first + i, threads) for i in range(count))


def _outputs_in_v(config: Config, v_bytes: int) -> tuple[Slot, ...]:
    """Return O of each consumer in V's memory, as upstream lays it out (hopper/epilogue_fwd.hpp).

    O begins where V does, or ends there where it is larger. A panel has the channels of a swizzled row, and below each
    other the rows of all consumers; the next one lies behind it.
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


@lru_cache(maxsize=64)
def resources_of(config: Config) -> Resources:
    """Return what the warps of a forward kernel share."""
    s = config
    stages = config.num_stages
    q_stages = config.query_slots
    bytes_of = {name: size for name, (_, size) in buffers(s).items()}
    first = int(NamedBarrierId.K_EMPTY)  # where our kernels' rings fit two slots; deeper rings follow on
    turns = first + 2 * stages + q_stages if s.traits.named_rings else first
    v_full = filled("v", stages)
    own = tuple(Slot(f"out.{w}", bytes_of["out"]) for w in range(s.consumers) if "out" in bytes_of)
    return Resources(
        config,
        bytes_of,
        tuple(Slot(f"q[{i}].{w}", bytes_of["q"]) for i in range(q_stages) for w in range(s.consumers)),
        slots("k", stages, bytes_of["k"]),
        slots("v", stages, bytes_of["v"]),
        slots("v_raw", stages, bytes_of["v_raw"]) if s.transposes_v else (),
        _outputs_in_v(s, stages * bytes_of["v"]) if s.traits.output_in_v else own,
        filled("q", q_stages, s.consumers if copies_queries(s) else 1),
        filled("k", stages),
        v_full,
        tuple(Mbarrier(f"v_ready[{i}]", 1) for i in range(stages)) if s.transposes_v else v_full,
        {
            "k": emptied("k", stages, s, first),
            "v": emptied("v", stages, s, first + stages),
            "q": emptied("q", q_stages, s, first + 2 * stages),
        },
        tuple(NamedBarrier(f"turn[{w}]", turns + w, 2 * WARPGROUP_THREADS) for w in range(s.consumers)),
        tuple(NamedBarrier(f"epilogue[{w}]", w + (w > 0), WARPGROUP_THREADS) for w in range(s.consumers)),
        NamedBarrier("producer", 1 + s.consumers, WARPGROUP_THREADS),
        Mbarrier("o_stored", 1),
        NamedBarrier("epilogue", 1, WARPGROUP_THREADS * s.consumers),
    )
