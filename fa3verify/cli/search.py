"""Verbs hunt and learn: searches for the worst input of a kernel, and for its order of operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit, require_writable
from fa3verify.cli.options import peers_option, seed_option, workers_option


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


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernel")
@click.option(
    "--head-dim",
    "head_dims",
    type=click.IntRange(8, 256),
    multiple=True,
    help="Ask at this head_dim; 64 and 128 by default, as far as the kernel takes them.",
)
@click.option(
    "--outputs",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Fresh output values at each head_dim that the answer is held against.",
)
@seed_option
@workers_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("out/order.json"),
    show_default=True,
    help="The proposal.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Also write everything that was found as JSON.")
@peers_option
@click.option("--quiet", is_flag=True, help="Print the answer only.")
def learn(
    kernel: str,
    head_dims: tuple[int, ...],
    outputs: int,
    seed: int,
    workers: int,
    out: Path,
    json_target: str | None,
    quiet: bool,
) -> None:
    """Find the order of operations of KERNEL, a forward, from its outputs alone.

    The answer is a class of orders that no launch separates, or what is certain where none survives. It is a proposal
    for fa3verify verify --order FILE, and acquits no kernel. Exit code 1 for an order with steps that are no sound
    choice, 5 where none survives.
    """
    from fa3verify.cli import console, console_search
    from fa3verify.commands.learn import learn_all
    from fa3verify.records import plain

    require_writable(str(out), json_target)
    with console.counting("head dims asked", quiet) as tell:
        learning = learn_all(kernel, head_dims, outputs=outputs, seed=seed, workers=workers, progress=tell)
    is_written = learning.write(out)
    if emit(plain(learning), json_target):
        console_search.print_learning(learning, out if is_written else None)
    raise Exit(FINDING if learning.findings else OK if is_written else NOTHING)
