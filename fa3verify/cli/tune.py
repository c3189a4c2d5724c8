"""Verb tune: rank every tile and schedule that fits; time the best ones our kernels can be launched with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli import described
from fa3verify.cli.described import described_options, machine_of
from fa3verify.cli.exits import EPILOG, FINDING, Verb, emit, require_device, require_writable, write
from fa3verify.cli.options import KERNEL_HELP, Options, backward_option, problem_options
from fa3verify.cli.simulate import VECTOR, hazards_line, interval_lines, loaded_line, problem_of
from fa3verify.files import Json, csv_cell, csv_text
from fa3verify.report.schedules import draw_ranking

if TYPE_CHECKING:
    from fa3_simulator.described import Choice
    from fa3_simulator.description import Values
    from fa3_simulator.machine import Machine
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
@click.option("--measure", type=click.IntRange(2), metavar="K", help="Time the top K our kernels take on a GPU.")
@described_options
@click.option(
    "--over", multiple=True, metavar="NAME=VALUES", help="Values to rank: stages=2:4, bn=96:192:16, bm=64,128."
)
@click.option("--csv", "csv_target", metavar="FILE|-", help="Write the table as csv.")
@click.option("--svg", metavar="FILE", help="Draw the time of every tile and schedule, on the first machine.")
def tune(
    described_kernel: str | None,
    machines: tuple[str, ...],
    json_target: str | None,
    csv_target: str | None,
    measure: int | None,
    **options: Any,
) -> None:
    """Simulate every tile and schedule that fits, with keys in parts and heads packed too, and rank them.

    Of a kernel that somebody described, FILE.py:KERNEL, it ranks the values of the parameters that --over names.
    """
    require_writable(json_target, csv_target, options["svg"])
    chosen = (machine_of(name, options["what_if"]) for name in machines)
    if described_kernel:
        emit(_tune_described(described_kernel, options, chosen, prints=json_target != "-"), json_target)
        return
    from fa3_kernels.plan.families import OURS, traits_of
    from fa3_simulator import tune as tuning
    from fa3verify.commands.tune import measured, ranking_of, shown, times_of

    is_timed = measure is not None
    backward = options["backward"]
    require(
        not (backward and (is_timed or options["pack_gqa"])),
        "--backward does not take --measure and --pack-gqa",
    )
    require(not is_timed or len(machines) <= 1, "--measure is of one --machine")
    kernel = options["kernel"]
    require(not is_timed or traits_of(kernel).is_built_here, f"--measure is for --kernel {OURS}, got {kernel}")
    if is_timed:
        require_device("tune --measure")
    problem = problem_of(options)
    require(not (is_timed and problem.is_varlen), "--measure is of batches, not of packed sequences")
    rankings = []
    for machine in {machine.name: machine for machine in chosen}.values():
        clock = options["clock_mhz"] or machine["max_clock_mhz"]
        ranked = tuning.tune(problem, machine, clock, family=kernel, pack_gqa=options["pack_gqa"], backward=backward)
        require(ranked, f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
        best = shown(ranked, options["top"], measure)
        ranking = ranking_of(problem, machine, kernel, ranked, best)
        if options["svg"] and not rankings:
            title = f"{ranking.problem}: {kernel} on {machine.name}"
            draw_ranking(options["svg"], title, answer(ranking), times_of(ranked))
        rankings.append(measured(ranking, best, problem) if is_timed else ranking)
    first, *others = rankings
    hazards = [hazard._asdict() for ranking in rankings for hazard in ranking.hazards]
    told, *more = [ranking.to_json() | {"answer": answer(ranking)} for ranking in rankings]
    emit(told | ({"others": more} if more else {}), json_target)
    write(csv_of(rankings), csv_target)
    if "-" not in (json_target, csv_target):
        for ranking in rankings:
            print_ranking(ranking)
        for ranking in others:
            print_changes(ranking, first)
        print_legend(rankings, hazards)
    if hazards:
        raise Exit(FINDING)


def _tune_described(kernel: str, options: Options, machines: Iterable[Machine], *, prints: bool) -> Json:
    """Rank the choices of ``--over`` for a described kernel on each machine, print them, and return them as JSON."""
    from fa3verify.commands.tune import choices_of

    schedule = described.schedule_of(kernel, options["settings"])
    over = described.ranges_of(options["over"])
    told, answers = {}, {}
    for machine in machines:
        title = f"{schedule.name} on {machine.name}"
        choices, binds, otherwise = choices_of(schedule, machine, over, options["clock_mhz"])
        times = {_words(x.values): x.timed.estimate.cycles for x in choices if x.timed}
        said = _answer_described(times, binds, otherwise) if times else f"none of {len(choices)} fits"
        if options["svg"] and times and not told:
            draw_ranking(options["svg"], title, said, _drawn(times, over))
        if prints:
            _print_choices(title, choices, options["top"], said)
        told[machine.name] = [choice.to_json() for choice in choices]
        answers[machine.name] = said
    return {"schedule": schedule.name, "ranked": told, "answers": answers}


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
    "cycles_low",
    "cycles_high",
    "milliseconds_low",
    "milliseconds_high",
    "interval_class",
    "interval_rows",
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
ERROR = 0.05  # of a simulated time of somebody's kernel
LEGEND = """\
=: a tie: as near to the first of the tie as half of the wider interval of both
gap: beyond the lower bound: each GEMM, exponential, HBM byte once at full rate
binds: what is busiest, and its share of the time. P: where P V has it from
G: our Gluon kernels can be launched so. F: FlashAttention-3 is launched so
"""
SPARE = ("TFLOP/s", "gap")  # columns that are left out, in this order, where lines would be too long


def csv_of(found: Sequence[MachineRanking]) -> str:
    """Return the rows of all machines as csv with the columns :data:`CSV_COLUMNS`."""
    return csv_text(
        CSV_COLUMNS,
        (
            [csv_cell(line[column]) for column in CSV_COLUMNS]
            for each in found
            for line in (each.to_json() | row.to_json() for row in each.ranked)
        ),
    )


def _binds(row: ScheduleRow) -> str:
    """Return the busiest resource and its share of the time, for HBM its rate."""
    name = _named(row.binds)
    return f"{name} {row.hbm_gb_per_s:.0f} GB/s" if name == "HBM" else f"{name} {row.busy:.0%}"


def _interval(row: ScheduleRow) -> str:
    """Return how much less and more than simulated a launch is measured to take, by its 90 % interval."""
    ends = [row.interval[f"cycles_{end}"] for end in ("low", "high")]
    return "..".join(f"{end / row.cycles - 1:+.0%}" for end in ends if end)


# Heading, a function from a row to its cell, and the value for which the column is left out if all rows have it.
COLUMNS: tuple[tuple[str, Callable[[ScheduleRow], object], object], ...] = (
    ("tile", lambda row: row.tile, None),
    ("parts", lambda row: row.splits, 1),
    ("heads", lambda row: "packed" if row.packed else "apart", "apart"),
    ("stages", lambda row: row.stages, None),
    ("P", lambda row: row.p, None),
    ("cycles", lambda row: row.cycles, None),
    ("ms", lambda row: f"{row.milliseconds:.3g}", None),
    ("90%", _interval, ""),
    ("TFLOP/s", lambda row: f"{row.tflops:.0f}", None),
    ("gap", lambda row: f"{row.gap:.{1 if row.gap < 1 else 0}%}", None),
    ("binds", _binds, None),
    ("", lambda row: "G" * row.gluon + "F" * row.flash3_choice, None),
)


def print_ranking(found: MachineRanking) -> None:
    """Print the problem, the table and the comparisons; where times were measured, only our own launches are ranked."""
    rows = found.ranked
    shown = "the best our kernels can be launched with" if found.agreement else "the best of every tile"
    click.echo(f"{found.problem}: {found.kernel} on {found.machine.name} at {found.clock_mhz:.0f} MHz")
    if found.launches:
        _wrapped(f"a call launches {found.launches}")
    click.echo(
        f"lower bound {found.lower_bound_cycles} cycles ({_named(found.lower_bound_binds)}); "
        f"{found.schedules} schedules fit, {shown}:"
    )
    places = [row.place for row in rows]
    ranks = [f"{place}{'=' * (places.count(place) > 1)}" for place in places]
    columns = [("#", ranks)] + [
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
    _print_comparisons(found)
    _wrapped(answer(found))


def answer(found: MachineRanking) -> str:
    """Return the first of a ranking in a sentence: how far ahead it is of another tile, what binds it, and the ties."""
    first, *others = found.ranked
    ties = ", ".join(row.choice() for row in others if row.place == first.place)
    return (
        _take([(row.choice(), row.cycles) for row in found.ranked])
        + f"{_named(first.binds)}, busy {first.busy:.0%} of the time."
        + f" A tie with {ties}." * bool(ties)
    )


def _take(ranked: Sequence[tuple[str, float]]) -> str:
    """Return the beginning of an answer: the first of some choices with their cycles, and how far ahead it is."""
    (first, least), *others = ranked
    ahead = [f"{cycles / least - 1:.1%} ahead of {other}, " for other, cycles in others[:1]]
    return f"Take {first or 'it as it is'}: {''.join(ahead)}bound by "


def _answer_described(times: Mapping[str, float], binds: str, otherwise: Sequence[Values]) -> str:
    """Return the first of a ranking in a sentence: how far ahead it is, what ``binds`` it, and whether it is sure.

    ``times`` are cycles by values in words, fastest first; ``otherwise`` are the values that would be first if vector
    counts were lower, and if they were higher.
    """
    held = ", ".join(
        f"{VECTOR:.0%} {how} it {'is still the first' if values == next(iter(times)) else f'gives way to {values}'}"
        for how, values in zip(("lower", "higher"), map(_words, otherwise), strict=True)
    )
    tie = f" Choices within {ERROR:.0%} are a tie." * (len(times) > 1)
    return f"{_take([*times.items()])}{binds}; with vector counts {held}.{tie}"


def _words(values: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _drawn(times: Mapping[str, float], over: Mapping[str, Sequence[Any]]) -> dict[tuple[str, str], float]:
    """Return the times, in the order of ``over``, by the first parameter in words and by the others."""
    keys = (_words(dict(zip(over, values, strict=True))) for values in product(*over.values()))
    return {(x.partition(", ")[0], x.partition(", ")[2]): times[x] for x in keys if x in times}


def _print_choices(title: str, choices: Sequence[Choice], top: int, said: str) -> None:
    """Print a ranking of described schedules, and its first in a sentence."""
    click.echo(f"{title}:")
    for place, choice in enumerate(choices[:top], 1):
        found = choice.timed
        time = f"{found.estimate.cycles:.0f} cycles, {found.tflops:.0f} TFLOP/s" if found else choice.misfit
        click.echo(f"{place:>3} {_words(choice.values)}: {'' if found else 'does not fit: '}{time}")
    if len(choices) > top:
        click.echo(f"    and {len(choices) - top} more; of all, {sum(not x.timed for x in choices)} do not fit")
    for line in interval_lines(choices[0].timed.figures()) if choices[0].timed else ():
        click.echo(f"the first: {line}")
    click.echo(said)


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


def _print_comparisons(found: MachineRanking) -> None:
    """Print how the ranking compares with measured times, and what it costs to choose among a library's launches."""
    if first := found.ranked[0].under_load:
        _wrapped(f"the first: {loaded_line(first, found.machine)}")
    if found.agreement and found.agreement[1]:
        regret = ", ".join(f"top-{k} {x:.1%}" for k, x in zip((1, 3), found.agreement[1]))
        click.echo(f"simulated against measured: Kendall tau {found.agreement[0]:.2f}, regret {regret}")
    peers = [("FlashAttention-3's own", found.regret_flash3)] if found.shows_peer else []
    said = (
        f"{name} {'is not among them' if loss is None else f'{loss:+.1%}'}"
        for name, loss in [("best launch of Gluon", found.regret_gluon), *peers]
    )
    if not found.agreement:
        click.echo(f"against the first: {', '.join(said)}")


