"""The time of what a described kernel may do and no shipped one does: several operands and products to a commit group,
mma.sync, multicast, cp.async and plain stores by threads."""

from __future__ import annotations

import random

import pytest

from fa3_simulator import engine
from fa3_simulator.costs import L2_LONE_BYTES, costs
from fa3_simulator.machine import Machine, load
from fa3_simulator.program import BY_THREADS, HOT, Builder, Gemm, Mbarrier, Op, Program, Slot, Stream
from tests.simulator import plain_engine

H200 = load("h200")
ISSUES_AHEAD = H200.with_values({"wgmma_window": 64})
A, B, ACC = Slot("a", 16384), Slot("b", 32768), Slot("acc", 0)
FULL = Mbarrier("full", 1)
GEMM = Gemm("g", 4, 128, 16, True)
TENSOR = 4 * (64 + 4)  # cycles of GEMM: 4 more for each instruction whose A is in registers
TAIL = H200["wgmma_tail_cycles"]
LATENCY = H200["memory_latency_ns"] * H200["max_clock_mhz"] / 1000


def one() -> tuple[Builder, Stream]:
    builder = Builder("one")
    return builder, builder.actor("warpgroup", 128, 240)


def run(program: Program, machine: Machine = H200) -> float:
    """Cycles of a program, which both engines agree on."""
    tables = costs(program, machine)
    trace = engine.simulate(program, tables)
    assert trace.end == plain_engine.simulate(program, tables).end
    return trace.cycles


@pytest.mark.parametrize("in_flight", range(8))
def test_a_wait_leaves_up_to_seven_groups_in_flight(in_flight: int) -> None:
    """Behind nine groups it ends with the oldest that it does not leave."""
    builder, stream = one()
    for _ in range(9):
        stream.issue(GEMM, None, B, ACC)
    stream.wgmma_wait(in_flight)
    assert run(builder.build(), ISSUES_AHEAD) == (9 - in_flight) * TENSOR + TAIL


def test_a_wait_leaves_up_to_seven_stores_in_flight() -> None:
    def cycles(in_flight: int) -> float:
        builder, stream = one()
        for _ in range(9):
            stream.tma_store(A, A.bytes)
        stream.store_wait(in_flight)
        return run(builder.build())

    found = [cycles(n) for n in range(8)]
    each = A.bytes / H200["store_bytes_per_cycle"]
    assert found == pytest.approx([H200["tma_issue_cycles"] + (9 - n) * each for n in range(8)], abs=0.2)


@pytest.mark.parametrize("in_flight", [-1, 8])
def test_no_wait_leaves_more_than_seven_or_less_than_none_in_flight(in_flight: int) -> None:
    _, stream = one()
    for wait in (stream.wgmma_wait, stream.store_wait):
        with pytest.raises(ValueError, match=f"a wait leaves 0 to 7 .* in flight, got {in_flight}"):
            wait(in_flight)


def test_a_wait_counts_commit_groups_and_not_products() -> None:
    """Of three products the first two are one group."""
    builder, stream = one()
    stream.issue(GEMM._replace(is_open=True), None, B, ACC)
    stream.issue(GEMM, None, B, ACC)
    stream.issue(GEMM, None, B, ACC)
    stream.wgmma_wait(1)
    assert run(builder.build(), ISSUES_AHEAD) == 2 * TENSOR + TAIL


def test_what_is_not_committed_is_not_waited_for() -> None:
    builder, stream = one()
    stream.issue(GEMM._replace(is_open=True), None, B, ACC)
    stream.wgmma_wait(0)
    assert run(builder.build()) < TENSOR


def test_further_operands_take_no_time_of_their_own() -> None:
    def cycles(operands: int) -> float:
        builder, stream = one()
        for _ in range(operands):
            stream.operand(B)
        stream.issue(GEMM, None, B, ACC)
        stream.wgmma_wait(0)
        return run(builder.build())

    assert cycles(3) == cycles(0) == TENSOR + TAIL


def test_mma_sync_takes_its_share_of_wgmmas_rate_and_nothing_of_the_shared_memory_port() -> None:
    builder, stream = one()
    stream.issue(GEMM._replace(rate=0.5, a_in_registers=False), None, B, ACC)
    stream.wgmma_wait(0)
    program = builder.build()
    assert run(program) == 4 * 64 / 0.5 + H200["mma_tail_cycles"]
    assert engine.simulate(program, costs(program, H200)).busy["smem"] == 0


def test_a_multicast_load_comes_at_the_rate_of_its_ctas_at_most_at_one_sms() -> None:
    def cycles(multicast: int, *, is_far: bool = False) -> float:
        builder, stream = one()
        stream.load(FULL, [B], multicast=multicast, is_far=is_far)
        stream.wait(FULL, 0)
        return run(builder.build()) - LATENCY - H200["mbarrier_hop_cycles"]

    rates = [B.bytes / cycles(n) for n in (1, 2, 4)]
    l2 = H200["l2_bytes_per_cycle"]
    assert rates == pytest.approx([l2, min(2 * l2, L2_LONE_BYTES), L2_LONE_BYTES], rel=0.01)
    assert l2 < L2_LONE_BYTES < 2 * l2
    assert cycles(2, is_far=True) == cycles(1, is_far=True)


