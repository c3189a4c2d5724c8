"""Hardware named barriers of a CTA: who owns which of the 16 ids, and how many threads meet at each.

The kernels use these ids; :mod:`fa3_kernels.gluon.pipeline` and :mod:`fa3_kernels.gluon.backward_pipeline` say what
each barrier guards. The id of a ring is the first of as many ids as the ring has slots, or as there are warpgroups.
Triton 3.6 takes the first ids itself, as its partitions synchronise on them; the others belong to the kernels.
"""

from __future__ import annotations

from enum import IntEnum

NUM_BARRIERS = 16  # PTX ISA, bar: ids 0 to 15
WARP_THREADS = 32
WARPGROUP_THREADS = 128


class NamedBarrier(IntEnum):
    """First id of every owner in the forward kernels."""

    DEFAULT_PARTITION = 0
    WORKER_SWITCH = 1
    WORKER_PARTITION = 2  # 3 ids: a kernel has at most three partitions besides the default one
    K_EMPTY = 5  # as many slots as stages
    V_EMPTY = 7  # as many; in e4m3 kernels those of transposed V
    Q_EMPTY = 9  # 2 slots
    TURN = 11  # 3 consumer warpgroups; a single one, which alone may have up to 4 stages, takes no turns


class BackwardBarrier(IntEnum):
    """First id of every owner in the backward kernel; Triton's partitions take the same first ids."""

    Q_EMPTY = 5  # 2 slots
    DOUT_EMPTY = 7  # 2 slots
    DQ_EMPTY = 9  # 2 consumer warpgroups
    DQ_FULL = 11  # 2 consumer warpgroups
    KV_EMPTY = 13
    EXCHANGE = 14
    SCORES_READY = 15


def first_of_ring(first: int, stages: int) -> int:
    """Return the first id of a ring of the forward where K and V have ``stages`` slots; as listed, they have two.

    >>> [first_of_ring(owner, 4) for owner in (NamedBarrier.K_EMPTY, NamedBarrier.V_EMPTY, NamedBarrier.Q_EMPTY)]
    [5, 9, 13]
    """
    return NamedBarrier.K_EMPTY + (first - NamedBarrier.K_EMPTY) // 2 * stages


def slot_threads(num_consumer_warpgroups: int, producer_warps: int = 1) -> int:
    """Return how many threads meet when a ring slot is handed back: every consumer arrives, the producer waits.

    >>> slot_threads(2)
    288
    """
    return WARP_THREADS * producer_warps + WARPGROUP_THREADS * num_consumer_warpgroups


TURN_THREADS = 2 * WARPGROUP_THREADS  # the warpgroup that passes its turn arrives, the one that takes it waits
