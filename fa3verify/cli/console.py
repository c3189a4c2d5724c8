"""What the terminal shows: progress on stderr, verdicts and their findings on stdout.

Searches are printed by :mod:`fa3verify.cli.console_search`; the exit code of a verb is chosen in the verb
(:mod:`fa3verify.cli.exits`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from fa3verify import operations
from fa3verify.campaign.findings import ContractQuestion, Finding, Symptom, lines, symptoms
from fa3verify.campaign.replay_files import ReplayFile
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.campaign.tasks import Outcome
from fa3verify.cases import tried
from fa3verify.cli.exits import emit, write
from fa3verify.files import Json
from fa3verify.judging.verdict import PARTS, ratio_text
from fa3verify.kernels.record import Kernel
from fa3verify.report.words import bits_line
from fa3verify.text import plural

if TYPE_CHECKING:
    from fa3verify.commands.replay import Replayed
    from fa3verify.commands.verify import ShardRun

STYLE = {
    "pass": "green",
    "fail": "bold red",
    "question": "bold cyan",
    "not compared": "yellow",
    "inconclusive": "bold yellow",
}
FAIL = "[red]FAIL[/red] "
UNDER = "     "  # in front of what is said of a finding


def say(*lines: object, mark: str = "") -> None:
    """Print lines of plain text on stdout, none of them broken, with a mark in front of each that may have colours."""
    console = Console(highlight=False)
    for line in lines:
        console.print(f"{mark}{escape(str(line))}", soft_wrap=True)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[int, Outcome | None], None]]:
    """Show a progress bar on a terminal's stderr; yield the callback of :func:`fa3verify.commands.verify.run`."""
    console = Console(stderr=True, quiet=quiet, highlight=False)
    narrow = console.width < 70
    # Room for the name of a task beside the other columns.
    fitting = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, console.width - (24 if narrow else 44)))
    columns = (
        TextColumn("{task.description}", table_column=fitting),
        *(() if narrow else (BarColumn(),)),
        MofNCompleteColumn(),
        *(() if narrow else (TimeElapsedColumn(),)),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("loading the kernels", total=None)

        def advance(total: int, outcome: Outcome | None) -> None:
            if outcome is None:
                bar.update(task, total=total, description="first cases, which compile")
                return
            bar.update(task, advance=1, description=escape(outcome.task.label))
            if outcome.error:
                console.print(f"[red]lost[/red] {escape(outcome.task.label)}: {escape(outcome.error)}")

        yield advance


def tell(
    run: Run,
    out: Path,
    json_target: str | None,
    junit_target: str | None,
    quiet: bool,
    *,
    began_s: float | None = None,
) -> None:
    """Print the verdict, and write it to every file that was asked for.

    ``json_target`` and ``junit_target`` are paths, "-" for standard output, which then has nothing else, or None. The
    printed time is since ``began_s`` by the monotonic clock, by default the run's own.
    """
    if "-" not in (json_target, junit_target):
        print_run(run, out, quiet=quiet, began_s=began_s)
    emit(run.to_json(), json_target)
    if junit_target:
        from fa3verify.campaign.junit import junit

        write(junit(run), junit_target)
    step_summary(out)


def _figure(value: float | None, measure: str = "") -> str:
    """Write a figure with two significant digits, exponents without padding, and None as a dash.

    The name of its ``measure`` decides two cases: a ratio near 1 has enough digits to show its side of 1, and an
    infinite relative error says that the exact value is 0.
    """
    if value is None:
        return "-"
    if "rel_rmse" in measure and math.isinf(value):
        return "exact 0"
    if "ratio" in measure and 0.95 <= value < 1.05:
        return "< 1" if 0.9995 <= value < 1 else ratio_text(value)
    return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")


def print_run(run: Run, out: Path, *, quiet: bool, began_s: float | None = None) -> None:
    """Print figures by kernel and family, the findings, the verdict and the report's path; the last line is bits lost.

    With ``quiet`` the figures are left out. ``began_s`` is as for :func:`tell`.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if not quiet:
        for kernel in run.kernels:
            _print_kernel(console, kernel)
        parts = (f"{PARTS[k]} [{STYLE.get(v, 'yellow')}]{v}[/]" for k, v in run.layers.items())
        console.print("\n" + "  ".join(parts))
    _print_findings(run.failures, out, out / "summary.json")
    for question in run.questions:
        _print_question(question, out)
    undecided = [kernel for kernel in run.kernels if kernel.inconclusive and kernel.verdict == "inconclusive"]
    say(*(f"{kernel.name}: {kernel.inconclusive}" for kernel in undecided), mark="[yellow]INCONCLUSIVE[/yellow] ")
    verdict = run.verdict
    cases = sum(kernel.cases for kernel in run.kernels)
    outputs = sum(kernel.outputs for kernel in run.kernels)
    judged = f"{plural(len(run.kernels), 'kernel')}, {plural(cases, 'case')}, {outputs:,} outputs"
    passed_s = run.wall_s if began_s is None else time.monotonic() - began_s
    say(f"{judged} in {passed_s:.0f} s", mark=f"[{STYLE[verdict]}]VERIFY {verdict.upper()}[/] ")
    if verdict == "pass" and (rests_on := tried.line([kernel.tried for kernel in run.kernels])):
        say(rests_on)
    say(f"report {out / 'report.html'}")
    if lost := bits_line(run.kernels):
        say(lost)


def _print_kernel(console: Console, kernel: KernelRun) -> None:
    """Print a kernel's table of families, its properties, what its bound assumed, and what was not tried."""
    console.print(_family_table(kernel, console.width))
    held = sum(law.status == "pass" for law in kernel.laws)
    examples = sum(law.examples for law in kernel.laws)
    console.print(f"properties {held}/{len(kernel.laws)} hold, {examples} examples")
    if kernel.assumption:
        say(kernel.assumption)
    if line := _quantisation_line(kernel):
        console.print(line)
    covered = kernel.coverage
    if covered and covered.pairs and covered.pairs.feasible:
        console.print(f"pairs of classes: {covered.pairs.tried:,} of {covered.pairs.feasible:,} feasible ones met")
    left_out = [*(covered.not_tried if covered else ()), *(kernel.tried.not_tried if kernel.tried else ())]
    if left_out:
        more = f" and {len(left_out) - 12} more" if len(left_out) > 12 else ""
        say(f"not tried: {', '.join(left_out[:12])}{more}")


def print_shard(shard: ShardRun, out: Path) -> None:
    """Print the findings of a shard, which has no verdict; the last line is the path of its file."""
    _print_findings(shard.failures, None, out / shard.file)
    count = len(shard.failures)
    found = f"[{STYLE['fail']}]{count} findings[/]" if count else "no finding"
    say(f"in {shard.tasks} tasks; the verdict is that of fa3verify merge", mark=f"{shard.shard.upper()} {found} ")
    say(f"shard {out / shard.file}")


def _print_findings(found: Iterable[Finding], out: Path | None, file: Path) -> None:
    """Print the first finding of each symptom, at most 20 symptoms; ``file`` is the file that has all findings.

    Replay files lie below ``out``, None where none was written.
    """
    shown = symptoms(found)
    for each in shown[:20]:
        _print_finding(each, out)
    if len(shown) > 20:
        say(f"... and {len(shown) - 20} more symptoms in {file}")


def _print_finding(symptom: Symptom, out: Path | None) -> None:
    """Print the first finding of a symptom: what failed, the case, how to run it again, and what else found it."""
    first = symptom.first
    say(f"{first.kernel} {first.what.told}: {first.message}", mark=f"[red]FAIL[/red], {symptom.severity}: ")
    say(*lines(first, str(out / first.replay) if first.replay and out else None), mark=UNDER)
    if symptom.elsewhere:
        say(f"found as well by: {symptom.elsewhere}", mark=UNDER)


def _print_question(question: ContractQuestion, out: Path) -> None:
    """What a kernel does, where that was seen, who else does it, and the line that answers."""
    seen = question.seen
    say(f"{seen.kernel}: {question.meaning}", mark="[cyan]QUESTION[/cyan] ")
    say(
        f"seen: {seen.what.told}: {seen.message}",
        *lines(seen, str(out / seen.replay) if seen.replay else None),
        f"elsewhere: {question.public}",
        question.answer,
        mark=UNDER,
    )


COLUMNS = {  # measure: heading; a narrow terminal leaves out the last ones
    "rel_rmse_seen": "rel rmse\nseen",
    "rel_rmse_unrounded": "rel rmse\nunrounded",
    "ratio_max": "error /\nbound",
    "sides": "others /\nbound",
    "bias": "signed\nbias",
    "ulp_p99": "ulp\np99",
    "ulp_max": "ulp\nmax",
    "max_error": "max\nerror",
}


def _family_table(kernel: KernelRun, width: int) -> Table:
    """Return the table of a kernel's families, with as many columns as fit a terminal of so many letters."""
    title = f"{escape(kernel.name)}: {escape(kernel.introduction.description)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
    shown = ["rel_rmse_seen", "ratio_max"] if width < 60 else list(COLUMNS)[: max(3, (width - 34) // 10)]
    sides = operations.find(kernel.operation).sides
    headings = COLUMNS | ({"sides": f"{sides[0].name} /\nbound"} if len(sides) == 1 else {})
    table.add_column("family", no_wrap=True, max_width=min(22, max(10, width - 29)))
    for measure in shown:
        table.add_column(headings[measure], justify="right", no_wrap=True)
    if width >= 39:  # a narrower one has no room for it
        table.add_column("bit\nequal", justify="right", no_wrap=True)
    for row in kernel.families:
        ratios = [ratio for side in sides if (ratio := row.figures[side.figure("ratio")]) is not None]
        values = row.figures | {"sides": max(ratios, default=None)}
        figures = [_figure(values[measure], measure.replace("sides", "ratio")) for measure in shown]
        figures = [*figures, f"{row.number('bit_equal'):.0%}"][: len(table.columns) - 1]
        name = row.family.replace("activations:", "real:")
        table.add_row(name, *(figures if row.is_compared else "-" * len(figures)))
    return table


def _quantisation_line(kernel: KernelRun) -> str:
    """Return a line about the error of quantising the inputs; empty for 16-bit kernels."""
    figures = [row.figures for row in kernel.families]
    predicted = [x for each in figures if (x := each["quantisation_ratio"]) is not None]
    bounded = [x for each in figures if (x := each["quantisation_bound_ratio"]) is not None]
    if not predicted:
        return ""
    return (
        f"quantising Q, K, V: RMS error / predicted {min(predicted):.2f} to {max(predicted):.2f} "
        f"over families, largest error / its own bound {ratio_text(max(bounded))}"
    )


def step_summary(out: Path) -> None:
    """Append the Markdown report to the file that GitHub Actions names, if it names one."""
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target and (out / "report.md").exists():
        with open(target, "a", encoding="utf-8") as file:
            file.write((out / "report.md").read_text(encoding="utf-8"))


def print_replay(file: ReplayFile, found: Replayed) -> None:
    """Print what a replay file is about, the figures, and whether the kernel holds."""
    say(f"{file.kernel}: {file.what.told}", found.message)
    say(*(f"  {name:20} {_figure(value, name)}" for name, value in (found.measures or {}).items()))
    say("", mark="[green]holds[/green]" if found.holds else "[bold red]still broken[/bold red]")


def kernel_row(kernel: Kernel) -> Json:
    """Return the JSON of one kernel in the list of kernels; ``unavailable`` is why it cannot run here, or None."""
    return {
        "name": kernel.name,
        "dtype": kernel.dtype,
        "operation": kernel.operation,
        "description": kernel.description,
        "features": sorted(kernel.features),
        "unavailable": kernel.unavailable,
    }


def print_kernels(known: list[Kernel], *, with_faults: bool) -> None:
    """Print the kernels that can be judged here, one on a line, then the others by the reason why they cannot.

    With the faults that can be planted in twins, if ``with_faults``.
    """
    width = max(len(c.name) for c in known)
    say(*(f"{c.name:{width}}  {c.description}" for c in known if c.unavailable is None))
    for reason in dict.fromkeys(c.unavailable for c in known if c.unavailable is not None):
        names = ", ".join(c.name for c in known if c.unavailable == reason)
        say(f", {reason}: {names}", mark="[yellow]not here[/yellow]")
    for operation in (x for x in operations.OPERATIONS.values() if with_faults and hasattr(x, "faults")):
        say(f"add +FAULT to a twin of {operation.name} to plant a fault: {', '.join(operation.faults)}")


@contextlib.contextmanager
def counting(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Count finished things on stderr, if it is a terminal; yield a callback, to be called with the name of each."""
    console = Console(stderr=True, quiet=quiet, highlight=False)
    hidden = quiet or not console.is_terminal
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        done = itertools.count(1)

        def tell(name: str) -> None:
            bar.update(task, description=f"{what}: {next(done)} done, {escape(name)}")

        yield tell


def teller(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints one line of progress on stderr."""
    console = Console(stderr=True, quiet=quiet, highlight=False)
    return lambda text: console.print(escape(text), soft_wrap=True)


def environment() -> Json:
    """Return versions, cache folder and environment variables, which ``fa3verify kernels`` prints at its end."""
    from fa3_kernels.twin.compiled import cache_directory
    from fa3verify.campaign.summary import provenance
    from fa3verify.records import plain

    variables = ("FA3VERIFY_CACHE", "FA3VERIFY_PROFILE", "FA3VERIFY_TRACEBACK", "NO_COLOR", "GITHUB_STEP_SUMMARY")
    facts = plain(provenance(0))
    del facts["seed"]
    return facts | {"cache": str(cache_directory()), "variables": {name: os.environ.get(name) for name in variables}}


def print_environment(facts: Json) -> None:
    """Print the facts of :func:`environment` after an empty line."""
    say("")
    for name, value in facts.items():
        for key, fact in (value if isinstance(value, dict) else {name: value}).items():
            say(f"{key:20} {'not set' if fact is None else fact}")
