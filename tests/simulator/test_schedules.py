"""Laws of the simulated schedules: safety, work conservation, bounds, and what tuning may conclude from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan import tile_order as kernel
from fa3_kernels.plan.call import box_channels, slices_of
from fa3_kernels.plan.config import SWITCHES, Config
from fa3_kernels.plan.tile_order import shape_of
from fa3_reference.problem import AttentionProblem
from fa3_simulator import engine
from fa3_simulator.costs import costs
from fa3_simulator.cta import EXACT_BLOCKS, TimedCta, kernel_of
from fa3_simulator.forward_launch import row_parts, tile_heads
from fa3_simulator.hazards import check
from fa3_simulator.launch import Launch, flops
from fa3_simulator.machine import Machine, load
from fa3_simulator.overlap import ledger, measure
from fa3_simulator.program import Op, Program
from fa3_simulator.roofline import lower_bound, roofline
from fa3_simulator.run import estimate
from fa3_simulator.schedules import TileBlocks, read_switches, switches
from fa3_simulator.tune import candidates, misfit, tune
from tests.simulator.programs import forward

H200 = load("h200")
SHIPPED = (
    Config(),
    Config(pingpong=False),
    Config(intra_wg_overlap=False),
    Config(head_dim=64, tile_m=192),
    Config(pingpong=False, intra_wg_overlap=False),
    Config(family="flash3", tile_n=176),
    Config(family="flash3", head_dim=64, tile_m=192, tile_n=192, pv_from_registers=False),
    Config(family="flash3", head_dim=256, tile_n=80),
    Config(family="flash3", dtype="e4m3", tile_n=224),
    Config(dtype="e4m3", promotion_interval=128),
    Config(pingpong=False, warp_specialized=False),
    Config(tile_n=96, softmax_stages=3),
    Config(family="flash3", head_dim=256, tile_n=64, softmax_stages=3),
    Config(dtype="e4m3", softmax_stages=3),
    Config(dtype="e4m3", promotion_interval=64, intra_wg_overlap=False),
    Config(dtype="e4m3", head_dim=256, promotion_interval=128),
    Config(dtype="e4m3", head_dim=256),
    Config(dtype="e4m3", head_dim=64, tile_m=192, promotion_interval=128),
    Config(dtype="e4m3", head_dim=64, intra_wg_overlap=False),
)
each_schedule = pytest.mark.parametrize(
    "schedule", SHIPPED, ids=lambda s: forward(s, [TileBlocks(1)]).name.replace(" ", "_")
)


def problem(
    batch: int, nheads: int, seqlen_q: int, seqlen_k: int, causal: bool = False, nheads_kv: int = 0
) -> AttentionProblem:
    """Head_dim 128 in fp16, which the configuration beside it replaces."""
    return AttentionProblem(batch, nheads, nheads_kv or nheads, seqlen_q, seqlen_k, 128, causal=causal)


def changed(machine: Machine, **values: float) -> Machine:
    return machine.with_values(values)


def cycles(schedule: Config, tiles: list[TileBlocks], machine: Machine = H200, clock: float | None = None) -> float:
    program = forward(schedule, tiles)
    return engine.simulate(program, costs(program, machine, clock)).cycles


@each_schedule
def test_shipped_programs_have_no_race_and_no_deadlock(schedule: Config) -> None:
    assert check(forward(schedule, [TileBlocks(5, 1), TileBlocks(1), TileBlocks(4)]), orders=10) == []


@pytest.mark.parametrize("tiles", [[], [TileBlocks(0)], [TileBlocks(2), TileBlocks(2, 3)], [TileBlocks(2, -1)]])
def test_a_program_is_of_tiles_with_blocks_of_which_some_are_masked(tiles: list[TileBlocks]) -> None:
    with pytest.raises(ValueError, match="at least one key block and at most as many masked ones"):
        forward(Config(), tiles)


@each_schedule
def test_instruction_counts_are_those_of_the_algorithm(schedule: Config) -> None:
    blocks = 7
    program = forward(schedule, [TileBlocks(blocks)])
    trace = engine.simulate(program, costs(program, H200), records=True)
    k = 256 // schedule.bits
    per_block = schedule.head_dim // k + schedule.tile_n // k * schedule.pv_parts[0]
    # of S, but for a tile's first: two each
    pieces = (blocks - 1) * schedule.head_dim // k if schedule.adds_in_place else 0
    assert len(trace.bursts) == schedule.consumers * (blocks * per_block + pieces)
    loads = sum(int((actor.ops[:, 0] == Op.LOAD).sum()) for actor in program.actors)
    assert loads == schedule.consumers + 2 * blocks
    size = schedule.bits // 8 * schedule.head_dim
    copied = sum(int(actor.ops[actor.ops[:, 0] == Op.LOAD, 2].sum()) for actor in program.actors)
    assert copied == size * (schedule.tile_m + 2 * blocks * schedule.tile_n)


@each_schedule
def test_time_is_at_least_every_resources_work(schedule: Config) -> None:
    program = forward(schedule, [TileBlocks(9)] * 2)
    timing = engine.simulate(program, costs(program, H200))
    assert all(timing.end >= busy for busy in timing.busy.values())


@each_schedule
def test_the_ledger_sums_to_the_idle_tensor_ticks(schedule: Config) -> None:
    program = forward(schedule, [TileBlocks(9, 1), TileBlocks(4)])
    tables = costs(program, H200)
    trace = engine.simulate(program, tables, records=True)
    found = measure(program, tables, trace)
    assert sum(found.ledger.values()) == trace.end - trace.busy["tensor"]
    assert all(ticks > 0 for ticks in found.ledger.values())
    assert 0 < found.tensor_efficiency <= found.overlap_efficiency <= 1


@each_schedule
def test_causes_of_idle_ticks_are_in_the_programs_own_words_and_the_largest_comes_first(schedule: Config) -> None:
    program = forward(schedule, [TileBlocks(9, 1), TileBlocks(4)])
    found = ledger(program, engine.simulate(program, costs(program, H200), records=True))
    names = {barrier.name.split("[")[0] for barrier in (*program.mbarriers, *program.named_barriers)}
    barriers = {f"{verb} {name}" for verb in ("wait", "load") for name in names}
    delays = {name.removesuffix("_cycles").replace("_", " ") for name in program.delays}
    of_wgmma = {"multiply-adds", "prologue", "epilogue", "wgmma latency", "issue", "operand fetch"}
    works = {work.name for work in program.works} | {"store", "wait store"}
    assert found.keys() <= barriers | delays | of_wgmma | works
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert {"wait k_full", "epilogue"} <= found.keys()


@each_schedule
def test_a_steady_state_is_affine_in_blocks(schedule: Config) -> None:
    a, b, c = (cycles(schedule, [TileBlocks(n)]) for n in (12, 24, 48))
    assert (c - b) / 24 == pytest.approx((b - a) / 12, rel=0.01)


@each_schedule
def test_on_chip_cycles_do_not_depend_on_the_clock(schedule: Config) -> None:
    still = changed(H200, memory_latency_ns=0)
    assert cycles(schedule, [TileBlocks(9)], still, 1000) == cycles(schedule, [TileBlocks(9)], still, 2000)


def test_the_papers_ablation_has_its_order() -> None:
    """Batch 4, 8448 tokens, 16 heads: 661, 582 and 570 TFLOP/s on an H100, 734, 578 and 561 of ours on an H200."""
    shape = problem(4, 16, 8448, 8448)
    full, no_overlap, no_specialisation = (
        estimate(shape, s, H200).cycles
        for s in (Config(), Config(intra_wg_overlap=False), Config(pingpong=False, warp_specialized=False))
    )
    assert full < no_overlap < no_specialisation


def test_promotion_leaves_no_overlap_to_switch_off_at_head_dim_256() -> None:
    """O, S and a part of P V do not fit the registers together (fa3_kernels.plan.variant), whatever the switch says."""
    promoted = Config(dtype="e4m3", head_dim=256, promotion_interval=128)
    chained = replace(promoted, promotion_interval=0)
    on, off = (cycles(s, [TileBlocks(20)]) for s in (promoted, replace(promoted, intra_wg_overlap=False)))
    assert on == off > 1.1 * cycles(replace(chained, family="flash3"), [TileBlocks(20)])
    assert cycles(chained, [TileBlocks(20)]) < 0.99 * cycles(replace(chained, intra_wg_overlap=False), [TileBlocks(20)])


def step_of(schedule: Config) -> list[str]:
    """What the first consumer does in the third block of a tile, from one release of K to the next."""
    program = forward(schedule, [TileBlocks(6)])
    index = [actor.name for actor in program.actors].index("consumer 0")
    names = [program.describe(index, i) for i in range(len(program.actors[index].ops))]
    ends = [i for i, name in enumerate(names) if name.startswith("arrive k_empty")]
    return [name.split("[")[0] for name in names[ends[1] + 1 : ends[2] + 1] if not name.startswith("read")]


MAXIMA = ["row max", "row reduction"]
SOFTMAX = [*MAXIMA, "exp2 and rescale O", "last sums"]


def test_promoted_e4m3_at_head_dim_256_has_two_gemms_in_flight() -> None:
    """Each part of P V, then the scores in two pieces, is started when the part before the last one has been added."""
    promoted = Config(dtype="e4m3", head_dim=256, promotion_interval=128)
    added, scores = ["wait wgmma", "add P V"], ["warp_skew_cycles", "wait warps", "wait k_full", "issue Q K^T"]
    assert step_of(promoted) == [
        *SOFTMAX,
        "wait v_full",
        "wait turn",
        "issue P V",
        "issue P V",
        *added,
        "issue P V",
        *added,
        "issue P V",
        *added,
        *scores,
        *added,
        "arrive v_empty",
        "issue Q K^T",
        "addresses",
        "wait wgmma",
        "arrive turn",
        "arrive k_empty",
    ]


def test_the_wait_for_p_v_stands_where_ptxas_put_it() -> None:
    """Behind the maxima that a branch keeps, among the exponentials otherwise, before both for promoted e4m3."""
    behind = ["wait wgmma", "arrive v_empty", "exp2 and rescale O", "rescale O", "last sums"]
    assert step_of(Config(dtype="e4m3"))[:8] == [*MAXIMA, "arrive turn", *behind]
    assert step_of(Config(head_dim=64))[:7] == [*MAXIMA, *behind]
    assert step_of(Config())[:8] == [*MAXIMA, "exp2", *behind]


def test_without_overlap_the_turn_is_handed_on_where_ptxas_put_it() -> None:
    """Among the exponentials, unless a branch keeps the order of the source."""
    serial = Config(intra_wg_overlap=False)
    assert step_of(serial)[-4:] == [*MAXIMA, "exp2", "arrive k_empty"]
    assert step_of(serial)[:2] == ["arrive turn", "exp2 and rescale O"]
    assert "exp2" not in step_of(replace(serial, head_dim=64, head_dim_v=64))


def test_without_registers_every_wgmma_is_waited_for() -> None:
    """ptxas' warning C7512: fp16 tiles of 128 x 256 at head_dim 64, which no tuning proposes."""
    short = Config(head_dim=64, tile_n=256)
    assert misfit(short, H200)
    assert step_of(short).count("issue Q K^T") == 4
    assert step_of(replace(short, tile_n=128)).count("issue Q K^T") == 1
    assert not any(misfit(s, H200) for s in SHIPPED)


