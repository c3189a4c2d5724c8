"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, emit, one_line_errors, require_device
from fa3verify.cli.options import backward_option, problem_options
from fa3verify.cli.simulate import hazards_line, problem_of


@click.command(epilog=EPILOG)
@problem_options
@backward_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--kernel",
    metavar="FAMILY",
    help="Whose: gluon, flash3 or flash4; gluon with --compile and --measure, else flash3.",
)
@click.option("--compile", "compiles", is_flag=True, help="Compile the top ones our kernels take: registers, spills.")
@click.option("--measure", type=click.IntRange(2), metavar="K", help="Time the top K our kernels take on a GPU.")
def tune(
    clock_mhz: float | None, json_target: str | None, top: int, compiles: bool, measure: int | None, **options: Any
) -> None:
    """Simulate every tile and schedule that fits, and rank them."""
    with one_line_errors():
        from fa3_kernels.plan.traits import OURS, traits_of
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load

        builds, backward = compiles or measure is not None, options["backward"]
        if backward and (builds or options["pack_gqa"]):
            raise ValueError("--backward does not take --compile, --measure and --pack-gqa")
        kernel = options["kernel"] or (OURS if builds else tuning.PEER)
        if builds and not traits_of(kernel).is_built_here:
            raise ValueError(f"--compile and --measure are for --kernel {OURS}, got {kernel}")
        if measure is not None:
            require_device("tune --measure")
        machine, problem = load(options["machine"]), problem_of(options)
        ranked = tuning.tune(
            problem, machine, clock_mhz, family=kernel, pack_gqa=options["pack_gqa"], backward=backward
        )
        if not ranked:
            raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
        if builds:
            best = [r for r in ranked if r.is_launchable][: max(measure or 0, top if compiles else 0)]
            if not best:
                raise ValueError(
                    f"none of the {len(ranked)} schedules that fit is one our kernels can be launched with"
                )
        else:
            best = tuning.without_duplicates(ranked)[:top]
        figures = {
            "kernel": kernel,
            "schedules": len(ranked),
            "regret_gluon": tuning.regret(ranked, [r for r in ranked if r.is_gluon_buildable]),
            "regret_flash3": tuning.regret(ranked, [r for r in ranked if r.is_flash3_choice]),
            "ranked": [_row(r, problem) for r in best],
            "hazards": _hazards(best),
        }
        if compiles:
            figures |= _compile(best, figures["ranked"], problem)
        if measure is not None:
            figures |= _measure(best[:measure], figures["ranked"], problem)
        emit(figures, json_target)
        if json_target != "-":
            _print_ranking(figures, builds, not traits_of(kernel).is_built_here)
        if figures["hazards"]:
            raise Exit(FINDING)


def _hazards(best: list[Any]) -> list[dict[str, str]]:
    """What is unsafe in a CTA of two tiles, one where each has its own, of the schedules that are shown."""
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
    from fa3verify.gpu import tuning as tune_build

    for entry, row in zip(best, rows, strict=True):
        row |= tune_build.compile_schedule(problem, entry.config)._asdict()
    return {}


def _measure(best: list[Any], rows: list[dict[str, Any]], problem: Any) -> dict[str, Any]:
    """Add measured cycles to the rows; rank agreement and regret where three were timed."""
    import numpy as np

    from fa3verify.gpu import tuning as tune_build
    from fa3verify.gpu.validation import agreement

    cell = tune_build.cell_of(problem)
    measured = tune_build.measure_cycles(cell, [tune_build.options_of(r.config, problem) for r in best])
    for row, cycles in zip(rows, measured):
        row |= {"measured_cycles": cycles} if isinstance(cycles, float) else {"not_measured": cycles}
    timed = [(r.estimate.cycles, m) for r, m in zip(best, measured) if isinstance(m, float)]
    if len(timed) < 2:
        return {"tau": float("nan"), "regret": ()}
    tau, regret = agreement(*np.array(timed).T)
    return {"tau": tau, "regret": regret}


def _row(entry: Any, problem: Any) -> dict[str, Any]:
    from fa3_simulator.run import operations

    c = entry.config
    return {
        "tile": f"{c.tile_m}x{c.tile_n}",
        **_schedule(c),
        "cycles": round(entry.estimate.cycles),
        "tflops": operations(problem, c) / entry.estimate.seconds / 1e12,
        "gap_to_roofline": entry.gap,
        "gluon": entry.is_gluon_buildable,
        "flash3_choice": entry.is_flash3_choice,
    }


def _schedule(config: Any) -> dict[str, Any]:
    """Slots and layout: of a backward those of Q, dO and dS, and the warpgroups that compute."""
    from fa3_kernels.plan.config import Config
    from fa3_simulator.schedules import switches

    c = config
    if isinstance(c, Config):
        p = "registers" if c.pv_from_registers else "smem"
        return {"stages": c.num_stages, "schedule": switches(c), "p": p}
    slots = "/".join(map(str, (c.num_stages, c.dout_stages, c.ds_stages)))
    return {"stages": slots, "schedule": c.layout, "p": f"{c.consumers} groups"}


def _note(row: dict[str, Any]) -> str:
    """What stands at the end of a line."""
    parts = ["gluon" if row["gluon"] else "CUTLASS only"] + ["FA3's choice"] * row["flash3_choice"]
    if "registers" in row:
        built = f"{row['registers']} registers, {row['spill_bytes']} bytes spilled" if row["registers"] else ""
        parts = [x for x in (built, row["note"] and f"! {row['note']}") if x]
    if "measured_cycles" in row:
        parts.append(f"measured {row['measured_cycles']:.0f} ({row['cycles'] / row['measured_cycles'] - 1:+.1%})")
    if "not_measured" in row:
        parts.append(f"! not measured: {row['not_measured']}")
    return ", ".join(parts)


def _print_ranking(figures: dict[str, Any], builds: bool, shows_peer: bool) -> None:
    shown = "the best our kernels can be launched with" if builds else "the best of every tile"
    click.echo(f"{figures['schedules']} schedules fit; {shown}:")
    wide = max(17, *(len(row["schedule"]) for row in figures["ranked"]))
    head = f"  {'tile':>8} {'stages':>6} {'schedule':>{wide}} {'P':>9} {'cycles':>10} {'TFLOP/s':>8} {'gap':>6}"
    click.echo(head)
    for row in figures["ranked"]:
        click.echo(
            f"  {row['tile']:>8} {row['stages']:>6} {row['schedule']:>{wide}} {row['p']:>9} {row['cycles']:>10} "
            f"{row['tflops']:>8.0f} {row['gap_to_roofline']:>6.1%}  {_note(row)}"
        )
    if "not_compiled" in figures:
        click.echo(f"not compiled: {figures['not_compiled']}; registers are estimated")
    if figures.get("regret"):
        regret = ", ".join(f"top-{k} {x:.1%}" for k, x in zip((1, 3), figures["regret"]))
        click.echo(f"simulated against measured: Kendall tau {figures['tau']:.2f}, regret {regret}")
    click.echo(hazards_line(figures["hazards"], "in the schedules shown"))
    if not builds:
        own = f", of FlashAttention-3's own {figures['regret_flash3']:.1%}" if shows_peer else ""
        click.echo(f"regret of the best Gluon tile {figures['regret_gluon']:.1%}{own}")
