"""A ranking of schedules as text of 80 columns and as csv, for the verb ``tune``.

:mod:`fa3verify.commands.tune` makes the records that are printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill

import rich_click as click

from fa3_simulator.footprint import Hazard
from fa3_simulator.held_out import HeldOut
from fa3verify.cli.simulate import hazards_line
from fa3verify.commands.tune import MachineRanking, ScheduleRow
from fa3verify.files import csv_cell, csv_text

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
