"""A ranking of schedules as text of 80 columns and as csv, from the figures of verb tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any

import rich_click as click

from fa3verify.cli.simulate import hazards_line

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
BINDS = {"mufu": "exp2", "hbm": "HBM", "l2": "L2", "reduce": "dQ"}  # as the table names them, others as they are
NAMED = 4  # of tiles that take the same time, and of constants in which two machines differ


def csv_of(found: Sequence[Mapping[str, Any]]) -> str:
    """Rows of all machines, one line each."""
    from fa3verify.files import csv_text

    lines = [figures | row for figures in map(dict, found) for row in figures["ranked"]]
    return csv_text(CSV_COLUMNS, ([_cell(line[column]) for column in CSV_COLUMNS] for line in lines))


def _cell(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _binds(row: Mapping[str, Any]) -> str:
    name = _named(row["binds"])
    return f"{name} {row['hbm_gb_per_s']:.0f} GB/s" if name == "HBM" else f"{name} {row['busy']:.0%}"


def _marks(row: Mapping[str, Any]) -> str:
    return "G" * row["gluon"] + "F" * row["flash3_choice"]


WIDTH = 80
SPARE = ("TFLOP/s", "gap")  # columns that go where parts and heads leave no room; --csv and --json have them
# Heading, what stands below, and whether the column is to be seen where all rows have the same.
COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], object], bool], ...] = (
    ("#", lambda row: row["rank"], True),
    ("tile", lambda row: row["tile"], True),
    ("parts", lambda row: row["splits"], False),
    ("heads", lambda row: "packed" if row["packed"] else "apart", False),
    ("stages", lambda row: row["stages"], True),
    ("P", lambda row: row["p"], True),
    ("cycles", lambda row: row["cycles"], True),
    ("ms", lambda row: f"{row['milliseconds']:.3g}", True),
    ("TFLOP/s", lambda row: f"{row['tflops']:.0f}", True),
    ("gap", lambda row: f"{row['gap']:.{1 if row['gap'] < 1 else 0}%}", True),
    ("binds", _binds, True),
    ("", _marks, True),
)


def print_ranking(figures: Mapping[str, Any], *, builds: bool) -> None:
    """Print the problem and the table."""
    rows = figures["ranked"]
    places = [row["place"] for row in rows]
    named = [row | {"rank": f"{row['place']}{'=' * (places.count(row['place']) > 1)}"} for row in rows]
    shown = "the best our kernels can be launched with" if builds else "the best of every tile"
    click.echo(f"{figures['problem']}: {figures['kernel']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
    click.echo(
        f"lower bound {figures['lower_bound_cycles']} cycles ({_named(figures['lower_bound_binds'])}); "
        f"{figures['schedules']} schedules fit, {shown}:"
    )
    columns = [
        (head, [str(value(row)) for row in named])
        for head, value, always in COLUMNS
        if always or any(value(row) != value({"splits": 1, "packed": False}) for row in named)
    ]
    for spare in SPARE:
        if max(map(len, _lines(columns, [str(row["schedule"]) for row in named]))) > WIDTH:
            columns = [column for column in columns if column[0] != spare]
    head, *lines = _lines(columns, [_behind(row) for row in named])
    click.echo(head)
    for row, line in zip(named, lines, strict=True):
        click.echo(line)
        if alike := row["alike"]:
            more = f" and {len(alike) - NAMED} more" * (len(alike) > NAMED)
            click.echo(f"{'':>{max(map(len, columns[0][1]))}} as long with {', '.join(alike[:NAMED])}{more}")
    _print_comparisons(figures, builds)


def _lines(columns: Sequence[tuple[str, list[str]]], behind: Sequence[str]) -> list[str]:
    """The heading and the rows, each with what stands behind its columns."""
    widths = [max(map(len, (head, *cells))) for head, cells in columns]
    rows = [[head for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    return [
        " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + f" {more}"
        for row, more in zip(rows, ["schedule", *behind], strict=True)
    ]


def _named(resource: str) -> str:
    return BINDS.get(resource, resource)


def _behind(row: Mapping[str, Any]) -> str:
    """The schedule, what was compiled and measured of it, and tiles that take the same time."""
    parts = [str(row["schedule"])]
    if "registers" in row:
        built = f"{row['registers']} registers, {row['spill_bytes']} bytes spilled" if row["registers"] else ""
        parts += [x for x in (built, row["note"] and f"! {row['note']}") if x]
    if "measured_cycles" in row:
        parts.append(f"measured {row['measured_cycles']:.0f} ({row['cycles'] / row['measured_cycles'] - 1:+.1%})")
    if "not_measured" in row:
        parts.append(f"! not measured: {row['not_measured']}")
    return ", ".join(parts)


def _print_comparisons(figures: Mapping[str, Any], builds: bool) -> None:
    """Print what choosing among some costs, and how the ranking fared where it was measured."""
    if "not_compiled" in figures:
        click.echo(f"not compiled: {figures['not_compiled']}; registers are estimated")
    if figures.get("regret"):
        regret = ", ".join(f"top-{k} {x:.1%}" for k, x in zip((1, 3), figures["regret"]))
        click.echo(f"simulated against measured: Kendall tau {figures['tau']:.2f}, regret {regret}")
    if builds:
        return
    losses = [("best launch of Gluon", figures["regret_gluon"])]
    if figures["shows_peer"]:
        losses.append(("FlashAttention-3's own", figures["regret_flash3"]))
    said = (f"{name} {'is not among them' if loss is None else f'{loss:+.1%}'}" for name, loss in losses)
    click.echo(f"against the first: {', '.join(said)}")


def print_legend(figures: Mapping[str, Any], hazards: list[dict[str, str]]) -> None:
    """Print what the columns mean, how far off they may be, and what is unsafe."""
    known = figures["held_out"]
    if known:
        click.echo(
            f"=: a tie: {known['error']:.1%} is the mean error over {known['rows']} held-out H200 timings of "
            f"{known['group']}"
        )
    else:
        click.echo("no timing of such a kernel was compared: how far off this may be, is not known")
    click.echo("gap: beyond the lower bound: each GEMM, exponential, HBM byte once at full rate")
    click.echo("binds: what is busiest, and its share of the time. P: where P V has it from")
    click.echo("G: our Gluon kernels can be launched so. F: FlashAttention-3 is launched so")
    click.echo(hazards_line(hazards, "in those shown").strip())


def print_changes(figures: Mapping[str, Any], first: Mapping[str, Any], machines: Mapping[str, Any]) -> None:
    """Print what is different on a machine: its constants, the first choice, and how the other's fares."""
    here = machines[figures["machine"]]
    there = machines[first["machine"]]
    differing = {name: (here[name], there[name]) for name in here.constants() if here[name] != there[name]}
    widest = sorted(differing, key=lambda name: -abs(differing[name][0] / (differing[name][1] or 1) - 1))
    constants = ", ".join(f"{name} {here[name]:g} ({there[name]:g})" for name in widest[:NAMED])
    best = figures["ranked"][0]
    other = first["ranked"][0]
    _wrapped(f"{here.name} beside {there.name}: {len(differing)} other constants, above all {constants}")
    _wrapped(
        f"first choice {_choice(best)}, {best['cycles'] / other['cycles']:.3f} times the cycles of {_choice(other)} on "
        f"the {there.name}"
    )
    same = [row for row in figures["ranked"] if _choice(row) == _choice(other)]
    if same and same[0] is not best:
        _wrapped(f"{_choice(other)} is at place {same[0]['place']}, {same[0]['cycles'] / best['cycles'] - 1:+.1%}")


def _wrapped(text: str) -> None:
    click.echo(fill(text, 80, subsequent_indent="  ", break_on_hyphens=False))


def _choice(row: Mapping[str, Any]) -> str:
    parts = f", {row['splits']} parts" * (row["splits"] > 1) + ", packed" * row["packed"]
    return f"{row['tile']} {row['schedule']}{parts}"
