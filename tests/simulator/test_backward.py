"""The backward program: safe in every order, with the algorithm's instructions, and no faster than what binds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.families import FAMILIES
from fa3_reference.problem import AttentionProblem
from fa3_simulator import engine
from fa3_simulator.backward_choice import candidates, schedule_for, shipped_schedule
from fa3_simulator.backward_launch import key_tiles
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.costs import costs
from fa3_simulator.cta import BackwardKernel, operations
from fa3_simulator.footprint import misfits
from fa3_simulator.hazards import check
from fa3_simulator.machine import Machine, load
from fa3_simulator.overlap import measure
from fa3_simulator.program import Op
from fa3_simulator.roofline import roofline
from fa3_simulator.run import estimate
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import regret, tune
from tests.simulator import plain_engine
from tests.simulator.explore import explore
from tests.simulator.programs import backward

H200 = load("h200")


def problem(
    head_dim: int, seqlen: int, *, batch: int = 1, causal: bool = False, nheads_kv: int = 0
) -> AttentionProblem:
    """Heads of 2048 channels together, as in the paper's grid."""
    nheads = 2048 // head_dim
    return AttentionProblem(batch, nheads, nheads_kv or nheads, seqlen, seqlen, head_dim, causal=causal)


SHIPPED = tuple(
    dict.fromkeys(
        shipped_schedule(problem(head_dim, 128, causal=causal), family)
        for family, sizes in (("flash3", (64, 96, 128, 192, 256)), ("gluon", (64, 96, 128, 160, 192, 256)))
        for head_dim in sizes
        for causal in (False, True)
    )
)
each_schedule = pytest.mark.parametrize(
    "schedule", SHIPPED, ids=lambda s: f"{s.family}-d{s.head_dim}-m{s.tile_m}-{s.dq}"
)


def tiles_of(schedule: BackwardSchedule) -> list[TileBlocks]:
    """As many key tiles as a CTA of the family takes."""
    return [TileBlocks(5, 2), TileBlocks(1), TileBlocks(3)][: 3 if schedule.is_ours else 1]


def changed(machine: Machine, **values: float) -> Machine:
    return machine.with_values(values)


@each_schedule
@pytest.mark.parametrize("adds_gradients", [False, True], ids=["equal heads", "grouped heads"])
def test_shipped_programs_are_safe_and_fit(schedule: BackwardSchedule, adds_gradients: bool) -> None:
    cta = BackwardKernel(schedule, adds_gradients).cta(tiles_of(schedule))
    assert check(cta.build(), H200, orders=5) == []
    assert list(misfits(cta, H200)) == []


@pytest.mark.parametrize("schedule", [s for s in SHIPPED if s.consumers == 2], ids=lambda s: f"{s.family}-{s.head_dim}")
def test_no_interleaving_conflicts(schedule: BackwardSchedule) -> None:
    found = explore(backward(schedule, [TileBlocks(1)]))
    assert (found.findings, found.is_complete) == ([], True)
    assert found.states > 1000


@each_schedule
def test_a_row_block_takes_five_products_and_adds_dq_once(schedule: BackwardSchedule) -> None:
    blocks = 3
    program = backward(schedule, [TileBlocks(blocks)])
    trace = engine.simulate(program, costs(program, H200), records=True)
    done = 0
    for burst in trace.bursts:
        gemm = program.gemms[int(program.actors[burst.actor].ops[burst.row][1])]
        done += 2 * 64 * gemm.n * 16
    ahead = schedule.is_ours and not schedule.splits_roles  # a tile ends with scores that nobody reads
    products = blocks * 5 + ahead
    assert done == products * 2 * schedule.tile_m * schedule.tile_n * schedule.head_dim
    added = sum(
        int(x)
        for actor in program.actors
        for kind, x, _, adds, _ in actor.ops
        if kind == Op.REDUCE or (kind == Op.STORE and adds)
    )
    assert added == blocks * 4 * schedule.tile_m * schedule.head_dim


@each_schedule
def test_the_plain_engine_agrees_and_the_ledger_sums(schedule: BackwardSchedule) -> None:
    program = backward(schedule, tiles_of(schedule), adds_gradients=True)
    tables = costs(program, H200)
    trace = engine.simulate(program, tables, records=True)
    assert plain_engine.in_order(plain_engine.simulate(program, tables)) == plain_engine.in_order(trace)
    assert sum(measure(program, tables, trace).ledger.values()) == trace.end - trace.busy["tensor"]


@each_schedule
def test_shared_memory_does_not_depend_on_the_tiles(schedule: BackwardSchedule) -> None:
    one, more = (backward(schedule, tiles) for tiles in ([TileBlocks(1)], tiles_of(schedule)))
    assert one.smem_bytes == more.smem_bytes


