"""Verb watch: a script in whose run attention is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, Verb


@click.command(
    cls=Verb, epilog=EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--one-in", type=click.FloatRange(1), default=100, show_default=True, help="A call is drawn once in N.")
@click.option("--budget", type=float, default=0.02, show_default=True, help="Share of the time that checks may take.")
@click.option("--rows", type=click.IntRange(1, 32), default=32, show_default=True, help="Rows of a call to check.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws calls, heads and rows.")
@click.option("--folder", type=click.Path(file_okay=False), default="fa3verify-watch", show_default=True)
@click.option("--raises", is_flag=True, help="A wrong call raises in the script.")
@click.argument("script", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(script: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with its ARGUMENTS, and check some rows of some calls of attention that it makes (needs torch).

    Exit code of the script; if that is 0, 1 where a call was wrong, and 5 where none was checked.
    """
    from fa3verify.sanitizer import watch

    raise Exit(watch(**options).run(script, arguments))