def test_a_causal_launch_is_compiled_for_its_mask() -> None:
    promoted = Config(dtype="e4m3", head_dim=64, tile_m=192, promotion_interval=128)
    launched = [kernel_of(promoted).compiled(problem(1, 1, 512, 512, c)) for c in (False, True)]
    assert [kernel.config.integer_max for kernel in launched] == [True, False]
    large = replace(promoted, head_dim=256, tile_m=128)
    for branched in (large, replace(large, head_dim=128), replace(large, promotion_interval=0)):
        assert [t.masked for (t,) in row_tiles(problem(1, 1, 512, 512, True), branched)] == [1] * 4


def test_p_v_in_more_parts_takes_longer() -> None:
    parts = [Config(dtype="e4m3", promotion_interval=n) for n in (128, 64, 32)]
    times = [cycles(s, [TileBlocks(30)]) for s in parts]
    assert times == sorted(times)
    assert times[0] < times[2]


@pytest.mark.parametrize("tile_n", [64, 96])
def test_three_stages_gain_nothing(tile_n: int) -> None:
    """The dispatch port binds already, so there is little to gain: the paper's appendix found none in practice."""
    two = Config(tile_n=tile_n)
    three = replace(two, softmax_stages=3)
    steady = [cycles(s, [TileBlocks(48)]) - cycles(s, [TileBlocks(24)]) for s in (two, three)]
    assert 0.99 * steady[0] < steady[1] < 1.1 * steady[0]


