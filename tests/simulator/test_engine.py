"""The engine against times derived by hand, against SimPy, and tick for tick against one in plain Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy
from hypothesis import given, strategies as st

from fa3_kernels.plan.config import Config
from fa3_simulator import engine
from fa3_simulator.costs import ALONE, SCALARS, TICKS, costs
from fa3_simulator.engine import DeadlockError
from fa3_simulator.machine import Machine, load
from fa3_simulator.overlap import ledger, measure
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Program, Slot, Work
from fa3_simulator.schedules import TileBlocks
from tests.simulator import plain_engine
from tests.simulator.programs import forward

H200 = load("h200")


def run(program: Program, machine: Machine = H200) -> float:
    return engine.simulate(program, costs(program, machine)).cycles


def test_a_gemm_alone_takes_its_tensor_time_and_the_tail() -> None:
    builder = Builder("gemm")
    stream = builder.actor("warpgroup", 128, 240)
    stream.issue(Gemm("S", 8, 128, 16, True), None, Slot("k", 0), Slot("s", 0))
    stream.wgmma_wait(0)
    assert (
        run(builder.build()) == 8 * (64 + 4) + H200["wgmma_tail_cycles"]
    )  # 64 cycles per 64 x 128 x 16, 4 for A in registers


def test_softmax_that_is_not_there_is_hidden() -> None:
    builder = Builder("gemm")
    builder.actor("warpgroup", 128, 240).issue(Gemm("S", 8, 128, 16, True), None, Slot("k", 0), Slot("s", 0))
    program = builder.build()
    priced = costs(program, H200)
    assert measure(program, priced, engine.simulate(program, priced, records=True)).hidden_softmax == 1


def test_no_wait_leaves_less_than_no_groups_in_flight() -> None:
    with pytest.raises(ValueError, match="0 to 7 groups of wgmma in flight, got -1"):
        Builder("gemm").actor("warpgroup", 128, 240).wgmma_wait(-1)


def test_e4m3_halves_the_tensor_time() -> None:
    builder = Builder("gemm")
    stream = builder.actor("warpgroup", 128, 240)
    stream.issue(Gemm("S", 4, 128, 8, True), None, Slot("k", 0), Slot("s", 0))
    stream.wgmma_wait(0)
    assert (
        run(builder.build()) == 4 * (64 + 4) + H200["wgmma_tail_cycles"]
    )  # k = 32 per instruction: the same cycles for twice the work


def test_operands_in_shared_memory_bind_narrow_instructions() -> None:
    builder = Builder("gemm")
    stream = builder.actor("warpgroup", 128, 240)
    stream.issue(Gemm("S", 100, 32, 16, False), Slot("q", 0), Slot("k", 0), Slot("s", 0))
    stream.wgmma_wait(0)
    assert run(builder.build()) == pytest.approx(
        100 * (32 + 64) * 32 / 128 + H200["wgmma_tail_cycles"], abs=20
    )  # 24 cycles fetch, 16 tensor


def test_exponentials_run_at_the_mufu_rate_and_slower_under_wgmma() -> None:
    def cycles(*, with_gemm: bool) -> float:
        builder = Builder("exp")
        stream = builder.actor("warpgroup", 128, 240)
        if with_gemm:
            stream.issue(Gemm("S", 64, 256, 16, True), None, Slot("k", 0), Slot("s", 0))
        stream.work(Work("exp", 8, mufu=64))
        return run(builder.build())

    lone = 64 * H200["mufu_lone_cycles"]
    assert cycles(with_gemm=False) == pytest.approx(lone, abs=1)
    assert cycles(with_gemm=True) > 1.2 * lone


def test_two_warpgroups_share_the_mufu() -> None:
    builder = Builder("exp")
    for name in ("a", "b"):
        builder.actor(name, 128, 240).work(Work("exp", 8, mufu=64))
    assert run(builder.build()) == pytest.approx(2 * 64 * H200["mufu_cycles"], rel=0.01)


def beside_wgmma(columns: int, work: Work) -> Program:
    """64 wgmma and their wait by one warpgroup while another does some work that ends before them."""
    builder = Builder("beside")
    stream = builder.actor("issuer", 128, 240)
    stream.issue(Gemm("S", 64, columns, 16, True), None, Slot("k", 0), Slot("s", 0))
    stream.wgmma_wait(0)
    builder.actor("other", 128, 240).work(work)
    return builder.build()


@pytest.mark.parametrize(
    ("columns", "share"), [(64, H200["fma_tensor_narrow"]), (128, 1.0), (256, H200["fma_tensor_wide"])]
)
def test_a_multiply_add_beside_wgmma_takes_its_time_from_the_tensor_core(columns: int, share: float) -> None:
    """Of a machine where it does: of the H200's constants in steps it takes nothing (decision 0018)."""
    machine = H200.with_values({"fma_tensor_cycles": 0.5})
    fma, chunks = 320, 40
    alone = run(beside_wgmma(columns, Work("nothing", 0)), machine)
    program = beside_wgmma(columns, Work("fma", chunks, fma=fma))
    lost = run(program, machine) - alone
    first = fma / chunks  # the first chunk may begin before wgmma does
    want = fma * 0.5 * share
    assert want - first <= lost <= want + 0.02 * want
    found = ledger(program, engine.simulate(program, costs(program, machine), records=True))
    assert found["multiply-adds"] / TICKS == pytest.approx(lost, abs=1)
    for pipe in ("mufu", "alu", "convert", "other"):
        assert run(beside_wgmma(columns, Work(pipe, chunks, **{pipe: 80})), machine) == alone


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_both_engines_take_the_same_time_from_the_tensor_core_for_multiply_adds(columns: int) -> None:
    """The other schedules of this file are run on a machine where it is none."""
    machine = H200.with_values({"fma_tensor_cycles": 0.5})
    program = beside_wgmma(columns, Work("fma", 40, fma=320))
    tables = costs(program, machine)
    trace = engine.simulate(program, tables, records=True)
    assert any(burst.taken for burst in trace.bursts)
    assert plain_engine.in_order(trace) == plain_engine.in_order(plain_engine.simulate(program, tables))


