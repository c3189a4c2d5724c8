"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli import described
from fa3verify.cli.described import described_options, machine_if
from fa3verify.cli.exits import EPILOG, FINDING, Verb, emit, require_device, require_writable, write
from fa3verify.cli.options import KERNEL_HELP, backward_option, is_given, problem_options
from fa3verify.cli.simulate import hazards_line, problem_of
from fa3verify.files import csv_cell, csv_text

if TYPE_CHECKING:
    from fa3_simulator.footprint import Hazard
    from fa3_simulator.held_out import HeldOut
    from fa3verify.commands.tune import MachineRanking, ScheduleRow


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("described_kernel", required=False, metavar="[FILE.py:KERNEL]")
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
@described_options
@click.option(
    "--over", multiple=True, metavar="NAME=VALUES", help="Values to rank: stages=2:4, bn=96:192:16, bm=64,128."
)
@click.option("--csv", "csv_target", metavar="FILE|-", help="Write the table as csv.")
def tune(
    described_kernel: str | None,
    machines: tuple[str, ...],
    json_target: str | None,
    csv_target: str | None,
    compiles: bool,
    measure: int | None,
    **options: Any,
) -> None:
    """Simulate every tile and schedule that fits, with keys in parts and heads packed too, and rank them.

    Of a kernel that somebody described, FILE.py:KERNEL, it ranks the values of the parameters that --over names.
    """
    if described_kernel:
        told = described.tune(described_kernel, options, machines, options["clock_mhz"], prints=json_target != "-")
        emit(told, json_target)
        return
    from fa3_kernels.plan.families import OURS, traits_of
    from fa3_simulator import tune as tuning
    from fa3_simulator.machine import load
    from fa3verify.commands.tune import compiled, measured, ranking_of, shown

    builds = compiles or measure is not None
    backward = options["backward"]
    require(
        not (backward and (builds or options["pack_gqa"])),
        "--backward does not take --compile, --measure and --pack-gqa",
    )
    require(not builds or len(machines) <= 1, "--compile and --measure are of one --machine")
    kernel = options["kernel"]
    require(
        not builds or traits_of(kernel).is_built_here,
        f"--compile and --measure are for --kernel {OURS}, got {kernel}",
    )
    if measure is not None:
        require_device("tune --measure")
    require_writable(json_target, csv_target)
    problem = problem_of(options)
    pack = options["pack_gqa"] if is_given("pack_gqa") else None
    rankings = []
    chosen = (machine_if(load(name), options["what_if"]) for name in machines)
    for machine in {machine.name: machine for machine in chosen}.values():
        clock = options["clock_mhz"] or machine["max_clock_mhz"]
        ranked = tuning.tune(problem, machine, clock, family=kernel, pack_gqa=pack, backward=backward)
        require(ranked, f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
        best = shown(ranked, options["top"], compiles, measure)
        ranking = ranking_of(problem, machine, kernel, ranked, best)
        ranking = compiled(ranking, best, problem) if compiles else ranking
        rankings.append(measured(ranking, best[:measure], problem) if measure else ranking)
    first, *others = rankings
    hazards = [hazard for ranking in rankings for hazard in ranking.hazards]
    beside = {"others": [ranking.to_json() for ranking in others]} if others else {}
    emit(first.to_json() | beside, json_target)
    write(csv_of(rankings), csv_target)
    if "-" not in (json_target, csv_target):
        for ranking in rankings:
            print_ranking(ranking, builds=builds)
        for ranking in others:
            print_changes(ranking, first)
        print_legend(first.held_out, hazards)
    if hazards:
        raise Exit(FINDING)


CSV_COLUMNS = (
    "problem",
    "machine",
    "clock_mhz",
    "kernel",
    "place",
    "tile",
    "splits",
    "packed",
    "stages",
    "p",
    "schedule",
    "cycles",
    "milliseconds",
    "tflops",
    "gap",
    "binds",
    "busy",
    "hbm_gb_per_s",
    "gluon",
    "flash3_choice",
)
BINDS = {"mufu": "exp2", "hbm": "HBM", "l2": "L2", "reduce": "dQ"}  # names of resources in the table, if others
NAMED = 4  # how many tiles that take the same time, and constants in which two machines differ, are named
WIDTH = 80
SPARE = ("TFLOP/s", "gap")  # columns that are left out, in this order, where lines would be too long


def csv_of(found: Sequence[MachineRanking]) -> str:
    """Return the rows of all machines as csv with the columns :data:`CSV_COLUMNS`."""
    lines = [each.to_json() | row.to_json() for each in found for row in each.ranked]
    return csv_text(CSV_COLUMNS, ([csv_cell(line[column]) for column in CSV_COLUMNS] for line in lines))


def _binds(row: ScheduleRow) -> str:
    """Return the busiest resource and its share of the time, for HBM its rate."""
    name = _named(row.binds)
    return f"{name} {row.hbm_gb_per_s:.0f} GB/s" if name == "HBM" else f"{name} {row.busy:.0%}"


# Heading, a function from a row to its cell, and the value for which the column is left out if all rows have it.
COLUMNS: tuple[tuple[str, Callable[[ScheduleRow], object], object], ...] = (
    ("tile", lambda row: row.tile, None),
    ("parts", lambda row: row.splits, 1),
    ("heads", lambda row: "packed" if row.packed else "apart", "apart"),
    ("stages", lambda row: row.stages, None),
    ("P", lambda row: row.p, None),
    ("cycles", lambda row: row.cycles, None),
    ("ms", lambda row: f"{row.milliseconds:.3g}", None),
    ("TFLOP/s", lambda row: f"{row.tflops:.0f}", None),
    ("gap", lambda row: f"{row.gap:.{1 if row.gap < 1 else 0}%}", None),
    ("binds", _binds, None),
    ("", lambda row: "G" * row.gluon + "F" * row.flash3_choice, None),
)


def print_ranking(found: MachineRanking, *, builds: bool) -> None:
    """Print the problem, the table and the comparisons; ``builds`` says that only our own launches are ranked."""
    rows = found.ranked
    shown = "the best our kernels can be launched with" if builds else "the best of every tile"
    click.echo(f"{found.problem}: {found.kernel} on {found.machine.name} at {found.clock_mhz:.0f} MHz")
    click.echo(
        f"lower bound {found.lower_bound_cycles} cycles ({_named(found.lower_bound_binds)}); "
        f"{found.schedules} schedules fit, {shown}:"
    )
    places = [row.place for row in rows]
    ranks = [f"{place}{'=' * (places.count(place) > 1)}" for place in places]
    columns = [("#", ranks)]
    columns += [
        (head, [str(value(row)) for row in rows])
        for head, value, untold in COLUMNS
        if any(value(row) != untold for row in rows)
    ]
    for spare in SPARE:
        if max(map(len, _lines(columns, [row.schedule for row in rows]))) > WIDTH:
            columns = [column for column in columns if column[0] != spare]
    head, *lines = _lines(columns, [row.behind() for row in rows])
    click.echo(head)
    for row, line in zip(rows, lines, strict=True):
        click.echo(line)
        if row.alike:
            more = f" and {len(row.alike) - NAMED} more" * (len(row.alike) > NAMED)
            click.echo(f"{'':>{max(map(len, ranks))}} as long with {', '.join(row.alike[:NAMED])}{more}")
    _print_comparisons(found, builds)


def _lines(columns: Sequence[tuple[str, list[str]]], behind: Sequence[str]) -> list[str]:
    """Return the lines of the table: heading and rows, columns set to the right, then the text ``behind`` each row."""
    widths = [max(map(len, (head, *cells))) for head, cells in columns]
    rows = [[head for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    return [
        " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + f" {more}"
        for row, more in zip(rows, ["schedule", *behind], strict=True)
    ]


def _named(resource: str) -> str:
    return BINDS.get(resource, resource)


def _print_comparisons(found: MachineRanking, builds: bool) -> None:
    """Print how the ranking compares with measured times, and what it costs to choose among a library's launches."""
    if first := found.ranked[0].under_load:
        _wrapped(f"the first: {described.loaded_line(first, found.machine)}")
    if found.not_compiled:
        click.echo(f"not compiled: {found.not_compiled}; registers are estimated")
    if found.agreement and found.agreement[1]:
        tau, regrets = found.agreement
        regret = ", ".join(f"top-{k} {x:.1%}" for k, x in zip((1, 3), regrets))
        click.echo(f"simulated against measured: Kendall tau {tau:.2f}, regret {regret}")
    if builds:
        return
    losses = [("best launch of Gluon", found.regret_gluon)]
    if found.shows_peer:
        losses.append(("FlashAttention-3's own", found.regret_flash3))
    said = (f"{name} {'is not among them' if loss is None else f'{loss:+.1%}'}" for name, loss in losses)
    click.echo(f"against the first: {', '.join(said)}")


def print_legend(known: HeldOut | None, hazards: Sequence[Hazard]) -> None:
    """Print what the columns mean, the simulator's known error (None if unknown), and the hazards."""
    if known:
        click.echo(
            f"=: a tie: {known.error:.1%} is the mean error over {known.rows} held-out H200 timings of {known.group}"
        )
    else:
        click.echo("no timing of such a kernel was compared: how far off this may be, is not known")
    click.echo("gap: beyond the lower bound: each GEMM, exponential, HBM byte once at full rate")
    click.echo("binds: what is busiest, and its share of the time. P: where P V has it from")
    click.echo("G: our Gluon kernels can be launched so. F: FlashAttention-3 is launched so")
    click.echo(hazards_line(hazards, "in those shown").strip())


def print_changes(found: MachineRanking, first: MachineRanking) -> None:
    """Print how a machine differs from the first: in constants, in its best schedule, and in how the other's fares."""
    here = found.machine
    there = first.machine
    differing = {name: (here[name], there[name]) for name in here.constants() if here[name] != there[name]}
    widest = sorted(differing, key=lambda name: -abs(differing[name][0] / (differing[name][1] or 1) - 1))
    constants = ", ".join(f"{name} {here[name]:g} ({there[name]:g})" for name in widest[:NAMED])
    best = found.ranked[0]
    other = first.ranked[0]
    _wrapped(f"{here.name} beside {there.name}: {len(differing)} other constants, above all {constants}")
    _wrapped(
        f"first choice {best.choice()}, {best.cycles / other.cycles:.3f} times the cycles of {other.choice()} on "
        f"the {there.name}"
    )
    same = [row for row in found.ranked if row.choice() == other.choice()]
    if same and same[0] is not best:
        _wrapped(f"{other.choice()} is at place {same[0].place}, {same[0].cycles / best.cycles - 1:+.1%}")


def _wrapped(text: str) -> None:
    click.echo(fill(text, 80, subsequent_indent="  ", break_on_hyphens=False))
