"""The ranking of schedules that the verb ``tune`` prints: simulated, and compiled or timed where that was asked for.

The schedules are simulated in :mod:`fa3_simulator.tune`, and :mod:`fa3verify.cli.tune` prints these records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fa3_kernels import gluon
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import traits_of
from fa3_reference.problem import AttentionProblem
from fa3_simulator import tune as tuning
from fa3_simulator.clock import config_under_load
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.footprint import Hazard
from fa3_simulator.hazards import check
from fa3_simulator.held_out import HeldOut, held_out, places
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import lower_bound, roofline
from fa3_simulator.run import in_words
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import Ranked, agreement, without_duplicates
from fa3verify.files import Json

if TYPE_CHECKING:
    from fa3verify.bench.tuning import Built


class ScheduleRow(NamedTuple):
    """One schedule of a ranking.

    ``under_load`` is what :func:`fa3_simulator.clock.under_load` says of it, and stands in JSON with the rest.
    ``alike`` are other tiles that take the same time. ``measured`` is measured cycles, or in words why there are none;
    None where nobody measured, as ``built`` is where nobody compiled. ``estimated_counts`` says that such a tile was
    never compiled, so that some instruction counts of a step are estimates.
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
    built: Built | None = None
    measured: float | str | None = None

    def to_json(self) -> Json:
        """Return the figures as JSON; what was not compiled or measured has no key."""
        told = self._asdict()
        built = told.pop("built")
        measured = told.pop("measured")
        told |= told.pop("under_load")
        if built:
            told |= built._asdict()
        if measured is not None:
            told["not_measured" if isinstance(measured, str) else "measured_cycles"] = measured
        return told

    def choice(self) -> str:
        """Return the choices of a launch in words: tile, schedule, parts of the keys, packing."""
        parts = f", {self.splits} parts" * (self.splits > 1) + ", packed" * self.packed
        return f"{self.tile} {self.schedule}{parts}"

    def behind(self) -> str:
        """Return the last column of the table: the schedule, and what compiling and measuring it gave."""
        parts = [self.schedule]
        if self.built:
            registers = f"{self.built.registers} registers, {self.built.spill_bytes} bytes spilled"
            parts += [registers] if self.built.registers else []
            parts += [f"! {self.built.note}"] if self.built.note else []
        if isinstance(self.measured, str):
            parts.append(f"! not measured: {self.measured}")
        elif self.measured is not None:
            parts.append(f"measured {self.measured:.0f} ({self.cycles / self.measured - 1:+.1%})")
        return ", ".join(parts)


class MachineRanking(NamedTuple):
    """The ranking of schedules for one problem on one machine.

    ``schedules`` is how many fit. ``held_out`` is the simulator's error on timings that it was not fitted to, None if
    there are none. ``regret_gluon`` and ``regret_flash3`` are how much slower than the first the best launch of a
    library is, None if it is not among them. ``agreement`` is the rank correlation with measured times, and the regret
    of the simulated choice; None where nothing was measured. ``not_compiled`` is why --compile did nothing, or empty.
    """

    problem: str
    machine: Machine
    clock_mhz: float
    kernel: str
    schedules: int
    lower_bound_cycles: int
    lower_bound_binds: str
    held_out: HeldOut | None
    shows_peer: bool
    regret_gluon: float | None
    regret_flash3: float | None
    ranked: Sequence[ScheduleRow]
    hazards: Sequence[Hazard]
    not_compiled: str = ""
    agreement: tuple[float, Sequence[float]] | None = None

    def to_json(self) -> Json:
        """Return the figures as JSON; without --measure and --compile some have no key."""
        told = self._asdict() | {
            "machine": self.machine.name,
            "held_out": self.held_out and self.held_out._asdict(),
            "assumed_constants": self.machine.assumed(),
            "ranked": [row.to_json() for row in self.ranked],
            "hazards": [hazard._asdict() for hazard in self.hazards],
        }
        agreement = told.pop("agreement")
        if agreement:
            told["tau"], told["regret"] = agreement
        if not self.not_compiled:
            del told["not_compiled"]
        return told


def shown(ranked: list[Ranked], top: int, compiles: bool, measure: int | None) -> list[list[Ranked]]:
    """Return the schedules that are shown, each in a list with those that take the same time after it.

    With --compile or --measure they are the best ones that our kernels can be launched with, each alone; ValueError if
    there is none.
    """
    if not compiles and measure is None:
        return without_duplicates(ranked)[:top]
    launchable = [[r] for r in ranked if r.is_launchable][: max(measure or 0, top if compiles else 0)]
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
    )


def _tile(config: AnyConfig) -> str:
    return f"{config.tile_m}x{config.tile_n}"


def _hazards(best: list[Ranked]) -> list[Hazard]:
    """Return what is unsafe in a CTA of two tiles, one where each has its own, of the schedules that are shown."""
    tiles = [TileBlocks(5), TileBlocks(3)]
    programs = (kernel_of(r.config).program(tiles if kernel_of(r.config).is_persistent else tiles[:1]) for r in best)
    return [x._replace(text=f"{program.name}: {x.text}") for program in programs for x in check(program)]


def _launchable(shown: Sequence[list[Ranked]]) -> list[Config]:
    """Return the configurations of the schedules to compile or time, each of which stands in a list of its own."""
    return [ours for (r,) in shown if (ours := kernel_of(r.config).built_here)]


def compiled(ranking: MachineRanking, shown: Sequence[list[Ranked]], problem: AttentionProblem) -> MachineRanking:
    """Return the ranking with registers and spills of each schedule, or with why nothing can be compiled here."""
    if reason := gluon.unsupported():
        return ranking._replace(not_compiled=reason)
    from fa3verify.bench import tuning as tune_build

    built = (tune_build.compile_schedule(problem, config) for config in _launchable(shown))
    rows = [row._replace(built=each) for row, each in zip(ranking.ranked, built, strict=True)]
    return ranking._replace(ranked=rows)


def measured(ranking: MachineRanking, shown: Sequence[list[Ranked]], problem: AttentionProblem) -> MachineRanking:
    """Return the ranking with measured cycles, and with rank correlation and regret if at least two were timed."""
    from fa3verify.bench import tuning as tune_build

    options = [tune_build.options_of(config, problem) for config in _launchable(shown)]
    cycles = tune_build.measure_cycles(problem, options)
    rows = [row._replace(measured=each) for row, each in zip(ranking.ranked, cycles)]
    timed = [(alike[0].estimate.cycles, each) for alike, each in zip(shown, cycles) if isinstance(each, float)]
    agreed = agreement(*np.array(timed).T) if len(timed) > 1 else (float("nan"), ())
    return ranking._replace(ranked=[*rows, *ranking.ranked[len(rows) :]], agreement=agreed)
