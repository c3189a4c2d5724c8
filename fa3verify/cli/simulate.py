"""Verb simulate: the cycles of one schedule, what binds, and what the tensor cores wait for.

The simulation is in ``fa3_simulator``; here options become a problem and a configuration, and figures are printed. The
verb ``tune``, which ranks many schedules, uses :func:`problem_of` and :func:`hazards_line`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli import described
from fa3verify.cli.described import described_options, machine_if
from fa3verify.cli.exits import EPILOG, FINDING, Verb, emit, fail
from fa3verify.cli.options import (
    Options,
    given_options,
    gone,
    is_given,
    machine_option,
    problem_options,
    schedule_options,
)

if TYPE_CHECKING:
    from fa3_reference.problem import AttentionProblem
    from fa3_simulator.accounts import Traced
    from fa3_simulator.costs import Costs
    from fa3_simulator.cta import AnyConfig
    from fa3_simulator.engine import Trace
    from fa3_simulator.footprint import Hazard
    from fa3_simulator.machine import Machine
    from fa3_simulator.program import Program
    from fa3_simulator.run import Estimate
    from fa3_simulator.schedules import TileBlocks
    from fa3verify.files import Json

# Options that --backward does not take.
FORWARD_ONLY = ("schedule", "p_in_smem", "promotion_interval", "num_splits", "page_size", "pack_gqa")


def _config(options: Options, problem: AttentionProblem) -> AnyConfig:
    """Return the schedule of the forward or backward that the options name; ValueError for options of the other."""
    from fa3_simulator import backward_choice, forward_choice
    from fa3_simulator.schedules import read_switches

    if options["backward"]:
        if given := given_options(FORWARD_ONLY):
            raise ValueError(f"--backward does not take {', '.join(given)}")
        changes = {"turns": options["turns"]} | ({"num_stages": options["stages"]} if is_given("stages") else {})
        return backward_choice.schedule_for(problem, options["kernel"], tile=options["tile"], **changes)
    if is_given("turns"):
        raise ValueError("--turns is for --backward")
    changes = {name: options[name] for name in ("promotion_interval", "num_splits", "pack_gqa")}
    changes["num_stages"] = options["stages"]
    changes |= {"pv_from_registers": False} if options["p_in_smem"] else {}
    changes |= read_switches(options["schedule"]) if options["schedule"] else {}
    named = {name: value for name, value in changes.items() if value is not None}
    return forward_choice.schedule_for(problem, options["kernel"], tile=options["tile"], **named)


def problem_of(options: Options) -> AttentionProblem:
    """Return the problem that the options name; without their options, kv heads and queries are as heads and keys."""
    from fa3_reference.problem import AttentionProblem

    batch, nheads, seqlen, head_dim = (options[name] for name in ("batch", "nheads", "seqlen", "head_dim"))
    kv_heads = options["nheads_kv"] or nheads
    queries = options["seqlen_q"] or seqlen
    semantics = {name: options[name] for name in ("dtype", "causal", "window", "softcap") if name in options}
    return AttentionProblem(batch, nheads, kv_heads, queries, seqlen, head_dim, **semantics)


def setup(options: Options) -> tuple[AttentionProblem, AnyConfig, Machine]:
    """Return the problem, the configuration as it is launched, and the machine that the options name.

    ValueError for options that do not go together, and for a configuration that does not fit the machine.
    """
    from fa3_simulator.machine import load
    from fa3_simulator.pages import paged
    from fa3_simulator.run import launched
    from fa3_simulator.tune import check_fits

    machine = machine_if(load(options["machine"]), options["what_if"])
    problem = problem_of(options)
    config = _config(options, problem)
    if options["page_size"]:
        config, machine = paged(problem, config, machine, options["page_size"], keeps_tile=options["tile"] is not None)
    check_fits(config, machine)
    return problem, launched(problem, config), machine


def _shown(tiles: Sequence[TileBlocks]) -> list[TileBlocks]:
    """Return the first two tiles, and of each at most 24 key blocks, which is what a picture can show."""
    from fa3_simulator.schedules import TileBlocks

    return [TileBlocks(min(tile.blocks, 24), min(tile.masked, 24)) for tile in tiles[:2]]


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@problem_options
@machine_option
@schedule_options
@described_options
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the timeline as SVG.")
@click.option(
    "--trace",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the timeline of one CTA there as Chrome JSON, for Perfetto.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="STAMPS.csv",
    help="Draw a measured timeline beside that of --trace; problem, schedule and clock are those of the file.",
)
@click.option(
    "--measure", is_flag=True, help="Record that timeline now, on a GPU, as FILE of --trace with suffix .stamps.csv."
)
@click.option("--quiet", is_flag=True, help="Print the path of --trace only.")
@gone("--validate", "python -m fa3_reports.measured.validation BENCH.csv, from a checkout")
def simulate(
    kernels: tuple[str, ...],
    clock_mhz: float | None,
    json_target: str | None,
    svg: Path | None,
    target: Path | None,
    measured: Path | None,
    **options: Any,
) -> None:
    """Simulate one schedule: cycles, what binds, and where the tensor cores idle.

    A KERNEL is a family, or FILE.py:NAME of a kernel that somebody described, with settings of its own behind commas:
    gemm.py:gemm,stages=4. Of two KERNELs it says what the second takes more, and by which causes.
    """
    from fa3_simulator.accounts import trace_cta
    from fa3_simulator.clock import config_under_load
    from fa3_simulator.cta import kernel_of
    from fa3_simulator.hazards import check
    from fa3_simulator.run import estimate, in_words
    from fa3_simulator.timeline import bars
    from fa3verify.cli import timeline

    if len(kernels) > 1 or any(map(described.is_described, kernels)):
        require(not (measured or options["measure"]), "--measured and --measure are for one family")
        _simulate_described(kernels, options, clock_mhz, json_target, svg, target)
        return
    options["kernel"] = kernels[0] if kernels else options["kernel"]
    stamps = timeline.stamps_of(target, measured, options)
    problem, config, machine = setup(options)
    refusal = ""
    if target and options["measure"]:
        clock_mhz, stamps, refusal = timeline.record_stamps(problem, config, target.with_suffix(".stamps.csv"))
    clock_mhz = stamps.sm_mhz if stamps else clock_mhz
    launch = estimate(problem, config, machine, clock_mhz)
    program, tables, trace = trace_cta(kernel_of(config), machine, clock_mhz, _shown(launch.tiles))
    hazards = check(program, machine)
    figures = _figures(problem, config, machine, launch, (program, tables, trace))
    figures["hazards"] = [hazard._asdict() for hazard in hazards]
    figures |= config_under_load(problem, config, machine, launch)
    drawn = bars(program, trace)
    if svg:
        title = f"{program.name}, {in_words(problem)}, {machine.name} at {launch.clock_mhz:.0f} MHz"
        timeline.write_svg(svg, drawn, trace.cycles, title)
    timelines = timeline.side_by_side(f"{program.name}, simulated {machine.name}", drawn, stamps)
    if target:
        written = timeline.write_trace(target, timelines, launch.clock_mhz, stamps)
        figures["trace"] = {"cycles": trace.cycles, **written}
    emit(figures, json_target)
    if json_target != "-":
        if not options["quiet"]:
            _print_figures(figures, hazards, machine)
            timeline.print_timelines(timelines, trace.cycles)
        if target:
            timeline.print_trace(target, figures["trace"], quiet=options["quiet"])
    if refusal:
        fail(FINDING, refusal)
    if hazards:
        raise Exit(FINDING)


def _traced_family(kernel: str, options: Options, clock: float | None) -> Traced:
    """Return the launch of a family for the problem of the options: ``flash3``, or ``flash3,tile=128x128``."""
    from fa3_simulator.accounts import Traced, first_blocks, trace_cta
    from fa3_simulator.cta import kernel_of
    from fa3_simulator.run import estimate

    context = get_current_context()
    known = {str(p.name): p for p in context.command.params}
    family, *own = kernel.split(",")
    mine = options | {"kernel": family}
    for name, value in map(described.pair, own):
        require(name in known, f"{name} is no setting of {family}")
        mine[name] = known[name].process_value(context, value)
    problem, config, machine = setup(mine)
    found = estimate(problem, config, machine, clock)
    program, tables, trace = trace_cta(kernel_of(config), machine, clock, first_blocks(found.tiles))
    return Traced(kernel, found, program, tables, trace)


def _launches_of(kernels: Sequence[str], options: Options, clock: float | None) -> tuple[Json, list[Traced], Machine]:
    """Return the figures of one described kernel, or of the difference of two kernels, their launches, and the
    machine.

    ValueError for more than two.
    """
    from fa3_simulator.machine import load

    require(len(kernels) <= 2, f"simulate takes one kernel, or two to compare, got {len(kernels)}")
    machine = machine_if(load(options["machine"]), options["what_if"])
    figures: Json = {}
    launches = []
    for kernel in kernels:
        if not described.is_described(kernel):
            launches.append(_traced_family(kernel, options, clock))
            continue
        schedule = described.schedule_of(kernel, options["settings"])
        found, traced = described.traced_schedule(schedule, machine, clock)
        if len(kernels) == 1:
            figures = described.figures_of(schedule, machine, clock, found, traced)
        launches.append(traced)
    return (described.differing(*launches) if len(launches) > 1 else figures), launches, machine


def _simulate_described(
    kernels: Sequence[str],
    options: Options,
    clock: float | None,
    json_target: str | None,
    svg: Path | None,
    target: Path | None,
) -> None:
    """Print the figures of a described kernel, or of the difference of two kernels, with their timelines."""
    from fa3_simulator.timeline import bars
    from fa3verify.cli import timeline

    figures, launches, machine = _launches_of(kernels, options, clock)
    first = launches[0]
    timelines = {found.name: bars(found.program, found.trace) for found in launches}
    if svg:
        title = f"{first.name}, {options['machine']} at {first.estimate.clock_mhz:.0f} MHz"
        timeline.write_svg(svg, timelines[first.name], first.trace.cycles, title)
    if target:
        figures["trace"] = {
            "cycles": first.trace.cycles,
            **timeline.write_trace(target, timelines, first.estimate.clock_mhz, None),
        }
    emit(figures, json_target)
    if json_target != "-":
        if not options["quiet"]:
            if len(launches) > 1:
                described.print_difference(figures)
            else:
                described.print_figures(figures, machine)
            timeline.print_timelines(timelines, first.trace.cycles)
        if target:
            timeline.print_trace(target, figures["trace"], quiet=options["quiet"])
    if figures.get("hazards"):
        raise Exit(FINDING)


def _figures(
    problem: AttentionProblem,
    config: AnyConfig,
    machine: Machine,
    found: Estimate,
    traced: tuple[Program, Costs, Trace],
) -> Json:
    """Return the figures that are printed and written as JSON.

    ``found`` is the estimate of the whole launch and ``traced`` one CTA of it. The closed form, the merging of parts
    and the hidden softmax are figures of a forward only; a backward has the cycles of its main kernel instead.
    """
    from fa3_simulator.cta import kernel_of, operations
    from fa3_simulator.overlap import measure
    from fa3_simulator.roofline import closed_form, roofline
    from fa3_simulator.what_if import speedups

    overlap = measure(*traced)
    bound = roofline(problem, config, machine, found.clock_mhz)
    ticks = sum(overlap.ledger.values()) or 1  # idle time of the tensor cores over all causes
    beside = kernel_of(config).figures(
        main=found.main_cycles,
        around=found.around_cycles,
        hidden=overlap.hidden_softmax,
        closed_form=closed_form(problem, config, machine),
    )
    return {
        "schedule": traced[0].name,
        "machine": machine.name,
        "clock_mhz": found.clock_mhz,
        "cycles": round(found.cycles),
        "milliseconds": found.seconds * 1e3,
        "tflops": operations(problem, config) / found.seconds / 1e12,
        "roofline_cycles": round(bound.cycles),
        "roofline_binds": bound.binds,
        **beside,
        "tensor_efficiency": overlap.tensor_efficiency,
        "overlap_efficiency": overlap.overlap_efficiency,
        "binds": "hbm" if found.hbm_cycles > found.cta_cycles else overlap.binds,
        "cta_cycles": round(found.cta_cycles),
        "times_as_fast_if_free": {
            **speedups(traced[0], kernel_of(config).on(machine, found.clock_mhz), found.clock_mhz, traced[2]),
            "waiting": 1 / overlap.overlap_efficiency,
        },
        "idle_tensor_share": {cause: share / ticks for cause, share in overlap.ledger.items()},
        "assumed_constants": [*machine.assumed(), *kernel_of(config).estimated],
    }


def hazards_line(found: Sequence[Hazard], where: str) -> str:
    """Return the hazards of schedules in words, a line for each; ``where`` says of what, if there is none."""
    if not found:
        return f"  hazards: none {where}, in any order (of any tiles: fa3verify hazards)"
    return "\n".join(f"  {x.kind}: {x.text}" for x in found)


def _print_figures(figures: Json, hazards: Sequence[Hazard], machine: Machine) -> None:
    """Print the figures of :func:`_figures` as text; keys that only one of forward and backward has may be absent."""
    click.echo(f"{figures['schedule']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
    is_forward = "closed_form_cycles" in figures
    beside = f"closed form {figures['closed_form_cycles']}" if is_forward else f"main kernel {figures['main_cycles']}"
    click.echo(
        f"  {figures['cycles']} cycles, {figures['milliseconds']:.4g} ms, {figures['tflops']:.0f} TFLOP/s "
        f"(roofline {figures['roofline_cycles']}, {figures['roofline_binds']}; {beside})"
    )
    if "clock_under_load_mhz" in figures:
        click.echo(f"  {described.loaded_line(figures, machine)}")
    if figures.get("merge_cycles"):
        click.echo(f"  of these {figures['merge_cycles']} cycles merge the parts of the keys, behind the main kernel")
    if "layout" in figures:
        order = "in any order" if figures["turns"] == "free" else f"in turns, {figures['turns']}"
        click.echo(f"  {figures['layout']}; key tiles add {order}")
    if figures["binds"] == "hbm":
        click.echo(f"  HBM binds: a CTA that had its keys in time, as below, would take {figures['cta_cycles']} cycles")
    hidden = figures.get("hidden_softmax")
    click.echo(
        f"  tensor efficiency {figures['tensor_efficiency']:.3f}, "
        f"overlap efficiency {figures['overlap_efficiency']:.3f} ({figures['binds']} binds)"
        + ("" if hidden is None else f", hidden softmax {hidden:.3f}")
    )
    for line in described.waiting_lines(figures):
        click.echo(f"  {line}")
    click.echo(hazards_line(hazards, "in this CTA"))
    if figures["assumed_constants"]:
        click.echo(f"  assumed, not measured: {', '.join(figures['assumed_constants'])}")