def test_registers_end_where_upstreams_tiles_do() -> None:
    """The next larger tile of each head_dim spills: 80 x 128 at 128, 64 x 80 at 256, 64 x 96 at 192."""
    for head_dim, larger in ((128, {"tile_m": 96}), (256, {"tile_n": 96}), (192, {"tile_n": 144})):
        chosen = shipped_schedule(problem(head_dim, 128), "flash3")
        spilled = replace(chosen, **larger)
        assert not BackwardKernel(chosen).cta([TileBlocks(1)]).short_of_registers()
        assert BackwardKernel(spilled).cta([TileBlocks(1)]).short_of_registers()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 80}, "head_dim must be one of 64, 96, 128, 160, 192, 256, got 80"),
        ({"tile_m": 80}, "dQ of a tile of 80 x 128 is no product of wgmma: 80 x 64 for each of 2"),
        ({"tile_n": 64}, "S of a tile of 64 x 64 is no product of wgmma: 32 x 64 for each of 2"),
        ({"tile_n": 100}, "tile_n must be a multiple of 16 to 256, got 100"),
        ({"num_stages": 5}, "num_stages must lie in"),
        ({"family": "flash3", "splits_roles": True, "head_dim": 256, "tile_n": 64}, "roles are split by ours alone"),
        ({"consumers": 4}, "consumers must be 2 or 3, got 4"),
        ({"scores_transposed": False, "v_in_registers": True}, "V in registers needs transposed scores"),
    ],
)
def test_impossible_schedules_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackwardSchedule(**fields)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=3),
    st.sampled_from([{"causal": True}, {}, {"window": (70, 0)}, {"window": (-1, 100)}, {"window": (30, 30)}]),
)
def test_every_visible_pair_lies_in_a_block_and_every_hidden_one_in_a_masked_one(
    lengths: list[tuple[int, int]], mask: dict
) -> None:
    queries, keys = zip(*lengths)
    asked = AttentionProblem.varlen(queries, keys, nheads=1, nheads_kv=1, head_dim=128, **mask)
    schedule = BackwardSchedule()
    found = {(tile.head, tile.n_block): tile for tile in key_tiles(asked, schedule)}
    for index, (rows, columns) in enumerate(lengths):
        first, stop = asked.visible_keys(np.arange(rows), rows, columns)
        sees = (np.arange(columns) >= first[:, None]) & (np.arange(columns) < stop[:, None])
        for n_block, start in enumerate(range(0, columns, schedule.tile_n)):
            mine = sees[:, start : start + schedule.tile_n]
            blocks = [mine[row : row + schedule.tile_m] for row in range(0, rows, schedule.tile_m)]
            seen = [i for i, block in enumerate(blocks) if block.any()]
            if not seen:
                assert (index, n_block) not in found or found[index, n_block].blocks == 0
                continue
            tile = found[index, n_block]
            assert (tile.first, tile.first + tile.blocks) == (seen[0], seen[-1] + 1)
            assert tile.masked == sum(not block.all() for block in blocks[seen[0] : seen[-1] + 1])


def test_upstream_masks_every_block_of_a_causal_tile_but_at_head_dim_64() -> None:
    for head_dim, everywhere in ((64, False), (128, True)):
        asked = problem(head_dim, 2048, causal=True)
        tile = key_tiles(asked, shipped_schedule(asked, "flash3"))[0]
        assert (tile.masked == tile.blocks) == everywhere


@each_schedule
def test_time_is_at_least_the_tensor_work_and_the_roofline(schedule: BackwardSchedule) -> None:
    asked = AttentionProblem(1, 16, 16, 2048, 2048, schedule.head_dim)
    found = estimate(asked, schedule, H200)
    assert found.tensor_cycles >= operations(asked, schedule) / (132 * H200["tensor_flops_16bit"])
    assert found.cta_cycles > max(found.tensor_cycles, roofline(asked, schedule, H200).cycles)


def test_the_roofline_of_shared_memory_counts_operands_copies_and_what_threads_move() -> None:
    """Bytes of a row block of 64 x 128, head_dim 128, of our kernel, counted by hand."""
    fetch = 2 * 2 * 8 * (64 + 64) * 32 + 2 * 2 * 4 * 128 * 32 + 2 * 2 * 4 * (64 + 64) * 32  # S, dP; dV, dK; dQ
    copies = 2 * (64 * 256 + 64 * 4) + 2 * 64 * 64 * 4  # Q, dO, lse, D; dQ of both warpgroups
    threads = 2 * (4 * 64 * 16 + (64 * 64 * 2 + 4 * 64 * 16) + 64 * 128 * 2)  # lse; dS and D; dQ
    blocks = 4096 // 64 * 4  # 512 key tiles on 132 SMs
    bound = roofline(problem(128, 4096), BackwardSchedule(), H200)
    assert bound.needs["smem"] == pytest.approx(blocks * (fetch + copies + threads) / 128, rel=2e-3)
    assert bound.binds == "smem"


