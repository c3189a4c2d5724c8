"""Named barriers: owners share no id, none lies outside the hardware's 16, and rings have room for their slots."""

from __future__ import annotations

from fa3_kernels.plan.barriers import NUM_BARRIERS, TURN_THREADS, NamedBarrier, ids, slot_threads


def test_no_id_has_two_owners_and_all_are_in_hardware():
    owned = [i for barrier in NamedBarrier for i in ids(barrier)]
    assert len(owned) == len(set(owned))
    assert set(owned) <= set(range(NUM_BARRIERS))


def test_rings_have_two_slots_and_every_warpgroup_a_turn():
    rings = (NamedBarrier.K_EMPTY, NamedBarrier.V_EMPTY, NamedBarrier.Q_EMPTY)
    assert [len(ids(ring)) for ring in rings] == [2, 2, 2]
    assert len(ids(NamedBarrier.TURN)) == 3
    assert len(ids(NamedBarrier.WORKER_PARTITION)) == 3  # two more consumers or a transposer, and the producer


def test_thread_counts_are_those_of_the_partitions():
    assert [slot_threads(n) for n in (2, 3)] == [32 + 2 * 128, 32 + 3 * 128]
    assert TURN_THREADS == 2 * 128
