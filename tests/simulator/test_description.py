"""A page of Python becomes a program, a launch and a ranking, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_simulator.costs import costs
from fa3_simulator.cta import kernel_of
from fa3_simulator.described import hazards, occupancy, timed, tune
from fa3_simulator.description import START_CYCLES, Description, Launch, described, kernel
from fa3_simulator.engine import simulate
from fa3_simulator.footprint import misfits
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.machine import load
from fa3_simulator.overlap import Traced, account, differences, first_blocks
from fa3_simulator.program import Builder, Gemm, Mbarrier, Op, Slot, Work
from fa3_simulator.run import estimate
from fa3_simulator.schedule import Cta
from fa3_simulator.shared_memory import regions
from fa3_simulator.what_if import RATES, changed

H200 = load("h200")


def build(cta, tiles, *, bm=128, bn=128, bk=64, stages=3, registers=240, shares=0):
    """One producer, one consumer of 64 rows; ``shares``: bytes of the stage of B that C is staged in."""
    ring = cta.ring("AB", stages, {"A": bm * bk * 2, "B": bn * bk * 2})
    out = cta.smem("C", bm * 64, at=(ring.parts["B"][0], 0)) if shares else cta.smem("C", bm * 64)
    own = cta.named_barrier("epilogue", 128)
    c = cta.warpgroup("consumer", registers=registers)
    acc = c.fragment("C", bn, rows=bm)
    p = cta.warp("producer")
    for tile in tiles:
        for _ in range(tile.blocks):
            p.tma_load(p.acquire(ring))
            stage = c.wait_full(ring)
            c.wgmma("A B", a=stage["A"], b=stage["B"], acc=acc, m=bm, n=bn, k=bk)
            c.wgmma_wait(0)
            c.release(stage)
        c.read(acc)
        c.store_wait()
        c.bar_sync(own)
        c.write(out)
        c.vector("C to shared memory", bm * 64 // 128, other=1, smem_bytes=bm * 64)
        c.fence()
        c.bar_sync(own)
        c.tma_store(out)
    c.store_wait()


def launch(size=2048, persistent=True, occupancy=1, *, bm, bn, bk):
    tiles = [size // bk] * ((size // bm) * (size // bn))
    return Launch(tiles, 2 * size**3, 6 * size**2, persistent=persistent, occupancy=occupancy)


GEMM = kernel(build)
GEMM.launch(launch)


def test_rings_count_stages_and_phases_as_a_program_by_hand_does() -> None:
    builder = Builder("by hand")
    consumer, producer = builder.actor("consumer", 128, 240), builder.actor("producer", 32, 24)
    a = [Slot(f"A[{i}]", 16384, "A", (16384 * i,), 1) for i in range(2)]
    b = [Slot(f"B[{i}]", 16384, "B", (16384 * i,), 1) for i in range(2)]
    full, empty = ([Mbarrier(f"AB_{name}[{i}]", 1) for i in range(2)] for name in ("full", "empty"))
    for use in range(5):
        if use >= 2:
            producer.wait(empty[use % 2], use // 2 - 1)
        producer.load(full[use % 2], [a[use % 2], b[use % 2]])
        consumer.wait(full[use % 2], use // 2)
        consumer.issue(Gemm("A B", 8, 128, 16, False), a[use % 2], b[use % 2], Slot("C of consumer", 0))
        consumer.wgmma_wait(0)
        consumer.arrive(empty[use % 2])
    expected = builder.build()
    got = GEMM(stages=2).program([5])
    for mine, theirs in zip(got.actors, expected.actors, strict=True):
        rows = mine.ops.tolist()[: len(theirs.ops)]
        assert [row[0] for row in rows] == theirs.ops[:, 0].tolist()
        waits = (Op.WAIT, Op.ARRIVE)
        named = [
            [(program.mbarriers[row[1]].name, row[2]) for row in rows if row[0] in waits]
            for program, rows in ((got, rows), (expected, theirs.ops.tolist()))
        ]
        assert named[0] == named[1]


def test_a_described_kernel_is_safe_for_any_tiles_and_a_shared_buffer_is_not() -> None:
    proof = hazards(GEMM(), H200)
    assert not proof.findings
    assert proof.is_complete
    (race, *_) = hazards(GEMM(shares=1), H200).findings
    assert race.kind == "race"
    assert "shares bytes with" in race.text
    assert "test_description.py:" in race.text


def test_a_tile_with_a_cta_of_its_own_begins_behind_the_one_before() -> None:
    schedule = GEMM(persistent=False)
    one, two = (
        simulate(program, costs(program, H200)).cycles
        for program in (schedule.resident([8], 1).build(), schedule.resident([8, 8], 1).build())
    )
    assert two == pytest.approx(2 * one + START_CYCLES, rel=0.02)


def test_as_many_ctas_share_an_sm_as_there_is_room_for() -> None:
    schedule = GEMM(stages=2, bn=64, registers=128)
    program = schedule.program([1])
    room = occupancy(schedule, replace(schedule.launch(), occupancy=0), H200)
    assert room == 228 * 1024 // (program.smem_bytes + 1024) == 3
    assert len(schedule.resident([1], room).build().actors) == 3 * len(program.actors)
    assert occupancy(schedule, schedule.launch(), H200) == 1
    with pytest.raises(ValueError, match=r"an SM has room for 3 CTAs of .*, its launch says 4"):
        occupancy(schedule, replace(schedule.launch(), occupancy=4), H200)


def test_registers_of_warps_count_by_the_warp() -> None:
    def lone(cta, tiles):
        cta.warp("first", registers=96).mark("end")
        cta.warp("second", registers=96).mark("end")

    assert occupancy(kernel(lone)(), Launch([1], occupancy=0), H200) == 65536 // (64 * 96)


def test_a_stage_stands_for_its_slots() -> None:
    """Whose slots were written as a stage, alone or among others, has the program of who wrote the slots."""

    def build(as_slots: Callable[[Any], Any]) -> list:
        cta = Cta("k")
        rings = [cta.ring(name, 2, {"A": 8192, "B": 8192}) for name in "xy"]
        w = cta.warpgroup("consumer")
        x, y = (w.wait_full(ring) for ring in rings)
        w.wgmma("A B", a=as_slots(x), b=as_slots([x, y]), acc=w.fragment("C", 64), n=64, k=64)
        w.mma_sync("A B", acc=w.fragment("D", 64), n=64, k=64, reads=as_slots(y))
        return cta.build().actors[0].ops.tolist()

    def spelled(given: Any) -> list:
        return [slot for stage in (given if isinstance(given, list) else [given]) for slot in stage.slots]

    assert build(lambda given: given) == build(spelled)


def test_a_group_is_one_for_the_waits() -> None:
    def pair(cta, tiles, *, grouped=True):
        c = cta.warpgroup("warps")
        acc = [c.fragment(f"C{i}", 64) for i in range(2)]
        b = cta.smem("B", 8192)
        with c.group():
            for each in acc:
                c.wgmma("A B", a=None, b=b, acc=each, n=64, k=64)
        c.wgmma_wait(0)

    program = kernel(pair)().program([1])
    gemms = [program.gemms[row[1]] for row in program.actors[0].ops.tolist() if row[0] == Op.WGMMA]
    assert [gemm.is_open for gemm in gemms] == [True, False]


def test_fragments_that_do_not_fit_the_registers_are_named_and_more_registers_let_them_fit() -> None:
    tight = GEMM(bm=64, bn=256, registers=144)
    (misfit,) = misfits(tight.cta([1]), H200)
    assert "C 128 + 24 for addresses are 152 registers, a thread has 144" in misfit
    assert not list(misfits(tight.cta([1]), changed(H200, "registers", more=16)))


def test_of_values_that_do_not_fit_a_ranking_says_why_and_of_equal_schedules_there_is_one() -> None:
    ranked = tune(GEMM(), H200, {"stages": [2, 3, 9], "bn": [64, 128]})
    assert len(ranked) == 6
    fitting = [choice for choice in ranked if choice.timed]
    cycles = [choice.timed.estimate.cycles for choice in fitting if choice.timed]
    assert cycles == sorted(cycles)
    assert all("bytes of shared memory" in choice.misfit for choice in ranked[len(fitting) :])
    assert GEMM(stages=2, bn=64) == GEMM(bn=64, stages=2)


def test_a_ranking_goes_on_where_one_choice_waits_for_ever() -> None:
    def build(cta, tiles, *, stages=2):
        ring = cta.ring("A", stages, 4096, readers=0)
        p, c = cta.warp("producer"), cta.warpgroup("consumer")
        for _ in range(2):
            p.tma_load(p.acquire(ring))
        first, second = c.wait_full(ring), c.wait_full(ring)
        c.release(first)
        c.release(second)

    of_two = kernel(build)
    of_two.launch(lambda: Launch([1], 1.0, 1.0))
    ranked = tune(of_two(), H200, {"stages": [1, 2]})
    assert [choice.values["stages"] for choice in ranked] == [2, 1]
    assert ranked[1].misfit.startswith("deadlock at cycle")


@pytest.mark.parametrize(
    ("given", "words"), [({"stage": 2}, "has no parameter stage; it has size, persistent"), ({"bk": 24}, "no wgmma")]
)
def test_what_a_description_cannot_be_is_refused_in_words(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        timed(GEMM(**given), H200)


def test_a_description_without_a_launch_says_so() -> None:
    with pytest.raises(ValueError, match="does not say what a launch is"):
        timed(Description(build)(), H200)


def _traced(name: str, found, program) -> Traced:
    tables = costs(program, H200)
    return Traced(name, found, program, tables, simulate(program, tables, records=True))


def test_the_cycles_of_a_launch_and_the_differences_of_two_add_up_exactly() -> None:
    problem = AttentionProblem(2, 16, 16, 4096, 4096, 128, causal=True)
    launches = []
    for family in ("gluon", "flash3"):
        config = schedule_for(problem, family)
        found = estimate(problem, config, H200)
        launches.append(_traced(family, found, kernel_of(config).program(first_blocks(found.tiles))))
    mine = timed(GEMM(), H200)
    launches.append(_traced("gemm", mine.estimate, mine.cta.kernel.program(first_blocks(mine.estimate.tiles))))
    causes = [account(launch) for launch in launches]
    for launch, each in zip(launches, causes, strict=True):
        assert sum(each.values()) == round(launch.estimate.cycles)
    more = differences(causes[0], causes[1])
    assert sum(more.values()) == sum(causes[1].values()) - sum(causes[0].values())


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_twice_as_high_makes_nothing_slower(rate: str) -> None:
    before = timed(GEMM(), H200).estimate.cycles
    assert timed(GEMM(), changed(H200, rate, 2)).estimate.cycles <= 1.005 * before
    assert timed(GEMM(), changed(H200, rate, 0.5)).estimate.cycles >= 0.995 * before


def test_long_tiles_are_extrapolated_as_they_are_simulated() -> None:
    schedule = GEMM(size=8192)
    found = timed(schedule, H200)
    program = schedule.program(found.estimate.tiles)
    exact = simulate(program, costs(program, H200)).cycles
    assert found.estimate.cta_cycles == pytest.approx(exact, rel=0.005)


def test_mma_sync_of_8_bits_takes_half_the_instructions_of_16() -> None:
    def product(cta, tiles, *, bits=16):
        c = cta.warpgroup("warps")
        c.mma_sync("A B", acc=c.fragment("C", 64), n=64, k=64, bits=bits)

    (wide,), (narrow,) = (kernel(product)(bits=bits).program([1]).gemms for bits in (16, 8))
    assert wide.instructions == 2 * narrow.instructions == 4
    assert (narrow.bits, narrow.rate < 1) == (8, True)


def test_mma_sync_has_16_rows_of_each_warp() -> None:
    def product(cta, tiles, *, m=16):
        c = cta.warp("one")
        c.mma_sync("A B", acc=c.fragment("C", 64, rows=m), m=m, n=64, k=16)

    assert [kernel(product)(m=m).program([1]).gemms[0].instructions for m in (16, 32)] == [1, 2]
    with pytest.raises(ValueError, match=r"no mma\.sync of 32 threads computes 8 x 64 x 16"):
        kernel(product)(m=8).program([1])


def test_vector_work_counts_for_each_element_or_in_all() -> None:
    def vectors(cta, tiles):
        c = cta.warpgroup("warps")
        c.vector("each", 64, fma=2, smem_bytes=128)
        c.vector("in all", shuffle=4)

    assert kernel(vectors)().program([1]).works == (
        Work("each", 16, fma=128, smem_bytes=128),
        Work("in all", 1, shuffle=4),
    )


def test_a_file_is_read_for_its_descriptions(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        dedent("""
        from fa3verify.schedule import kernel

        @kernel
        def mine(cta, tiles, *, n=1):
            cta.warp("only").mark("end")
        """)
    )
    assert list(described(path)) == ["mine"]
    assert np.shape(described(path)["mine"](n=2).program([1]).actors[0].ops) == (1, 5)
    path.write_text("x = 1")
    with pytest.raises(ValueError, match="describes no kernel"):
        described(path)


def counted(cta, tiles, *, bn=176, ops=2.0, warpgroups=1, k=64, depth=1):
    """Two products and some vector work for each block, of blocks in twos where ``depth`` is 2."""
    slot = cta.smem("B", bn * k * 2)
    w = cta.warpgroup("warps", registers=240, warpgroups=warpgroups)
    acc = w.fragment("C", bn, rows=64 * warpgroups)
    for tile in tiles:
        w.vector("prologue", 100, fma=3)
        for _ in range(0, tile.blocks, depth):
            for _ in range(depth):
                w.wgmma("A B", a=None, b=slot, acc=acc, m=64 * warpgroups, n=bn, k=k)
                w.wgmma("A B again", a=None, b=slot, acc=acc, m=64 * warpgroups, n=bn, k=k)
                w.wgmma_wait(0)
                w.vector("softmax", bn // 2, fma=ops, mufu=1, smem_bytes=4096)
                w.vector("rest", 8, other=1)
                w.mma_sync("C D", acc=acc, n=32, k=16, m=64 * warpgroups)
        w.vector("epilogue", 100, mufu=3)


@pytest.mark.parametrize(("warpgroups", "depth"), [(1, 1), (2, 1), (1, 2)])
def test_a_block_is_what_a_longer_tile_has_more_of_one_warp(warpgroups: int, depth: int) -> None:
    schedule = kernel(counted)(warpgroups=warpgroups, depth=depth)
    ((actor, counts),) = schedule.of_a_block().values()
    assert actor.threads == 128 * warpgroups
    # 4 warps of a warpgroup share 64 rows: 2 products of 64 x 176 in 4 steps of 16, and 4 of 16 x 8 x 16
    assert counts["64x176x16"] == 8
    assert counts["16816"] == 4
    assert (counts["fma"], counts["mufu"], counts["other"]) == (176, 88, 8)
    assert counts["smem_bytes"] == 4096 / (4 * warpgroups)


def test_counts_are_filled_in_per_pipe_and_shared_by_chunks_where_nobody_declared_any() -> None:
    schedule = kernel(counted)()
    wanted = {"fma": 352.0, "mufu": 44.0, "alu": 96.0}
    ((_, counts),) = schedule.filled({"warps": wanted}).of_a_block().values()
    ((_, before),) = schedule.of_a_block().values()
    assert {pipe: counts[pipe] for pipe in wanted} == wanted
    assert counts["other"] == before["other"]
    assert counts["64x176x16"] == before["64x176x16"]
    works = {work.name: work for work in schedule.filled({"warps": wanted}).program([2]).works}
    assert (works["softmax"].fma, works["prologue"].fma) == (352, 600)  # twice what they declare
    assert works["softmax"].alu == 11 * works["rest"].alu == 88  # 22 chunks and 2
    assert schedule.filled({"warps": dict(before)}).program([3]).works == schedule.program([3]).works
    assert schedule.program([2]).works[1].fma == 176  # the description itself stays as it is


def alone(body: Callable[..., None], warpgroups: int = 1, threads: int = 0) -> float:
    """Return the cycles of warps that do ``body``: so many warpgroups in one stream, or a lone warp."""

    def only(cta, tiles):
        body(cta, cta.warp("warp") if threads else cta.warpgroup("warps", warpgroups=warpgroups))

    program = kernel(only)().program([1])
    return simulate(program, costs(program, H200)).cycles


def test_two_warps_on_each_scheduler_issue_in_turn_and_wait_together() -> None:
    def issues(cta, c):
        c.vector("issue", fma=640)

    def waits(cta, c):
        c.vector("wait", fma=64, stall=2000)

    assert alone(issues, 2) == pytest.approx(2 * alone(issues), rel=1e-3)
    assert alone(issues, threads=32) == alone(issues)
    assert alone(waits, 2) == alone(waits)


def test_four_lone_warps_work_beside_each_other_and_eight_take_twice_as_long() -> None:
    def cycles(warps: int) -> float:
        def lone(cta, tiles):
            for w in range(warps):
                cta.warp(f"warp {w}").vector("issue", fma=6400)

        program = kernel(lone)().program([1])
        return simulate(program, costs(program, H200)).cycles

    assert cycles(4) == pytest.approx(cycles(1), rel=0.02)
    assert cycles(8) == pytest.approx(2 * cycles(1), rel=0.1)


def test_mma_sync_of_a_lone_warp_and_of_few_sums_takes_its_own_time_and_leaves_the_tensor_cores_to_others() -> None:
    def product(c, n: int, m: int) -> None:
        c.mma_sync("A B", acc=c.fragment("C", n, rows=m), m=m, n=n, k=64, waits=False)

    def gemm(threads: int, n: int) -> list[int]:
        def only(cta, tiles):
            product(cta.warp("one") if threads == 32 else cta.warpgroup("four"), n, threads // 2)

        program = kernel(only)().program([1])
        return costs(program, H200).gemm[0].tolist()

    busy, issue = 1, 4
    four, one, few = gemm(128, 64), gemm(32, 64), gemm(128, 8)
    assert one[busy] == pytest.approx(four[busy] / 4, abs=1)
    assert one[issue] == pytest.approx(four[busy], abs=1)  # a warp takes as long as four beside each other
    assert few[busy] == pytest.approx(four[busy] / 8, abs=1)
    assert few[issue] == pytest.approx(24 * 64, rel=0.02)  # cycles from one to the next that adds to its sum


def test_reads_behind_each_other_wait_once_and_fragments_need_no_load() -> None:
    def reads(count: int) -> Callable[..., None]:
        def body(cta, c):
            c.read(c.fragment("C", 64))
            for i in range(count):
                c.read(cta.smem(f"A{i}", 1024))

        return body

    assert alone(reads(0)) == 0
    assert alone(reads(1)) == alone(reads(3)) == H200["shared_load_cycles"]
    assert alone(lambda cta, c: c.fence()) == H200["proxy_fence_cycles"]


def test_a_load_of_a_few_bytes_has_the_latency_of_l2_or_of_hbm() -> None:
    ns = H200["max_clock_mhz"] / 1000
    for far, latency in ((False, "l2_latency_ns"), (True, "memory_latency_ns")):
        found = alone(lambda cta, c, far=far: c.global_load(128, far=far))
        assert found == pytest.approx(H200[latency] * ns, abs=128 / 50 + H200["mbarrier_hop_cycles"] + 1)


def test_where_hbm_binds_ctas_have_its_rate_and_its_latency_too() -> None:
    def read(cta, tiles, *, far=True):
        c = cta.warpgroup("warps", registers=64)
        for tile in tiles:
            for _ in range(tile.blocks):
                c.global_load(65536, far=far)

    def whole(size=64, *, far):
        return Launch([size] * 132, hbm_bytes=132 * size * 65536.0 * far)

    description = kernel(read)
    description.launch(whole)
    near, far = (timed(description(far=way), H200).estimate for way in (False, True))
    assert far.hbm_cycles < far.cta_cycles
    each = H200["memory_latency_ns"] * H200["max_clock_mhz"] / 1000
    assert far.cta_cycles == pytest.approx(far.hbm_cycles + 64 * each, rel=0.03)
    assert near.cta_cycles < far.hbm_cycles


def test_loads_into_registers_are_proved_for_any_tiles_and_take_no_shared_memory() -> None:
    def read(cta, tiles):
        c, a = cta.warpgroup("warps"), cta.smem("A", 4096)
        sync = cta.named_barrier("syncthreads", 128, identity=0)
        for tile in tiles:
            for _ in range(tile.blocks):
                c.global_load(4096, waits=False)
                c.bar_sync(sync)
                c.cp_async_wait(0)
                c.write(a)
                c.bar_sync(sync)
                c.read(a)

    description = kernel(read)
    description.launch(lambda: Launch([4], persistent=False))
    proof = hazards(description(), H200)
    assert (proof.findings, proof.is_complete) == ([], True)
    assert description().program([4]).smem_bytes < 2 * 4096


def test_a_wait_for_wgmma_hands_back_the_stages_that_were_read() -> None:
    def rows(*, at_once: bool) -> list:
        cta = Cta("one")
        ring, c = cta.ring("A", 2, 64), cta.warpgroup("consumer")
        first, second = c.wait_full(ring), c.wait_full(ring)
        if at_once:
            c.wgmma_wait(1, first, second)
        else:
            c.wgmma_wait(1)
            c.release(first)
            c.release(second)
        return c.rows

    assert rows(at_once=True) == rows(at_once=False)


def test_a_stage_that_nobody_hands_back_is_not_waited_for() -> None:
    cta = Cta("one")
    ring, p = cta.ring("A", 2, 64, consumers=0), cta.warp("producer")
    for _ in range(5):
        p.release(p.acquire(ring))
    assert not p.rows
    assert [barrier.name for barrier in cta.build().mbarriers] == ["A_full[0]", "A_full[1]"]


def test_a_buffer_lies_in_another_in_equal_parts() -> None:
    cta = Cta("one")
    whole = cta.smem("whole", 96)
    cta.smem("parts", 64, at=(whole, 0, 64))
    assert regions(cta.build().slots) == {(0, 1): 64, (0,): 32}


def test_a_fragment_takes_the_registers_of_several_that_are_dead() -> None:
    c = Cta("one").warpgroup("consumer")
    for name, columns in (("S", 32), ("T", 32), ("O", 64)):
        c.fragment(name, columns)
    alone = c.registers_needed
    c.fragment("P", 100, reuses="S, T")
    assert c.registers_needed - alone == (100 - 64) // 2
    c.fragment("P", 60, reuses="S, T")
    assert c.registers_needed == alone


def test_no_elements_are_no_work() -> None:
    c = Cta("one").warpgroup("consumer")
    c.vector("nothing", 0, fma=1)
    assert not c.rows
    c.vector("in all", fma=1)
    assert len(c.rows) == 1


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_repeated_is_what_is_written_again(stages: int) -> None:
    """Though it is written once for each place in the rings and for each argument, and copied from then on."""
    written = 0

    def streams(*, copies: bool) -> list:
        cta = Cta("one")
        ring = cta.ring("A", stages, 64)
        warps = cta.warp("producer"), cta.warpgroup("consumer")

        def block(reads: int) -> None:
            nonlocal written
            written += 1
            warps[0].tma_load(warps[0].acquire(ring))

        def use(reads: int) -> None:
            stage = warps[1].wait_full(ring)
            for _ in range(reads):
                warps[1].read(stage.slot)
            warps[1].release(stage)

        for number in range(30):
            for mine, emit in zip(warps, (block, use), strict=True):
                mine.repeated(emit, number % 5 // 3) if copies else emit(number % 5 // 3)
        return [warp.rows for warp in warps]

    copied = streams(copies=True)
    assert written <= 2 * 3 * stages
    assert copied == streams(copies=False)
