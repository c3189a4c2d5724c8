"""Verb studies: the figures of a release that answer questions about our twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, OK, Verb
from fa3verify.cli.options import seed_option, workers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="release", show_default=True)
@seed_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/studies"), show_default=True)
@workers_option
@click.option("--quiet", is_flag=True, help="Print the path of the page only.")
def studies(kernels: tuple[str, ...], profile: Any, seed: int, out: Path, workers: int, quiet: bool) -> None:
    """Draw the studies of our twins, and the accumulator loss of KERNELS beside theirs: OUT/studies.html.

    The same command goes on where it stopped. Exit code 1 if a measurement was lost.
    """
    from fa3_reports.studies import run
    from fa3verify.cli import console

    with console.counting("units measured", quiet) as tell:
        lost = run.run(profile, seed, out, kernels, workers=workers, progress=tell)
    for words in lost:
        click.echo(f"LOST {words}")
    click.echo(str(out / run.PAGE))
    raise Exit(FINDING if lost else OK)