def test_three_stages_keep_two_score_tiles_in_registers() -> None:
    two, three = (kernel_of(Config(softmax_stages=n)).cta([TileBlocks(1)]).warps[0].registers_needed for n in (2, 3))
    assert three - two == 64
    assert misfit(Config(softmax_stages=3), H200) == (
        "consumer 0: S 128 + O 64 + P and sums 32 + 24 for addresses are 248 registers, a thread has 240"
    )


@pytest.mark.parametrize(
    "schedule", [s for s in SHIPPED if s.warp_specialized], ids=lambda s: forward(s, [TileBlocks(1)]).name
)
def test_more_stages_never_hurt(schedule: Config) -> None:
    """By more than 3 %: how far apart the warpgroups settle depends on their start (2.2 % of e4m3 d128, chained)."""
    deeper = replace(schedule, num_stages=schedule.num_stages + 1)
    assert cycles(deeper, [TileBlocks(20)] * 2) <= 1.03 * cycles(schedule, [TileBlocks(20)] * 2)


def renamed(program: Program) -> Program:
    actors = tuple(replace(actor, name=f"x{i}") for i, actor in enumerate(program.actors))
    return replace(program, name="other", actors=actors)


@each_schedule
def test_names_change_nothing(schedule: Config) -> None:
    program = forward(schedule, [TileBlocks(5)])
    tables = costs(program, H200)
    assert engine.simulate(program, tables) == engine.simulate(renamed(program), tables)


