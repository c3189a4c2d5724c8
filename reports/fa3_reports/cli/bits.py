"""Verb bits: our GPU kernels against their twins over all cases, and what the quantiser costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit, fail, require_device
from fa3verify.cli.options import devices_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("parts", metavar="[forward|paged|backward|quantise|accuracy|speed]...", nargs=-1)
@click.option("--dtype", "dtypes", type=click.Choice(["fp16", "bf16", "e4m3"]), multiple=True, help="All by default.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/bits"), show_default=True)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that share the GPU; 0 is one per core.")
@devices_option
@click.option("--budget", type=click.FloatRange(0), default=float("inf"), help="Seconds after which the rest is left.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of an earlier campaign: its rows of launches that are what they were need not be made again.",
)
@click.option(
    "--cases",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file of problems, one a line as of 'fa3verify bench --problem', instead of the cases of this project.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws values and choices of --cases."
)
@click.option("--json", "json_target", metavar="FILE|-", help="Write the sums as JSON.")
@click.option("--quiet", is_flag=True, help="Print the sums only.")
def bits(
    parts: tuple[str, ...],
    dtypes: tuple[str, ...],
    file: Path | None,
    seed: int,
    json_target: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare our GPU kernels with their twins, bit for bit, over every case there is.

    Forward, backward and quantiser by default; paged is the forward over caches, accuracy and speed are the
    quantiser's. Finished rows are kept in OUT:
    the same command goes on where it stopped. Exit code 5 while rows are missing. The cases of --cases are listed in
    OUT/asked_cases.csv first, also without a GPU.
    """
    known = ("forward", "paged", "backward", "quantise", "accuracy", "speed")
    if unknown := [name for name in parts if name not in known]:
        raise ValueError(f"unknown part {unknown[0]!r}; known are {', '.join(known)}")
    asked = None
    if file is not None:
        from fa3_reports.bits.asked_cases import read_cases, write_list

        asked = read_cases(file, seed)
        path = write_list(asked, options["out"])
        if not quiet and json_target != "-":
            click.echo(f"{sum(map(len, asked.values()))} cases in {path}")
    require_device("bits")
    from fa3_reports.bits import campaign
    from fa3_reports.cli import console as shown
    from fa3verify.cli import console

    settings = campaign.Settings(
        options["out"], dtypes or ("fp16", "bf16", "e4m3"), options["workers"], options["budget"], options["keep"]
    )
    try:
        parts = parts or (tuple(asked) if asked else ("forward", "backward", "quantise"))
        defined = campaign.asked_parts(asked) if asked else campaign.PARTS
        if absent := [name for name in parts if name not in defined]:
            raise ValueError(f"{file} has no problem of part {absent[0]}")
        found = campaign.run(parts, settings, console.teller(quiet), defined)
    except campaign.Wrong as error:
        fail(FINDING, str(error))
    tables = {f.table.file: f.totals() | {"rows": len(f.rows), "left": f.left} for f in found}
    emit({"tables": tables, "broken": {f.table.file: f.broken for f in found}}, json_target)
    if json_target != "-":
        shown.print_bits(tables, [row for f in found for row in f.broken])
    is_complete = not any(f.left for f in found) and any(f.rows for f in found)
    raise Exit(FINDING if any(f.broken for f in found) else OK if is_complete else NOTHING)