def test_a_softmax_takes_what_its_exponentials_take_and_two_overlap_theirs() -> None:
    """Multiply-adds and conversions hide under the exponentials of one warp, in the order in which ptxas mixes them."""

    def cycles(warpgroups: int) -> float:
        builder = Builder("mix")
        for i in range(warpgroups):
            builder.actor(f"w{i}", 128, 240).work(Work("softmax", 8, fma=128, mufu=64, convert=32))
        return run(builder.build())

    alone = 64 * H200["mufu_lone_cycles"]
    assert cycles(1) == pytest.approx(alone, abs=1)
    assert 1.9 * alone < cycles(2) < 2.1 * alone


def two_at_once(first: Work, second: Work) -> list[float]:
    """When either of two warpgroups is done that begin together."""
    builder = Builder("two")
    for name, work in (("a", first), ("b", second)):
        stream = builder.actor(name, 128, 240)
        stream.work(work)
        stream.mark("end")
    program = builder.build()
    return [tick / TICKS for (tick,) in engine.simulate(program, costs(program, H200)).marks]


def test_two_that_want_the_same_unit_share_it_evenly() -> None:
    """The one that began first does not gain, so that who is ahead stays as far ahead; different work costs little."""
    exponentials, maxima = Work("exp", 32, mufu=256), Work("max", 8, alu=64)
    together = two_at_once(exponentials, exponentials)
    assert together[1] - together[0] <= 2 * 8 * H200["mufu_cycles"]
    alone = 64 * H200["alu_cycles"]
    chunk = exponentials.mufu / exponentials.chunks * H200["mufu_lone_cycles"]
    assert alone < two_at_once(maxima, exponentials)[0] <= 2 * (alone + chunk)


def test_what_wants_other_pipes_is_slowed_in_proportion_and_hardly() -> None:
    """Maxima beside exponentials, decision 0017: measured 1.42 and 1.12 times as long."""
    exponentials, maxima = Work("exp", 64, fma=512, mufu=256), Work("max", 160, alu=640)
    alone = [two_at_once(work, Work("none", 0))[0] for work in (exponentials, maxima)]
    slowed = [x / y for x, y in zip(two_at_once(exponentials, maxima), alone, strict=True)]
    assert 1.1 < slowed[0] < 1.45
    assert 1.3 < slowed[1] < 1.6


def test_multiply_adds_alone_keep_the_port_and_hold_up_the_exponentials_of_another_warp() -> None:
    exponentials, adds = Work("exp", 64, fma=512, mufu=256), Work("add", 16, fma=256)
    alone = two_at_once(adds, Work("none", 0))[0]
    beside, late = two_at_once(adds, exponentials)
    assert beside == pytest.approx(alone, rel=0.5)
    lone = two_at_once(exponentials, Work("none", 0))[0]
    chunk = lone / exponentials.chunks
    assert late - lone == pytest.approx(beside * (1 - 1 / H200["held_up_factor"]), abs=H200["held_up_factor"] * chunk)


