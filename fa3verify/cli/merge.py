"""Verb merge: one verdict and one report of the shards of a campaign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb, require_outputs, told_anyhow
from fa3verify.cli.options import output_options


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@output_options
def merge(folders: tuple[Path, ...], **options: Any) -> None:
    """Judge a campaign whose shards lie in FOLDERS, written by verify --shard; write the report of the whole."""
    from fa3verify.cli import console
    from fa3verify.commands import verify

    targets = options["json_target"], options["junit_target"]
    require_outputs(*targets, options["update_baseline"])
    settings = verify.Settings((), "quick", 0, options["out"], options["baseline"], options["update_baseline"])
    run = verify.merge(folders, settings)
    with told_anyhow(run.exit_code):
        console.tell(run, settings.out, *targets, options["quiet"])
