"""Verb report: the report of a run again, from its data."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, one_line_errors


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out"), show_default=True)
def report(run: Path, out: Path) -> None:
    """Build the report again from RUN, a run.nc that verify wrote."""
    with one_line_errors():
        from fa3verify.campaign import verify
        from fa3verify.report.build import rebuild

        verify.prepare_output(out)
        click.echo(rebuild(run, out))
