"""Verbs for the pages and texts of what is published, and for what may join it."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, OK, USAGE, Verb
from fa3verify.cli.options import workers_option

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
@click.option("--out", type=_FOLDER, default=Path("reports/invariance"), show_default=True)
@workers_option
def invariance(out: Path, workers: int) -> None:
    """Compare the bits of our kernels and of the released FlashAttention-3 over all that a serving stack may change.

    OUT gets the table, README.md, and table.json with every comparison; a difference is no finding.
    """
    from fa3_reports import invariance as table
    from fa3verify.cli.console import counting

    with counting("comparisons", False) as tell:
        click.echo(str(table.write(out, workers, tell)))


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("files", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FOLDER, default=Path("out"), show_default=True)
def atlas(files: tuple[Path, ...], out: Path) -> None:
    """Write atlas.html and atlas.md of FILES: atlases that fa3verify atlas and verify wrote, and lists of known
    findings, such as reports/findings/known.json.
    """
    from fa3_reports.atlas.page import write_pages

    click.echo(str(write_pages(out, files)))


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("file", type=_FILE)
def row(file: Path) -> None:
    """Say in one line each what is wrong with FILE, an atlas.json that is to be sent; exit code 2 if anything is."""
    from fa3_reports.atlas_rows import mistakes
    from fa3verify.text import one_line

    lines = mistakes(file)
    for line in lines or ["its form is right; whether its figures are, fa3verify replay says"]:
        click.echo(one_line(f"{file}: {line}"), err=bool(lines))
    raise Exit(USAGE if lines else OK)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("script", type=_FILE)
@click.argument("arguments", nargs=-1)
def issue(script: Path, arguments: tuple[str, ...]) -> None:
    """Print a text for a library's tracker from a SCRIPT of reports/findings/scripts, which is run with ARGUMENTS, such
    as the path of the library.
    """
    from fa3_reports.issue import issue as text

    click.echo(text(script, arguments), nl=False)