def test_faster_hardware_gains_or_loses_little() -> None:
    """Not "never slower": a shorter load can move the warpgroups against each other (a scheduling anomaly of 2 %)."""
    slow = cycles(Config(), [TileBlocks(30)])
    for name, value in (("mufu_cycles", 4), ("l2_bytes_per_cycle", 128), ("tensor_flops_16bit", 8192)):
        assert cycles(Config(), [TileBlocks(30)], changed(H200, **{name: value})) <= 1.03 * slow


@given(
    seqlen_q=st.integers(1, 700),
    seqlen_k=st.integers(1, 700),
    causal=st.booleans(),
    tile_n=st.sampled_from([64, 128, 176]),
)
def test_every_visible_pair_lies_in_a_visited_block(seqlen_q: int, seqlen_k: int, causal: bool, tile_n: int) -> None:
    shape, schedule = problem(1, 1, seqlen_q, seqlen_k, causal), Config(tile_n=tile_n, family="flash3")
    tiles = [tile for (tile,) in row_tiles(shape, schedule)]
    assert len(tiles) == -(-seqlen_q // 128)
    rows = np.arange(seqlen_q)
    seen = np.clip(rows + seqlen_k - seqlen_q + 1, 0, seqlen_k) if causal else np.full(seqlen_q, seqlen_k)
    for i, tile in enumerate(tiles):
        assert tile.blocks == -(-int(seen[i * 128 : (i + 1) * 128].max()) // tile_n)
        whole = int(seen[i * 128 : (i + 1) * 128].min()) // tile_n  # blocks that every row sees in full
        assert tile.masked == tile.blocks - min(whole, tile.blocks)


@given(
    seqlen_q=st.integers(1, 300),
    seqlen_k=st.integers(1, 900),
    causal=st.booleans(),
    group=st.integers(1, 64),
    pack_gqa=st.booleans(),
    tile=st.sampled_from([(128, 128), (192, 64)]),
)
def test_row_tiles_are_those_our_kernels_are_launched_with(seqlen_q, seqlen_k, causal, group, pack_gqa, tile) -> None:
    right = 0 if causal else -1
    launch = kernel.Shape((seqlen_q,), (seqlen_k,), 2 * group, 2, right=right, pack_gqa=pack_gqa)
    config = Config(tile_m=tile[0], tile_n=tile[1], pack_gqa=pack_gqa)
    shape = problem(1, 2 * group, seqlen_q, seqlen_k, causal, nheads_kv=2)
    tiles = [tile for (tile,) in row_tiles(shape, config)]
    assert [t.blocks for t in tiles if t.blocks] == [item.blocks for item in kernel.items(launch, 0, *tile)]
    assert len(tiles) * tile_heads(shape, config) == kernel.count_items(launch, tile[0])


def test_packed_rows_of_flash_attention_3_run_on_across_positions() -> None:
    """Three heads fill 128 rows with 42 and two thirds positions; our kernels pad them to four."""
    shape = problem(1, 3, 128, 128, causal=True, nheads_kv=1)
    assert len(row_tiles(shape, Config(family="flash3", pack_gqa=True))) == 3
    assert len(row_tiles(shape, Config(pack_gqa=True))) == 4


def test_heads_that_share_a_tile_load_their_keys_once() -> None:
    shape = problem(1, 8, 1, 4096, nheads_kv=2)
    packed, unpacked = (
        tile_heads(shape, config) * sum(t.blocks for (t,) in row_tiles(shape, config))
        for config in (Config(pack_gqa=True), Config())
    )
    assert unpacked == 4 * packed == 4 * 2 * 4096 // 128
    assert flops(shape, 128) == 4 * 8 * 4096 * 128


def row_tiles(shape: AttentionProblem, config: Config) -> list[list[TileBlocks]]:
    """Row tiles of one head, each as the parts of its keys."""
    return [[TileBlocks(len(blocks), masked) for blocks, masked in row] for row in row_parts(shape, config)]


def launch_of(shape: AttentionProblem, config: Config) -> Launch:
    return kernel_of(config).launch(shape, H200, 1980.0)


def test_what_no_program_is_written_for_is_refused() -> None:
    asked = problem(1, 1, 512, 512)
    with pytest.raises(ValueError, match="the forward is simulated without softcap"):
        estimate(replace(asked, softcap=5.0), Config(), H200)
    with pytest.raises(
        ValueError, match="windows, packed sequences and pages are simulated for the forward of our own"
    ):
        estimate(replace(asked, window=(100, 0)), Config(family="flash3"), H200)


def test_no_launch_ends_before_hbm_has_moved_every_tensor_once() -> None:
    """32 x 8192 keys of 8 heads, read by one tile each: 1.07 GB."""
    shape, config = problem(32, 32, 1, 8192, nheads_kv=8), Config(pack_gqa=True)
    found, bound = estimate(shape, config, H200), roofline(shape, config, H200)
    assert launch_of(shape, config).hbm_bytes == pytest.approx(32 * 128 * 2 * (2 * 8 * 8192 + 2 * 32))
    assert bound.binds == "hbm"
    launch = H200["launch_cycles"] + H200["drain_cycles"]
    assert found.cycles - launch == found.hbm_cycles == bound.cycles > found.cta_cycles
    slow = estimate(shape, config, H200, clock_mhz=990.0)
    assert slow.hbm_cycles == pytest.approx(found.hbm_cycles / 2)


def test_tiles_with_a_cta_each_follow_one_another_without_overlap() -> None:
    shape = problem(1, 264, 128, 1024)
    kept, fresh = (Config(family=family) for family in ("flash3", "flash4"))
    (tile, again) = launch_of(shape, fresh).longest(132)
    assert tile == again
    assert estimate(shape, fresh, H200).cta_cycles == 2 * cycles(fresh, [tile], clock=1980.0)
    assert estimate(shape, kept, H200).cta_cycles < estimate(shape, fresh, H200).cta_cycles


def test_where_hbm_binds_the_schedule_with_the_most_room_is_ranked_first() -> None:
    ranked = tune(problem(32, 32, 1, 8192, nheads_kv=8), H200, family="gluon", pack_gqa=True)
    tied = [r.estimate.cta_cycles for r in ranked if r.estimate.cycles == ranked[0].estimate.cycles]
    assert len(tied) > 2
    assert tied == sorted(tied)


def test_the_longest_cta_has_at_least_the_average_work() -> None:
    shape = problem(4, 16, 4096, 4096, True)
    total = shape.batch * shape.nheads * sum(tile.blocks for (tile,) in row_tiles(shape, Config()))
    longest = sum(tile.blocks for tile in launch_of(shape, Config()).longest(132))
    assert total / 132 <= longest <= 1.05 * total / 132


@pytest.mark.parametrize("causal", [False, True])
def test_extrapolated_ctas_agree_with_simulated_ones(causal: bool) -> None:
    shape = problem(2, 16, 8192, 8192, causal)
    cta = TimedCta(kernel_of(Config()), H200, 1980.0)
    found = estimate(shape, Config(), H200)
    assert sum(tile.blocks for tile in found.tiles) > EXACT_BLOCKS
    exact, tensor, _, smem = cta.exact(found.tiles)
    assert found.cta_cycles == pytest.approx(exact, rel=0.01)
    assert found.tensor_cycles == pytest.approx(tensor, rel=1e-9)
    assert found.smem_cycles == pytest.approx(smem, rel=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 2048, 2048), (1, 16, 700, 100), (1, 4, 100, 3000), (8, 8, 1, 4096)])