def test_cp_async_arrives_as_a_copy_by_tma_does_but_is_not_issued_by_it() -> None:
    def program(*, by_threads: bool, waits: bool) -> Program:
        builder, stream = one()
        stream.load(FULL, [B], by_threads=by_threads)
        if waits:
            stream.wait(FULL, 0)
        return builder.build()

    assert run(program(by_threads=True, waits=True)) == run(program(by_threads=False, waits=True))
    spans = [
        engine.simulate(p, costs(p, H200), records=True).spans
        for p in (program(by_threads=x, waits=False) for x in (True, False))
    ]
    assert spans[0] == []
    assert len(spans[1]) == 1


@pytest.mark.parametrize(("multicast", "by_threads"), [(0, False), (2, True)])
def test_a_load_that_no_instruction_does_is_refused(multicast: int, *, by_threads: bool) -> None:
    _, stream = one()
    with pytest.raises(ValueError, match=f"for 1 CTA or more, by cp.async for 1, got {multicast}"):
        stream.load(FULL, [B], multicast=multicast, by_threads=by_threads)


def test_bytes_that_somebody_else_expects_end_the_phase_when_all_have_landed() -> None:
    def cycles(sizes: list[int]) -> float:
        builder = Builder("two")
        loads, waits = builder.actor("loads", 32, 24), builder.actor("waits", 128, 240)
        loads.load_only(FULL, [Slot(f"s{i}", size) for i, size in enumerate(sizes)])
        waits.expect(FULL, sum(sizes))
        waits.wait(FULL, 0)
        return run(builder.build())

    assert cycles([16384, 16384]) == cycles([32768]) > LATENCY


def test_plain_stores_by_threads_leave_at_the_rate_of_stores_and_hold_a_warp_up_when_the_queue_is_full() -> None:
    def cycles(size: int, *, adds: bool = False, width: int = 16) -> float:
        builder, stream = one()
        stream.global_add(size) if adds else stream.global_store(size, width=width)
        return run(builder.build())

    queue = int(H200["store_queue_bytes"])
    assert cycles(queue) == 0
    assert cycles(queue, width=4) == pytest.approx(0.75 * queue / H200["thread_store_bytes_per_cycle"], abs=1)
    assert cycles(queue + 65536) == pytest.approx(65536 / H200["thread_store_bytes_per_cycle"], abs=1)
    assert cycles(65536, adds=True) > 1.02 * 65536 / H200["thread_store_bytes_per_cycle"]


def drawn(seed: int) -> Program:
    """A ring of two stages whose producer and consumer use all these operations, in an order drawn at random."""
    rng = random.Random(seed)
    builder = Builder("drawn")
    full, empty = ([Mbarrier(f"{name}[{i}]", 1) for i in range(2)] for name in ("full", "empty"))
    parts = [[Slot(f"{name}[{i}]", rng.choice((1000, 8192, 24576))) for name in "ab"] for i in range(2)]
    producer, consumer = builder.actor("producer", 32, 24), builder.actor("consumer", 128, 240)
    for block in range(12):
        stage, turn = block % 2, block // 2
        if turn:
            producer.wait(empty[stage], turn - 1)
        how = rng.choice(({}, {"is_far": True}, {"by_threads": True}, {"multicast": 2}, {"multicast": 4}))
        if rng.random() < 0.5:
            producer.load(full[stage], parts[stage], **how)
        else:
            producer.load_only(full[stage], parts[stage], **how)
            producer.expect(full[stage], sum(slot.bytes for slot in parts[stage]))
        consumer.wait(full[stage], turn)
        for _ in range(rng.randint(1, 4)):
            consumer.operand(parts[stage][0])
            n, rate = rng.choice((64, 128, 256)), rng.choice((1.0, 1.0, 0.62))
            share = rng.choice((0.25, 1.0))
            gemm = Gemm("g", rng.randint(1, 4), n, 16, rng.random() < 0.5, rate, rng.random() < 0.4, share)
            consumer.issue(gemm, None, parts[stage][1], ACC)
            if rng.random() < 0.3:
                consumer.tma_store(parts[stage][0], 1000, adds=rng.random() < 0.5)
        consumer.wgmma_wait(rng.randint(0, 7))
        consumer.store_wait(rng.randint(0, 7))
        consumer.arrive(empty[stage])
        rng.choice((consumer.global_add, consumer.global_store))(rng.choice((512, 20000)))
        for slot in parts[stage] if rng.random() < 0.5 else ():  # as a load of threads that L2 has had for long
            own = Mbarrier(f"own {block} {slot.name}", 1)
            consumer.expect(own, slot.bytes)
            consumer._add(Op.LOAD, builder.mbarriers[own], slot.bytes, builder.slots[ACC], BY_THREADS + HOT)
            consumer.wait(own, 0)
    return builder.build()


@pytest.mark.parametrize("seed", range(40))
def test_the_compiled_loops_give_the_ticks_of_the_plain_engine_for_all_these_operations(seed: int) -> None:
    program = drawn(seed)
    tables = costs(program, H200)
    want = plain_engine.simulate(program, tables)
    got = engine.simulate(program, tables, records=True)
    assert plain_engine.in_order(got) == plain_engine.in_order(want)
