"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from typing import Any

import rich_click as click

from fa3verify.cli.exits import EPILOG, emit, one_line_errors, require_device
from fa3verify.cli.options import problem_options
from fa3verify.cli.simulate import shape_of


@click.command(epilog=EPILOG)
@problem_options
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--kernel", type=click.Choice(["gluon", "flash3"]), help="gluon with --compile and --measure, else flash3."
)
@click.option("--compile", "compiles", is_flag=True, help="Compile the top ones our kernels take: registers, spills.")
@click.option("--measure", type=click.IntRange(2), metavar="K", help="Time the top K our kernels take on a GPU.")
def tune(
    clock_mhz: float | None, json_target: str | None, top: int, compiles: bool, measure: int | None, **options: Any
) -> None:
    """Simulate every tile and schedule that fits, and rank them."""
    with one_line_errors():
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load

        builds = compiles or measure is not None
        kernel = options["kernel"] or ("gluon" if builds else "flash3")
        if builds and kernel != "gluon":
            raise ValueError(f"--compile and --measure are for --kernel gluon, got {kernel}")
        if measure is not None:
            require_device("tune --measure")
        machine, shape = load(options["machine"]), shape_of(options)
        ranked = tuning.tune(shape, options["dtype"], options["head_dim"], machine, clock_mhz, kernel=kernel)
        if not ranked:
            raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
        if builds:
            best = [r for r in ranked if tuning.is_launchable(r.schedule)][: max(measure or 0, top if compiles else 0)]
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
            "ranked": [_row(r, shape) for r in best],
        }
        if compiles:
            figures |= _compile(best, figures["ranked"], shape)
        if measure is not None:
            figures |= _measure(best[:measure], figures["ranked"], shape)
        emit(figures, json_target)
        if json_target != "-":
            _print_ranking(figures, builds)


def _compile(best: list[Any], rows: list[dict[str, Any]], shape: Any) -> dict[str, Any]:
    """Add what ptxas made of each schedule to its row; or say why nothing can be compiled."""
    from fa3_kernels.gluon import unsupported

    if reason := unsupported():
        return {"not_compiled": reason}
    from fa3verify.gpu import tuning as tune_build

    for entry, row in zip(best, rows, strict=True):
        row |= tune_build.compile_schedule(shape, entry.schedule)._asdict()
    return {}


def _measure(best: list[Any], rows: list[dict[str, Any]], shape: Any) -> dict[str, Any]:
    """Add measured cycles to the rows; rank agreement and regret where three were timed."""
    import numpy as np

    from fa3verify.gpu import tuning as tune_build
    from fa3verify.gpu.validation import agreement

    cell = tune_build.cell_of(best[0].schedule, shape)
    measured = tune_build.measure_cycles(cell, [tune_build.options_of(r.schedule, shape) for r in best])
    for row, cycles in zip(rows, measured):
        row |= {"measured_cycles": cycles} if isinstance(cycles, float) else {"not_measured": cycles}
    timed = [(r.estimate.cycles, m) for r, m in zip(best, measured) if isinstance(m, float)]
    if len(timed) < 2:
        return {"tau": float("nan"), "regret": ()}
    tau, regret = agreement(*np.array(timed).T)
    return {"tau": tau, "regret": regret}


def _row(entry: Any, shape: Any) -> dict[str, Any]:
    s = entry.schedule
    return {
        "tile": f"{s.tile_m}x{s.tile_n}",
        "stages": s.num_stages,
        "schedule": s.switches,
        "p": "registers" if s.pv_from_registers else "smem",
        "cycles": round(entry.estimate.cycles),
        "tflops": shape.flops(s.head_dim) / entry.estimate.seconds / 1e12,
        "gap_to_roofline": entry.gap,
        "gluon": entry.is_gluon_buildable,
        "flash3_choice": entry.is_flash3_choice,
    }


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


def _print_ranking(figures: dict[str, Any], builds: bool) -> None:
    shown = "the best our kernels can be launched with" if builds else "the best of every tile"
    click.echo(f"{figures['schedules']} schedules fit; {shown}:")
    click.echo(f"  {'tile':>8} {'stages':>6} {'schedule':>17} {'P':>9} {'cycles':>10} {'TFLOP/s':>8} {'gap':>6}")
    for row in figures["ranked"]:
        click.echo(
            f"  {row['tile']:>8} {row['stages']:>6} {row['schedule']:>17} {row['p']:>9} {row['cycles']:>10} "
            f"{row['tflops']:>8.0f} {row['gap_to_roofline']:>6.1%}  {_note(row)}"
        )
    if "not_compiled" in figures:
        click.echo(f"not compiled: {figures['not_compiled']}; registers are estimated")
    if figures.get("regret"):
        regret = ", ".join(f"top-{k} {x:.1%}" for k, x in zip((1, 3), figures["regret"]))
        click.echo(f"simulated against measured: Kendall tau {figures['tau']:.2f}, regret {regret}")
    if not builds:
        own = "" if figures["kernel"] == "gluon" else f", of FlashAttention-3's own {figures['regret_flash3']:.1%}"
        click.echo(f"regret of the best Gluon tile {figures['regret_gluon']:.1%}{own}")