def test_no_tile_is_faster_than_the_lower_bound_and_no_roofline_is_below_it(shape: tuple, causal: bool) -> None:
    asked = replace(problem(*shape), causal=causal)
    for config in (Config(), Config(tile_m=64, tile_n=32, pingpong=False), Config(tile_n=64, family="flash3")):
        bound, found = lower_bound(asked, config, H200), estimate(asked, config, H200)
        assert 0 < bound.cycles < found.cycles
        assert bound.needs["tensor"] <= roofline(asked, config, H200).needs["tensor"]


def test_the_lower_bound_counts_visible_pairs_once() -> None:
    """700 queries of which the last 100 see keys: 100 * 101 / 2 pairs."""
    asked = replace(problem(1, 132, 700, 100), causal=True)
    assert lower_bound(asked, Config(), H200).needs["tensor"] == pytest.approx(5050 * 4 * 128 / 4096)


@pytest.mark.parametrize(("num_splits", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 3, 1]), (5, [2, 2, 2, 1])])
def test_parts_of_the_keys_are_the_kernels(num_splits: int, sizes: list[int]) -> None:
    asked = replace(problem(1, 1, 128, 7 * 128), causal=True)
    (tiles,) = row_tiles(asked, Config(num_splits=num_splits))
    assert [tile.blocks for tile in tiles] == sizes
    assert [tile.masked for tile in tiles] == [0] * (len(sizes) - 1) + [1]


