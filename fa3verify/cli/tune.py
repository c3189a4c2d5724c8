"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, emit, one_line_errors, require_device, require_writable, write
from fa3verify.cli.options import KERNEL_HELP, backward_option, is_given, problem_options
from fa3verify.cli.ranking import csv_of, print_changes, print_legend, print_ranking
from fa3verify.cli.simulate import problem_of


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
        from fa3_kernels.plan.traits import OURS, traits_of
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
        loaded = {machine.name: machine for machine in map(load, machines)}
        found = [_rank(problem, machine, kernel, (compiles, measure), options) for machine in loaded.values()]
        first, *others = found
        hazards = [hazard for figures in found for hazard in figures["hazards"]]
        emit(first | ({"others": others} if others else {}), json_target)
        write(csv_of(found), csv_target)
        if "-" not in (json_target, csv_target):
            for figures in found:
                print_ranking(figures, builds=builds)
            for figures in others:
                print_changes(figures, first, loaded)
            print_legend(first, hazards)
        if hazards:
            raise Exit(FINDING)


def _rank(
    problem: Any, machine: Any, kernel: str, asked: tuple[bool, int | None], options: dict[str, Any]
) -> dict[str, Any]:
    """Figures of one machine: the problem, the best schedules, and what was compiled and measured of them."""
    from fa3_simulator import tune as tuning

    compiles, measure = asked
    pack = options["pack_gqa"] if is_given("pack_gqa") else None
    clock = options["clock_mhz"] or machine["max_clock_mhz"]
    ranked = tuning.tune(problem, machine, clock, family=kernel, pack_gqa=pack, backward=options["backward"])
    if not ranked:
        raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
    if compiles or measure:
        shown = [[r] for r in ranked if r.is_launchable][: max(measure or 0, options["top"] if compiles else 0)]
        if not shown:
            raise ValueError(f"none of the {len(ranked)} schedules that fit is one our kernels can be launched with")
    else:
        shown = tuning.without_duplicates(ranked)[: options["top"]]
    best = [alike[0] for alike in shown]
    figures = _header(problem, machine, clock, kernel, ranked) | {
        "ranked": _rows(problem, machine, shown),
        "hazards": _hazards(best),
    }
    if compiles:
        figures |= _compile(best, figures["ranked"], problem)
    if measure:
        figures |= _measure(best[:measure], figures["ranked"], problem)
    return figures


def _header(problem: Any, machine: Any, clock: float, kernel: str, ranked: list[Any]) -> dict[str, Any]:
    """Return what was asked, the time that nothing can beat, and how far off the simulator was for such kernels."""
    from fa3_kernels.plan.traits import traits_of
    from fa3_simulator import tune as tuning
    from fa3_simulator.held_out import held_out
    from fa3_simulator.roofline import lower_bound
    from fa3_simulator.run import in_words

    bound = lower_bound(problem, ranked[0].config, machine, clock)
    known = held_out(ranked[0].config)
    return {
        "problem": in_words(problem),
        "machine": machine.name,
        "clock_mhz": clock,
        "kernel": kernel,
        "schedules": len(ranked),
        "lower_bound_cycles": round(bound.cycles),
        "lower_bound_binds": bound.binds,
        "held_out": known._asdict() if known else None,
        "shows_peer": not traits_of(kernel).is_built_here,
        "regret_gluon": tuning.regret(ranked, [r for r in ranked if r.is_gluon_buildable]),
        "regret_flash3": tuning.regret(ranked, [r for r in ranked if r.is_flash3_choice]),
        "assumed_constants": machine.assumed(),
    }


def _rows(problem: Any, machine: Any, shown: list[list[Any]]) -> list[dict[str, Any]]:
    """Return what is told of each schedule; of those that take the same time the first is."""
    from fa3_simulator.held_out import held_out, places

    known = held_out(shown[0][0].config)
    found = places([alike[0].estimate.cycles for alike in shown], known.error if known else 0.0)
    return [
        {"place": place, **_row(alike[0], problem, machine), "alike": [_tile(r.config) for r in alike[1:]]}
        for place, alike in zip(found, shown, strict=True)
    ]


