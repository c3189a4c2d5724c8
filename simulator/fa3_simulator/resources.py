"""What the warps of one CTA of a forward share: the rings, barriers and buffers of a configuration."""

from __future__ import annotations

from math import gcd

from fa3_kernels.plan.barriers import WARPGROUP_THREADS, NamedBarrier, slot_threads
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import SWIZZLED_BYTES, buffers
from fa3_simulator.program import Slot
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import copies_queries


class Resources:
    """Rings, barriers and buffers that the warps of a forward kernel share."""

    def __init__(self, cta: Cta, config: Config) -> None:
        s = self.config = config
        each = range(s.consumers)
        size = {name: size for name, (_, size) in buffers(s).items()}  # bytes of one buffer of each kind
        threads = slot_threads(s.consumers, 4 if s.transposes_v else 1) if s.traits.named_rings else 0
        back = s.consumers if s.warp_specialized else 0  # without a producer a barrier of the CTA frees all stages
        cta.identities = int(NamedBarrier.K_EMPTY) - 1
        self.k, self.v = (
            cta.ring(name, s.num_stages, size[name], consumers=back, threads=threads, readers=s.consumers)
            for name in "kv"
        )
        # of each stage the rows of each consumer; consumers that copy them are the only ones to write there
        copies = copies_queries(s)
        self.q = cta.ring(
            "q",
            s.query_slots,
            {f"q.{w}": size["q"] for w in each},
            consumers=0 if copies else back,
            threads=threads,
            readers=1,
            full_arrivals=s.consumers if copies else 1,
        )
        # V before it is transposed, by the warps that load it
        self.v_raw = cta.ring("v_raw", s.num_stages, size["v_raw"], consumers=0) if s.transposes_v else None
        self.turn = [cta.named_barrier(f"turn[{w}]", 2 * WARPGROUP_THREADS) for w in each]
        self.epilogue = [cta.named_barrier(f"warps[{w}]", WARPGROUP_THREADS, w + (w > 0)) for w in each]
        if not s.warp_specialized:  # the only barrier that such a kernel has
            self.epilogue = [cta.named_barrier("all warps", WARPGROUP_THREADS * s.consumers, 0)] * s.consumers
        self.producer = cta.named_barrier("warps of the producer", WARPGROUP_THREADS, 1 + s.consumers)
        # over all consumers: when all have read V, and again when O of each is in V's memory
        self.together = cta.named_barrier("all consumers", WARPGROUP_THREADS * s.consumers, 1)
        # of each consumer; there are none where O leaves through Q's slots, or where P is in registers
        self.out, self.p = (
            [cta.smem(f"{name}.{w}", size[name]) for w in each if name in size] for name in ("out", "p")
        )
        if s.traits.output_in_v:
            self.stored = cta.mbarrier("o_stored")  # O has left V's memory
            self.out = _outputs_in_v(cta, s, self.v.parts["v"][0], s.num_stages * size["v"])


def _outputs_in_v(cta: Cta, config: Config, v: Slot, v_bytes: int) -> list[Slot]:
    """Return O of each consumer in V's memory, as upstream lays it out (hopper/epilogue_fwd.hpp).

    O begins where V does, but where O is larger both end at the same byte. O is cut into panels of the channels of a
    swizzled row. A panel holds the rows of all consumers, one consumer behind the other, and the next panel follows.
    """
    width = gcd(config.head_dim_v, SWIZZLED_BYTES // 2)
    part = WARPGROUP_ROWS * width * 2
    count = config.head_dim_v // width
    begin = min(0, v_bytes - config.consumers * count * part)
    panels = [begin + panel * config.consumers * part for panel in range(count)]
    return [
        cta.smem(f"out.{w}", count * part, (v, *(panel + w * part for panel in panels)))
        for w in range(config.consumers)
    ]
