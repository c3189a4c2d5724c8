"""Verbs device, claims, clauses and issue: the pages and texts that are made of what is published."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("folder", type=_FOLDER)
@click.option("--out", type=_FOLDER, help="[default: the folder itself]")
def device(folder: Path, out: Path | None) -> None:
    """Write the page of a device from its FOLDER, such as reports/h200."""
    from fa3_reports.device import page

    click.echo(str(page.write(folder, out)))


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("file", type=_FILE)
@click.option("--out", type=_FOLDER, help="[default: the folder of FILE]")
def claims(file: Path, out: Path | None) -> None:
    """Write the page of papers' claims from FILE, such as reports/claims.toml."""
    from fa3_reports import claims as said

    click.echo(str(said.write(file, out)))


@click.command(cls=Verb, epilog=EPILOG)
@click.option("--out", type=_FOLDER, help="Write below this folder. [default: the checkout]")
def clauses(out: Path | None) -> None:
    """Write the conformance list, and the page that says which kernels of the atlas meet it."""
    from fa3_reports import conformance as pages

    click.echo("\n".join(map(str, pages.write(out or pages.ROOT))))


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("script", type=_FILE)
@click.argument("arguments", nargs=-1)
def issue(script: Path, arguments: tuple[str, ...]) -> None:
    """Print a text for a library's tracker from a SCRIPT of reports/findings/scripts, which is run with ARGUMENTS, such
    as the path of the library.
    """
    from fa3_reports.issue import issue as text

    click.echo(text(script, arguments), nl=False)