@each_schedule
def test_long_tiles_are_as_affine_in_their_row_blocks_as_they_are_taken_to_be(schedule: BackwardSchedule) -> None:
    def cycles(blocks: int) -> float:
        program = backward(schedule, [TileBlocks(blocks)])
        return engine.simulate(program, costs(program, H200)).cycles

    twelve, double, long = map(cycles, (12, 24, 96))
    assert double + (double - twelve) * 6 == pytest.approx(long, rel=0.015)


def test_adding_dq_from_registers_holds_the_kernel_up_and_adding_it_by_tma_does_not() -> None:
    """What FlashAttention pull request 2889 found at head_dim 256: 480 TFLOP/s with the reductions, 747 without."""
    free = changed(H200, reduce_bytes_per_ns=1e6)
    gain = {}
    for head_dim in (128, 256):
        asked = problem(head_dim, 16384)
        schedule = shipped_schedule(asked, "flash3")
        gain[head_dim] = estimate(asked, schedule, H200).cycles / estimate(asked, schedule, free).cycles
    assert gain[128] < 1.1
    assert 1.3 < gain[256] < 1.6


def test_grouped_heads_pay_for_fp32_sums_of_dk_and_dv() -> None:
    equal, grouped = (
        estimate(asked, shipped_schedule(asked, "flash3"), H200)
        for asked in (problem(128, 2048), problem(128, 2048, nheads_kv=4))
    )
    assert grouped.main_cycles > equal.main_cycles
    assert grouped.around_cycles > equal.around_cycles
    assert equal.cycles == equal.main_cycles + equal.around_cycles


def test_a_sequence_of_its_own_length_costs_what_it_costs_alone() -> None:
    """All tiles of a packed batch are handed out together: at least as fast as one launch after the other."""
    lengths = (1024, 4096)
    fields = {"nheads": 16, "nheads_kv": 16, "head_dim": 128}
    packed = AttentionProblem.varlen(lengths, lengths, **fields)
    schedule = BackwardSchedule()
    apart = sum(estimate(problem(128, n), schedule, H200).cycles for n in lengths)
    assert 0.8 * apart < estimate(packed, schedule, H200).cycles < apart


def test_a_narrower_window_is_never_slower() -> None:
    fields = {"batch": 1, "nheads": 16, "nheads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128}
    windows = ((256, 0), (1024, 0), (4096, 0))
    cycles = [
        estimate(AttentionProblem(**fields, window=window), schedule_for(problem(128, 128)), H200).cycles
        for window in windows
    ]
    assert cycles == sorted(cycles)


@pytest.mark.parametrize(("head_dim", "most"), [(128, 0.0), (256, 0.02)])
def test_tuning_chooses_what_upstream_launches(head_dim: int, most: float) -> None:
    ranked = tune(problem(head_dim, 4096, batch=4), H200, family="flash3", backward=True)
    assert regret(ranked, [r for r in ranked if r.is_flash3_choice]) <= most
    assert not any(r.is_launchable for r in ranked)


@pytest.mark.parametrize("family", ["gluon", "flash3"])
def test_what_ships_is_a_candidate(family: str) -> None:
    for head_dim in (64, 128, 192, 256):
        asked = problem(head_dim, 128)
        assert shipped_schedule(asked, family) in candidates(asked, family, H200)


@pytest.mark.parametrize("head_dim", [96, 128, 160, 192, 256])
def test_candidates_of_ours_have_tiles_of_powers_of_two_and_fit(head_dim: int) -> None:
    found = list(candidates(problem(head_dim, 128), "gluon", H200))
    assert {(s.tile_m, s.tile_n) for s in found} <= {(m, n) for m in (64, 128) for n in (64, 128)}
    assert found
    for schedule in found:
        assert check(backward(schedule, [TileBlocks(2)]), H200) == []


def test_tiles_are_those_of_the_plan() -> None:
    """A family whose backward the plan knows is simulated with the plan's tiles, masked and dense."""
    families = {name: traits.backward for name, traits in FAMILIES.items() if traits.backward}
    assert "flash3.dew" in families
    for family, known in families.items():
        for head_dim, tiles in known.tiles.items():
            for causal, tile in zip((False, True), tiles, strict=True):
                chosen = shipped_schedule(problem(head_dim, 128, causal=causal), family)
                assert (chosen.tile_m, chosen.tile_n) == tuple(tile), (family, head_dim, causal)


def test_what_no_kernel_launches_is_refused_with_the_rule() -> None:
    for asked, family, message in (
        (problem(128, 128), "cudnn", "a backward schedule is known of flash3, gluon, got cudnn"),
        (replace(problem(128, 128), dtype="e4m3"), "gluon", "the backward is for fp16 and bf16, got e4m3"),
    ):
        with pytest.raises(ValueError, match=message):
            shipped_schedule(asked, family)
    with pytest.raises(ValueError, match="without softcap"):
        key_tiles(replace(problem(128, 128), softcap=20.0), BackwardSchedule())
    with pytest.raises(ValueError, match="at least one row block"):
        backward(BackwardSchedule(), [TileBlocks(0)])
