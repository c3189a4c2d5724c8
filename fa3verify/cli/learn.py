"""Verb learn: find a kernel's order of operations from its outputs."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit, require_writable
from fa3verify.cli.options import peers_option, seed_option, workers_option


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
    emit(plain(learning), json_target)
    if json_target != "-":
        console_search.print_learning(learning, out if is_written else None)
    raise Exit(FINDING if learning.findings else OK if is_written else NOTHING)
