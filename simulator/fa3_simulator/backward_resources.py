"""What the warps of one CTA of a backward kernel share: the slots, mbarriers and named barriers of a schedule.

Those of a forward are in :mod:`fa3_simulator.resources`.
"""

from __future__ import annotations

from itertools import count

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS, slot_threads
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.program import Mbarrier, NamedBarrier, Slot
from fa3_simulator.resources import emptied, filled, slots


class BackwardResources:
    """Slots and barriers that the warps share.

    K, V, P, dS and dQ have one slot for each consumer; where consumers split roles, K, V, P and dS have one slot for
    all. In our kernel lse and D of a row block lie side by side in the slot of lse, and ``delta`` is ().
    """

    def __init__(self, s: BackwardSchedule, *, adds_gradients: bool) -> None:
        self.schedule = s
        self.adds_gradients = adds_gradients
        row = 2 * s.head_dim
        each = range(s.consumers)
        parts = range(1 if s.splits_roles else s.consumers)
        part = 2 * s.tile_m * s.tile_n // len(parts)
        self.q = slots("q", s.num_stages, s.tile_m * row)
        self.lse = slots("lse", s.num_stages, (8 if s.is_ours else 4) * s.tile_m)
        self.dout = slots("dout", s.dout_stages, s.tile_m * row)
        self.delta = () if s.is_ours else slots("delta", s.dout_stages, 4 * s.tile_m)
        self.k, self.v = ([Slot(f"{name}.{w}", s.tile_n * row // len(parts)) for w in parts] for name in "kv")
        self.ds, self.p = (
            [[Slot(f"{name}[{i}].{w}", part) for w in parts] for i in range(s.ds_stages)] for name in ("ds", "p")
        )
        self.dq = [Slot(f"dq.{w}", 4 * s.staged(w)) for w in each]
        self.scores = Slot("scores", 4 * s.tile_m * s.tile_n)
        self.q_full = filled("q", s.num_stages)
        self.dout_full = filled("dout", s.dout_stages)
        self.kv_full = Mbarrier("kv_full", 1)
        # The first identities of named barriers are taken: by Triton's partitions, which have five, or else by one
        # barrier for each consumer.
        first = 5 if s.is_ours else 1 + s.consumers
        self.own = [NamedBarrier(f"warpgroup {w}", w + (w > 0), WARPGROUP_THREADS) for w in each]
        self.both = NamedBarrier("all warpgroups", first, WARPGROUP_THREADS * s.consumers)
        self.kv_empty = NamedBarrier("kv_empty", first + 1, slot_threads(s.consumers))
        self.q_empty = emptied("q", s.num_stages, s, first + 2)
        self.dout_empty = emptied("dout", s.dout_stages, s, first + 2 + s.num_stages)
        names = count(first + 2 + (s.num_stages + s.dout_stages) * s.traits.named_rings)
        if s.dq == "tma warp":
            self.dq_full, self.dq_empty = (
                [NamedBarrier(f"{name}.{w}", next(names), WARPGROUP_THREADS + WARP_THREADS) for w in each]
                for name in ("dq_full", "dq_empty")
            )
        if s.splits_roles:
            self.scores_ready = NamedBarrier("scores_ready", next(names), WARPGROUP_THREADS * s.consumers)
