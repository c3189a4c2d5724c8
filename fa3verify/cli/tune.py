"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, emit, one_line_errors, require_device, require_writable, write
from fa3verify.cli.options import KERNEL_HELP, backward_option, is_given, problem_options
from fa3verify.cli.ranking import MachineRanking, ScheduleRow, csv_of, print_changes, print_legend, print_ranking
from fa3verify.cli.simulate import problem_of

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config
    from fa3_reference.problem import AttentionProblem
    from fa3_simulator.cta import AnyConfig
    from fa3_simulator.footprint import Hazard
    from fa3_simulator.machine import Machine
    from fa3_simulator.tune import Ranked


@click.command(epilog=EPILOG)
@problem_options
@click.option(
    "--machine",
    "machines",
    multiple=True,
    default=("h200",),
    show_default=True,
    help="h100, h200 or a .toml file; of several, what changes between them is said.",
)
@backward_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
@click.option("--kernel", metavar="FAMILY", default="gluon", show_default=True, help=KERNEL_HELP)
@click.option("--compile", "compiles", is_flag=True, help="Compile the top ones our kernels take: registers, spills.")
@click.option("--measure", type=click.IntRange(2), metavar="K", help="Time the top K our kernels take on a GPU.")
@click.option("--csv", "csv_target", metavar="FILE|-", help="Write the table as csv.")
def tune(
    machines: tuple[str, ...],
    json_target: str | None,
    csv_target: str | None,
    compiles: bool,
    measure: int | None,
    **options: Any,
) -> None:
    """Simulate every tile and schedule that fits, with keys in parts and heads packed too, and rank them."""
    with one_line_errors():
        from fa3_kernels.plan.families import OURS, traits_of
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load

        builds = compiles or measure is not None
        backward = options["backward"]
        if backward and (builds or options["pack_gqa"]):
            raise ValueError("--backward does not take --compile, --measure and --pack-gqa")
        if builds and len(machines) > 1:
            raise ValueError("--compile and --measure are of one --machine")
        kernel = options["kernel"]
        if builds and not traits_of(kernel).is_built_here:
            raise ValueError(f"--compile and --measure are for --kernel {OURS}, got {kernel}")
        if measure is not None:
            require_device("tune --measure")
        require_writable(json_target, csv_target)
        problem = problem_of(options)
        pack = options["pack_gqa"] if is_given("pack_gqa") else None
        rankings = []
        for machine in {machine.name: machine for machine in map(load, machines)}.values():
            clock = options["clock_mhz"] or machine["max_clock_mhz"]
            ranked = tuning.tune(problem, machine, clock, family=kernel, pack_gqa=pack, backward=backward)
            if not ranked:
                raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
            shown = _shown(ranked, options["top"], compiles, measure)
            ranking = _ranking(problem, machine, kernel, ranked, shown)
            ranking = _compiled(ranking, shown, problem) if compiles else ranking
            rankings.append(_measured(ranking, shown[:measure], problem) if measure else ranking)
        first, *others = rankings
        hazards = [hazard for ranking in rankings for hazard in ranking.hazards]
        beside = {"others": [ranking.to_json() for ranking in others]} if others else {}
        emit(first.to_json() | beside, json_target)
        write(csv_of(rankings), csv_target)
        if "-" not in (json_target, csv_target):
            for ranking in rankings:
                print_ranking(ranking, builds=builds)
            for ranking in others:
                print_changes(ranking, first)
            print_legend(first.held_out, hazards)
        if hazards:
            raise Exit(FINDING)


def _shown(ranked: list[Ranked], top: int, compiles: bool, measure: int | None) -> list[list[Ranked]]:
    """Return the schedules that are shown, each in a list with those that take the same time after it.

    With --compile or --measure they are the best ones that our kernels can be launched with, each alone; ValueError if
    there is none.
    """
    from fa3_simulator.tune import without_duplicates

    if not compiles and measure is None:
        return without_duplicates(ranked)[:top]
    launchable = [[r] for r in ranked if r.is_launchable][: max(measure or 0, top if compiles else 0)]
    if not launchable:
        raise ValueError(f"none of the {len(ranked)} schedules that fit is one our kernels can be launched with")
    return launchable


def _ranking(
    problem: AttentionProblem, machine: Machine, kernel: str, ranked: list[Ranked], shown: list[list[Ranked]]
) -> MachineRanking:
    """Return the ranking: the problem, a lower bound of the time, the simulator's known error, and the shown schedules.

    ``ranked`` are all schedules that fit, the fastest first.
    """
    from fa3_kernels.plan.families import traits_of
    from fa3_simulator import tune as tuning
    from fa3_simulator.held_out import held_out, places
    from fa3_simulator.roofline import lower_bound
    from fa3_simulator.run import in_words

    clock = ranked[0].estimate.clock_mhz
    bound = lower_bound(problem, ranked[0].config, machine, clock)
    compared = held_out(ranked[0].config)
    ranks = places([alike[0].estimate.cycles for alike in shown], compared.error if compared else 0.0)
    return MachineRanking(
        in_words(problem),
        machine,
        clock,
        kernel,
        len(ranked),
        round(bound.cycles),
        bound.binds,
        compared,
        not traits_of(kernel).is_built_here,
        tuning.regret(ranked, [r for r in ranked if r.is_gluon_buildable]),
        tuning.regret(ranked, [r for r in ranked if r.is_flash3_choice]),
        [_row(place, alike, problem, machine) for place, alike in zip(ranks, shown, strict=True)],
        _hazards([alike[0] for alike in shown]),
    )