def test_a_chain_of_trips_through_shared_memory_takes_its_latency() -> None:
    builder = Builder("trip")
    builder.actor("warpgroup", 128, 240).work(Work("transpose", 4, alu=32, smem_bytes=4096, trips=4))
    assert run(builder.build()) == pytest.approx(4 * H200["trip_cycles"] + 32 * H200["alu_cycles"], abs=1)


def test_stores_leave_at_the_measured_rate_not_at_that_of_shared_memory() -> None:
    builder, slot = Builder("store"), Slot("o", 16384)
    stream = builder.actor("warpgroup", 128, 240)
    stream.tma_store(slot, slot.bytes)
    stream.store_wait()
    want = H200["tma_issue_cycles"] + slot.bytes / H200["store_bytes_per_cycle"]
    assert run(builder.build()) == pytest.approx(want, abs=0.1)


def test_what_adds_to_memory_leaves_at_its_own_rate_and_holds_up_the_threads_that_add_from_registers() -> None:
    size = 16384
    leaving = size / H200["reduce_bytes_per_ns"] * H200["max_clock_mhz"] / 1000

    def cycles(*, from_registers: bool, waits: bool = True) -> float:
        builder, slot = Builder("add"), Slot("dq", size)
        stream = builder.actor("warpgroup", 128, 240)
        if from_registers:
            stream.global_add(size)
        else:
            stream.tma_store(slot, size, adds=True)
        if waits:
            stream.store_wait()
        return run(builder.build())

    issue = H200["tma_issue_cycles"]
    assert cycles(from_registers=False) == pytest.approx(issue + leaving, abs=0.1)
    assert cycles(from_registers=False, waits=False) == issue
    assert cycles(from_registers=True, waits=False) == pytest.approx(leaving, abs=0.1)


def test_a_wait_for_stores_leaves_the_newest_in_flight() -> None:
    def cycles(in_flight: int) -> float:
        builder, slots = Builder("stores"), [Slot(f"o[{i}]", 16384) for i in range(3)]
        stream = builder.actor("warpgroup", 128, 240)
        for slot in slots:
            stream.tma_store(slot, slot.bytes)
        stream.store_wait(in_flight)
        program = builder.build()
        tables = costs(program, H200)
        assert engine.simulate(program, tables).end == plain_engine.simulate(program, tables).end
        return run(program)

    each = 16384 / H200["store_bytes_per_cycle"]
    found = [cycles(n) for n in (0, 1, 2)]
    assert found == pytest.approx([H200["tma_issue_cycles"] + n * each for n in (3, 2, 1)], abs=0.1)
    assert cycles(3) == 3 * H200["tma_issue_cycles"]


def test_a_load_takes_latency_bandwidth_and_the_barrier_hop() -> None:
    builder, full, slot = Builder("load"), Mbarrier("full", 1), Slot("k", 32768)
    builder.actor("producer", 32, 24).load(full, (slot,))
    builder.actor("consumer", 128, 240).wait(full, 0)
    latency = H200["memory_latency_ns"] * H200["max_clock_mhz"] / 1000
    want = latency + 32768 / H200["l2_bytes_per_cycle"] + H200["mbarrier_hop_cycles"]
    assert run(builder.build()) == pytest.approx(want, abs=0.1)  # a piece is a whole number of ticks


def test_mbarrier_parity_is_that_of_the_ptx_isa() -> None:
    builder, barrier = Builder("parity"), Mbarrier("b", 1)
    stream = builder.actor("alone", 32, 24)
    stream.wait(barrier, 1)  # the phase before the first counts as complete
    stream.arrive(barrier)
    stream.wait(barrier, 0)
    assert run(builder.build()) == 2 * H200["mbarrier_poll_cycles"]
    blocked = Builder("blocked")
    blocked.actor("alone", 32, 24).wait(barrier, 0)
    with pytest.raises(DeadlockError, match=r"cycle 0: alone at wait b \(row 0\), where nobody will arrive"):
        run(blocked.build())


def test_a_deadlock_names_named_barrier_and_cycle() -> None:
    builder = Builder("short")
    stream = builder.actor("one", 128, 240)
    stream.delay("cold_code_cycles")
    stream.bar_sync(NamedBarrier("turn", 11, 256))
    program, cold = builder.build(), round(H200["cold_code_cycles"])
    with pytest.raises(DeadlockError, match=rf"cycle {cold}: one at wait turn"):
        run(program)
    with pytest.raises(DeadlockError, match=rf"cycle {cold}: one at wait turn"):
        plain_engine.simulate(program, costs(program, H200))


