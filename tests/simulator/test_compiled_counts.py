"""The simulated work of a step is what the compiled kernels do: their accepted figures (audit/audit.json), no GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from fa3_kernels.audit.evidence import accepted_rows
from fa3_kernels.plan.call import boxes
from fa3_kernels.plan.choose import is_launchable
from fa3_kernels.plan.config import Config, default_config
from fa3_reports.audit.calls import ShippedLaunch
from fa3_reports.audit.launched import kind_of
from fa3_reports.audit.launches import launches as shipped
from fa3_simulator import vector_work as module
from fa3_simulator.machine import load
from fa3_simulator.program import Op, Program
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import misfit
from fa3_simulator.vector_work import estimated, other_instructions, other_work, transpose_trip, transpose_trips
from tests.simulator.programs import forward

GOLDEN, H200 = accepted_rows(), load("h200")
CLASSES = ("fma", "alu", "mufu", "convert", "convert_e4m3", "shuffle", "other")
# Of caches the simulator knows nothing.
FORWARD = [x for x in shipped() if x.function == "forward" and kind_of(x) != "paged"]
WARP_SPECIALIZED = [x for x in FORWARD if "warp_specialize" not in x.choices]
# Without a mask, a cap or splits: the loop is that of the plain step.
PLAIN = [
    x
    for x in WARP_SPECIALIZED
    if x.name.split("_", 2)[2].removeprefix("v128_") in ("dense", "dense_chained", "no_pingpong", "no_overlap")
]
BARRIERS = (Op.BAR_ARRIVE, Op.BAR_SYNC)


def config_of(launch: ShippedLaunch) -> Config:
    return default_config(launch.problem, **{k: v for k, v in launch.choices.items() if k != "descale_blocks"})


def compiled(launch: ShippedLaunch) -> dict:
    return next(figures for name, figures in GOLDEN.items() if name.startswith(f"{launch.name}/forward"))


def first_loop(launch: ShippedLaunch) -> Counter[str]:
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


def step_counts(config: Config) -> Counter[str]:
    longer = consumer_counts(forward(config, [TileBlocks(5)]))
    longer.subtract(consumer_counts(forward(config, [TileBlocks(4)])))
    return longer


each_plain = pytest.mark.parametrize("launch", PLAIN, ids=lambda x: x.name)
each_launch = pytest.mark.parametrize("launch", WARP_SPECIALIZED, ids=lambda x: x.name)


@each_plain
def test_a_step_has_the_compiled_loops_instructions(launch: ShippedLaunch) -> None:
    config = config_of(launch)
    found, loop = step_counts(config), first_loop(launch)
    assert found["wgmma"] == loop["HGMMA"] + loop["QGMMA"]
    assert found["mufu"] == loop["MUFU.EX2"]
    assert found["fma"] == loop["FFMA"] + loop["FMUL"] + loop["FADD"]
    assert found["barriers"] == loop["BAR"]
    if not config.takes_integer_max(False):
        assert found["alu"] == loop["FMNMX"]


@each_plain
def test_classes_and_other_instructions_make_up_the_compiled_loop(launch: ShippedLaunch) -> None:
    """The loop holds both ways to take maxima, shuffles too; the one by integers runs, with two FMNMX behind it."""
    config = config_of(launch)
    found, loop = step_counts(config), first_loop(launch)
    not_taken = loop["FMNMX"] - 2 + 4 if config.takes_integer_max(False) else 0
    missing = loop["instructions"] - not_taken - found.total()
    if launch.name.endswith("no_overlap"):  # and its softmax is kept in front of the barriers by more instructions
        assert 15 < missing < 50
    else:
        assert missing == 0


@each_launch
def test_copies_are_the_compiled_ones(launch: ShippedLaunch) -> None:
    """A box is at most 128 bytes wide; those of one e4m3 copy are started by several warps of the producer at once, but
    for those of a tile of several boxes. A tile of one block has one tile of V.
    """
    config = config_of(launch)
    program = forward(config, [TileBlocks(1)])
    loads = sum(int((actor.ops[:, 0] == Op.LOAD).sum()) for actor in program.actors)
    of_q, of_v = (
        count if count > 1 else max(1, channels * 2 // 128) if config.bits == 16 else 1
        for channels in (config.head_dim, config.head_dim_v)
        for count in (boxes(channels, config.bits),)
    )
    assert compiled(launch)["tma"]["UTMALDG"] == (loads - 1) * of_q + of_v


@each_launch
def test_the_transposition_has_the_compiled_permutations(launch: ShippedLaunch) -> None:
    """Its code stands once in the loop, once behind it and, where one Q slot makes tiles end first, once in front."""
    config = config_of(launch)
    if config.transposes_v:
        copies = 3 if config.output_in_query_slot else 2
        assert compiled(launch)["moves"]["PRMT"] == copies * transpose_trips(config) * transpose_trip(config).alu


@each_launch
def test_a_shipped_kernel_fits_and_can_be_launched(launch: ShippedLaunch) -> None:
    config = config_of(launch)
    assert misfit(config, H200) is None
    assert is_launchable(launch.problem, config)


def test_the_kernel_without_warp_specialisation_has_its_own_count() -> None:
    launch = next(x for x in shipped() if x.name == "fp16_d128_lockstep")
    found, loop = step_counts(Config(pingpong=False, warp_specialized=False)), first_loop(launch)
    assert (found["wgmma"], found["alu"], found["mufu"]) == (loop["HGMMA"], loop["FMNMX"], loop["MUFU.EX2"])
    assert found.total() - found["barriers"] == loop["instructions"] - loop["BAR"]
    assert loop["BAR"] == found["barriers"]


def test_flash3_keeps_one_comparison_per_score() -> None:
    flash3 = Config(family="flash3", head_dim=64)
    assert step_counts(flash3)["alu"] == 64 + 4
    assert other_work(flash3) == other_work(Config(head_dim=64))


@pytest.mark.parametrize("family", ["gluon", "flash3"])
def test_instructions_of_a_tile_that_nobody_compiled_are_estimated_and_it_is_said(family: str) -> None:
    compiled_tile, other = Config(family=family), Config(family=family, tile_n=96)
    assert other_instructions(compiled_tile) == other_instructions(other) == 69
    assert bool(estimated(compiled_tile)) == (family == "flash3")
    assert estimated(other) == ["instructions of a step beside its arithmetic"]


def test_a_tile_that_is_compiled_has_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the audit is all that another tile takes: of 64 keys here."""
    row = {"loops": ["instructions 300 HGMMA 12 MUFU.EX2 34 FFMA 36 FMUL 64 FADD 34 FMNMX 36 BAR 5"]}
    monkeypatch.setattr(module, "accepted_rows", lambda: GOLDEN | {"fp16_d128_v128_dense/forward_fp16": row})
    monkeypatch.setattr(module, "_counted", module._counted.__wrapped__)
    narrow = Config(tile_n=64)
    assert other_instructions(narrow) == 300 - 12 - 34 - 36 - 64 - 34 - 36 - 5 - 4 - 64 // 4
    assert not estimated(narrow)
    assert other_instructions(Config()) == 69