def print_legend(found: Sequence[MachineRanking], hazards: Sequence[Mapping[str, str]]) -> None:
    """Print what the columns mean, what intervals and ties are made from, and the hazards."""
    known = {row.interval["interval_class"]: row.interval["interval_rows"] for each in found for row in each.ranked}
    if classes := "; ".join(f"{name} ({rows})" for name, rows in known.items() if name):
        _wrapped(f"90%: interval of the measured time, by held-out H200 timings of {classes}")
    if None in known:
        click.echo("no interval: too few such launches were timed to say how far off this may be")
    click.echo(LEGEND + hazards_line(hazards, "in those shown").strip())


def print_changes(found: MachineRanking, first: MachineRanking) -> None:
    """Print how a machine differs from the first: in constants, in its best schedule, and in how the other's fares."""
    here = found.machine
    there = first.machine
    differing = {name: (here[name], there[name]) for name in here.constants() if here[name] != there[name]}
    widest = sorted(differing, key=lambda name: -abs(differing[name][0] / (differing[name][1] or 1) - 1))[:NAMED]
    best = found.ranked[0]
    other = first.ranked[0]
    _wrapped(
        f"{here.name} beside {there.name}: {len(differing)} other constants, above all "
        + ", ".join(f"{name} {here[name]:g} ({there[name]:g})" for name in widest)
    )
    _wrapped(
        f"first choice {best.choice()}, {best.cycles / other.cycles:.3f} times the cycles of {other.choice()} on "
        f"the {there.name}"
    )
    same = [row for row in found.ranked if row.choice() == other.choice()]
    if same and same[0] is not best:
        _wrapped(f"{other.choice()} is at place {same[0].place}, {same[0].cycles / best.cycles - 1:+.1%}")


def _wrapped(text: str) -> None:
    click.echo(fill(text, 80, subsequent_indent="  ", break_on_hyphens=False))
