"""A page of Python becomes a program, a launch and a ranking, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_simulator.accounts import Traced, account, differences, first_blocks
from fa3_simulator.costs import costs
from fa3_simulator.cta import kernel_of
from fa3_simulator.described import hazards, misfits, occupancy, timed, tune
from fa3_simulator.description import START_CYCLES, Description, Launch, described, kernel
from fa3_simulator.engine import simulate
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, Gemm, Mbarrier, Op, Slot, Work
from fa3_simulator.run import estimate
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
        producer.wait_empty(empty, use)
        producer.load(full[use % 2], [a[use % 2], b[use % 2]])
        consumer.wait(full[use % 2], use // 2)
        consumer.issue(Gemm("A B", 8, 128, 16, False), a[use % 2], b[use % 2], Slot("C of consumer", 0))
        consumer.wgmma_wait(0)
        consumer.hand_back(empty[use % 2])
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
        for program in (schedule.resident([8], 1), schedule.resident([8, 8], 1))
    )
    assert two == pytest.approx(2 * one + START_CYCLES, rel=0.02)


def test_as_many_ctas_share_an_sm_as_there_is_room_for() -> None:
    schedule = GEMM(stages=2, bn=64, registers=128)
    program = schedule.program([1])
    room = occupancy(schedule, replace(schedule.launch(), occupancy=0), H200)
    assert room == 228 * 1024 // (program.smem_bytes + 1024) == 3
    assert len(schedule.resident([1], room).actors) == 3 * len(program.actors)
    assert occupancy(schedule, schedule.launch(), H200) == 1


def test_registers_of_warps_count_by_the_warp() -> None:
    def lone(cta, tiles):
        cta.warp("first", registers=96).mark("end")
        cta.warp("second", registers=96).mark("end")

    assert occupancy(kernel(lone)(), Launch([1], occupancy=0), H200) == 65536 // (64 * 96)


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
    (misfit,) = misfits(tight, H200)
    assert "C 128 + 24 for addresses are 152 registers, a thread has 144" in misfit
    assert not misfits(tight, changed(H200, "registers", more=16))


def test_of_values_that_do_not_fit_a_ranking_says_why_and_of_equal_schedules_there_is_one() -> None:
    ranked = tune(GEMM(), H200, {"stages": [2, 3, 9], "bn": [64, 128]})
    assert len(ranked) == 6
    fitting = [choice for choice in ranked if choice.timed]
    cycles = [choice.timed.estimate.cycles for choice in fitting if choice.timed]
    assert cycles == sorted(cycles)
    assert all("bytes of shared memory" in choice.misfit for choice in ranked[len(fitting) :])
    assert GEMM(stages=2, bn=64) == GEMM(bn=64, stages=2)


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
