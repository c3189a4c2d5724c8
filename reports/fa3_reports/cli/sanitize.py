"""Verb sanitize: the shipped kernels under compute-sanitizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, FINDING, NOTHING, OK, Verb, fail, require_device

if TYPE_CHECKING:
    from fa3_reports.sanitizer import Tool

TOOLS = ("memcheck", "synccheck", "racecheck")  # checked by a test: those of fa3_reports.sanitizer


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("launches", nargs=-1)
@click.option("--tool", "tools", type=click.Choice(TOOLS), multiple=True, help="All by default.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/sanitizer"), show_default=True
)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that share the GPU; 0 is one per core.")
@click.option("--seconds", type=click.FloatRange(1), default=120.0, show_default=True, help="Limit of one process.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def sanitize(
    launches: tuple[str, ...], tools: tuple[Tool, ...], out: Path, workers: int, seconds: float, quiet: bool
) -> None:
    """Examine every shipped kernel on a GPU with compute-sanitizer: OUT/sanitizer.csv, a row per kind of report.

    LAUNCHES restricts it to some, by their names in the audit. Exit code 1 if a report is not explained by the
    machine code, 5 if a tool came to no end or dropped reports.
    """
    require_device("sanitize")
    import shutil

    program = shutil.which("compute-sanitizer")
    if program is None:
        fail(ENVIRONMENT, "compute-sanitizer, which is part of the CUDA toolkit, is not on the PATH")
    from fa3_reports import sanitizer
    from fa3_reports.audit.shipped import shipped
    from fa3verify.campaign.pool import default_workers
    from fa3verify.cli import console
    from fa3verify.files import csv_text, write_text

    names = launches or tuple(launch.name for launch in shipped())
    settings = sanitizer.Settings(names, tools or sanitizer.TOOLS, workers or default_workers(), seconds)
    found = sanitizer.run(settings, Path(program), console.teller(quiet))
    write_text(out / "sanitizer.csv", csv_text(sanitizer.COLUMNS, found.rows))
    write_text(out / "sanitizer_provenance.json", sanitizer.provenance(Path(program)))
    for row in found.unexplained:
        click.echo(f"not explained: {' '.join(row)}")
    for what, words in found.cut.items():
        click.echo(f"cut: {what}: {words}")
    explained = sum(bool(row[-1]) for row in found.rows)
    click.echo(f"{len(names)} launches, {len(found.unexplained)} reports not explained, {explained} explained")
    raise Exit(FINDING if found.unexplained else NOTHING if found.cut else OK)