def test_a_two_slot_pipeline_agrees_with_simpy() -> None:
    """Producer, consumer, two slots: the same constants in a process-based simulator written independently."""
    blocks, slots = 17, [Slot(f"k[{i}]", 16384) for i in range(2)]
    full = [Mbarrier(f"full[{i}]", 1) for i in range(2)]
    empty = [Mbarrier(f"empty[{i}]", 1) for i in range(2)]
    builder = Builder("pipeline")
    producer, consumer = builder.actor("producer", 32, 24), builder.actor("consumer", 128, 240)
    for j in range(blocks):
        if j >= 2:
            producer.wait(empty[j % 2], j // 2 - 1)
        producer.load(full[j % 2], (slots[j % 2],))
        consumer.wait(full[j % 2], j // 2)
        consumer.work(Work("softmax", 4, mufu=60))
        consumer.arrive(empty[j % 2])
    program = builder.build()
    tables = costs(program, H200)

    hop, poll, issue = (
        int(tables.scalars[SCALARS.index(name)]) for name in ("mbarrier_hop", "mbarrier_poll", "tma_issue")
    )
    latency, piece = (int(tables.scalars[SCALARS.index(name)]) for name in ("memory_latency", "piece"))
    work = int(tables.work[0, ALONE]) * 4
    env = simpy.Environment()
    ready = [[env.event() for _ in range(blocks)] for _ in range(2)]  # loaded, consumed
    link = simpy.Resource(env)

    def wait(event):
        if event.triggered:
            yield env.timeout(poll)
        else:
            yield event
            yield env.timeout(hop)

    def copy(j: int):
        yield env.timeout(latency)
        with link.request() as mine:
            yield mine
            yield env.timeout(16384 // 4096 * piece)
        ready[0][j].succeed()

    def produce():
        for j in range(blocks):
            if j >= 2:
                yield from wait(ready[1][j - 2])
            env.process(copy(j))
            yield env.timeout(issue)

    def consume():
        for j in range(blocks):
            yield from wait(ready[0][j])
            yield env.timeout(work)
            ready[1][j].succeed()

    env.process(produce())
    env.process(consume())
    env.run()
    assert engine.simulate(program, tables).end == env.now


schedules = st.builds(
    Config,
    dtype=st.just("fp16"),
    head_dim=st.sampled_from([64, 128, 256]),
    tile_m=st.sampled_from([64, 128, 192]),
    tile_n=st.sampled_from([32, 48, 80, 128, 176]),
    num_stages=st.sampled_from([1, 2, 3]),
    pingpong=st.booleans(),
    intra_wg_overlap=st.booleans(),
    pv_from_registers=st.booleans(),
    family=st.sampled_from(["gluon", "flash3"]),
) | st.builds(
    Config,
    dtype=st.just("e4m3"),
    head_dim=st.sampled_from([64, 128, 256]),
    tile_m=st.sampled_from([128, 192]),
    tile_n=st.sampled_from([64, 128]),
    num_stages=st.sampled_from([2, 3]),
    pingpong=st.booleans(),
    promotion_interval=st.sampled_from([0, 32, 64]),
    family=st.sampled_from(["gluon", "flash3"]),
)
schedules |= schedules.filter(lambda s: s.intra_wg_overlap and s.num_stages > 1).map(
    lambda s: replace(s, softmax_stages=3)
)
tiles = st.lists(
    st.integers(1, 9).flatmap(lambda n: st.integers(0, n).map(lambda masked: TileBlocks(n, masked))),
    min_size=1,
    max_size=4,
)


@given(schedule=schedules, work=tiles, clock=st.sampled_from([1100.0, 1980.0]))
def test_the_compiled_loops_give_the_ticks_of_the_plain_engine(
    schedule: Config, work: list[TileBlocks], clock: float
) -> None:
    if schedule.num_stages == 1 and schedule.intra_wg_overlap:
        work = [TileBlocks(1)]  # two tiles of K in flight need two slots
    program = forward(schedule, work)
    tables = costs(program, H200, clock)
    want = plain_engine.simulate(program, tables)
    got = engine.simulate(program, tables, records=True)
    assert plain_engine.in_order(got) == plain_engine.in_order(want)
    assert engine.simulate(program, tables) == replace(got, spans=[], bursts=[])
