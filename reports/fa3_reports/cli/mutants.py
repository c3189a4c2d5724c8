"""Verb mutants: how much of what can go wrong the suite finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, OK, Verb

KINDS = ("museum", "uncommon", "grid", "automatic", "sound")


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kinds", nargs=-1, type=click.Choice(KINDS))
@click.option("--profile", type=click.Choice(["quick", "release"]), default="quick", show_default=True)
@click.option("--bits/--no-bits", default=True, show_default=True, help="Compare mutants with the sound twin, too.")
@click.option(
    "--rules", type=click.Choice(["ours", "all"]), default="all", show_default=True, help="Whose rules judge the grid."
)
@click.option("--mutants", "count", type=click.IntRange(1), default=300, show_default=True, help="Automatic ones.")
@click.option("--trials", type=click.IntRange(1), default=20_000, show_default=True, help="Of sound kernels, at least.")
@click.option("--module", "modules", multiple=True, help="Mutate this module of the twin only; may be repeated.")
@click.option("--kernel", "kernels", multiple=True, help="Examine mutants of this twin; may be repeated.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--seconds", type=click.FloatRange(0), default=0.0, help="Begin no task after this time; 0 is never.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out"), show_default=True)
@click.option("--quiet", is_flag=True, help="Print the sums only.")
def mutants(kinds: tuple[str, ...], **options: Any) -> None:
    """Plant mistakes in our twins and count which the suite finds; KINDS are by default all.

    museum: bugs that attention kernels were released with. uncommon: bugs that only rare inputs show. grid: the faults
    of a table over lengths and inputs, judged by our rules and by those of other projects. automatic: mutants of the
    twins' source, each in a process of its own.
    sound: twins of different orders as they are, in which whatever is found is a false alarm. Results are in OUT as csv
    and Markdown; a stopped campaign over automatic mutants goes on from what it has. Exit code 1 if anything was
    missed, or a sound kernel found wrong.
    """
    from fa3_reports.mutation import campaign
    from fa3_reports.mutation.automatic import KERNELS, Settings
    from fa3verify.cli import console

    quiet = options.pop("quiet")
    options["kernels"] = options["kernels"] or KERNELS
    settings = Settings(**options)
    with console.counting("examined", quiet) as tell:
        missed, text = campaign.run(kinds or KINDS, tell, settings)
    click.echo(text)
    raise Exit(FINDING if missed else OK)
