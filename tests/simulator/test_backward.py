"""The backward program: safe in every order, with the algorithm's instructions, bound by shared memory as measured."""

from __future__ import annotations

import pytest

from fa3_reference.problem import AttentionProblem
from fa3_simulator import engine, interpreter
from fa3_simulator.backward import BackwardConfig, backward
from fa3_simulator.costs import costs
from fa3_simulator.explore import explore
from fa3_simulator.hazards import check
from fa3_simulator.machine import load
from fa3_simulator.overlap import measure
from fa3_simulator.roofline import roofline
from fa3_simulator.run import estimate, flops, key_tiles

H200 = load("h200")
SCHEDULES = (BackwardConfig(), BackwardConfig(head_dim=64), BackwardConfig(head_dim=64, tile_m=128))
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"d{s.head_dim}-m{s.tile_m}")


@each_schedule
def test_the_program_is_safe_and_fits(schedule: BackwardConfig) -> None:
    assert check(backward(schedule, [5, 1, 3]), H200, orders=10) == []


def test_no_interleaving_conflicts() -> None:
    found = explore(backward(BackwardConfig(), [3]))
    assert (found.findings, found.is_complete) == ([], True)


@each_schedule
def test_five_gemms_per_query_block(schedule: BackwardConfig) -> None:
    blocks = 3
    trace = engine.simulate(program := backward(schedule, [blocks]), costs(program, H200))
    flops = 0
    for burst in trace.bursts:
        gemm = program.gemms[int(program.actors[burst.actor].ops[burst.row][1])]
        flops += 2 * 64 * gemm.n * 16
    assert flops == blocks * 5 * 2 * schedule.tile_m * schedule.tile_n * schedule.head_dim


@each_schedule
def test_both_engines_agree_and_the_ledger_sums(schedule: BackwardConfig) -> None:
    program = backward(schedule, [4, 2])
    tables = costs(program, H200)
    trace, timing = engine.simulate(program, tables), interpreter.simulate(program, tables)
    assert (trace.end, trace.busy) == (timing.end, timing.busy)
    assert sum(measure(program, tables, trace).ledger.values()) == trace.end - trace.busy["tensor"]


def test_shared_memory_binds_at_head_dim_128() -> None:
    """n = 64 wgmma with both operands in shared memory fetch 128 bytes per cycle: all the port has."""
    program = backward(BackwardConfig(), [24])
    tables = costs(program, H200)
    assert measure(program, tables, engine.simulate(program, tables)).binds == "smem"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 96}, "head_dim must be 64 or 128, got 96"),
        ({"tile_m": 80}, "tile_m must be 64 or 128"),
        ({"tile_n": 64}, "tile_n must be 128"),
        ({"num_stages": 5}, "num_stages must lie in"),
    ],
)
def test_impossible_schedules_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**fields)


@pytest.mark.parametrize("causal", [False, True])
def test_every_visible_pair_lies_in_a_tile(causal: bool) -> None:
    for seqlen_q, seqlen_k in ((256, 256), (100, 500), (512, 300), (64, 128)):
        shape = AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 128, causal=causal)
        seen = sum(tile.blocks for tile in key_tiles(shape, BackwardConfig()))
        want = 0
        for first in range(0, seqlen_k, 128):
            rows = range(seqlen_q) if not causal else range(max(first - (seqlen_k - seqlen_q), 0), seqlen_q)
            want += len({row // 64 for row in rows})
        assert seen == want


def test_time_is_at_least_the_tensor_work() -> None:
    shape, schedule = AttentionProblem(1, 16, 16, 8192, 8192, 128, causal=True), BackwardConfig()
    found = estimate(shape, schedule, H200)
    work = 2.5 * flops(shape, 128) / (132 * H200["tensor_flops_16bit"])
    assert found.tensor_cycles >= work
    assert found.cta_cycles > found.tensor_cycles


@each_schedule
def test_no_schedule_beats_its_roofline(schedule: BackwardConfig) -> None:
    shape = AttentionProblem(1, 16, 16, 4096, 4096, 128)
    bound = roofline(shape, schedule, H200)
    assert bound.binds == "smem"
    assert bound.cycles <= estimate(shape, schedule, H200).cta_cycles


def test_the_roofline_of_shared_memory_counts_operands_loads_and_dq() -> None:
    """Bytes of a query block of 64 x 128, head_dim 128, by hand: operands, copies, what threads write and read."""
    fetch = 2 * 2 * 8 * (64 + 64) * 32 + 2 * 2 * 4 * 128 * 32 + 2 * 2 * 4 * (64 + 64) * 32  # S, dP; dV, dK; dQ
    copies = 2 * (64 * 256 + 64 * 4) + 2 * 64 * 64 * 4  # Q, dO, LSE, delta; dQ of both warpgroups
    threads = 2 * (4 * 64 * 16 + (64 * 64 * 2 + 4 * 64 * 16) + 64 * 128 * 2)  # LSE; dS and delta; dQ
    blocks = 4096 // 64 * 4  # 512 key tiles on 132 SMs
    bound = roofline(AttentionProblem(1, 16, 16, 4096, 4096, 128), BackwardConfig(), H200)
    assert bound.smem == pytest.approx(blocks * (fetch + copies + threads) / 128, rel=2e-3)