def test_parts_cost_a_launch_and_their_bytes_and_pay_where_sms_are_idle() -> None:
    few, whole, parts = (
        problem(1, 8, 1, 65536, nheads_kv=8),
        Config(pack_gqa=True),
        Config(pack_gqa=True, num_splits=16),
    )
    one, many = estimate(few, whole, H200), estimate(few, parts, H200)
    assert one.around_cycles == 0
    assert many.around_cycles > H200["launch_cycles"]
    assert many.cycles < one.cycles / 5
    full = problem(8, 16, 1024, 1024)
    assert estimate(full, Config(num_splits=4), H200).cycles > estimate(full, Config(), H200).cycles


@pytest.mark.parametrize(
    "changes", [{"tile_n": 176}, {"dtype": "e4m3", "tile_n": 224}, {"head_dim": 256, "tile_n": 80}]
)
def test_flash_attention_3_copies_packed_queries_in_its_consumers_which_costs_a_latency_a_tile(changes: dict) -> None:
    """1 to 10 % of tiles of 24 blocks: Q is not loaded ahead; ours is by TMA, packed or not."""
    packed, apart = (Config(family="flash3", pack_gqa=pack, **changes) for pack in (True, False))
    program = forward(packed, [TileBlocks(5), TileBlocks(3)])
    assert not check(program, H200)
    loads = {a.name: [int(op[3]) for op in a.ops if op[0] == Op.LOAD] for a in program.actors}
    own = {name: {program.slots[slot].name for slot in slots} for name, slots in loads.items()}
    assert own["consumer 0"] == {"q.0[0]"}
    assert not any(name.startswith("q.") for name in own["producer"])
    longer = cycles(packed, [TileBlocks(24)] * 2) / cycles(apart, [TileBlocks(24)] * 2) - 1
    assert 0.003 < longer < 0.1
    ours = Config(pack_gqa=True)
    assert cycles(ours, [TileBlocks(24)] * 2) == cycles(replace(ours, pack_gqa=False), [TileBlocks(24)] * 2)


