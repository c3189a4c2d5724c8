"""Verb info: versions, extras, cache and environment variables."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.exits import EPILOG, emit, one_line_errors


@click.command(epilog=EPILOG)
@click.option("--json", "json_target", metavar="FILE|-", help="Write it as JSON.")
def info(json_target: str | None) -> None:
    """Print versions, extras found, cache and environment variables."""
    with one_line_errors():
        from fa3verify.cli import console

        facts = console.environment()
        emit(facts, json_target)
        if json_target != "-":
            console.print_info(facts)