def _tile(config: Any) -> str:
    return f"{config.tile_m}x{config.tile_n}"


def _row(entry: Any, problem: Any, machine: Any) -> dict[str, Any]:
    from fa3_simulator.roofline import roofline
    from fa3_simulator.run import moved_bytes, operations

    c = entry.config
    found = entry.estimate
    bound = roofline(problem, c, machine, found.clock_mhz)
    return {
        "tile": _tile(c),
        **_schedule(c),
        "cycles": round(found.cycles),
        "milliseconds": found.seconds * 1e3,
        "tflops": operations(problem, c) / found.seconds / 1e12,
        "gap": entry.gap,
        "binds": bound.binds,
        "busy": bound.cycles / found.cycles,
        "hbm_gb_per_s": moved_bytes(problem, c) / found.seconds / 1e9,
        "gluon": entry.is_gluon_buildable,
        "flash3_choice": entry.is_flash3_choice,
    }


def _schedule(config: Any) -> dict[str, Any]:
    """Slots and layout: of a backward those of Q, dO and dS, and the warpgroups that compute."""
    from fa3_kernels.plan.config import Config
    from fa3_simulator.schedules import switches

    c = config
    if isinstance(c, Config):
        p = "reg" if c.pv_from_registers else "smem"
        return {"splits": c.num_splits, "packed": c.pack_gqa, "stages": c.num_stages, "p": p, "schedule": switches(c)}
    slots = "/".join(map(str, (c.num_stages, c.dout_stages, c.ds_stages)))
    return {"splits": 1, "packed": False, "stages": slots, "p": f"{c.consumers} wg", "schedule": c.layout}


def _hazards(best: list[Any]) -> list[dict[str, str]]:
    """Return what is unsafe in a CTA of two tiles, one where each has its own, of the schedules that are shown."""
    from fa3_simulator.cta import is_persistent, program_of
    from fa3_simulator.hazards import check
    from fa3_simulator.schedules import TileBlocks

    tiles = [TileBlocks(5), TileBlocks(3)]
    programs = (program_of(r.config, tiles if is_persistent(r.config) else tiles[:1]) for r in best)
    return [{"kind": x.kind, "text": f"{program.name}: {x.text}"} for program in programs for x in check(program)]


def _compile(best: list[Any], rows: list[dict[str, Any]], problem: Any) -> dict[str, Any]:
    """Add what ptxas made of each schedule to its row; or say why nothing can be compiled."""
    from fa3_kernels.gluon import unsupported

    if reason := unsupported():
        return {"not_compiled": reason}
    from fa3verify.bench import tuning as tune_build

    for entry, row in zip(best, rows, strict=True):
        row |= tune_build.compile_schedule(problem, entry.config)._asdict()
    return {}


def _measure(best: list[Any], rows: list[dict[str, Any]], problem: Any) -> dict[str, Any]:
    """Add measured cycles to the rows; rank agreement and regret where three were timed."""
    import numpy as np

    from fa3verify.bench import tuning as tune_build
    from fa3verify.timed.validation import agreement

    cell = tune_build.cell_of(problem)
    measured = tune_build.measure_cycles(cell, [tune_build.options_of(r.config, problem) for r in best])
    for row, cycles in zip(rows, measured):
        row |= {"measured_cycles": cycles} if isinstance(cycles, float) else {"not_measured": cycles}
    timed = [(r.estimate.cycles, m) for r, m in zip(best, measured) if isinstance(m, float)]
    if len(timed) < 2:
        return {"tau": float("nan"), "regret": ()}
    tau, regret = agreement(*np.array(timed).T)
    return {"tau": tau, "regret": regret}