def test_under_a_causal_mask_flash_attention_3_takes_tiles_from_a_counter_in_sections_of_l2() -> None:
    """K and V of a head are 8 MiB at 16k keys, so that four heads are in flight; the last rows of each come first."""
    shape, upstream = problem(1, 16, 16384, 16384, causal=True), Config(family="flash3", tile_n=176)
    order = list(launch_of(shape, upstream).tiles)
    assert len(order) == 16 * 128
    first = order[: 4 * 128]
    assert first == sorted(first, key=lambda tile: -tile.blocks)
    assert order == first * 4
    dense = replace(shape, causal=False)
    ours = replace(upstream, family="gluon")
    assert launch_of(dense, upstream).longest(132) == launch_of(dense, ours).longest(132)


def test_tiles_of_our_kernels_are_handed_out_as_their_static_schedule_has_it() -> None:
    """At 2048 keys 16 heads share L2, so that short tiles of some come in front of long ones of others."""
    shape, config = problem(8, 16, 2048, 2048, causal=True), Config()
    table = kernel.static_schedule(shape_of(shape), 132, tile_m=128, tile_n=128, head_dim=128)
    rows = [tile for (tile,) in row_tiles(shape, config)]
    launch = launch_of(shape, config)
    by_cta = {tuple(rows[entry % 2**20] for entry in mine if entry >= 0) for mine in table.tolist()}
    assert list(launch.tiles) != sorted(launch.tiles, reverse=True)
    assert len(by_cta) > 10
    for tile_cost in (0.0, 0.6, 5.0):
        longest = launch.longest(132, tile_cost)
        assert longest in by_cta
        assert all(work(longest, tile_cost) >= work(mine, tile_cost) for mine in by_cta)