def _row(place: int, alike: list[Ranked], problem: AttentionProblem, machine: Machine) -> ScheduleRow:
    """Return the row of the first of some schedules that take the same time; the others are named in ``alike``."""
    from fa3_simulator.roofline import roofline
    from fa3_simulator.run import moved_bytes, operations
    from fa3_simulator.vector_work import estimated

    entry = alike[0]
    config = entry.config
    estimate = entry.estimate
    bound = roofline(problem, config, machine, estimate.clock_mhz)
    return ScheduleRow(
        place,
        _tile(config),
        *_schedule(config),
        cycles=round(estimate.cycles),
        milliseconds=estimate.seconds * 1e3,
        tflops=operations(problem, config) / estimate.seconds / 1e12,
        gap=entry.gap,
        binds=bound.binds,
        busy=bound.cycles / estimate.cycles,
        hbm_gb_per_s=moved_bytes(problem, config) / estimate.seconds / 1e9,
        gluon=entry.is_gluon_buildable,
        flash3_choice=entry.is_flash3_choice,
        alike=[_tile(r.config) for r in alike[1:]],
        estimated_counts=bool(estimated(config)),
    )


def _tile(config: AnyConfig) -> str:
    return f"{config.tile_m}x{config.tile_n}"


def _schedule(config: AnyConfig) -> tuple[int, bool, int | str, str, str]:
    """Return parts of the keys, packing, stages, where P is, and the schedule in words.

    For a backward: the stages of Q, dO and dS, the number of consumer warpgroups, and the layout.
    """
    from fa3_kernels.plan.config import Config
    from fa3_simulator.schedules import switches

    c = config
    if isinstance(c, Config):
        return c.num_splits, c.pack_gqa, c.num_stages, "reg" if c.pv_from_registers else "smem", switches(c)
    return 1, False, f"{c.num_stages}/{c.dout_stages}/{c.ds_stages}", f"{c.consumers} wg", c.layout


def _hazards(best: list[Ranked]) -> list[Hazard]:
    """Return what is unsafe in a CTA of two tiles, one where each has its own, of the schedules that are shown."""
    from fa3_simulator.cta import is_persistent, program_of
    from fa3_simulator.hazards import check
    from fa3_simulator.schedules import TileBlocks

    tiles = [TileBlocks(5), TileBlocks(3)]
    programs = (program_of(r.config, tiles if is_persistent(r.config) else tiles[:1]) for r in best)
    return [x._replace(text=f"{program.name}: {x.text}") for program in programs for x in check(program)]


def _launchable(shown: Sequence[list[Ranked]]) -> list[Config]:
    """Return the configurations of the schedules to compile or time, each of which stands in a list of its own."""
    from fa3_kernels.plan.config import Config

    return [r.config for (r,) in shown if isinstance(r.config, Config)]


def _compiled(ranking: MachineRanking, shown: Sequence[list[Ranked]], problem: AttentionProblem) -> MachineRanking:
    """Return the ranking with registers and spills of each schedule, or with why nothing can be compiled here."""
    from fa3_kernels.gluon import unsupported

    if reason := unsupported():
        return ranking._replace(not_compiled=reason)
    from fa3verify.bench import tuning as tune_build

    built = (tune_build.compile_schedule(problem, config) for config in _launchable(shown))
    rows = [row._replace(built=each) for row, each in zip(ranking.ranked, built, strict=True)]
    return ranking._replace(ranked=rows)


def _measured(ranking: MachineRanking, shown: Sequence[list[Ranked]], problem: AttentionProblem) -> MachineRanking:
    """Return the ranking with measured cycles, and with rank correlation and regret if at least two were timed."""
    import numpy as np

    from fa3_simulator.tune import agreement
    from fa3verify.bench import tuning as tune_build

    options = [tune_build.options_of(config, problem) for config in _launchable(shown)]
    measured = tune_build.measure_cycles(problem, options)
    rows = [row._replace(measured=cycles) for row, cycles in zip(ranking.ranked, measured)]
    timed = [(alike[0].estimate.cycles, m) for alike, m in zip(shown, measured) if isinstance(m, float)]
    agreed = agreement(*np.array(timed).T) if len(timed) > 1 else (float("nan"), ())
    return ranking._replace(ranked=[*rows, *ranking.ranked[len(rows) :]], agreement=agreed)
