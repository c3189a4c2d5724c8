"""Verbs about schedules: simulate one, draw it, rank all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich_click as click

from fa3verify.exits import EPILOG, emit, one_line_errors

_SWITCHES = {"pingpong": "pingpong", "overlap": "intra_wg_overlap"}


def _tile(_context: Any, _parameter: Any, value: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)x(\d+)", value)):
        raise click.BadParameter(f"must be ROWSxKEYS such as 128x176, got {value!r}")
    return int(match[1]), int(match[2])


def _problem_options(command: Callable) -> Callable:
    """Options that say what is computed, and where."""
    for option in (
        click.option("--dtype", type=click.Choice(["fp16", "bf16", "e4m3"]), default="fp16", show_default=True),
        click.option("--head-dim", type=click.IntRange(8, 256), default=128, show_default=True),
        click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
        click.option("--nheads", type=click.IntRange(1), default=16, show_default=True),
        click.option("--seqlen", type=click.IntRange(1), default=8192, show_default=True),
        click.option("--causal", is_flag=True),
        click.option("--machine", default="h200", show_default=True, help="h100, h200 or a .toml file."),
        click.option(
            "--clock-mhz", type=click.FloatRange(100, 4000), help="SM clock; the machine's maximum by default."
        ),
        click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON."),
    ):
        command = option(command)
    return command


def _schedule_options(command: Callable) -> Callable:
    """Options that say how."""
    for option in (
        click.option("--tile", callback=_tile, default="128x128", show_default=True, metavar="ROWSxKEYS"),
        click.option("--stages", type=click.IntRange(1, 8), default=2, show_default=True),
        click.option(
            "--schedule",
            default="pingpong+overlap",
            show_default=True,
            help="pingpong and overlap joined by +, or none.",
        ),
        click.option(
            "--promotion-interval", type=click.IntRange(0), default=0, help="e4m3: keys per promotion of P V."
        ),
        click.option("--kernel", type=click.Choice(["gluon", "flash3"]), default="gluon", show_default=True),
        click.option("--p-in-smem", is_flag=True, help="P V reads P from shared memory, not from registers."),
    ):
        command = option(command)
    return command


def _schedule(options: dict[str, Any]) -> Any:
    from fa3_simulator.schedules import Schedule

    names = [] if options["schedule"] == "none" else options["schedule"].split("+")
    if unknown := set(names) - set(_SWITCHES):
        raise ValueError(f"schedule is made of {' and '.join(_SWITCHES)}, or none, got {', '.join(sorted(unknown))}")
    tile_m, tile_n = options["tile"]
    return Schedule(
        dtype=options["dtype"],
        head_dim=options["head_dim"],
        tile_m=tile_m,
        tile_n=tile_n,
        num_stages=options["stages"],
        promotion_interval=options["promotion_interval"],
        v_transpose=options["dtype"] == "e4m3",
        pv_from_registers=not options["p_in_smem"],
        kernel=options["kernel"],
        **{field: name in names for name, field in _SWITCHES.items()},
    )


def _setup(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Shape, schedule and machine; ValueError when the schedule does not fit."""
    from fa3_simulator.machine import load
    from fa3_simulator.run import Shape
    from fa3_simulator.tune import misfit

    machine, schedule = load(options["machine"]), _schedule(options)
    if problem := misfit(schedule, machine):
        raise ValueError(f"this schedule does not fit an SM of the {machine.name}: {problem}")
    shape = Shape(options["batch"], options["nheads"], options["seqlen"], options["seqlen"], options["causal"])
    return shape, schedule, machine


def _trace(schedule: Any, machine: Any, clock: float | None, tiles: tuple) -> tuple[Any, Any, Any]:
    """Program, costs and trace of one CTA; long tiles are cut to what a picture can show."""
    from fa3_simulator.costs import costs
    from fa3_simulator.engine import simulate as run
    from fa3_simulator.forward import forward
    from fa3_simulator.schedules import Tile

    shown = [Tile(min(tile.blocks, 24), min(tile.masked, 24)) for tile in tiles[:2]]
    program = forward(schedule, shown)
    tables = costs(program, machine, clock)
    return program, tables, run(program, tables)


@click.command(epilog=EPILOG)
@_problem_options
@_schedule_options
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the timeline as SVG.")
@click.option("--backward", is_flag=True, help="The backward kernel of 64 queries x 128 keys instead; fp16 or bf16.")
def simulate(clock_mhz: float | None, json_target: str | None, svg: Path | None, **options: Any) -> None:
    """Simulate one schedule: cycles, what binds, and where the tensor cores idle."""
    with one_line_errors():
        if options["backward"]:
            _print_backward(_backward_figures(clock_mhz, options), json_target)
            return
        from fa3_simulator.overlap import measure
        from fa3_simulator.roofline import closed_form, roofline
        from fa3_simulator.run import estimate
        from fa3_simulator.timeline import bars, svg_gantt, text_gantt

        shape, schedule, machine = _setup(options)
        found = estimate(shape, schedule, machine, clock_mhz)
        program, tables, trace = _trace(schedule, machine, clock_mhz, found.tiles)
        overlap, bound = measure(program, tables, trace), roofline(shape, schedule, machine)
        ticks = sum(overlap.ledger.values()) or 1
        figures = {
            "schedule": program.name,
            "machine": machine.name,
            "clock_mhz": found.clock_mhz,
            "cycles": round(found.cycles),
            "milliseconds": found.seconds * 1e3,
            "tflops": shape.flops(schedule.head_dim) / found.seconds / 1e12,
            "roofline_cycles": round(bound.cycles),
            "roofline_binds": bound.binds,
            "closed_form_cycles": round(closed_form(shape, schedule, machine)),
            "tensor_efficiency": overlap.tensor_efficiency,
            "overlap_efficiency": overlap.overlap_efficiency,
            "hidden_softmax": overlap.hidden_softmax,
            "binds": overlap.binds,
            "idle_tensor_share": {cause: share / ticks for cause, share in overlap.ledger.items()},
            "assumed_constants": machine.assumed(),
        }
        drawn = bars(program, trace)
        end = trace.cycles
        if svg:
            from fa3verify.files import write_text

            write_text(svg, svg_gantt(drawn, 0, min(end, 20000), program.name))
        emit(figures, json_target)
        if json_target != "-":
            _print_figures(figures)
            click.echo(text_gantt(drawn, end * 0.3, min(end * 0.3 + 6000, end)))


