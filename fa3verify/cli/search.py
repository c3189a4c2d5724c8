"""Verb hunt: the search for the worst input of any kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli.exits import EPILOG, FINDING, OK, Verb
from fa3verify.cli.options import peers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernel")
@click.option("--objective", type=click.Choice(["ratio", "baseline", "difference"]), default="ratio", show_default=True)
@click.option("--against", metavar="KERNEL", help="The other kernel of a difference.")
@click.option(
    "--unit", type=click.Choice(["bound", "ulp"]), default="bound", show_default=True, help="Of a difference."
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with this stored baseline, not with the shipped one of profile quick.",
)
@click.option("--problems", type=click.IntRange(1), help="Budget: problems judged, 20,000 by default.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Budget: rounds begin until then.")
@click.option("--ground", "grounds", multiple=True, metavar="NAME", help="Search only there; all grounds by default.")
@click.option("--at-random", is_flag=True, help="Draw as the suite draws: what the search is compared with.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/hunt"), show_default=True)
@click.option("--resume", is_flag=True, help="Go on with what an interrupted hunt of this command left in --out.")
@peers_option
@click.option("--quiet", is_flag=True, help="Print the paths only.")
def hunt(kernel: str, problems: int | None, seconds: float | None, quiet: bool, **options: Any) -> None:
    """Search for the input that maximises KERNEL's error / bound before the last rounding, its error over a stored
    baseline, or its difference from another kernel; exit code 1 if the bound is left or the kernel fails.

    The best inputs are replay files, and the table says what was searched: a largest known error is a lower bound.
    """
    from fa3verify.cli import console, console_search
    from fa3verify.search import objectives, run

    require(not (problems and seconds), "the budget is --problems or --seconds, not both")
    budget = None if seconds else problems or 20_000
    choices = {name: options[name] for name in ("out", "seed", "workers", "grounds", "at_random", "resume")}
    named = (options[name] for name in ("objective", "against", "unit", "baseline"))
    goal = objectives.objective_of(kernel, *named)
    hunted = run.Hunt(kernel, goal, problems=budget, seconds=seconds, **choices)
    with console.counting("searches", quiet) as tell:
        hunted.run(tell)
    console_search.print_hunt(hunted, hunted.out / run.FILE, quiet=quiet)
    raise Exit(FINDING if hunted.is_finding else OK)