def work(tiles: tuple[TileBlocks, ...], tile_cost: float) -> float:
    return sum(tile.blocks for tile in tiles) + tile_cost * len(tiles)


def test_who_is_free_first_is_decided_by_what_tiles_take() -> None:
    """A tile that costs much beside its blocks makes short tiles dear, so that the last CTA has another mix."""
    shape, upstream = problem(2, 16, 4096, 4096, causal=True), Config(family="flash3", tile_n=176)
    found = estimate(shape, upstream, H200).tiles
    dear = launch_of(shape, upstream).longest(132, 20.0)
    assert sum(tile.blocks for tile in found) != sum(tile.blocks for tile in dear)
    slow = estimate(shape, upstream, changed(H200, cold_code_cycles=20000)).tiles
    assert sum(tile.blocks for tile in slow) != sum(tile.blocks for tile in found)


def test_time_is_at_least_the_roofline() -> None:
    for schedule in SHIPPED:
        for causal in (False, True):
            shape = problem(1, 16, 4096, 4096, causal)
            assert estimate(shape, schedule, H200).cta_cycles >= roofline(shape, schedule, H200).cycles


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "fp32"}, "dtype must be one of fp16, bf16, e4m3, got 'fp32'"),
        ({"tile_m": 96}, "tile_m must be 64, 128 or 192"),
        ({"tile_n": 120}, r"tile_n must be a multiple of 16 in \[16, 256\]"),
        ({"dtype": "e4m3", "tile_n": 80}, r"tile_n must be a multiple of 32 in \[16, 256\]"),
        ({"promotion_interval": 64}, "promotion_interval must be 0, or for e4m3"),
        ({"num_stages": 0}, "num_stages must lie in"),
        ({"head_dim": 300}, "head_dim must be a multiple of 8"),
        ({"softmax_stages": 4}, "softmax_stages must be 2 or 3, got 4"),
        ({"softmax_stages": 3, "intra_wg_overlap": False}, "three softmax stages need intra_wg_overlap"),
        ({"softmax_stages": 3, "num_stages": 1}, "two stages of K"),
    ],
)
def test_impossible_schedules_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_footprints_that_do_not_fit_are_named_with_their_numbers() -> None:
    found = check(forward(Config(tile_n=256, num_stages=3), [TileBlocks(1)]), H200)
    assert any("bytes of shared memory, a CTA has 232448" in f.text for f in found)


def test_every_choice_of_every_switch_has_a_name_that_is_read_and_is_enumerated_by_tune() -> None:
    names = {"+".join(filter(None, chosen)) or "none" for chosen in product(*SWITCHES)}
    assert names >= {"none", "overlap3", "pingpong+overlap"}
    assert {switches(Config(**read_switches(name))) for name in names} == names
    assert {switches(config) for config in candidates(problem(1, 1, 1, 1))} == names


def test_the_ablation_without_overlap_reads_every_block_of_v_once_it_is_there():
    program = forward(Config(pingpong=False, warp_specialized=False, intra_wg_overlap=False), [TileBlocks(5)])
    assert check(program, orders=4) == []


@pytest.mark.parametrize(("head_dim", "parts"), [(64, 2), (96, 4), (128, 4)])
def test_parts_of_p_v_are_awaited_while_the_next_one_or_the_next_scores_run(head_dim: int, parts: int) -> None:
    """Slices of the channels times chunks of the keys; all are over before the softmax reads the scores."""
    config = Config("e4m3", head_dim, promotion_interval=64)
    slices, chunks = config.pv_parts
    assert len(slices_of(head_dim, box_channels(head_dim, 8), slices)) * chunks == parts
    longer, shorter = (
        [int(x) for kind, x, *_ in forward(config, [TileBlocks(n)]).actors[0].ops if kind == Op.WGMMA_WAIT]
        for n in (6, 5)
    )
    step = Counter(longer) - Counter(shorter)
    assert step == {1: parts, 0: 1}
