"""Verb simulate: the cycles of one schedule, what binds, and what the tensor cores wait for.

The figures are made in :mod:`fa3verify.commands.simulate`; here options become a problem and a configuration, and
figures are printed. The verb ``tune``, which ranks many schedules, prints some of them as this one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli import described
from fa3verify.cli.described import cubin_options, described_options, machine_of
from fa3verify.cli.exits import EPILOG, FINDING, Verb, emit
from fa3verify.cli.options import (
    Options,
    is_given,
    machine_option,
    problem_options,
    refuse_options,
    schedule_options,
)
from fa3verify.files import Json
from fa3verify.report.schedules import draw_timeline
from fa3verify.text import one_line

if TYPE_CHECKING:
    from fa3_reference.problem import AttentionProblem
    from fa3_simulator.cta import AnyConfig
    from fa3_simulator.machine import Machine
    from fa3_simulator.overlap import Traced

VECTOR = 0.2  # how far off the vector counts that somebody declared may be
SHOWN = 5  # the most findings that are printed of a described kernel
# Options that --backward does not take.
FORWARD_ONLY = ("schedule", "p_in_smem", "promotion_interval", "num_splits", "page_size", "pack_gqa")


def _config(options: Options, problem: AttentionProblem, sms: int) -> AnyConfig:
    """Return the schedule of the forward or backward that the options name; ValueError for options of the other."""
    from fa3_simulator import backward_choice, forward_choice
    from fa3_simulator.schedules import read_switches

    if options["backward"]:
        refuse_options(FORWARD_ONLY, "--backward does not take {}")
        changes = {"turns": options["turns"]} | ({"num_stages": options["stages"]} if is_given("stages") else {})
        return backward_choice.schedule_for(problem, options["kernel"], tile=options["tile"], **changes)
    refuse_options(("turns",), "{} is for --backward")
    named = {name: x for name in ("promotion_interval", "num_splits", "pack_gqa") if (x := options[name]) is not None}
    named |= {"num_stages": options["stages"]} | ({"pv_from_registers": False} if options["p_in_smem"] else {})
    named |= read_switches(options["schedule"]) if options["schedule"] else {}
    return forward_choice.schedule_for(problem, options["kernel"], tile=options["tile"], sms=sms, **named)


def problem_of(options: Options) -> AttentionProblem:
    """Return the problem that the options name; without their options, kv heads and queries are as heads and keys.

    Sequences with lists of their own lengths, and those over pages, are packed.
    """
    from fa3_reference.layout import Cache
    from fa3_reference.problem import AttentionProblem

    batch, seqlen, queries = (options[name] for name in ("batch", "seqlen", "seqlen_q"))
    page_size, of_q, of_k = (options.get(name) for name in ("page_size", "seqlens_q", "seqlens_k"))
    same = ("nheads", "head_dim", "dtype", "causal", "window", "softcap")  # bench alone has the last
    rest = {name: options[name] for name in same if name in options} | {
        "nheads_kv": options["nheads_kv"] or options["nheads"]
    }
    if not (page_size or of_q or of_k):
        return AttentionProblem(batch, seqlen_q=queries or seqlen, seqlen_k=seqlen, **rest)
    of_k = of_k or ((seqlen,) * len(of_q) if of_q and is_given("seqlen") else of_q or (seqlen,) * batch)
    of_q = of_q or ((queries,) * len(of_k) if queries else of_k)
    return AttentionProblem.varlen(of_q, of_k, **rest, cache=Cache(page_size=page_size) if page_size else None)


def setup(options: Options) -> tuple[AttentionProblem, AnyConfig, Machine]:
    """Return the problem, the configuration as it is launched, and the machine that the options name.

    ValueError for options that do not go together, and for a configuration that does not fit the machine.
    """
    from fa3_simulator.cta import kernel_of
    from fa3_simulator.pages import over_pages
    from fa3_simulator.tune import check_fits

    machine = machine_of(options["machine"], options["what_if"])
    problem = problem_of(options)
    config = _config(options, problem, int(machine["sms"]))
    check_fits(config, machine)
    return problem, kernel_of(config).compiled(problem).config, over_pages(problem, config, machine)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@problem_options
@machine_option
@schedule_options
@described_options
@cubin_options
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the timeline as SVG.")
@click.option(
    "--trace",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the timeline of one CTA there as Chrome JSON, for Perfetto.",
)
@click.option("--quiet", is_flag=True, help="Print the path of --trace only.")
def simulate(
    kernels: tuple[str, ...],
    clock_mhz: float | None,
    json_target: str | None,
    svg: Path | None,
    target: Path | None,
    **options: Any,
) -> None:
    """Simulate one schedule: cycles, what binds, and where the tensor cores idle.

    A KERNEL is a family, or FILE.py:NAME of a kernel that somebody described, with settings of its own behind commas:
    gemm.py:gemm,stages=4. Of two KERNELs it says what the second takes more, and by which causes.
    """
    from fa3_simulator.run import in_words
    from fa3_simulator.timeline import bars
    from fa3verify.cli import timeline
    from fa3verify.commands import simulate as simulated

    own = [*filter(described.is_described, kernels)]
    is_a_family = len(kernels) < 2 and not own
    require(len(kernels) == len(own) == 1 or not options["cubin"], "--cubin is for one described kernel")
    if is_a_family:
        options["kernel"] = kernels[0] if kernels else options["kernel"]
        problem, config, machine = setup(options)
        first = simulated.traced_family("", problem, config, machine, clock_mhz, is_drawn=True)
        figures = simulated.of_family(problem, config, machine, first)
        title = f"{first.program.name}, {in_words(problem)}, {machine.name}"
        timelines = {f"{first.program.name}, simulated {machine.name}": bars(first.program, first.trace)}
    else:
        figures, launches, machine = _launches_of(kernels, options, clock_mhz)
        first = launches[0]
        title = f"{first.name}, {options['machine']}"
        timelines = {found.name: bars(found.program, found.trace) for found in launches}
    if svg:
        drawn = next(iter(timelines.values()))
        draw_timeline(svg, f"{title} at {first.estimate.clock_mhz:.0f} MHz", drawn, first.trace.cycles)
    if target:
        clock = first.estimate.clock_mhz
        figures["trace"] = timeline.write_trace(target, timelines, clock, first.trace.cycles)
    emit(figures, json_target)
    if json_target != "-":
        if not options["quiet"]:
            (_print_difference if "causes" in figures else _print_figures)(figures, machine)
            timeline.print_timelines(timelines, first.trace.cycles)
        if target:
            timeline.print_trace(target, figures["trace"], quiet=options["quiet"])
    if figures.get("hazards"):
        raise Exit(FINDING)


def family_of(kernel: str, options: Options) -> tuple[AttentionProblem, AnyConfig, Machine]:
    """Return what :func:`setup` does for ``flash3``, or ``flash3,tile=128x128``."""
    context = get_current_context()
    known = {str(p.name): p for p in context.command.params}
    family, *own = kernel.split(",")
    mine = options | {"kernel": family}
    for name, value in map(described.pair, own):
        require(name in known, f"{name} is no setting of {family}")
        mine[name] = known[name].process_value(context, value)
    return setup(mine)


def _launches_of(kernels: Sequence[str], options: Options, clock: float | None) -> tuple[Json, list[Traced], Machine]:
    """Return the figures of one described kernel, or of the difference of two kernels, their launches, and the
    machine.

    ValueError for more than two.
    """
    from fa3verify.commands import simulate as simulated

    require(len(kernels) <= 2, f"simulate takes one kernel, or two to compare, got {len(kernels)}")
    machine = machine_of(options["machine"], options["what_if"])
    if len(kernels) == 1:
        schedule = described.schedule_of(kernels[0], options["settings"])
        figures, traced = simulated.of_schedule(schedule, machine, clock, options["cubin"], options["function"])
        return figures, [traced], machine
    launches = [
        simulated.traced_schedule(described.schedule_of(kernel, options["settings"]), machine, clock)[1]
        if described.is_described(kernel)
        else simulated.traced_family(kernel, *family_of(kernel, options), clock)
        for kernel in kernels
    ]
    return simulated.differing(*launches), launches, machine


def hazards_line(found: Sequence[Mapping[str, str]], where: str, most: int | None = None) -> str:
    """Return the hazards of schedules, each with its kind and text, in words, a line for each.

    ``where`` says of what, if there is none; of more than ``most`` the others are counted.
    """
    if not found:
        return f"  hazards: none {where}, in any order (of any tiles: fa3verify hazards)"
    lines = [f"  {x['kind']}: {x['text']}" for x in found[:most]]
    return "\n".join([*lines, *([f"  and {len(found) - len(lines)} more findings"] if len(found) > len(lines) else [])])


def interval_lines(figures: Json) -> list[str]:
    """Return the 90 % interval of a measured time and what it is made from; [] where too few were timed."""
    if figures["interval_class"] is None:
        return []
    less, more = (figures[f"cycles_{end}"] / figures["cycles"] - 1 for end in ("low", "high"))
    return [
        f"90 % interval {figures['cycles_low']:.0f} to {figures['cycles_high']:.0f} cycles "
        f"({less:+.1%} to {more:+.1%}), {figures['milliseconds_low']:.4g} to {figures['milliseconds_high']:.4g} ms: "
        f"{figures['interval_rows']} H200 timings of {figures['interval_class']}"
    ]


def loaded_line(figures: Mapping[str, float], machine: Machine) -> str:
    """Return the figures of :func:`fa3_simulator.clock.under_load`, what they were fitted on, and another cap here."""
    import subprocess

    from fa3verify.timed.timing import query

    fitted_w = machine.clock["power_cap_w"].value
    try:
        here_w = float(query("power.limit"))
    except (OSError, subprocess.CalledProcessError, ValueError):
        here_w = fitted_w  # no GPU, or none that says
    return (
        f"{figures['milliseconds_under_load']:.4g} ms, {figures['tflops_under_load']:.0f} TFLOP/s at "
        f"{figures['clock_under_load_mhz']:.0f} MHz, the clock predicted under load "
        f"(of a cool burst, fitted on one {machine.name} at {fitted_w:.0f} W"
        + (f"; the GPU here is capped at {here_w:.0f} W)" if here_w != fitted_w else ")")
    )


def _summary(figures: Json) -> str:
    """Return the line of a launch's time; keys that only one of forward, backward and description has may be absent."""
    time = f"{figures['cycles']} cycles, {figures['milliseconds']:.4g} ms"
    rate = f"{figures['tflops']:.0f} TFLOP/s"
    if "roofline_cycles" not in figures:
        rate = rate if figures["tflops"] else f"{figures['hbm_tb_per_s']:.2f} TB/s"
        return f"{time}, {rate}, {figures['ctas_on_an_sm']} CTA an SM"
    main = f"main kernel {figures['main_cycles']}" if "main_cycles" in figures else ""
    beside = main or f"closed form {figures['closed_form_cycles']}"
    return f"{time}, {rate} (roofline {figures['roofline_cycles']}, {figures['roofline_binds']}; {beside})"


