"""The ranking of schedules that the verb ``tune`` prints: simulated, and timed where that was asked for.

The schedules are simulated in :mod:`fa3_simulator.tune`, and :mod:`fa3verify.cli.tune` prints these records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.plan.families import traits_of
from fa3_reference.problem import AttentionProblem
from fa3_simulator import described, tune as tuning
from fa3_simulator.clock import config_under_load
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.described import Choice
from fa3_simulator.description import Schedule, Values
from fa3_simulator.footprint import Hazard
from fa3_simulator.forward_choice import schedule_for, served
from fa3_simulator.hazards import check
from fa3_simulator.held_out import places
from fa3_simulator.machine import Machine
from fa3_simulator.overlap import measure
from fa3_simulator.roofline import lower_bound, roofline
from fa3_simulator.run import in_words
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import Ranked, agreement, without_duplicates
from fa3verify.commands.simulate import binding, machines_off, traced_schedule
from fa3verify.files import Json


class ScheduleRow(NamedTuple):
    """One schedule of a ranking.

    ``under_load`` is what :func:`fa3_simulator.clock.under_load` says of it, and ``interval`` the 90 % interval as
    :meth:`fa3_simulator.run.Estimate.interval_figures` has it; both stand in JSON with the rest.
    ``alike`` are other tiles that take the same time. ``measured`` is measured cycles, or in words why there are none;
    None where nobody measured. ``estimated_counts`` says that such a tile was never compiled, so that some instruction
    counts of a step are estimates.
    """

    place: int
    tile: str
    splits: int
    packed: bool
    stages: int | str
    p: str
    schedule: str
    cycles: int
    milliseconds: float
    tflops: float
    gap: float
    binds: str
    busy: float
    hbm_gb_per_s: float
    gluon: bool
    flash3_choice: bool
    alike: Sequence[str]
    estimated_counts: bool
    under_load: Mapping[str, float]
    interval: Json
    measured: float | str | None = None

    def to_json(self) -> Json:
        """Return the figures as JSON; what was not measured has no key."""
        told = self._asdict()
        measured = told.pop("measured")
        told |= told.pop("under_load") | told.pop("interval")
        if measured is not None:
            told["not_measured" if isinstance(measured, str) else "measured_cycles"] = measured
        return told

    def choice(self) -> str:
        """Return the choices of a launch in words: tile, schedule, parts of the keys, packing."""
        parts = f", {self.splits} parts" * (self.splits > 1) + ", packed" * self.packed
        return f"{self.tile} {self.schedule}{parts}"

    def behind(self) -> str:
        """Return the last column of the table: the schedule, and what measuring it gave."""
        if isinstance(self.measured, str):
            return f"{self.schedule}, ! not measured: {self.measured}"
        if self.measured is None:
            return self.schedule
        return f"{self.schedule}, measured {self.measured:.0f} ({self.cycles / self.measured - 1:+.1%})"


class MachineRanking(NamedTuple):
    """The ranking of schedules for one problem on one machine.

    ``schedules`` is how many fit. ``regret_gluon`` and ``regret_flash3`` are how much slower than the first the best
    launch of a library is, None if it is not among them. ``agreement`` is the rank correlation with measured times, and
    the regret of the simulated choice; None where nothing was measured. ``launches`` is in words what a call of ours
    launches, as servers make it, empty for other problems.
    """

    problem: str
    machine: Machine
    clock_mhz: float
    kernel: str
    schedules: int
    lower_bound_cycles: int
    lower_bound_binds: str
    shows_peer: bool
    regret_gluon: float | None
    regret_flash3: float | None
    ranked: Sequence[ScheduleRow]
    hazards: Sequence[Hazard]
    launches: str
    agreement: tuple[float, Sequence[float]] | None = None

    def to_json(self) -> Json:
        """Return the figures as JSON; without --measure some have no key."""
        told = self._asdict() | {
            "machine": self.machine.name,
            "assumed_constants": self.machine.assumed(),
            "ranked": [row.to_json() for row in self.ranked],
            "hazards": [hazard._asdict() for hazard in self.hazards],
        }
        agreement = told.pop("agreement")
        if agreement:
            told["tau"], told["regret"] = agreement
        return told


def times_of(ranked: Sequence[Ranked]) -> dict[tuple[str, str], float]:
    """Return the cycles of the fastest of each tile and schedule, by both in words, by rows and keys of the tile."""
    last = sorted(ranked, key=lambda x: (x.config.tile_m, x.config.tile_n, -x.estimate.cycles))  # the fastest of a tile
    return {(_tile(x.config), kernel_of(x.config).row[-1]): x.estimate.cycles for x in last}


def choices_of(
    schedule: Schedule, machine: Machine, over: Mapping[str, Sequence[Any]], clock: float | None
) -> tuple[list[Choice], str, list[Values]]:
    """Return the ranking of a described kernel, what binds the first, and the values that would be first if vector
    counts were lower, and if they were higher; nothing of the first where none fits."""
    choices = described.tune(schedule, machine, over, clock)
    if not choices[0].timed:
        return choices, "", []
    best = schedule.description(**{**dict(schedule.values), **choices[0].values})
    found, traced = traced_schedule(best, machine, clock)
    binds = binding(
        measure(traced.program, traced.tables, traced.trace),
        is_bound_by_hbm=found.is_bound_by_hbm,
    )
    return choices, binds, [described.tune(schedule, x, over, clock)[0].values for x in machines_off(machine)]


def shown(ranked: list[Ranked], top: int, measure: int | None) -> list[list[Ranked]]:
    """Return the schedules that are shown, each in a list with those that take the same time after it.

    With --measure they are the best ones that our kernels can be launched with, each alone; ValueError if there is
    none.
    """
    if measure is None:
        return without_duplicates(ranked)[:top]
    launchable = [[r] for r in ranked if r.is_launchable][:measure]
    if not launchable:
        raise ValueError(f"none of the {len(ranked)} schedules that fit is one our kernels can be launched with")
    return launchable


def ranking_of(
    problem: AttentionProblem, machine: Machine, kernel: str, ranked: list[Ranked], shown: list[list[Ranked]]
) -> MachineRanking:
    """Return the ranking: the problem, a lower bound of the time, the simulator's known error, and the shown schedules.

    ``ranked`` are all schedules that fit, the fastest first.
    """
    clock = ranked[0].estimate.clock_mhz
    bound = lower_bound(problem, ranked[0].config, machine, clock)
    ranks = places([(alike[0].estimate.cycles, alike[0].estimate.held_out) for alike in shown])
    return MachineRanking(
        in_words(problem),
        machine,
        clock,
        kernel,
        len(ranked),
        round(bound.cycles),
        bound.binds,
        not traits_of(kernel).is_built_here,
        tuning.regret(ranked, [r for r in ranked if r.is_gluon_buildable]),
        tuning.regret(ranked, [r for r in ranked if r.is_flash3_choice]),
        [_row(place, alike, problem, machine) for place, alike in zip(ranks, shown, strict=True)],
        _hazards([alike[0] for alike in shown]),
        served(problem, schedule_for(problem)).get("launches", "") if kernel_of(ranked[0].config).built_here else "",
    )


def _row(place: int, alike: list[Ranked], problem: AttentionProblem, machine: Machine) -> ScheduleRow:
    """Return the row of the first of some schedules that take the same time; the others are named in ``alike``."""
    entry = alike[0]
    config = entry.config
    estimate = entry.estimate
    launch = kernel_of(config).launch(problem, machine, estimate.clock_mhz)
    bound = roofline(problem, config, machine, estimate.clock_mhz)
    return ScheduleRow(
        place,
        _tile(config),
        *kernel_of(config).row,
        cycles=round(estimate.cycles),
        milliseconds=estimate.seconds * 1e3,
        tflops=launch.flops / estimate.seconds / 1e12,
        gap=entry.gap,
        binds=bound.binds,
        busy=bound.cycles / estimate.cycles,
        hbm_gb_per_s=launch.hbm_bytes / estimate.seconds / 1e9,
        gluon=entry.is_gluon_buildable,
        flash3_choice=entry.is_flash3_choice,
        alike=[_tile(r.config) for r in alike[1:]],
        estimated_counts=bool(kernel_of(config).estimated),
        under_load=config_under_load(problem, config, machine, estimate),
        interval=estimate.interval_figures(),
    )


def _tile(config: AnyConfig) -> str:
    return f"{config.tile_m}x{config.tile_n}"


def _hazards(best: list[Ranked]) -> list[Hazard]:
    """Return what is unsafe in a CTA of two tiles, one where each has its own, of the schedules that are shown."""
    tiles = [TileBlocks(5), TileBlocks(3)]
    programs = (kernel_of(r.config).program(tiles if kernel_of(r.config).is_persistent else tiles[:1]) for r in best)
    return [x._replace(text=f"{program.name}: {x.text}") for program in programs for x in check(program)]


def measured(ranking: MachineRanking, shown: Sequence[list[Ranked]], problem: AttentionProblem) -> MachineRanking:
    """Return the ranking with measured cycles, and with rank correlation and regret if at least two were timed."""
    from fa3verify.bench import tuning as timing

    configs = [ours for (r,) in shown if (ours := kernel_of(r.config).built_here)]
    cycles = timing.measure_cycles(problem, [timing.options_of(config, problem) for config in configs])
    rows = [row._replace(measured=each) for row, each in zip(ranking.ranked, cycles, strict=True)]
    simulated = (r.estimate.cycles for (r,) in shown)
    timed = [(one, each) for one, each in zip(simulated, cycles, strict=True) if isinstance(each, float)]
    agreed = agreement(*np.array(timed).T) if len(timed) > 1 else (float("nan"), ())
    return ranking._replace(ranked=rows, agreement=agreed)
