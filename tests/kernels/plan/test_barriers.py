"""Named barriers: owners share no id, none lies outside the hardware's 16, and rings have room for their slots."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.barriers import NUM_BARRIERS, TURN_THREADS, BackwardBarrier, NamedBarrier, slot_threads

# ids of an owner that has several
COUNTS = {"WORKER_PARTITION": 3, "TURN": 3}
COUNTS |= dict.fromkeys(("K_EMPTY", "V_EMPTY", "Q_EMPTY", "DOUT_EMPTY", "DQ_EMPTY", "DQ_FULL"), 2)


def ids(barrier: NamedBarrier | BackwardBarrier) -> range:
    return range(int(barrier), int(barrier) + COUNTS.get(barrier.name, 1))


@pytest.mark.parametrize("owners", [NamedBarrier, BackwardBarrier])
def test_no_id_has_two_owners_and_all_are_in_hardware(owners):
    owned = [i for barrier in owners for i in ids(barrier)]
    assert len(owned) == len(set(owned))
    assert set(owned) <= set(range(NUM_BARRIERS))


def test_thread_counts_are_those_of_the_partitions():
    assert [slot_threads(n) for n in (2, 3)] == [32 + 2 * 128, 32 + 3 * 128]
    assert TURN_THREADS == 2 * 128
