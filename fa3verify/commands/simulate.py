"""The figures that the verb ``simulate`` prints: of a family's launch, of a described kernel, and of how two differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.clock import under_load
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.described import TimedLaunch, timed
from fa3_simulator.description import Schedule
from fa3_simulator.footprint import Hazard
from fa3_simulator.forward_choice import served
from fa3_simulator.hazards import check
from fa3_simulator.launch import Launch
from fa3_simulator.machine import Machine
from fa3_simulator.overlap import Overlap, Traced, account, differences, measure, traced
from fa3_simulator.roofline import closed_form, roofline
from fa3_simulator.run import Estimate, estimate
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.what_if import changed, speedups
from fa3verify.commands import compiled
from fa3verify.files import Json

VECTOR = 0.2  # how far off the vector counts that somebody declared may be
SHOWN_TILES = 2  # the most tiles, and the most key blocks of each, that a picture can show
SHOWN_BLOCKS = 24


def traced_family(
    name: str,
    problem: AttentionProblem,
    config: AnyConfig,
    machine: Machine,
    clock: float | None,
    *,
    is_drawn: bool = False,
) -> Traced:
    """Return the launch of a family's kernel, with a record of its longest CTA, or of so much as a picture can show.

    ValueError where nothing is launched.
    """
    found = estimate(problem, config, machine, clock)
    require(found.tiles, "nothing is launched, as no query sees a key")
    tiles = [TileBlocks(min(x.blocks, SHOWN_BLOCKS), min(x.masked, SHOWN_BLOCKS)) for x in found.tiles[:SHOWN_TILES]]
    return traced(name, found, kernel_of(config), machine, tiles if is_drawn else None)


def traced_schedule(schedule: Schedule, machine: Machine, clock: float | None) -> tuple[TimedLaunch, Traced]:
    """Return the timed launch of a schedule, and its longest CTA with a record."""
    found = timed(schedule, machine, clock)
    return found, traced(schedule.name, found.estimate, found.cta.kernel, machine)


def binding(overlap: Overlap, *, is_bound_by_hbm: bool) -> str:
    """Return which resource bounds the time of a launch, of whose longest CTA ``overlap`` is."""
    return "hbm" if is_bound_by_hbm else overlap.binds


def _figures(
    launched: Traced,
    overlap: Overlap,
    launch: Launch,
    machine: Machine,
    again: Callable[[float], Estimate],
    hazards: Sequence[Hazard],
    *,
    is_bound_by_hbm: bool,
) -> Json:
    """Return the figures that every launch has; ``again`` simulates it at another clock."""
    found = launched.estimate
    idle = sum(overlap.ledger.values()) or 1  # idle time of the tensor cores over all causes
    return {
        "schedule": launched.program.name,
        "machine": machine.name,
        "clock_mhz": found.clock_mhz,
        "cycles": round(found.cycles),
        "milliseconds": found.seconds * 1e3,
        **found.interval_figures(),
        "tflops": launch.flops / found.seconds / 1e12,
        "tensor_efficiency": overlap.tensor_efficiency,
        "overlap_efficiency": overlap.overlap_efficiency,
        "binds": binding(overlap, is_bound_by_hbm=is_bound_by_hbm),
        "idle_tensor_share": {cause: ticks / idle for cause, ticks in overlap.ledger.items()},
        "hazards": [hazard._asdict() for hazard in hazards],
        **under_load(machine, launch.dtype, found, again, launch.flops),
    }


def of_family(problem: AttentionProblem, config: AnyConfig, machine: Machine, launched: Traced) -> Json:
    """Return the figures of a family's launch.

    The closed form, the merging of parts and the hidden softmax are figures of a forward only; a backward has the
    cycles of its main kernel instead.
    """
    found = launched.estimate
    kernel = kernel_of(config)
    overlap = measure(launched.program, launched.tables, launched.trace)
    bound = roofline(problem, config, machine, found.clock_mhz)
    on = kernel.on(machine, found.clock_mhz)
    launch = kernel.launch(problem, machine, found.clock_mhz)
    again = partial(estimate, problem, config, machine)
    if isinstance(config, BackwardSchedule):
        beside = {"main_cycles": round(found.main_cycles), "layout": config.layout, "turns": config.turns}
    else:
        beside = {
            # Below 0 the tensor core idles for longer than the softmax takes, and so for another reason.
            "hidden_softmax": overlap.hidden_softmax if overlap.hidden_softmax >= 0 else None,
            "closed_form_cycles": round(closed_form(problem, config, machine)),
            "merge_cycles": round(found.around_cycles),
            **served(problem, config),
        }
    return _figures(
        launched,
        overlap,
        launch,
        machine,
        again,
        check(launched.program, machine),
        is_bound_by_hbm=found.hbm_cycles > found.cta_cycles,
    ) | {
        "roofline_cycles": round(bound.cycles),
        "roofline_binds": bound.binds,
        **beside,
        "cta_cycles": round(found.cta_cycles),
        "times_as_fast_if_free": {
            **speedups(launched.program, on, found.clock_mhz, launched.trace),
            "waiting": 1 / overlap.overlap_efficiency,
        },
        "assumed_constants": [*machine.assumed(), *kernel.estimated],
    }


def machines_off(machine: Machine) -> list[Machine]:
    """Return the machines on which vector counts that are lower, and higher, by :data:`VECTOR` take as long."""
    return [changed(machine, "vector", 1 / (1 + share)) for share in (-VECTOR, VECTOR)]


def of_schedule(
    schedule: Schedule, machine: Machine, clock: float | None, path: Path | None, pattern: str
) -> tuple[Json, Traced]:
    """Return the figures of a described kernel, with the names that families have, and its launch.

    ``path`` is a file with the kernel as compiled, and ``pattern`` is found in the name of its function.
    """
    found, launched = traced_schedule(schedule, machine, clock)
    cycles, at_mhz = found.estimate.cycles, found.estimate.clock_mhz
    overlap = measure(launched.program, launched.tables, launched.trace)
    on = found.cta.kernel.on(machine, at_mhz)
    hazards = check(schedule.program(found.estimate.tiles[: 1 + found.launch.persistent]), machine)

    def again(clock_mhz: float) -> Estimate:
        return timed(schedule, machine, clock_mhz).estimate

    figures = _figures(
        launched, overlap, found.launch, machine, again, hazards, is_bound_by_hbm=found.is_bound_by_hbm
    ) | {
        "hbm_tb_per_s": found.launch.hbm_bytes / found.estimate.seconds / 1e12,
        "ctas_on_an_sm": found.together,
        "times_as_fast_if_free": speedups(launched.program, on, at_mhz, launched.trace),
        "moves_by_vector_counts": _moves(schedule, machine, clock, cycles),
    }
    if path:
        figures["compiled"] = _compiled(schedule, machine, clock, cycles, path, pattern)
    return figures, launched


def _moves(schedule: Schedule, machine: Machine, clock: float | None, cycles: float) -> list[float]:
    """Return how much longer than ``cycles`` a launch takes on each of :func:`machines_off`."""
    return [timed(schedule, other, clock).estimate.cycles / cycles - 1 for other in machines_off(machine)]


def _compiled(
    schedule: Schedule, machine: Machine, clock: float | None, declared: float, path: Path, pattern: str
) -> Json:
    """Return a compiled kernel beside its description, which takes ``declared`` cycles, and what the launch takes with
    the compiled vector counts."""
    facts, sass = compiled.read_function(path, pattern)
    rows = compiled.beside(schedule, sass, facts["registers"])
    counts = {name: {x: own for x, (_, own) in row["counts"].items()} for row in rows for name in row["streams"]}
    filled = schedule.filled(counts)
    now = timed(filled, machine, clock).estimate.cycles
    return facts | {
        "smem_bytes": schedule.program([1]).smem_bytes,
        "streams": rows,
        "cycles": round(now),
        "more": now / declared - 1,
        "moves_by_vector_counts": _moves(filled, machine, clock, now),
    }


def differing(first: Traced, second: Traced) -> Json:
    """Return the cycles of two launches by cause, and what the second takes more by each."""
    sides = account(first), account(second)
    return {"kernels": [first.name, second.name], "causes": sides, "more": differences(*sides)}