def _backward_figures(clock_mhz: float | None, options: dict[str, Any]) -> dict[str, Any]:
    """The main backward kernel: predicted, and never compared with a timing in cycles."""
    from fa3_simulator.backward import BackwardSchedule, backward
    from fa3_simulator.costs import costs
    from fa3_simulator.engine import simulate as run
    from fa3_simulator.machine import load
    from fa3_simulator.overlap import measure
    from fa3_simulator.run import Shape, estimate

    if options["dtype"] == "e4m3":
        raise ValueError("the backward is for fp16 and bf16, got e4m3")
    schedule, machine = BackwardSchedule(head_dim=options["head_dim"]), load(options["machine"])
    shape = Shape(options["batch"], options["nheads"], options["seqlen"], options["seqlen"], options["causal"])
    found = estimate(shape, schedule, machine, clock_mhz)
    program = backward(schedule, [min(found.tiles[0].blocks, 24)])
    tables = costs(program, machine, clock_mhz)
    overlap = measure(program, tables, run(program, tables))
    return {
        "schedule": program.name,
        "machine": machine.name,
        "clock_mhz": found.clock_mhz,
        "cycles": round(found.cycles),
        "milliseconds": found.seconds * 1e3,
        "tflops": 2.5 * shape.flops(schedule.head_dim) / found.seconds / 1e12,
        "tensor_efficiency": overlap.tensor_efficiency,
        "overlap_efficiency": overlap.overlap_efficiency,
        "binds": overlap.binds,
    }


def _print_backward(figures: dict[str, Any], json_target: str | None) -> None:
    emit(figures, json_target)
    if json_target != "-":
        click.echo(f"{figures['schedule']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
        click.echo(f"  {figures['cycles']} cycles, {figures['milliseconds']:.4g} ms, {figures['tflops']:.0f} TFLOP/s")
        click.echo(
            f"  tensor efficiency {figures['tensor_efficiency']:.3f}, overlap efficiency "
            f"{figures['overlap_efficiency']:.3f} ({figures['binds']} binds); no timing has been compared with it"
        )


def _print_figures(figures: dict[str, Any]) -> None:
    click.echo(f"{figures['schedule']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
    click.echo(
        f"  {figures['cycles']} cycles, {figures['milliseconds']:.4g} ms, {figures['tflops']:.0f} TFLOP/s "
        f"(roofline {figures['roofline_cycles']}, {figures['roofline_binds']}; closed form {figures['closed_form_cycles']})"
    )
    click.echo(
        f"  tensor efficiency {figures['tensor_efficiency']:.3f}, overlap efficiency {figures['overlap_efficiency']:.3f} "
        f"({figures['binds']} binds), hidden softmax {figures['hidden_softmax']:.3f}"
    )
    idle = sorted(figures["idle_tensor_share"].items(), key=lambda item: -item[1])
    click.echo("  idle tensor core: " + ", ".join(f"{cause} {share:.0%}" for cause, share in idle if share >= 0.005))
    click.echo(f"  assumed, not measured: {', '.join(figures['assumed_constants'])}")


@click.command(epilog=EPILOG)
@_problem_options
@_schedule_options
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def trace(out: Path, clock_mhz: float | None, json_target: str | None, **options: Any) -> None:
    """Write the simulated timeline of one CTA to OUT as Chrome JSON, for Perfetto."""
    with one_line_errors():
        from fa3_simulator.run import longest_cta
        from fa3_simulator.timeline import bars, chrome_trace
        from fa3verify.files import write_text

        shape, schedule, machine = _setup(options)
        tiles = longest_cta(shape, schedule, int(machine["sms"]))
        program, _, run = _trace(schedule, machine, clock_mhz, tiles)
        clock = clock_mhz or machine["max_clock_mhz"]
        events = chrome_trace(bars(program, run), clock, f"{program.name}, simulated {machine.name}")
        write_text(out, json.dumps(events))
        emit({"events": len(events["traceEvents"]), "cycles": run.cycles}, json_target)
        if json_target != "-":
            click.echo(f"{out}: {len(events['traceEvents'])} events, {run.cycles:.0f} cycles")


@click.command(epilog=EPILOG)
@_problem_options
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
def tune(clock_mhz: float | None, json_target: str | None, top: int, **options: Any) -> None:
    """Simulate every tile and schedule that fits, and rank them."""
    with one_line_errors():
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load
        from fa3_simulator.run import Shape

        machine = load(options["machine"])
        shape = Shape(options["batch"], options["nheads"], options["seqlen"], options["seqlen"], options["causal"])
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
    switches = [name for name, on in (("pingpong", s.pingpong), ("overlap", s.intra_wg_overlap)) if on]
    return {
        "tile": f"{s.tile_m}x{s.tile_n}",
        "stages": s.num_stages,
        "schedule": "+".join(switches) or "none",
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