def _print_figures(figures: Json, machine: Machine) -> None:
    """Print the figures of a launch as text, of a family's or of a described kernel; some have keys of their own."""
    is_described = "moves_by_vector_counts" in figures
    hidden = figures.get("hidden_softmax")
    idle = sorted(figures["idle_tensor_share"].items(), key=lambda item: -item[1])
    free = (f"{thing} {ratio:.2f}" for thing, ratio in figures["times_as_fast_if_free"].items())
    waits = (f"{cause} {share:.0%}" for cause, share in idle if share >= 0.005)
    lines = [_summary(figures)]
    if "clock_under_load_mhz" in figures:
        lines.append(loaded_line(figures, machine))
    if "launches" in figures:
        lines.append(figures["launches"])
    lines += interval_lines(figures)
    if figures.get("merge_cycles"):
        lines.append(f"of these {figures['merge_cycles']} cycles merge the parts of the keys, behind the main kernel")
    if "layout" in figures:
        order = "in any order" if figures["turns"] == "free" else f"in turns, {figures['turns']}"
        lines.append(f"{figures['layout']}; key tiles add {order}")
    if figures["binds"] == "hbm" and not is_described:
        lines.append(f"HBM binds: a CTA that had its keys in time, as below, would take {figures['cta_cycles']} cycles")
    if is_described:
        lines.append(_moved(figures))
    lines += [
        f"tensor efficiency {figures['tensor_efficiency']:.3f}, overlap efficiency {figures['overlap_efficiency']:.3f} "
        f"({figures['binds']} binds)" + ("" if hidden is None else f", hidden softmax {hidden:.3f}"),
        f"times as fast if free: {', '.join(free)}",
        f"idle tensor core: {', '.join(waits)}",
        hazards_line(figures["hazards"], "in this CTA", SHOWN if is_described else None).strip(),
    ]
    if figures.get("assumed_constants"):
        lines.append(f"assumed, not measured: {', '.join(figures['assumed_constants'])}")
    click.echo(f"{figures['schedule']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
    for line in lines:
        click.echo(f"  {line}")
    if "compiled" in figures:
        _print_compiled(figures["compiled"])


def _print_compiled(figures: Json) -> None:
    click.echo(
        f"  compiled: {one_line(figures['function'], 160)}\n  shared memory: {figures['static_smem_bytes']} bytes are "
        f"static, the description has {figures['smem_bytes']} in all"
    )
    for row in figures["streams"]:
        found = (
            f"the loop at {row['loop']}, blocks a trip {row['blocks_a_trip']:.3g}"
            if row["loop"]
            else "no loop: differs"
        )
        click.echo(f"  {', '.join(row['streams'])}: {found}\n{'described':>30}{'compiled':>10}, a block of one warp")
        for name, (mine, own) in row["counts"].items():
            click.echo(f"    {name:<16}{mine:>10.5g}{own:>10.5g}{'  differs' * (name in row['differs'])}")
    click.echo(
        f"  with the compiled counts in each vector(...) {figures['cycles']} cycles, {figures['more']:+.1%}; "
        f"{_moved(figures)}"
    )


def _moved(figures: Json) -> str:
    low, high = figures["moves_by_vector_counts"]
    return f"with vector counts {VECTOR:.0%} lower or higher {low:+.1%} or {high:+.1%}"


def _print_difference(figures: Json, _machine: Machine) -> None:
    """Print where the cycles of two launches go; the differences add up to the last line."""
    first, second = figures["causes"]
    for name, causes in zip(figures["kernels"], figures["causes"], strict=True):
        click.echo(f"{name}: {sum(causes.values())} cycles")
    for cause, cycles in figures["more"].items():
        click.echo(f"  {cycles:+10d}  {cause} ({first.get(cause, 0)}, {second.get(cause, 0)})")
    click.echo(f"  {sum(figures['more'].values()):+10d}  together, of the second")
