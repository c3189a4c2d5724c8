"""Verb recordings: the twins of released kernels against what those kernels returned on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--products", type=click.FloatRange(0), default=3e8, show_default=True, help="Of a launch at most; 0: all."
)
@click.option("--against", type=click.Path(path_type=Path, dir_okay=False), help="Compare with this one instead.")
@click.option("--outputs", type=click.FloatRange(1), help="Compare until so many of all FILEs stand in --ledger.")
@click.option("--ledger", type=click.Path(path_type=Path, dir_okay=False), help="CSV to which every launch is added.")
@click.option("--seconds", type=click.FloatRange(0), default=480, show_default=True, help="After which --outputs ends.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--json", "json_target", metavar="FILE|-", help="Write the sums as JSON.")
def recordings(
    files: tuple[Path, ...],
    products: float,
    against: Path | None,
    outputs: float | None,
    ledger: Path | None,
    seconds: float,
    workers: int,
    json_target: str | None,
) -> None:
    """Run twins on every launch of recordings and compare O and LSE, digest by digest.

    Needs neither a GPU nor the libraries. With --against two recordings are compared, such as those of two versions of
    a library. With --outputs a ledger is filled for the least work, a tenth of it with 4096 keys or more; the same
    command goes on from there. Exit code 1 if one bit differs, 5 if nothing could be compared.
    """
    if (outputs is None) != (ledger is None):
        raise click.UsageError("--outputs and --ledger are given together")
    from fa3_reports import recordings as stored
    from fa3_reports.cli import console

    if outputs and ledger:
        _extend(files, ledger, outputs=int(outputs), seconds=seconds, workers=workers, json_target=json_target)
    sums: dict[str, dict[str, Any]] = {}
    for file in files:
        recording = stored.read(file)
        if against:
            sums[file.name] = stored.against(recording, stored.read(against))
        else:
            sums[file.name] = stored.compare(recording, products=int(products) or None, workers=workers)
        if json_target != "-":
            console.print_recording(recording, sums[file.name])
    emit(sums, json_target)
    if any(found["differing"] for found in sums.values()):
        raise Exit(FINDING)
    raise Exit(OK if any(found["launches"] for found in sums.values()) else NOTHING)


def _extend(
    files: tuple[Path, ...], ledger: Path, *, outputs: int, seconds: float, workers: int, json_target: str | None
) -> NoReturn:
    """Fill the ledger and leave."""
    from fa3_reports import recordings as stored
    from fa3_reports.ledger import extend, sums

    given = {file.stem: stored.read(file) for file in files}
    tell = partial(click.echo, err=True)
    entries = extend(ledger, given, outputs=outputs, seconds=seconds, workers=workers, tell=tell)
    found = sums(entries)
    if json_target != "-":
        for name, values in found.items():
            click.echo(f"{name}: {values.launches:,} launches, {values.outputs:,} outputs, {values.differing} differ")
    emit({name: values._asdict() for name, values in found.items()}, json_target)
    raise Exit(FINDING if any(x.differing for x in found.values()) else OK if found else NOTHING)
