"""Verb replay: one recorded case or counterexample again."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit
from fa3verify.cli.options import peers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kernel", metavar="NAME", help="Run another kernel on the same case.")
@click.option("--family", metavar="NAME", help="Of an atlas's replay file, the largest case of this family alone.")
@peers_option
@click.option(
    "--activations",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where your own activations are, if not where they were.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON.")
def replay(
    file: Path, kernel: str | None, family: str | None, activations: Path | None, json_target: str | None
) -> None:
    """Run a replay FILE again: exit code 1 if the kernel still breaks its bound or property, 5 if this call alone shows
    nothing of what was found of the kernel.
    """
    from fa3verify.campaign import replay_files
    from fa3verify.cli import console
    from fa3verify.commands import replay as replays

    stored = replay_files.read(file)
    result = replays.run(stored, kernel, activations, family)
    emit(result._asdict(), json_target)
    if json_target != "-":
        console.print_replay(stored, result)
    raise Exit(FINDING if not result.holds else NOTHING if stored.is_finding_of(kernel) else OK)
