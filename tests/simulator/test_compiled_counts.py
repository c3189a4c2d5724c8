"""The simulated work of a step is what the compiled kernels do: their accepted figures (fa3_kernels/audit/audit.json), no GPU needed."""

from __future__ import annotations

from collections import Counter

import pytest

from fa3_kernels.audit.golden import read_golden
from fa3_kernels.audit.shipped import Launch, shipped
from fa3_kernels.plan.config import Config, default_config
from fa3_simulator.forward import forward
from fa3_simulator.machine import load
from fa3_simulator.program import Op, Program
from fa3_simulator.schedules import Schedule, Tile, pv_parts, ships_integer_max
from fa3_simulator.tune import is_launchable, misfit
from fa3_simulator.vector_work import other_work, transpose_trip, transpose_trips

GOLDEN, H200 = read_golden(), load("h200")
CLASSES = ("fma", "alu", "mufu", "convert", "convert_e4m3", "shuffle", "other")
WARP_SPECIALIZED = [x for x in shipped() if x.function == "forward" and "warp_specialize" not in x.choices]
# Without a mask, a cap or splits: the loop is that of the plain step.
PLAIN = [
    x for x in WARP_SPECIALIZED if x.name.split("_", 2)[2] in ("dense", "dense_chained", "no_pingpong", "no_overlap")
]
BARRIERS = (Op.BAR_ARRIVE, Op.BAR_SYNC)


def config_of(launch: Launch) -> Config:
    return default_config(launch.problem, **{k: v for k, v in launch.choices.items() if k != "descale_blocks"})


def schedule_of(config: Config) -> Schedule:
    names = (
        "dtype",
        "head_dim",
        "tile_m",
        "tile_n",
        "num_stages",
        "pingpong",
        "intra_wg_overlap",
        "promotion_interval",
    )
    return Schedule(**{name: getattr(config, name) for name in names}, v_transpose=config.dtype == "e4m3")


def compiled(launch: Launch) -> dict:
    return next(figures for name, figures in GOLDEN.items() if name.startswith(f"{launch.name}/forward"))


def first_loop(launch: Launch) -> Counter[str]:
    words = compiled(launch)["loops"][0].split()
    return Counter({name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)})


def consumer_counts(program: Program) -> Counter[str]:
    """Instructions of one warp of the first consumer, by class; ``other`` are those without one."""
    found: Counter[str] = Counter()
    for kind, x, *_ in next(a for a in program.actors if a.name == "consumer 0").ops.tolist():
        if kind == Op.WGMMA:
            found["wgmma"] += program.gemms[x].instructions
        elif kind == Op.VECTOR:
            work = program.works[x]
            found += Counter({name: getattr(work, name) for name in CLASSES})
        found["barriers"] += kind in BARRIERS
    return found


def step_counts(schedule: Schedule) -> Counter[str]:
    longer = consumer_counts(forward(schedule, [Tile(5)]))
    longer.subtract(consumer_counts(forward(schedule, [Tile(4)])))
    return longer


each_plain = pytest.mark.parametrize("launch", PLAIN, ids=lambda x: x.name)
each_launch = pytest.mark.parametrize("launch", WARP_SPECIALIZED, ids=lambda x: x.name)


@each_plain
def test_a_step_has_the_compiled_loops_instructions(launch: Launch) -> None:
    schedule = schedule_of(config_of(launch))
    found, loop = step_counts(schedule), first_loop(launch)
    assert found["wgmma"] == loop["HGMMA"] + loop["QGMMA"]
    assert found["mufu"] == loop["MUFU.EX2"]
    assert found["fma"] == loop["FFMA"] + loop["FMUL"] + loop["FADD"]
    assert found["barriers"] == loop["BAR"]
    if not schedule.max_by_integers:
        assert found["alu"] == loop["FMNMX"]


@each_plain
def test_classes_and_other_instructions_make_up_the_compiled_loop(launch: Launch) -> None:
    """Of two ways to take maxima the loop holds both, shuffles too; the one by integers runs, with two FMNMX behind it."""
    schedule = schedule_of(config_of(launch))
    found, loop = step_counts(schedule), first_loop(launch)
    not_taken = loop["FMNMX"] - 2 + 4 if schedule.max_by_integers else 0
    missing = loop["instructions"] - not_taken - found.total()
    if launch.name.endswith("no_overlap"):  # and its softmax is kept in front of the barriers by more instructions
        assert 15 < missing < 40
    else:
        assert missing == 0


@each_launch
def test_copies_are_the_compiled_ones(launch: Launch) -> None:
    """A box is at most 128 bytes wide; those of one e4m3 copy are started by different warps of the producer at once."""
    schedule = schedule_of(config_of(launch))
    program = forward(schedule, [Tile(1)])
    loads = sum(int((actor.ops[:, 0] == Op.LOAD).sum()) for actor in program.actors)
    boxes = schedule.head_dim * 2 // 128 if schedule.bits == 16 else 1
    assert compiled(launch)["tma"]["UTMALDG"] == loads * boxes


@each_launch
def test_the_transposition_has_the_compiled_permutations(launch: Launch) -> None:
    """Its code stands once in the loop, once behind it and, where one Q slot makes tiles end first, once in front."""
    schedule = schedule_of(config_of(launch))
    if schedule.v_transpose:
        copies = 3 if schedule.stages_output_in_q else 2
        assert compiled(launch)["moves"]["PRMT"] == copies * transpose_trips(schedule) * transpose_trip(schedule).alu


@each_launch
def test_a_shipped_kernel_has_its_registers_and_fits(launch: Launch) -> None:
    config = config_of(launch)
    schedule = schedule_of(config)
    assert schedule.registers == (config.producer_regs, config.consumer_regs)
    assert misfit(schedule, H200) is None
    assert is_launchable(schedule)


@each_launch
def test_what_the_kernels_choose_by_launch_is_chosen_alike(launch: Launch) -> None:
    variant = pytest.importorskip("fa3_kernels.plan.variant", reason="needs Triton")
    config, is_masked = config_of(launch), launch.problem.causal or launch.problem.window != (-1, -1)
    schedule = schedule_of(config)
    assert ships_integer_max(schedule, is_masked) == variant._integer_max(config, is_masked)
    assert pv_parts(schedule)[0] == variant._slices(config)
    assert schedule.stages_output_in_q == (variant.query_slots(config) == 1)


def test_the_kernel_without_warp_specialisation_has_its_own_count() -> None:
    launch = next(x for x in shipped() if x.name == "fp16_d128_lockstep")
    found, loop = step_counts(Schedule(pingpong=False, warp_specialized=False)), first_loop(launch)
    assert (found["wgmma"], found["alu"], found["mufu"]) == (loop["HGMMA"], loop["FMNMX"], loop["MUFU.EX2"])
    assert found.total() - found["barriers"] == loop["instructions"] - loop["BAR"]
    assert loop["BAR"] == found["barriers"]


def test_flash3_keeps_one_comparison_per_score() -> None:
    flash3 = Schedule(kernel="flash3", head_dim=64)
    assert step_counts(flash3)["alu"] == 64 + 4
    assert other_work(flash3) == other_work(Schedule(head_dim=64))
