"""Verb tune: rank every tile and schedule that fits."""

from __future__ import annotations

from typing import Any

import rich_click as click

from fa3verify.exits import EPILOG, emit, one_line_errors
from fa3verify.schedule_commands import problem_options, shape_of


@click.command(epilog=EPILOG)
@problem_options
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
def tune(clock_mhz: float | None, json_target: str | None, top: int, **options: Any) -> None:
    """Simulate every tile and schedule that fits, and rank them."""
    with one_line_errors():
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load

        machine = load(options["machine"])
        shape = shape_of(options)
        ranked = tuning.tune(shape, options["dtype"], options["head_dim"], machine, clock_mhz)
        if not ranked:
            raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
        best = tuning.without_duplicates(ranked)
        gluon = [r for r in ranked if r.is_gluon_buildable]
        flash3 = [r for r in ranked if r.is_flash3_choice]
        figures = {
            "schedules": len(ranked),
            "regret_gluon": tuning.regret(ranked, gluon),
            "regret_flash3": tuning.regret(ranked, flash3),
            "ranked": [_row(r, shape) for r in best[:top]],
        }
        emit(figures, json_target)
        if json_target != "-":
            _print_ranking(figures)


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


def _print_ranking(figures: dict[str, Any]) -> None:
    click.echo(f"{figures['schedules']} schedules fit; the best of every tile:")
    click.echo(f"  {'tile':>8} {'stages':>6} {'schedule':>17} {'P':>9} {'cycles':>10} {'TFLOP/s':>8} {'gap':>6}")
    for row in figures["ranked"]:
        note = ("gluon" if row["gluon"] else "CUTLASS only") + (", FA3's choice" if row["flash3_choice"] else "")
        click.echo(
            f"  {row['tile']:>8} {row['stages']:>6} {row['schedule']:>17} {row['p']:>9} {row['cycles']:>10} "
            f"{row['tflops']:>8.0f} {row['gap_to_roofline']:>6.1%}  {note}"
        )
    click.echo(
        f"regret of the best Gluon tile {figures['regret_gluon']:.1%}, of FlashAttention-3's own {figures['regret_flash3']:.1%}"
    )
